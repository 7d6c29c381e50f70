"""Clipping as training does it: accumulation, scalers, checkpoints, other gradients, refusals."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attach_models import DEVICE, Model, mlp, square
from clip_oracle import bounded, check_clip, clipped, gradients, is_sum, norms_of, refuses, weighted
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops

N = 6
BOUND = 0.5


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(n=N):
    return torch.randn(n, 3, dtype=torch.float64)


either = pytest.mark.parametrize("weight_grad", [True, False], ids=["", "deferred"])


@either
@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("check", ["graph", "samples"])
@pytest.mark.parametrize("read", [False, True], ids=["unread", "norms read before"])
def test_accumulation_over_unequal_batches(read, check, backend, weight_grad):
    model, batches = net(), [batch(4), batch(1), batch(3)]
    options = {"backend": backend, "weight_grad": weight_grad, "check": check}
    with torchgradx.attach(model, clip=True, loss_scale=1 / 3, **options) as probe:
        for set_to_none in (True, False):
            model.zero_grad(set_to_none=set_to_none)
            for x in batches:
                (square(model, x) / 3).backward()
            if read:
                probe.norms()
            assert probe.clip_grad_norm_(BOUND).shape == (8,)
            is_sum(model, clipped(model, *batches, share=1 / 3))


@either
def test_what_no_step_has_clipped_is_dropped_once_weights_have_changed(weight_grad):
    model, seen = net(), []
    with torchgradx.attach(model, clip=True, weight_grad=weight_grad) as probe:
        for _ in range(4):
            x = batch()
            seen.append(StorageWeakRef(x.untyped_storage()))
            square(model, x).backward()
            model[0].bias.detach().add_(1)  # as an optimizer does
        assert [ref.expired() for ref in seen] == [True, True, True, False]
        refuses(torchgradx.CoverageError, "weights were changed", probe, model, BOUND)


def test_samples_that_are_run_alone_leave_nothing_in_grad():
    """A reentrant checkpoint has their backward reach .grad."""

    def forward(m, x):
        return m.head(checkpoint(m.inner, m.first(x), use_reentrant=True))

    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    parts = {"first": nn.Linear(3, 3), "inner": inner, "head": nn.Linear(3, 2)}
    model, x = Model(forward, **parts).double(), torch.randn(4, 3).double()
    plain = Model(lambda m, x: m.head(m.inner(m.first(x))), **copy.deepcopy(parts)).double()
    want = clipped(plain, x)
    with torchgradx.attach(model, clip=True, check="samples") as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(BOUND)
        is_sum(model, want)


def test_a_gradient_of_zeros_is_left_alone():
    x = batch()
    x[2] = 0
    model = nn.Linear(3, 2, bias=False).double()
    rows = gradients(model, square, x)
    for how in ({"max_norm": 0.0}, {"max_norm": BOUND}, {"factors": lambda norms: 1 / norms}):
        model.zero_grad()
        with torchgradx.attach(model, clip=True) as probe:
            square(model, x).backward()
            norms = probe.clip_grad_norm_(**how)
        assert norms[2] == 0
        if "factors" in how:
            factors = torch.where(norms > 0, 1 / norms, 0)
        else:
            factors = bounded(norms_of(rows, "model"), how["max_norm"])[""]
        is_sum(model, {n: g / N for n, g in weighted(rows, {"": factors}, "model").items()})


def test_what_else_is_in_grad_stays():
    """From before the record, from a penalty's own backward, and from a paused pass."""
    model, x, y = net(), batch(), batch()
    penalty = lambda: sum(p.square().sum() for p in model.parameters())  # noqa: E731
    with torchgradx.attach(model, clip=True) as probe:
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            penalty().backward()
            square(model, x).backward()
            penalty().backward()
            with probe.paused():
                square(model, y).backward()
            torch.autograd.grad(square(model, y), model.parameters())  # adds to no .grad
            probe.clip_grad_norm_(BOUND)
            twin = copy.deepcopy(model)
            twin.zero_grad()
            (2 * sum(p.square().sum() for p in twin.parameters()) + square(twin, y)).backward()
            others = {name: p.grad for name, p in twin.named_parameters()}
            want = clipped(model, x)
            is_sum(model, {name: want[name] + others[name] for name in want})


