"""What a layer is given: in any memory format, by keyword, of any class; and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    close_named,
    every_mode,
    fallback_mode,
    loop,
    loop_model,
    mlp,
    need_native,
    square,
)
from torch import nn
from torch.overrides import TorchFunctionMode

import torchgradx

N, C, T = 4, 8, 9
ROWS, IMAGES = torch.randn(N, T, C), torch.randn(N, T, T, C)  # channels last
GIVEN = {
    "conv1d": (lambda: nn.Conv1d(C, 6, 3), lambda: ROWS.transpose(1, 2)),
    "conv1d, one channel": (lambda: nn.Conv1d(1, 6, 3), lambda: ROWS[..., :1].transpose(1, 2)),
    "conv1d by groups": (lambda: nn.Conv1d(C, 8, 3, groups=4), lambda: ROWS.transpose(1, 2)),
    "conv1d padded": (
        lambda: nn.Conv1d(C, 6, 3, padding=1, padding_mode="circular"),
        lambda: ROWS.transpose(1, 2),
    ),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(C, 6, 3), lambda: ROWS.transpose(1, 2)),
    "conv2d": (lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(0, 3, 1, 2)),
    "conv2d, samples second": (lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(1, 3, 0, 2)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(C, 6, 3), lambda: IMAGES.permute(0, 3, 1, 2)),
    "conv3d": (lambda: nn.Conv3d(C, 6, (1, 2, 2)), lambda: IMAGES[:, None].permute(0, 4, 1, 2, 3)),
    "linear": (lambda: nn.Linear(T, 6), lambda: ROWS.transpose(1, 2)),
    "linear, samples second": (lambda: nn.Linear(C, 6), lambda: ROWS.transpose(0, 1)),
    "linear without bias, one sample": (
        lambda: nn.Linear(C, 6, bias=False),
        lambda: ROWS[:, :1].transpose(0, 1),  # contiguous, though its first stride is no product
    ),
    "layer norm": (lambda: nn.LayerNorm(T), lambda: ROWS.transpose(1, 2)),
    "rms norm": (lambda: nn.RMSNorm(C), lambda: ROWS.transpose(0, 1)),
    "group norm": (lambda: nn.GroupNorm(2, C), lambda: IMAGES.permute(0, 3, 1, 2)),
    "batch norm": (lambda: nn.BatchNorm2d(C).eval(), lambda: IMAGES.permute(0, 3, 1, 2)),
    "prelu": (lambda: nn.PReLU(C), lambda: IMAGES.permute(0, 3, 1, 2)),
    "embedding": (lambda: nn.Embedding(9, 6), lambda: torch.randint(9, (T, N)).t()),
    "lstm": (lambda: nn.LSTM(T, 6, batch_first=True), lambda: ROWS.transpose(1, 2)),
}


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GIVEN)
def test_outputs_lie_in_memory_as_they_would(name, dtype, options):
    need_native(options)
    make, given = GIVEN[name]
    model, x = make().to(dtype), given()
    x = x.to(dtype) if x.is_floating_point() else x
    want = model(x)
    with torchgradx.attach(model, **options):
        got = model(x)
    for a, b in zip(*([t] if torch.is_tensor(t) else t[:1] for t in (got, want)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@every_mode
def test_a_text_network_flattens_what_it_convolved(options):
    model = Model(
        lambda m, ids: m.l(torch.relu(m.c(m.e(ids).permute(0, 2, 1))).view(len(ids), -1)),
        e=nn.Embedding(9, C), c=nn.Conv1d(C, 6, 3, padding=1), l=nn.Linear(6 * T, 3),
    )  # fmt: skip
    check(model, square, torch.randint(9, (N, T)), **options)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


@every_mode
def test_the_model_of_the_forum_question(options):
    model = Model(
        lambda m, x: m.fc(torch.relu(m.conv2(torch.relu(m.conv1(x)))).flatten(1)),
        conv1=nn.Conv2d(3, 10, 3, padding=1, bias=False),
        conv2=nn.Conv2d(10, 20, 3, padding=1, stride=2, bias=False),
        fc=nn.Linear(500, 10, bias=False),
    )
    x, y = torch.randn(50, 3, 10, 10), torch.randint(0, 10, (50,))
    check(model, cross_entropy, x, y, dtype=torch.float32, **options)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


@both_dtypes
@a_few_modes
def test_a_cnn_with_group_norm_and_in_place_activations(options, dtype):
    x, y = torch.randn(N, 2, 6, 6), torch.randint(0, 5, (N,))
    check(small_cnn(), cross_entropy, x, y, dtype=dtype, **options)


@every_mode
@pytest.mark.parametrize("what", ["input", "model", "both"])
def test_channels_last_changes_nothing(what, options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, stride=2))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    if what != "input":
        model = model.to(memory_format=torch.channels_last)
    if what != "model":
        x = x.to(memory_format=torch.channels_last)
    check(model, square, x, want=want, **options)


@every_mode
def test_channels_last_changes_nothing_to_normalisations(options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.PReLU(4))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    last = torch.channels_last
    check(model.to(memory_format=last), square, x.to(memory_format=last), want=want, **options)


@every_mode
def test_strided_and_expanded_inputs_are_as_good_as_contiguous_ones(options):
    images = torch.randn(N, 8, 2, 9).permute(0, 2, 1, 3)[..., ::2]
    check(nn.Conv2d(2, 3, 3), square, images, **options)
    check(nn.Linear(3, 4), square, torch.randn(3, N, 5).permute(1, 2, 0), **options)
    check(nn.Linear(3, 4), square, torch.randn(N, 1, 3).expand(N, 5, 3), **options)


@every_mode
def test_an_expanded_output_gradient_is_as_good_as_a_dense_one(options):
    def total(model, x):
        return model(x).flatten(1).sum(1).mean()

    check(nn.Linear(3, 4), total, torch.randn(N, 5, 3), **options)
    check(nn.Conv2d(2, 3, 3, padding=1), total, torch.randn(N, 2, 5, 5), **options)


@fallback_mode
def test_permuting_samples_permutes_norms(options):
    model, order = small_cnn().double(), torch.tensor([2, 0, 3, 1])
    x, y = torch.randn(N, 2, 6, 6).double(), torch.randint(0, 5, (N,))
    with torchgradx.attach(model, **options) as probe:
        cross_entropy(model, x, y).backward()
        norms = probe.norms()
        cross_entropy(model, x[order], y[order]).backward()
        assert torch.allclose(probe.norms(), norms[order], rtol=1e-9)


@a_few_modes
def test_the_same_bits_come_out_twice(options):
    model, x, y = small_cnn(), torch.randn(32, 2, 6, 6), torch.randint(0, 5, (32,))
    with torchgradx.attach(model, **options) as probe:
        runs = []
        for _ in range(2):
            model.zero_grad()
            cross_entropy(model, x, y).backward()
            runs.append([probe.norms(), *probe.norms(per="parameter").values()])
            runs[-1] += [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@every_mode
def test_a_sample_without_a_gradient_has_exactly_zero(options):
    need_native(options)
    model, x = mlp(), torch.randn(N, 6, 3)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0])
    with torchgradx.attach(model, **options) as probe:
        (model(x).square().flatten(1).sum(1) * weights).mean().backward()
        norms = probe.norms()
    assert (norms > 0).tolist() == [True, False, True, False]


@a_few_modes
@pytest.mark.parametrize("factor", [1e-18, 1e15])
def test_very_small_and_very_large_gradients_survive_float32(factor, options):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    x = torch.rand(N, 2, 6, 6)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        (square(model, x) * factor).backward()
        norms = probe.norms().double() / factor
    assert torch.allclose(norms, want, rtol=1e-4), f"{norms.tolist()} and not {want.tolist()}"


LAYERS = {
    "Linear": (lambda: nn.Linear(3, 3), (N, 5, 3)),
    "Conv2d": (lambda: nn.Conv2d(3, 2, 2), (N, 3, 4, 4)),
    "Conv2d, reflected": (
        lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), (N, 3, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(3), (N, 5, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), (N, 5, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (N, 4, 3, 2)),
    "PReLU": (lambda: nn.PReLU(4), (N, 4, 3)),
    "Embedding": (lambda: nn.Embedding(7, 3), (N, 5)),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_and_input(name):
    make, shape = LAYERS[name]
    x = torch.randint(0, 7, shape) if name == "Embedding" else torch.randn(shape).double()
    return make().double(), x


@a_few_modes
@every_layer
def test_by_keyword(name, options):
    layer, x = layer_and_input(name)
    keyword = "x" if name == "RMSNorm" else "input"
    check(Model(lambda m, t: m.layer(**{keyword: t}), layer=layer), square, x, **options)


def strides(shape, order):
    return torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(4)])


@a_few_modes
@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.InstanceNorm2d, nn.PReLU])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize(("high", "wide"), [(3, 2), (1, 3), (3, 1)])
def test_images_in_any_order_of_memory(kind, order, high, wide, options):
    layer = nn.GroupNorm(2, 4) if kind is nn.GroupNorm else kind(4)
    if kind is nn.InstanceNorm2d:
        layer = kind(4, affine=True)
    x = strides((N, 4, high, wide), order).normal_().double()
    inner = nn.Conv2d(4, 4, 1)  # so that its input has a gradient
    check(Model(lambda m, t: m.layer(t + m.inner(t)), layer=layer, inner=inner), square, x,
          **options)  # fmt: skip


class Logged(torch.Tensor):
    """Sees each function that it is given to."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        LOG.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs or {})


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        LOG.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


