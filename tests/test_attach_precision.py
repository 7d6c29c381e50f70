"""Half precision, mixed dtypes, GradScaler; steps of inf and nan are shown, and prove nothing."""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    DEVICE,
    Model,
    a_few_modes,
    check,
    close,
    close_named,
    exact_or_refused,
    loop,
    loop_model,
    mlp,
    square,
)
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def twice(m, x):
    return m.out(torch.tanh(m.l(torch.tanh(m.l(x)))))


def inside_and_outside(m, x):
    """A layer used under autocast and beside it."""
    hidden = torch.tanh(m.l(x))
    with torch.autocast(x.device.type, enabled=False):
        hidden = m.l(hidden.float())
    return m.out(hidden)


def checkpointed(reentrant):
    return lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.l(x)), use_reentrant=reentrant))


def loop_of_mixed(net, x):
    """The loop over single samples as they are: the oracle's makes one dtype of all."""
    rows = []
    for n in range(len(x)):
        net.zero_grad()
        square(net, x[n : n + 1]).backward()
        rows.append([p.grad.double().norm() for p in net.parameters()])
    names = [name for name, _ in net.named_parameters()]
    return dict(zip(names, torch.tensor(rows).unbind(1), strict=True))


def shared(function, **more):
    return lambda: Model(function, l=nn.Linear(8, 8), out=nn.Linear(8, 2), **more)


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


MODELS = {
    "a layer used twice": (shared(twice), (N, 8)),
    "a layer used twice, positions": (shared(twice), (N, 5, 8)),
    "under autocast and beside it": (shared(inside_and_outside), (N, 5, 8)),
    "recurrent": (shared(lambda m, x: m.out(m.g(m.l(x))[0]),
                         g=nn.GRU(8, 8, batch_first=True)), (N, 5, 8)),
    "attention": (shared(lambda m, x: m.out(m.a(x, x, x, need_weights=False)[0]),
                         a=nn.MultiheadAttention(8, 2, batch_first=True)), (N, 5, 8)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(),
                                     nn.Flatten(), nn.Linear(64, 2)), (N, 3, 6, 6)),
    "slopes": (lambda: nn.Sequential(nn.Linear(8, 6), nn.PReLU(), nn.Unflatten(1, (6, 1)),
                                     nn.Conv1d(6, 4, 1), nn.PReLU(4), nn.Flatten(),
                                     nn.Linear(4, 2)), (N, 8)),
    "checkpointed": (shared(checkpointed(False), block=block()), (N, 8)),
    "checkpointed reentrantly": (shared(checkpointed(True), block=block()), (N, 8)),
}  # fmt: skip


@a_few_modes
@halves
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_exact_within_its_rounding_however_layers_are_used(name, dtype, options):
    exact_under_autocast(name, dtype, options)


def exact_under_autocast(name, dtype, options):
    make, shape = MODELS[name]
    net, x = make(), torch.randn(shape)

    def under(model, x):
        with torch.autocast(DEVICE, dtype):
            out = model(x)
        return out.float().square().flatten(1).sum(1).mean()

    want = loop(net, under, x, dtype=torch.float32)
    # two dozen roundings to half on a sample's way, which differ between one sample and a batch
    rtol = 24 * torch.finfo(dtype).eps
    check(net, under, x, dtype=torch.float32, want=want, rtol=rtol, **options)


@a_few_modes
@halves
@pytest.mark.parametrize("name", ["a layer used twice", "recurrent", "images"])
def test_half_precision_models_are_those_of_float64_within_their_rounding(name, dtype, options):
    make, shape = MODELS[name]
    net, x = make().to(dtype), torch.randn(shape).to(dtype)
    want = loop(net, square, x)
    with torchgradx.attach(net, **options) as probe:
        square(net, x).backward()
        close_named(probe.norms(per="parameter"), want, 24 * torch.finfo(dtype).eps)
        assert probe.norms().dtype == torch.float32


@a_few_modes
def test_parameters_of_several_dtypes_count_together_in_the_widest(options):
    def forward(m, x):
        hidden = m.b(torch.tanh(m.a(x)).double())
        return m.c(hidden.bfloat16()).float()

    net = Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8).double(),
                c=nn.Linear(8, 2).bfloat16())  # fmt: skip
    x = torch.randn(N, 8)
    want = loop_of_mixed(net, x)
    with torchgradx.attach(net, **options) as probe:
        square(net, x).backward()
        close_named(probe.norms(per="parameter"), want, 24 * torch.finfo(torch.bfloat16).eps)
        assert probe.norms().dtype == torch.float64


CAST = {
    "a weight": lambda m, h: F.linear(h.to(m.kind), m.w.to(m.kind), m.b.to(m.kind)).to(h.dtype),
    "a factor": lambda m, h: (h.to(m.kind) * m.b.to(m.kind)).to(h.dtype),
    "a norm": lambda m, h: (F.rms_norm(h.to(m.kind), (8,)) * (1 + m.b.to(m.kind))).type_as(h),
}


