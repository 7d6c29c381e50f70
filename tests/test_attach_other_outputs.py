"""Modules that go another way when they run again than in their forwards, in each precision and at
any number of samples; and those that hold their own parameters in a list besides."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import check, fallback_mode, need_native, square
from torch import nn

import torchgradx

N, WIDE = 6, 16
SAID = {"*": "batch"}  # a module whose layout is said is run again, and not asked at its nodes
HALVES = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast to bfloat16": (torch.float32, torch.bfloat16),
    "autocast to float16": (torch.float32, torch.float16),
}
in_halves = pytest.mark.parametrize(("dtype", "autocast"), HALVES.values(), ids=HALVES)


class Way(nn.Module):
    """A matrix of its own; each subclass has its way through it."""

    def __init__(self):
        super().__init__()
        self.w, self.calls, self.on = nn.Parameter(torch.randn(WIDE, WIDE) / 4), 0, False
        self.drawing = torch.Generator().manual_seed(0)
        self.register_buffer("mean", torch.zeros(WIDE))

    def forward(self, x):
        return torch.tanh(x @ self.w)


class Drops(Way):
    def forward(self, x):
        return super().forward(x * (torch.rand(x.shape, generator=self.drawing) < 0.7).to(x))


class Noisy(Way):
    def forward(self, x):
        return x @ (self.w * (1 + torch.randn(WIDE, WIDE, generator=self.drawing).to(x)))


class Switched(Way):
    """On in the forward, as by a context manager around it."""

    def forward(self, x):
        return super().forward(2 * x if self.on else x)


class Warms(Way):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Centred(Way):
    def forward(self, x):
        y = super().forward(x - self.mean)
        self.mean.add_(1)
        return y


def ahead(module, x, autocast=None):
    """Loss, with all that is switched off again by the backward."""
    module[1].on = True
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = module(x)
    module[1].on = False
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().sum() / len(x)


@fallback_mode
@in_halves
@pytest.mark.parametrize("kind", [Drops, Noisy, Switched, Warms, Centred])
def test_halves_show_another_way_too(kind, dtype, autocast, options):
    """By sums of gradients, of 64 roundings each, they do not."""
    need_native(options)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), kind(), nn.Linear(WIDE, 4)).to(dtype)
    x = torch.randn(N, WIDE).to(dtype)
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        ahead(model, x, autocast).backward()
        with pytest.raises(torchgradx.CoverageError, match="other outputs"):
            probe.norms()


@fallback_mode
@in_halves
def test_halves_that_go_the_same_way_are_read(dtype, autocast, options):
    need_native(options)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Way(), Way(), nn.Linear(WIDE, 4)).to(dtype)
    x, twin = torch.randn(N, WIDE).to(dtype), copy.deepcopy(model).double()
    want = torch.zeros(N).double()
    for n, row in enumerate(x.double().split(1)):
        found = torch.autograd.grad(ahead(twin, row), list(twin.parameters()))
        want[n] = torch.stack([g.norm() for g in found]).norm()
    eps = torch.finfo(autocast or dtype).eps
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        for _ in range(2):
            ahead(model, x, autocast).backward()
            # some 16 roundings one after the other, of each way
            torch.testing.assert_close(probe.norms().double(), want, rtol=16 * eps, atol=0)
            probe.reset()


class Drifts(Way):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 1e-3 * self.calls)


@fallback_mode
@pytest.mark.parametrize("n", [8, 2048])
def test_a_small_drift_shows_at_any_number_of_samples(n, options):
    need_native(options)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Drifts(), nn.Linear(WIDE, 4))
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        ahead(model, torch.randn(n, WIDE)).backward()
        with pytest.raises(torchgradx.CoverageError, match="other outputs"):
            probe.norms()


class Rounds(Way):
    """A batch otherwise than one alone."""

    by = 1.1

    def forward(self, x):
        return super().forward(x) * (self.by if len(x) > 1 else 1)


@fallback_mode
def test_halves_that_are_rounded_otherwise_in_a_batch_have_the_batchs_gradients(options):
    need_native(options)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Rounds(), nn.Linear(WIDE, 4)).bfloat16()
    x = torch.randn(N, WIDE).bfloat16()
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        for _ in range(2):
            parts = model(x).float().square().sum(1)
            parts.mean().backward()
            got = probe.norms(per="parameter")["1.w"]
    parts, w = model(x).float().square().sum(1), model[1].w
    want = [torch.autograd.grad(part, w, retain_graph=True)[0].float().norm() for part in parts]
    eps = torch.finfo(torch.bfloat16).eps  # of the gradient of the outputs, times 1 / N
    torch.testing.assert_close(got, torch.stack(want), rtol=4 * eps, atol=0)


@fallback_mode
def test_in_float32_a_batch_that_gives_something_else_is_refused(options):
    need_native(options)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Rounds(), nn.Linear(WIDE, 4))
    x = torch.randn(N, WIDE)
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match="other outputs"):
            probe.norms()


class Differs(nn.Module):
    """A small difference of large terms, which samples alone round otherwise than their batch."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.eye(256).to(dtype) + 1e-3 * torch.randn(256, 256).to(dtype))

    def forward(self, x):
        return x - torch.einsum("bd,de->be", x, self.w)