@pytest.mark.parametrize("clipped_ones", [0, 1, 6])
@pytest.mark.parametrize("layer", ["linear", "conv", "norm", "sequence first"])
def test_some_are_clipped(layer, clipped_ones):
    model, shape = {
        "linear": (nn.Linear(3, 2), (N, 4, 3)),
        "conv": (nn.Conv2d(3, 2, 2), (N, 3, 4, 4)),
        "norm": (nn.GroupNorm(1, 3), (N, 3, 4)),
        "sequence first": (nn.Linear(3, 2), (4, N, 3)),
    }[layer]
    model, dim = model.double(), int(layer == "sequence first")
    x = torch.randn(shape, dtype=torch.float64)
    bounds = torch.full((N,), 1e3, dtype=torch.float64)
    bounds[torch.randperm(N)[:clipped_ones]] = 0.5
    second = lambda m, x: m(x).square().transpose(0, dim).flatten(1).sum(1).mean()  # noqa: E731
    rows = gradients(model, second, x, dims=dim)
    with torchgradx.attach(model, clip=True, batch_dim=dim) as probe:
        second(model, x).backward()
        probe.clip_grad_norm_(bounds)
    factors = {"": (bounds / norms_of(rows, "model")[""]).clamp(max=1)}
    is_sum(model, {name: g / N for name, g in weighted(rows, factors, "model").items()})


def test_samples_of_several_forwards():
    model, x, y = net(), batch(), batch()
    pair = lambda m, both: (m(both[:, 0]) - m(both[:, 1])).square().sum(1).mean()  # noqa: E731
    with torchgradx.attach(model, clip=True) as probe:
        with probe.same_samples():
            loss = (model(x) - model(y)).square().sum(1).mean()
        loss.backward()
        probe.clip_grad_norm_(BOUND)
    is_sum(model, clipped(model, torch.stack([x, y], 1), loss=pair))


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"weight_grad": False}], ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant, options):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = Model(lambda m, x: m.c(checkpoint(m.b, m.a(x), use_reentrant=reentrant)),
                  a=nn.Linear(3, 4), b=inner, c=nn.Linear(4, 2))  # fmt: skip
    check_clip(model, square, torch.randn(N, 3), **options)