@a_few_modes
@pytest.mark.parametrize(("wide", "coarse"), [(torch.float32, torch.bfloat16),
                                              (torch.float64, torch.float32)])  # fmt: skip
@pytest.mark.parametrize("positions", [(), (6,)], ids=["rows", "sequences"])
@pytest.mark.parametrize("name", CAST)
def test_a_module_that_computes_in_a_coarser_dtype(name, positions, wide, coarse, options):
    """Its sums are rounded as that dtype is, some four times on their way, and no more is asked."""
    parts = {"w": torch.randn(8, 8) / 3} if name == "a weight" else {}
    own = Model(CAST[name], b=torch.randn(8), **parts)
    own.kind = coarse
    net = nn.Sequential(nn.Linear(8, 8), own, nn.Linear(8, 4)).to(wide)
    x = torch.randn(N, *positions, 8, dtype=wide)
    want = [torch.autograd.grad(square(net, x[n : n + 1]), [*net.parameters()], allow_unused=True)
            for n in range(N)]  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            square(net, x).backward()
            for k, norms in enumerate(probe.norms(per="parameter").values()):
                alone = [0.0 if g[k] is None else float(g[k].norm()) for g in want]
                close(norms, norms.new_tensor(alone), 4 * torch.finfo(coarse).eps)


