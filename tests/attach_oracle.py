"""The oracle for whole models: a float64 loop over single samples, plain autograd, and nothing of
the code under test. `check` holds an attached model against it and against an unattached twin."""

import copy
import gc
import math

import torch
from attach_models import DEVICE
from attach_modes import need_native

import torchgradx


def as_dtype(tensor, dtype):
    floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return tensor.to(dtype) if floating and dtype is not None else tensor


def one_sample(batch, n, dims):
    dims = dims if isinstance(dims, tuple) else (dims,) * len(batch)
    for tensor, dim in zip(batch, dims, strict=True):
        yield tensor.narrow(dim if tensor.dim() > 1 else 0, n, 1)


def count(batch, dims):
    return batch[0].shape[dims[0] if isinstance(dims, tuple) else dims]


def each_gradient(model, loss, *batch, dims=0, dtype=torch.float64):
    """{parameter: gradient of loss(model, sample n)} of each sample, one at a time.
    dtype=None: in the dtypes that the model and the batch have."""
    model = copy.deepcopy(model).to(dtype=dtype)
    batch = [as_dtype(t.detach(), dtype) for t in batch]
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for n in range(count(batch, dims)):
        model.zero_grad()
        loss(model, *one_sample(batch, n, dims)).backward()
        yield {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
               for name, p in live.items()}  # fmt: skip


def loop(*given, **options):
    """{parameter: [N] norms of the gradients}, of what each_gradient takes."""
    rows = [{name: g.double().norm().item() for name, g in row.items()}
            for row in each_gradient(*given, **options)]  # fmt: skip
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for name in rows[0]}  # fmt: skip


def loop_within(model, losses, *batch):
    """{parameter: [N]}: norms of the gradients of each sample's own loss in one forward of all, of
    which it may take more than its rows: random numbers, statistics. losses(model, *batch): [N]"""
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for loss in losses(model, *batch):
        grads = torch.autograd.grad(loss, [*live.values()], retain_graph=True, allow_unused=True)
        rows.append(torch.stack([loss.new_zeros(()) if g is None else g.norm() for g in grads]))
    return dict(zip(live, torch.stack(rows).double().unbind(1), strict=True))


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
    return 32 * torch.finfo(dtype).eps * math.sqrt(max(p.numel() for p in model.parameters()))


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