@pytest.mark.skipif(not ops.NATIVE, reason="refused without the extension")
def test_compiled_as_one_graph(nothing_compiled):
    """Whose memory is used again: what is kept is a copy."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
                          nn.Linear(36, 5)).double()  # fmt: skip
    x = torch.randn(N, 3, 5, 5, dtype=torch.float64)
    with torchgradx.attach(model, clip=True, directions={"4.weight": torch.ones(5, 36)}) as probe:
        step = torch.compile(model, fullgraph=True, backend="inductor")
        for _ in range(2):
            model.zero_grad()
            square(step, x).backward()
            dots = probe.dot()
            probe.clip_grad_norm_(BOUND)
            is_sum(model, clipped(model, x))
            exact = torch.stack([row["4.weight"].sum() for row in gradients(model, square, x)])
            assert torch.allclose(dots, exact, rtol=1e-9)


def test_what_a_fused_step_follows_is_dropped_once_gradients_are_zeroed():
    """A fused optimizer changes the weights, and no version of them."""
    model, seen = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torchgradx.attach(model, clip=True):
        for _ in range(4):
            x = batch()
            seen.append(StorageWeakRef(x.untyped_storage()))
            square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [ref.expired() for ref in seen] == [True, True, True, False]


@either
def test_a_backward_in_inference_mode(weight_grad):
    model, x = net(), batch()
    with torchgradx.attach(model, clip=True, weight_grad=weight_grad) as probe:
        loss = square(model, x)
        with torch.inference_mode():
            loss.backward()
        probe.clip_grad_norm_(BOUND)
        is_sum(model, clipped(model, x))


def test_gradients_of_another_dtype():
    model = nn.Linear(3, 2).bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32
    with torchgradx.attach(model, clip=True, weight_grad=False) as probe:
        square(model, batch().bfloat16()).backward()
        norms = probe.clip_grad_norm_(BOUND)
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert whole.dtype is torch.float32
    assert 0 < whole.norm() <= 1.01 * BOUND < norms.max()


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("retain", [False, True])
def test_a_grad_scaler_that_writes_into_a_sparse_gradient(retain, options):
    """The values of a sparse .grad are the memory of the output's gradient."""
    x, found, model = torch.randint(0, 7, (N, 4)), [], Model(
        lambda m, x: m.a(torch.tanh(m.e(x)) + F.embedding(x, m.table, sparse=m.e.sparse)),
        e=nn.Embedding(7, 3), table=torch.randn(7, 3), a=nn.Linear(3, 2))  # fmt: skip
    for model.e.sparse in (False, True):
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
        with torchgradx.attach(model, clip=True, loss_scale=scaler, **options) as probe:
            scaler.scale(square(model, x)).backward(retain_graph=retain)
            scaler.unscale_(optimizer)
            norms = probe.clip_grad_norm_(BOUND)
        found.append([norms, *(p.grad.to_dense().clone() for p in model.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["plain", "bfloat16", "float16"])
def test_a_grad_scaler(kind):
    """Between unscale_ and step: .grad is unscaled, and so is what was there before the record."""
    model, x = net().float(), batch().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    dtype, small = getattr(torch, kind, None), 1e-7 if kind == "float16" else 1.0
    with torchgradx.attach(model, clip=True) as probe:
        probe.loss_scale = scaler
        for accumulated in (False, True):
            optimizer.zero_grad()
            if accumulated:
                scaler.scale(square(model, x) * small).backward()
                probe.reset()  # what was recorded until now is not clipped
            with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
                loss = square(model, x).float() * small
            scaler.scale(loss).backward()
            with pytest.raises(RuntimeError, match="unscale_"):
                probe.clip_grad_norm_(BOUND)
            scaler.unscale_(optimizer)
            probe.clip_grad_norm_(BOUND * small)
            for p in model.parameters():
                p.grad /= small
            want = clipped(model, x)
            if accumulated:
                plain = clipped(model, x, bound=1e9)
                want = {name: g + plain[name] for name, g in want.items()}
            is_sum(model, want, 1e-5 if kind == "plain" else 0.05)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.skipif(DEVICE != "cpu", reason="numpy's memory is the host's")
def test_after_it_nothing_is_kept():
    model = mlp()
    with torchgradx.attach(model, clip=True) as probe:
        for end in (lambda: probe.clip_grad_norm_(BOUND), probe.reset, probe.remove):
            memory = np.random.rand(N, 3).astype("float32")
            lives = weakref.ref(memory)
            square(model, torch.from_numpy(memory)).backward()
            del memory
            gc.collect()
            assert lives() is not None
            end()
            gc.collect()
            assert lives() is None


def test_what_is_not_said_right_changes_nothing():
    model, x = mlp(), torch.randn(N, 3)
    with torchgradx.attach(model, clip=True) as probe:
        square(model, x).backward()
        refuses(TypeError, "max_norm or factors", probe, model)
        refuses(TypeError, "max_norm or factors", probe, model, 1.0, factors=torch.ones_like)
        refuses(TypeError, "factors must be", probe, model, factors=1.0)
        for bound in ("1", True, -1.0, float("nan")):
            kind = ValueError if type(bound) is float else TypeError
            refuses(kind, "max_norm must be", probe, model, bound)
        refuses(ValueError, r"Tensor \[6\]", probe, model, torch.ones(N - 1))
        refuses(ValueError, "per must be", probe, model, 1.0, per="layer")
        refuses(ValueError, "nonfinite must be", probe, model, 1.0, nonfinite="skip")
        refuses(ValueError, "factors must turn", probe, model, factors=lambda norms: norms[1:])
        refuses(ValueError, "must be finite", probe, model, factors=lambda norms: norms / 0)
        probe.clip_grad_norm_(1.0)  # and can still be clipped
        refuses(RuntimeError, "clipped already", probe, model, 1.0)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        refuses(RuntimeError, "clip=True", probe, model, 1.0)
    with pytest.raises(ValueError, match="clip must be one of"):
        torchgradx.attach(model, clip=1.0)


@pytest.mark.parametrize("max_norm", [0.0, 1e-6])
def test_a_small_bound_does_not_cancel(max_norm):
    """The clipped sum is made anew: never what is left of a far larger one."""
    model, x = net().float(), batch().float() * 1e3
    with torchgradx.attach(model, clip=True) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(max_norm)
    want = clipped(model, x, bound=max_norm)
    total = sum(g.square().sum() for g in want.values()).sqrt()
    for name, p in model.named_parameters():
        assert (p.grad - want[name]).norm() <= 1e-3 * total + 1e-300
