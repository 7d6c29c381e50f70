"""The oracle for whole models: a float64 loop over single samples, plain autograd, and nothing of
the code under test. `check` holds an attached model against it and against an unattached twin."""

import copy
import functools
import gc
import math
import os
import re

import pytest
import torch
from torch import nn

import torchgradx

DEVICE = os.environ.get("TORCHGRADX_TEST_DEVICE", "cpu")  # of all tensors: see conftest.py
if DEVICE != "cpu":  # what is compared with: float32 in earnest, the same bits each time
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False

NATIVE = [{"backend": "native"}, {"backend": "native", "fused": False}]
NATIVE += [{"backend": "native", "weight_grad": False}]
ANY = [{}, {"fused": False}, {"weight_grad": False}]
VMAP = [{"backend": "vmap"}, {"backend": "vmap", "weight_grad": False}]


def title(options):
    return ",".join(f"{key}={value}" for key, value in options.items()) or "default"


def each_of(modes):
    """Parametrise a test over options of attach(); with other parameters they are a grid."""
    parametrize = pytest.mark.parametrize("options", modes, ids=title)
    needs = pytest.mark.usefixtures("_native_where_it_is_asked_for")
    return lambda test: pytest.mark.grid(needs(parametrize(test)))


every_mode = each_of(ANY + VMAP + NATIVE)
fallback_mode = each_of(ANY + VMAP)
a_few_modes = each_of(ANY + VMAP[:1])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


class Model(nn.Module):
    """Model(forward, name=module_or_tensor, ...): a module from a function of (model, *inputs)."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def rms_norm(d, of=lambda weight: weight):
    """As users write it: no kernel is called by its name."""

    def forward(m, x):
        return of(m.weight) * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())

    return Model(forward, weight=torch.rand(d) + 0.5)


def mlp(width=5):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def square(model, *batch):
    """Mean over samples of the sum of squares of the sample's output."""
    return model(*batch).square().flatten(1).sum(1).mean()


def square_second(model, *batch):
    """As square, for an output [T, N, ...]."""
    return model(*batch).square().transpose(0, 1).flatten(1).sum(1).mean()


def penalised(model, *batch):
    """square, and a penalty on the first parameter, as weight decay written into the loss."""
    return square(model, *batch) + 0.1 * next(model.parameters()).square().sum()


def as_dtype(tensor, dtype):
    floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return tensor.to(dtype) if floating and dtype is not None else tensor


def one_sample(batch, n, dims):
    dims = dims if isinstance(dims, tuple) else (dims,) * len(batch)
    for tensor, dim in zip(batch, dims, strict=True):
        yield tensor.narrow(dim if tensor.dim() > 1 else 0, n, 1)


def count(batch, dims):
    return batch[0].shape[dims[0] if isinstance(dims, tuple) else dims]


def loop(model, loss, *batch, dims=0, dtype=torch.float64):
    """{parameter: [N] norms of the gradient of loss(model, sample n)}, one sample at a time.
    dtype=None: in the dtypes that the model and the batch have."""
    model = copy.deepcopy(model).to(dtype=dtype)
    batch = [as_dtype(t.detach(), dtype) for t in batch]
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for n in range(count(batch, dims)):
        model.zero_grad()
        loss(model, *one_sample(batch, n, dims)).backward()
        grads = [p.grad for p in live.values()]
        rows.append([0.0 if g is None else g.to_dense().double().norm().item() for g in grads])
    columns = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return dict(zip(live, columns, strict=True))


def joined(passes):
    """The norms of several passes, in their order."""
    return {name: torch.cat([norms[name] for norms in passes]) for name in passes[0]}


def per_module(norms):
    modules = {}
    for name, value in norms.items():
        modules.setdefault(name.rpartition(".")[0], []).append(value)
    return {name: torch.stack(values).norm(dim=0) for name, values in modules.items()}


def per_model(norms):
    return torch.stack(list(norms.values())).norm(dim=0)


def loop_model(model, loss, *batch, **options):
    return per_model(loop(model, loss, *batch, **options))


def tolerance(model, dtype):
    """float64: far below any error of meaning. Else: a gradient entry and a norm are sums of at
    most the largest parameter's length (errors grow as its root), over some 32 roundings of a
    sample's way forward and back."""
    if dtype == torch.float64:
        return 1e-9
    longest = max(p.numel() for p in model.parameters())
    return 32 * torch.finfo(dtype).eps * math.sqrt(longest)


