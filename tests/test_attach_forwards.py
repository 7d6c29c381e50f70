"""A layer is called as its class is: by keyword, with what stands in place of its parameters, with
tensors of other classes, and with what it refuses."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    loop,
    square,
)
from torch import nn
from torch.overrides import TorchFunctionMode

import torchgradx

N = 4

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
