"""Clipping and dot products of every layer, by every path, against a loop over single samples."""

import pytest
import torch
from attach_models import Model, mlp, square, square_second, under_autocast
from attach_modes import each_of
from broadcast_models import WAYS, D, N, T, positional, tokens, vision_transformer
from clip_oracle import check_clip, gradients
from recurrent_models import I, every_kind, every_option, made, net
from test_attach_attention import BAGS, E, S, attention
from test_attach_layers import ELEMENTWISE_LAYERS, FALLBACK_LAYERS, KERNEL_LAYERS, of_images
from test_attach_uses import THRICE, frozen
from torch import nn

import torchgradx
from torchgradx import ops

LAYERS = KERNEL_LAYERS | ELEMENTWISE_LAYERS | FALLBACK_LAYERS
DEFERRED = {"weight_grad": False}
NATIVE_PATHS = [{}, {"fused": False}, DEFERRED]
paths = each_of([*NATIVE_PATHS, {"backend": "vmap"}, {**DEFERRED, "backend": "vmap"}])
native_paths = each_of(NATIVE_PATHS)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@paths
@pytest.mark.parametrize("name", LAYERS)
def test_each_layer(name, options):
    make, shape = LAYERS[name]
    layer = make()
    for p in layer.parameters():
        nn.init.normal_(p)
    model = nn.Sequential(layer, nn.Tanh()).train(layer.training)
    ids = "embedding" in name
    check_clip(model, square, torch.randint(0, 7, shape) if ids else torch.randn(shape), **options)


@native_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_numbers(dtype, options):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(),
                          nn.Flatten(), nn.Linear(200, 5))  # fmt: skip
    check_clip(model, square, torch.randn(6, 3, 5, 5), dtype=dtype, **options)


@native_paths
@every_option
@every_kind
def test_recurrent_modules(kind, option, options):
    check_clip(net(made(kind, option)), square, torch.randn(N, T, I), **options)


def tied_to_its_head():
    model = Model(lambda m, ids: m.head(torch.tanh(m.l(m.l(m.table(ids))))),
                  table=nn.Embedding(7, 3), l=nn.Linear(3, 3), head=nn.Linear(3, 7))  # fmt: skip
    model.head.weight = model.table.weight
    return model


def attending(how, **kinds):
    return lambda: Model(how, a=attention(**kinds))


def transposed():
    return nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(5, D), nn.Tanh())


IDS, SEQUENCES = (), ((N, T, E), (N, S, E))
MODELS = {  # and the shapes of what they are given
    "attention": (attending(lambda m, x, y: m.a(x, y, y)[0]), SEQUENCES),
    "attention twice": (attending(lambda m, x, y: m.a(m.a(x, x, x)[0], y, y)[0]), SEQUENCES),
    "attention, keys of its own": (
        attending(lambda m, x, y: m.a(x, y, y)[0], add_bias_kv=True), SEQUENCES),
    "bilinear": (lambda: Model(lambda m, x, y: m.b(x, y), b=nn.Bilinear(3, 4, 2)),
                 ((N, 5, 3), (N, 5, 4))),
    "a transposed Linear": (transposed, ((N, T, D),)),
    "a Linear thrice": (THRICE, ((N, 6, 3),)),
    "an embedding and its head": (tied_to_its_head, IDS),
    "partly frozen": (
        lambda: frozen(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
                       "0.weight", "1.weight", "2.bias"), ((N, 3),)),
    "beside its modules": (vision_transformer, ((N, T, 3),)),
    "a table of positions": (positional, IDS),
    "several images of a sample": (lambda: of_images(nn.Conv2d(2, 6, 3, 2, 1)), ((N, 3, 2, 7, 6),)),
} | {f"bags {name}": (make, IDS) for name, make in BAGS.items()}  # fmt: skip


@paths
@pytest.mark.parametrize("name", MODELS)
def test_each_model(name, options):
    make, shapes = MODELS[name]
    inputs = [torch.randn(shape) for shape in shapes] or [tokens(t=6)]
    check_clip(make(), square, *inputs, **options)


@native_paths
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"attention", "norm", "where"}))
def test_what_no_sample_enters(way, options):
    model = Model(lambda m, x: m.o(torch.tanh(WAYS[way](m.i(x), m.w))), w=torch.randn(T, D),
                  i=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    check_clip(model, square, torch.randn(N, T, D), **options)


@paths
@pytest.mark.parametrize("a", [nn.Linear(3, 3), nn.PReLU(3)], ids=["linear", "prelu"])
def test_rows_of_sequences(a, options):
    model = Model(lambda m, x: m.b(torch.tanh(m.a(x.flatten(0, 1)))).unflatten(0, x.shape[:2]),
                  a=a, b=nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))  # fmt: skip
    check_clip(model, square, torch.randn(N, T, 3), **options)
    check_clip(model, square_second, torch.randn(T, N, 3), dims=1, batch_dim=1, **options)


# ---- Dot products, as training asks for them -----------------------------------------------------
def exact(model, x, directions):
    rows = gradients(model, square, x)
    return torch.stack([sum((row[k] * v).sum() for k, v in directions.items()) for row in rows])