def close(got, want, rtol=1e-9, among=None):
    """|got - want| <= rtol (want + among / 10); among: the norm of all parameters together, below
    which a small parameter's norm is rounding of the larger terms it is made from."""
    assert got.shape == want.shape, f"{tuple(got.shape)} and not {tuple(want.shape)}"
    bound = rtol * (want + (want if among is None else among / 10))
    got, bound, want = got.cpu(), bound.cpu(), want.cpu()
    wrong = (got.double() - want).abs() > bound + 1e-300
    wrong |= ~got.isfinite()
    assert not wrong.any(), f"{got.tolist()} and not {want.tolist()}"


def close_named(got, want, rtol=1e-9):
    """Every name of want; a name beside them (a frozen parameter's) counts nothing."""
    total = per_model(want)
    for name, value in want.items():
        assert name in got, f"{name} is missing among {list(got)}"
        try:
            close(got[name], value, rtol, total)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    for name in got.keys() - want.keys():
        assert not got[name].any(), f"{name} counts nothing, and has {got[name].tolist()}"


def same_gradients(model, twin, rtol=None):
    """Bit for bit if rtol is None; else as close_named: what cancels is rounding of the rest."""
    grads = [q.grad.to_dense() for q in twin.parameters() if q.grad is not None and q.grad.numel()]
    largest = max((float(g.abs().max()) for g in grads), default=0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}.grad: {p.grad} and not {q.grad}"
        if p.grad is None:
            continue
        got, want = p.grad.to_dense(), q.grad.to_dense()
        if rtol is None:
            assert torch.equal(got, want), f"{name}.grad differs from the plain backward's"
        else:
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            worst = (got - want).abs().max().double() if got.numel() else 0.0
            bound = rtol * (want.abs().max() + largest / 10) if want.numel() else 0.0
            assert worst <= bound, f"{name}.grad is off by {worst}"


def fingerprint(model):
    """What an attachment must not leave on a model."""
    modules = {
        name: (type(m), tuple(vars(m)), m.training,
               tuple(len(hooks) for k, hooks in sorted(vars(m).items()) if k.endswith("_hooks")))
        for name, m in model.named_modules()
    }  # fmt: skip
    parameters = {
        name: (type(p), tuple(vars(p)), len(p._backward_hooks or ()),
               len(p._post_accumulate_grad_hooks or ()))
        for name, p in model.named_parameters()
    }  # fmt: skip
    return modules, parameters, tuple(model.state_dict())


@functools.cache
def native_missing():
    """Why backend="native" cannot run here, or None."""
    layer = nn.Linear(2, 2)
    try:
        with torchgradx.attach(layer, backend="native") as probe:
            square(layer, torch.randn(3, 2)).backward()
            probe.norms()
    except Exception as error:  # the reason is shown as the skip's
        return f"backend='native' does not run here: {error}"
    return None


def need_native(options):
    if options.get("backend") == "native" and native_missing():
        pytest.skip(native_missing())


def prepared(model, batch, dtype, input_grad=False, device=DEVICE):
    model = copy.deepcopy(model).to(device, dtype)
    batch = [as_dtype(t, dtype).to(device) for t in batch]
    if input_grad:
        batch = [t.detach().requires_grad_() if t.is_floating_point() else t for t in batch]
    return model, batch


def check(model, loss, *batch, dtype=torch.float64, dims=0, want=None, rtol=None,
          input_grad=False, device=DEVICE, **options):  # fmt: skip
    """One step of an attached copy of the model: norms equal the loop's, under every `per=`;
    the loss is the same bits, and `.grad` (inputs' too) is what it is without the probe."""
    need_native(options)
    want = loop(model, loss, *batch, dims=dims) if want is None else want
    model, batch = prepared(model, batch, dtype, input_grad, device)
    twin, twin_batch = prepared(model, [t.detach() for t in batch], dtype, input_grad, device)
    rtol = rtol or tolerance(model, dtype)
    only_norms = options.get("weight_grad") is False
    before = fingerprint(model)
    if only_norms:
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
    kept = [p.grad for p in model.parameters()]
    with torchgradx.attach(model, **options) as probe:
        value = loss(model, *batch)
        value.backward()
        named, modules = probe.norms(per="parameter"), probe.norms(per="module")
        whole = probe.norms()
        again = probe.norms(per="model")
    plain = loss(twin, *twin_batch)
    plain.backward()
    assert torch.equal(value, plain), "the attachment changed the model's output"
    close_named(named, want, rtol)
    close_named(modules, per_module(want), rtol)
    close(whole, per_model(want), rtol)
    assert torch.equal(whole, again), "reading twice gave two answers"
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for norms in [whole, *named.values(), *modules.values()]:
        assert (norms.dtype, norms.requires_grad) == (expected, False)
    if only_norms:
        for p, old in zip(model.parameters(), kept, strict=True):
            assert p.grad is old, "weight_grad=False replaced .grad"
            assert bool((old == 0.5).all()), "weight_grad=False changed .grad"
    else:
        same_gradients(model, twin, None if options.get("fused") is False else rtol)
    for t, u in zip(batch, twin_batch, strict=True):
        assert (t.grad is None) == (u.grad is None)
        if u.grad is not None:
            assert (t.grad - u.grad).abs().max() <= rtol * u.grad.abs().max()
    del value  # what is left may live as long as the last graph
    if fingerprint(model) != before:
        gc.collect()
    assert fingerprint(model) == before, "something is left after remove()"
    return whole