MIXED = {
    "layer norm": (lambda: nn.LayerNorm(6), (N, 5, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (N, 5, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (N, 4, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (N, 4, 3, 3)),
    "batch norm in eval": (lambda: nn.BatchNorm2d(4).eval(), (N, 4, 3, 3)),
}


@a_few_modes
@halves
@pytest.mark.parametrize("name", MIXED)
def test_normalisations_of_halves_have_float32_gradients_of_float32_parameters(
    name, dtype, options
):
    make, shape = MIXED[name]
    net, x = make(), torch.randn(shape).to(dtype)
    for p in net.parameters():
        nn.init.normal_(p)

    def wide(model, x):
        return model(x.to(dtype)).float().square().flatten(1).sum(1).mean()

    want = loop(net, wide, x, dtype=torch.float32)
    with torchgradx.attach(net, **options) as probe:
        wide(net, x).backward()
        close_named(probe.norms(per="parameter"), want, 24 * torch.finfo(dtype).eps)
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert {g.dtype for g in grads} <= {torch.float32}


@a_few_modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_table_of_another_dtype_than_its_reader(dtype, options):
    net = Model(lambda m, ids: m.head(m.table(ids).float()), head=nn.Linear(3, 2),
                table=nn.Embedding(7, 3).to(dtype))  # fmt: skip
    ids = torch.randint(0, 7, (N, 5))
    want = loop_of_mixed(net, ids)
    net.zero_grad()
    with torchgradx.attach(net, **options) as probe:
        square(net, ids).backward()
        close_named(probe.norms(per="parameter"), want, 24 * torch.finfo(torch.bfloat16).eps)
    if options.get("weight_grad", True):
        assert net.table.weight.grad.dtype == dtype


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@a_few_modes
def test_the_default_dtype_does_not_matter(default_dtype, options):
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    check(net, square, torch.randn(N, 3), **options)
    check(net, square, torch.randn(N, 3), dtype=torch.float32, **options)


@a_few_modes
def test_a_step_that_overflows_is_shown_and_the_next_are_exact(options):
    net, x = mlp(), torch.randn(N, 3)
    want = loop_model(net, square, x)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, backoff_factor=2.0**-30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with torchgradx.attach(net, loss_scale=scaler, **options) as probe:
        for overflows in (True, False, False):
            with torch.autocast(DEVICE, torch.float16):
                out = net(x)
            loss = out.float().square().flatten(1).sum(1).mean()
            scaler.scale(loss).backward()
            norms = probe.norms()
            if overflows:
                assert not norms.isfinite().any(), norms
            else:
                assert torch.allclose(norms.double(), want, rtol=24 * 2**-10)
            if options.get("weight_grad", True):
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler.update(1024.0)
            optimizer.zero_grad()


POISONED = {
    "rows": (mlp, (N, 3)),
    "positions": (mlp, (N, 6, 3)),
    "normalised": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), (N, 3)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(),
                                     nn.Linear(64, 2)), (N, 3, 6, 6)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", POISONED)
def test_one_sample_of_nan_is_that_samples_alone_and_the_next_batch_is_exact(name, value, options):
    make, shape = POISONED[name]
    net, x = make().double(), torch.randn(shape).double()
    want, poisoned = loop_model(net, square, x), x.clone()
    poisoned[1].view(-1)[0] = value
    with torchgradx.attach(net, **options) as probe:
        for batch, healthy in ((poisoned, [0, 2, 3]), (poisoned, [0, 2, 3]), (x, [0, 1, 2, 3])):
            square(net, batch).backward()
            norms = probe.norms()
            assert norms.isfinite().nonzero().flatten().tolist() == healthy
            assert torch.allclose(norms[healthy], want[healthy], rtol=1e-9)


@a_few_modes
def test_a_first_pass_of_nan_approves_of_no_later_one(options):
    """A model that mixes samples, which nan hides."""

    def forward(m, x):
        hidden = m.l(x)
        return m.o(torch.tanh(hidden - hidden.mean(0)))

    net = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(net, **options) as probe:
        square(net, x * float("nan")).backward()
        assert not probe.norms().isfinite().any()
        square(net, x).backward()
        with pytest.raises(torchgradx.CoverageError) as refusal:
            probe.norms()
    assert "l.weight" in refusal.value.parameters


@pytest.mark.parametrize("when", ["first", "later"])
def test_rows_of_nan_do_not_choose_a_layout(when):
    """Rows t*N+n, all of nan at first: no verdict may be had from them, nor kept."""

    def forward(m, x):
        n, t, d = x.shape
        rows = m.l(x.transpose(0, 1).reshape(t * n, d))
        return m.o(torch.tanh(rows)).view(t, n, -1).transpose(0, 1)

    net = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    x = torch.randn(N, 8, 3).double()
    want = loop(net, square, x)
    with torchgradx.attach(net) as probe:
        if when == "first":
            square(net, x * float("nan")).backward()
            with contextlib.suppress(torchgradx.CoverageError):  # nan proves nothing
                assert not probe.norms().isfinite().any()
        square(net, x).backward()
        close_named(probe.norms(per="parameter"), want)


@a_few_modes
def test_norms_whose_squares_float16_cannot_hold(options):
    net, x = mlp(16).half(), torch.randn(N, 3).half()
    loss = lambda net, x: 2.0**10 * square(net, x)  # noqa: E731
    want = loop(net, loss, x)
    with torchgradx.attach(net, **options) as probe:
        loss(net, x).backward()
        close_named(probe.norms(per="parameter"), want, 32 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("n", [3, 8, 11])
def test_halves_between_wider_ends_are_proven_as_halves(n):
    """float16 autocast: tables and norms give float32, what comes back to them went through
    numbers so small that scaling rounds them."""
    model = Model(lambda m, ids: m.o(0.03 * m.b(m.e(ids)).mean(1)).float(), e=nn.Embedding(11, 8),
                  b=nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
                  o=nn.Linear(8, 11))  # fmt: skip
    ids, targets = torch.randint(0, 11, (n, 5)), torch.randint(0, 11, (n,))
    with torchgradx.attach(model) as probe:
        with torch.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(model(ids), targets)
        (256 * loss).backward()
        norms = probe.norms(loss_scale=256)
    want = loop_model(model, lambda m, *one: F.cross_entropy(m(one[0]), one[1]), ids, targets)
    assert (norms.double() - want).abs().max() < 0.05 * want.max()


def attends(last):
    """Each output to all positions, but to `last` of them by a softmax of -100: 4e-44, which
    float32 has no bits for."""

    def forward(m, x):
        y = m.l(x)
        mask = torch.zeros(x.shape[1], dtype=y.dtype).index_fill_(0, torch.tensor([4]), -100)
        return torch.softmax(mask, 0) @ torch.cat([y[:, :4], last(y[:, 4:])], 1)

    return Model(forward, l=nn.Linear(3, 2))


@a_few_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_that_a_mask_left_almost_nothing_are_exact(dtype, options):
    check(attends(lambda y: y), square, torch.randn(9, 5, 3), dtype=dtype, **options)


@a_few_modes
def test_rows_that_a_mask_left_almost_nothing_and_are_anothers_change_no_norm(options):
    exact_or_refused(attends(lambda y: y.roll(1, 0)), square, torch.randn(9, 5, 3), **options)


WIDENED = ("layer_norm", "native_layer_norm", "group_norm", "_softmax", "tanh")


@pytest.fixture
def as_on_a_gpu():
    """A GPU's autocast computes some operators in float32, which the CPU's leaves as they are."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")

    def wide(t):
        return t.float() if t.is_floating_point() else t

    def widened(stock, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return stock(*tree_map_only(torch.Tensor, wide, args), **kwargs)

    for name in WIDENED:
        library.impl(name, partial(widened, getattr(torch.ops.aten, name).default))
    yield
    library._destroy()


@a_few_modes
@halves
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_exact_where_it_widens_normalisations(name, dtype, options, as_on_a_gpu):
    exact_under_autocast(name, dtype, options)
