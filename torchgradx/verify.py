"""verify(): compares the norms of a model with a loop over its samples, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .errors import CoverageError, VerificationError
from .graph.arguments import one_sample, tensors_in
from .graph.sizes import as_rows
from .options import takes_call
from .scoring import Loss, arguments_of, backward_from, call, grads_kept, norms_alone


@dataclass(frozen=True, repr=False)
class Report:
    """What verify() compared: the norms by parameter, of the probe and of the loop."""

    norms: Mapping[str, Tensor]  # name -> [N]
    loop: Mapping[str, Tensor]
    rtol: float

    def errors(self) -> dict[str, float]:
        """Return each parameter's largest difference, relative to the sample's whole norm."""
        loops = {name: loop.double().cpu() for name, loop in self.loop.items()}
        whole = torch.stack([loop.square() for loop in loops.values()]).sum(0).sqrt()
        found = {}
        for name, loop in loops.items():
            norms = self.norms[name].double().cpu()
            off = (norms - loop).abs() / whole.nan_to_num(torch.inf)
            is_same = (norms == loop) | (norms.isnan() & loop.isnan())
            found[name] = float(off.where(~is_same, 0).max()) if len(off) else 0.0
        return found

    @property
    def agrees(self) -> bool:
        return all(error <= self.rtol for error in self.errors().values())

    def __repr__(self) -> str:
        worst = max(self.errors().values(), default=0.0)
        verdict = "agrees" if self.agrees else "differs"
        return f"Report({verdict}: {len(self.loop)} parameters, largest error {worst:.1e})"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        errors = self.errors()
        width = max(map(len, errors), default=0)
        lines = [f"{'parameter':<{width}}  largest error  (allowed {self.rtol:.1e})"]
        for name, error in errors.items():
            wrong = "" if error <= self.rtol else "  <- differs"
            lines.append(f"{name:<{width}}  {error:13.2e}{wrong}")
        return "\n".join(lines)


@torch.inference_mode(False)
def verify(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any,
    rtol: float | None = None,
    *,
    loss_reduction: str = "mean",
    batch_dim: int = 0,
    check: str = "samples",
    **options: Any,
) -> Report:
    """Compare a model's norms with a loop over single samples; `.grad` and the model are untouched.

    The loop sees each sample alone, so it also finds what no attachment can: a loss that mixes
    samples (in-batch negatives) has no gradient by sample.

    Args:
        model, loss_fn, inputs, targets, loss_reduction: as of `grad_norms`. Tensors with N in their
            first dimension (`batch_dim` for inputs) are split; others are given whole.
        rtol: the largest error allowed, relative to the sample's norm over the model; None derives
            it from the dtype.
        check, options: of `attach`.

    Returns:
        A Report; print it for a table.

    Raises:
        VerificationError: the norms differ, or are refused; the text is the table, or the refusal.
    """
    if rtol is not None and not isinstance(rtol, Real):
        raise TypeError(f"rtol must be a number or None; got {rtol!r}")
    if rtol is not None and not rtol >= 0:
        raise ValueError(f"rtol must be 0 or more; got {rtol}")
    options = {"batch_dim": batch_dim, "check": check, **options}
    graph = {**options, "check": "graph"} if check == "samples" else options  # all run alone below
    state = torch.get_rng_state()
    call = (model, loss_fn, inputs, targets, "parameter", loss_reduction)
    try:
        norms = norms_alone(*call, graph, compare=False)
    except CoverageError as error:
        raise VerificationError(str(error)) from error
    assert isinstance(norms, dict)
    with torch.random.fork_rng(devices=[]), grads_kept(inputs):
        torch.set_rng_state(state)
        loop = _norms_of_loop(model, loss_fn, inputs, targets, norms, loss_reduction, options)
    report = Report(norms, loop, _tolerance(model) if rtol is None else rtol)
    if not report.agrees:
        why = f"does the model or the loss mix samples, or draw random numbers?{_random(model)}"
        try:
            norms_alone(*call, options)
        except CoverageError as error:  # the loss itself shows it
            why = str(error)
        raise VerificationError(
            f"the norms differ from those of each sample alone: {why}\n{report}"
        )
    return report


def _tolerance(model: nn.Module) -> float:
    live = [p for p in model.parameters() if p.requires_grad]
    dtypes, kinds = {p.dtype for p in live}, {p.device.type for p in live}
    dtypes |= {torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
    # A norm over a long sum keeps half its digits at least, whatever the order of summation.
    return max((torch.finfo(d).eps for d in dtypes), default=0.0) ** 0.5


def _random(model: nn.Module) -> str:
    """Name the modules that draw random numbers as they are."""
    modules = model.named_modules()
    named = [name for name, m in modules if m.training and isinstance(m, _DropoutNd) and m.p > 0]
    more = ", ..." if len(named) > 5 else ""
    return f" Dropout is on in {', '.join(named[:5])}{more}: say model.eval()." if named else ""


LoopGradients = Iterator[Sequence[Tensor | None]]  # of each sample, by parameter


def _norms_of_loop(
    model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, norms: Mapping[str, Tensor],
    loss_reduction: str, options: Mapping[str, Any],
) -> dict[str, Tensor]:  # fmt: skip
    """Return norms of the parameters of `norms`, by a loop over a copy of the model."""
    n = len(next(iter(norms.values()))) if norms else 0
    twin = copy.deepcopy(model, _computed_by(model))
    _mend(twin)
    live = [twin.get_parameter(name) for name in norms]
    given = _scale_of(inputs, options)
    scale = 1.0 if given.dim() else float(given)  # [N] is of the batch's loss alone

    @torch.enable_grad()
    def one_by_one() -> LoopGradients:
        for sample in range(n):
            twin.zero_grad()
            one = one_sample(inputs, sample, n, options["batch_dim"])
            output = call(twin, one)
            # Reentrant checkpoints allow no grad().
            backward_from(loss_fn(output, one_sample(targets, sample, n, 0)), output)
            yield [None if p.grad is None else p.grad / scale for p in live]

    loop = one_by_one()
    if options.get("sample_ids") is not None:  # then no sample can be cut out
        loop = _loop_by_rows(twin, live, loss_fn, inputs, targets, n, options, loss_reduction)
    found = {name: p.new_zeros(n, dtype=torch.float64) for name, p in zip(norms, live, strict=True)}
    for sample, gradients in enumerate(loop):
        for norm, gradient in zip(found.values(), gradients, strict=True):
            norm[sample] = 0 if gradient is None else gradient.double().norm()
    return found


def _mend(model: nn.Module) -> None:
    """Lay out gradients of BatchNorm's outputs as these are: torch's backward of a batch of one, in
    eval mode on a CPU, is wrong for others (2.13 and 2.14)."""

    def lay_out(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            like = out.detach()
            out.register_hook(lambda g: torch.empty_like(like).copy_(g))

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_hook(lay_out)


def _loop_by_rows(
    model: nn.Module, live: Sequence[Tensor], loss_fn: Loss, inputs: Any, targets: Any, n: int,
    options: Mapping[str, Any], loss_reduction: str,
) -> LoopGradients:  # fmt: skip
    """Yield gradients by sample where none can be cut out: pull back its rows of the outputs'."""
    args, kwargs = arguments_of(inputs)
    ids, scales = options["sample_ids"](args, kwargs), _scale_of(inputs, options).expand(n)
    with torch.enable_grad():
        output = call(model, inputs)
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        seeds = torch.autograd.grad(loss_fn(output, targets), outputs, allow_unused=True)
    pairs = [(t, g) for t, g in zip(outputs, seeds, strict=True) if g is not None]
    each = torch.arange(n, device=ids.device)  # of outputs with one row for each sample
    has_each = [len(g) == n != ids.numel() and g.shape[: ids.dim()] != ids.shape for _, g in pairs]
    owners = [as_rows(each if one else ids.flatten(), g)
              for one, (_, g) in zip(has_each, pairs, strict=True)]  # fmt: skip
    weights = torch.where(scales == 0, 0.0, (n if loss_reduction == "mean" else 1) / scales.abs())
    for sample in range(n):
        of_one = [g.where(of == sample, 0) for (_, g), of in zip(pairs, owners, strict=True)]
        roots = [t for t, _ in pairs]
        found = torch.autograd.grad(roots, live, of_one, retain_graph=True, allow_unused=True)
        yield [None if g is None else g.double() * weights[sample] for g in found]


def _scale_of(inputs: Any, options: Mapping[str, Any]) -> Tensor:
    """Return the number or the Tensor [N] that `loss_scale` is for these inputs."""
    scale = options.get("loss_scale", 1.0)
    if callable(scale):
        scale = scale(*arguments_of(inputs)) if takes_call(scale) else scale()
    is_scaler = isinstance(scale, torch.amp.GradScaler)
    return torch.as_tensor(scale.get_scale() if is_scaler else scale, device="cpu")


def _computed_by(model: nn.Module) -> dict[int, Any]:
    """Return tensors with a graph that a forward left in attributes, for deepcopy to detach."""
    tensors = (t for module in model.modules() for t in vars(module).values())
    return {id(t): t.detach() for t in tensors if isinstance(t, Tensor) and not t.is_leaf}