LOG = []


@pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="the fallback calls no operator itself")
@every_layer
@pytest.mark.parametrize("how", ["class", "mode"])
def test_who_watches_the_calls_sees_those_of_the_framework_s_own(name, how):
    layer, x = layer_and_input(name)

    def seen():
        LOG.clear()
        if how == "class":
            loss = square(layer, x.as_subclass(Logged))
        else:
            with Watching():
                loss = square(layer, x)
        return loss, list(LOG)

    want, calls = loop(layer, square, x), seen()[1]
    with torchgradx.attach(layer, fused=False) as probe:
        loss, attached = seen()
        loss.backward()
        close_named(probe.norms(per="parameter"), want)
    assert set(calls) <= set(attached)  # which the probe's own join
    assert type(loss) is (Logged if how == "class" else torch.Tensor)


WRONG = {
    "Linear": torch.randn(N, 5, 4).double(),
    "Conv2d": torch.randn(N, 2, 4, 4).double(),
    "LayerNorm": torch.randn(N, 5, 4).double(),
    "GroupNorm": torch.randn(1, 4).double()[:, :, None].expand(1, 4, 0),
    "Embedding": torch.full((N, 5), 7),
}


@pytest.mark.parametrize("wrong", ["sizes", "dtype", "no tensor"])
@pytest.mark.parametrize("name", WRONG)
def test_what_it_refuses_is_refused_alike(name, wrong):
    layer, _ = layer_and_input(name)
    x = WRONG[name]
    if name == "GroupNorm":
        layer, x = nn.GroupNorm(4, 4).double(), torch.randn(1, 4).double()
    x = {"sizes": x, "dtype": x.bool(), "no tensor": "x"}[wrong]
    with pytest.raises(Exception) as plain:  # noqa: PT011
        layer(x)
    with torchgradx.attach(layer, fused=False), pytest.raises(type(plain.value)) as ours:
        layer(x)
    assert str(ours.value) == str(plain.value)


@a_few_modes
def test_what_hides_a_weight_is_what_the_layer_computes_with(options):
    layer, x = nn.Linear(3, 2).double(), torch.randn(N, 3).double()
    other = torch.randn(2, 3).double()
    with torchgradx.attach(layer, **options):
        layer.__dict__["weight"] = other
        torch.testing.assert_close(layer(x), nn.functional.linear(x, other, layer.bias))
        del layer.__dict__["weight"]


class Doubled(nn.Linear):
    """Its weight is not what it holds, which nn.Linear would leave as the memory was."""

    def reset_parameters(self):
        for p in self.parameters():
            nn.init.normal_(p)

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 2 if name == "weight" else found


@a_few_modes
def test_a_layer_that_computes_its_weight_is_no_stock_one(options):
    if options.get("backend") == "native":
        pytest.skip("no kernel has it")
    check(nn.Sequential(Doubled(3, 4), nn.Tanh(), nn.Linear(4, 2)), square, torch.randn(N, 3),
          **options)  # fmt: skip