def under_autocast(dtype=torch.bfloat16, loss=square):
    """The loss, in float32, of a forward in half precision."""

    def halved(model, *batch):
        def forward(*batch):
            with torch.autocast(DEVICE, dtype):
                return model(*batch).float()

        return loss(forward, *batch)

    return halved


def exact_step(probe, model, *batch, loss=square, rtol=1e-9, want=None, twin=None):
    """A step, and the norms of it and of each parameter: those of the loop; .grad: a twin's."""
    want = loop(model, loss, *batch) if want is None else want
    if twin is not None:
        model.zero_grad()
        twin.zero_grad()
        loss(twin, *batch).backward()
    loss(model, *batch).backward()
    close_named(probe.norms(per="parameter"), want, rtol)
    close(probe.norms(), per_model(want), rtol)
    if twin is not None:
        same_gradients(model, twin, rtol)


def refusal(probe, match=None):
    """The CoverageError with which the probe refuses to be read."""
    with pytest.raises(torchgradx.CoverageError, match=match) as refusal:
        probe.norms()
    return refusal.value


def exact_steps(model, *batches, loss=square, rtol=1e-9, **options):
    """Steps of one attachment, each of them exact. Returns what explain() says after the last."""
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    wants = [loop(model, loss, *batch) for batch in batches]
    with torchgradx.attach(model, **options) as probe:
        for batch, want in zip(batches, wants, strict=True):
            exact_step(probe, model, *batch, loss=loss, rtol=rtol, want=want)
        return probe.explain()


def read_or_refused(probe, want, words=""):
    """What is read is exact, or an error with these words, which is returned."""
    try:
        got = probe.norms(per="parameter")
    except torchgradx.CoverageError as error:
        refusal = error
    else:
        return close_named(got, want)
    assert words in str(refusal), refusal
    return refusal


def step_or_refused(probe, model, *batch, loss=square, words=""):
    """A step, and as read_or_refused; the next one begins a new record."""
    want = loop(model, loss, *batch)
    loss(model, *batch).backward()
    refusal = read_or_refused(probe, want, words)
    probe.reset()
    return refusal


def attempt(model, loss, *batch, **options):
    """One step and a reading: {parameter: norms} or None, the CoverageError or None, and whether
    backward() ran (attach itself may refuse)."""
    probe = None
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError as error:
        refusal = error
    else:
        loss(model, *batch).backward()  # outside the try: backward() itself must not raise
        try:
            return probe.norms(per="parameter"), None, True
        except torchgradx.CoverageError as error:
            refusal = error
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
    finally:
        if probe is not None:
            probe.remove()
    assert refusal.parameters, f"no parameter named: {refusal}"
    for name in refusal.parameters:
        assert name in dict(model.named_parameters()), f"{name} is not a parameter's name"
    assert any(name in str(refusal) for name in refusal.parameters), str(refusal)
    return None, refusal, probe is not None


def exact_or_refused(model, loss, *batch, dims=0, **options):
    """Where the contract promises only not to be wrong. Returns the refusal, if there was one."""
    need_native(options)
    model, batch = prepared(model, batch, torch.float64)
    want = loop(model, loss, *batch, dims=dims)
    got, refusal, _ = attempt(model, loss, *batch, **options)
    if refusal is None:
        close_named(got, want)
    return refusal


def refused(model, loss, *batch, names, match="", spared=(), **options):
    """A CoverageError that names these parameters and not the spared ones; .grad is whole."""
    need_native(options)
    model, batch = prepared(model, batch, torch.float64)
    twin = copy.deepcopy(model)
    loss(twin, *batch).backward()
    got, refusal, ran = attempt(model, loss, *batch, **options)
    assert refusal is not None, f"accepted, and gave {got}"
    assert set(names) <= set(refusal.parameters), refusal.parameters
    assert not set(spared) & set(refusal.parameters), refusal.parameters
    text = str(refusal)
    for name in names:
        assert name in text, text
    assert re.search(match, text), f"{match!r} is not in: {text}"
    if ran and options.get("weight_grad", True):
        same_gradients(model, twin, None if options.get("fused") is False else 1e-9)
    return refusal