@fallback_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_terms_that_cancel_have_the_batchs_gradients(dtype, options):
    need_native(options)
    model = nn.Sequential(Differs(dtype), nn.Linear(256, 4).to(dtype))
    x = torch.randn(33, 256).to(dtype)
    parts, w = model(x).float().square().sum(1), model[0].w
    want = [torch.autograd.grad(part, w, retain_graph=True)[0].float().norm() for part in parts]
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        model(x).float().square().sum(1).mean().backward()
        got = probe.norms(per="parameter")["0.w"]
    eps = torch.finfo(dtype).eps
    # 32 roundings of sums of 256 terms; a replay's is the batch's own
    torch.testing.assert_close(got.float(), torch.stack(want), rtol=32 * 16 * eps, atol=0)


class Masks(Switched):
    """Large constants beside what it computes."""

    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(WIDE) % 2 == 0, -1e4)


def with_a_forward_of_its_own():
    layer = nn.Bilinear(WIDE, WIDE, WIDE)
    layer.on = False

    def forward(self, x):
        x = 2 * x if self.on else x
        w, b = self.weight.to(x), self.bias.to(x)
        return torch.tanh(F.bilinear(x, x, w / 4, b))

    layer.forward = MethodType(forward, layer)
    return layer


@fallback_mode
@in_halves
@pytest.mark.parametrize("made", [Masks, with_a_forward_of_its_own])
def test_what_hides_another_way_does_not(made, dtype, autocast, options):
    need_native(options)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), made(), nn.Softmax(1), nn.Linear(WIDE, 4))
    model, x = model.to(dtype), torch.randn(N, WIDE).to(dtype)
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        ahead(model, x, autocast).backward()
        with pytest.raises(torchgradx.CoverageError, match="other outputs"):
            probe.norms()


FACTOR = [1.0]


class Outside(Way):
    def forward(self, x):
        return super().forward(x) * FACTOR[0]


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["default", "fused=False"])
def test_clipping_after_a_switch_is_refused_and_leaves_grad(options):
    model = nn.Sequential(nn.Linear(WIDE, WIDE), Outside(), nn.Linear(WIDE, 4))
    with torchgradx.attach(model, layout=SAID, clip=True, **options) as probe:
        square(model, torch.randn(N, WIDE)).backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        FACTOR[0] = 3.0
        try:
            with pytest.raises(torchgradx.CoverageError, match="other outputs") as raised:
                probe.clip_grad_norm_(0.1)
        finally:
            FACTOR[0] = 1.0
        assert raised.value.parameters == ("1.w",)
        assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


class Listed(nn.Module):
    """The weights that its loop goes over, besides where torch has them."""

    def __init__(self, keep):
        super().__init__()
        self.w = nn.ParameterList([torch.randn(4, 4) / 2 for _ in range(2)])
        self.keep = keep
        self.kept = keep(self.w)

    def __deepcopy__(self, memo):
        twin = Listed(self.keep)
        twin.load_state_dict(self.state_dict())
        return twin.to(self.w[0].dtype)

    def weights(self):
        kept = self.kept
        return kept.values() if isinstance(kept, dict) else kept

    def forward(self, x):
        for weight in self.weights():
            x = torch.tanh(x @ weight)
        return x


KEEP = {"a list": list, "a tuple": tuple, "a dict": lambda w: dict(enumerate(w))}


@fallback_mode
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_parameters_that_are_in_a_list_besides_are_exact(keep, options):
    check(nn.Sequential(nn.Linear(3, 4), Listed(keep)), square, torch.randn(N, 3), **options)


class Held(nn.Module):
    """Its weight in what cannot be looked into."""

    def __init__(self):
        super().__init__()
        self.w, self.gain = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.randn(4))
        self.linear = partial(F.linear, weight=self.w)

    def forward(self, x):
        return self.linear(x) * self.gain.cosh()


@fallback_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_that_is_held_elsewhere_is_not_counted_as_zero(dtype, options):
    need_native(options)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).to(dtype)
    model.append(Held().to(dtype))
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        square(model, torch.randn(N, 3).to(dtype)).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"2\.w"):
            probe.norms()