def setting():
    model = mlp().double()
    return model, torch.randn(N, 3, dtype=torch.float64), dict(model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"weight_grad": False}, {"backend": "vmap"}], ids=str)
def test_directions_may_change_with_every_pass(options):
    model, x, named = setting()
    with torchgradx.attach(model, **options) as probe:
        for names in (["0.weight"], ["0.bias", "2.weight"], list(named)):
            directions = {k: torch.randn_like(named[k]) for k in names}
            probe.directions = directions
            assert probe.directions == directions
            loss = square(model, x)
            probe.directions = {}  # for the passes to come
            loss.backward()
            probe.directions = directions
            dots = probe.dot()
            assert torch.allclose(dots, exact(model, x, directions), rtol=1e-9)
            assert (dots.dtype, dots.requires_grad) == (torch.float64, False)
        probe.directions = {}
        loss = square(model, x)
        probe.directions = directions  # too late
        loss.backward()
        with pytest.raises(RuntimeError, match="before the forward"):
            probe.dot()


def test_scales_and_signs_and_accumulation():
    model, x, named = setting()
    directions = {k: torch.randn_like(p) for k, p in named.items()}
    want = exact(model, x, directions)
    with torchgradx.attach(model, directions=directions, loss_scale=-0.5) as probe:
        for part in (x[:2], x[2:]):
            (square(model, part) * -0.5).backward()
        assert torch.allclose(probe.dot(), want, rtol=1e-9)
        assert (probe.norms() > 0).all()
    with torchgradx.attach(model, directions=directions, loss_reduction="sum") as probe:
        (square(model, x) * N).backward()
        assert torch.allclose(probe.dot(), want, rtol=1e-9)


@pytest.mark.skipif(not ops.NATIVE, reason="its gradients by sample are rounded to bfloat16")
def test_half_precision_is_summed_in_float32():
    model = torch.nn.Linear(512, 64).bfloat16()
    x, n = torch.randn(5, 20, 512).bfloat16(), 5  # a fifth is no bfloat16
    v = torch.randn(64, 512)
    with torchgradx.attach(model, directions={"weight": v}) as probe:
        y = model(x)
        y.backward(torch.ones_like(y) / n)
        dots = probe.dot()
    want = torch.einsum("nti,oi->n", x.double(), v.double())
    terms = x.double().square().sum((1, 2)).sqrt() * v.double().norm() * 20**0.5
    share = (torch.ones(1).bfloat16() / n).double() * n  # of a gradient that bfloat16 rounds
    assert ((dots - want * share).abs() <= 64 * 2**-24 * terms).all()


def test_what_is_not_a_direction_is_named():
    model, x, named = setting()
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        with pytest.raises(RuntimeError, match="directions"):
            probe.dot()
        with pytest.raises(ValueError, match=r"'0\.wieght'"):
            probe.directions = {"0.wieght": named["0.weight"]}
        with pytest.raises(ValueError, match=r"Tensor \[5, 3\]"):
            probe.directions = {"0.weight": named["2.weight"]}
        with pytest.raises(ValueError, match="floating"):
            probe.directions = {"0.bias": torch.ones(5, dtype=torch.long)}
        with pytest.raises(TypeError, match="directions must be"):
            probe.directions = [named["0.weight"]]
        assert probe.directions == {}
        probe.norms()
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    twice = {"0.weight": torch.ones(3, 3), "1.weight": torch.ones(3, 3)}
    with pytest.raises(ValueError, match="given twice"):
        torchgradx.attach(tied, directions=twice)


@pytest.mark.parametrize("backend", ["auto", "vmap"])
def test_products_under_autocast_are_of_the_gradients(backend):
    """By vmap both are of one gradient; a kernel's have the operands' precision."""
    model = nn.Sequential(nn.Linear(64, 64), nn.PReLU(64), nn.Linear(64, 3))
    x, loss = torch.randn(N, 64), under_autocast()
    directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    v = torch.cat([along.flatten() for along in directions.values()])
    with torchgradx.attach(model, directions=directions, backend=backend) as probe:
        loss(model, x).backward()
        dots = probe.dot()
    for dot, one in zip(dots, x.split(1), strict=True):
        parts = torch.autograd.grad(loss(model, one), [*model.parameters()])
        own = torch.cat([g.flatten() for g in parts])
        largest = float(own.norm() * v.norm())
        assert abs(dot - own @ v) <= (1e-6 if backend == "vmap" else 1e-3) * largest


def test_a_sparse_gradient_of_halves():
    model, ids = nn.EmbeddingBag(9, 4, mode="sum", sparse=True).bfloat16(), torch.randint(9, (1, 3))
    with torchgradx.attach(model, clip=True) as probe:
        square(model, ids).backward()
        probe.clip_grad_norm_(1e-3)
    assert (model.weight.grad.is_sparse, model.weight.grad.dtype) == (True, torch.bfloat16)
    assert 0.99e-3 < model.weight.grad.to_dense().float().norm() < 1.01e-3
