"""Norms without a training step: one line, no hooks to manage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .attach import attach, set_aside
from .graph.arguments import tensors_in
from .graph.nodes import is_leaf, nodes_below, to_signed
from .kept import model_kept
from .options import Model, Parts, check_loss, check_per
from .probe import Probe
from .refusals import cause, refused_all

Loss = Callable[[Any, Any], Tensor]
MEAN_REDUCTION, SUM_REDUCTION = 1, 2  # as the nodes of torch's losses number them


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return (args, kwargs) of a tensor, a tuple (positional arguments) or a dict (keywords)."""
    if isinstance(inputs, Mapping):
        return (), inputs
    if inputs is None or isinstance(inputs, (Real, str)):
        raise TypeError(f"inputs must be a Tensor, or a tuple or dict of arguments; got {inputs!r}")
    several = isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence)
    return tuple(inputs) if several else (inputs,), {}


def call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments_of(inputs)
    return model(*args, **kwargs)


@contextlib.contextmanager
def norms_only(model: nn.Module, **options: Any) -> Iterator[Probe]:
    """Attach for norms alone, beside a standing probe; every .grad is afterwards as before."""
    with (
        grads_kept(list(model.parameters())),
        set_aside(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        attach(model, **{"weight_grad": False, **options}) as probe,
    ):
        yield probe


@contextlib.contextmanager
def grads_kept(tree: Any, until: Any = ()) -> Iterator[None]:
    """Set aside the .grad of a tree's tensors and of the leaves below them, but not below the
    tensors of `until`; it is afterwards as before."""
    tensors = [t for t in tensors_in(tree) if t.requires_grad]
    ends = {None, *(t.grad_fn for t in tensors_in(until))}
    nodes = nodes_below((t.grad_fn for t in tensors), ends)
    below = [e.variable for node in nodes for e, _ in node.next_functions if e and is_leaf(e)]
    before = {t: t.grad for t in (*tensors, *below) if t.is_leaf or t.retains_grad}
    for leaf in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before.items():
            leaf.grad = gradient


def sample_norms(
    probe: Probe, output: Any, targets: Any, loss_fn: Loss, per: str, loss_reduction: str,
    compare: bool = True, retain_graph: bool = False,
) -> Tensor | dict[str, Tensor]:  # fmt: skip
    """Run one backward from the attached model's output; return the norms of its samples alone.

    compare: refuse a loss that is seen not to be reduced as the probe expects.
    """
    loss = loss_fn(output, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return one number, its {loss_reduction} over N; got {got}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that requires a gradient: is the model frozen, or "
            "the loss detached?"
        )
    reduction = LossReduction(loss) if compare else None
    backward_from(loss, output, retain_graph)
    if reduction is not None:
        reduction.compare(probe)
    return probe.norms(per)


def backward_from(loss: Tensor, output: Any, retain_graph: bool = False) -> None:
    """Run the backward of a loss; the .grad of leaves that it has beside the model's output (the
    weights of a loss_fn) is afterwards as before."""
    with grads_kept(loss, until=output):
        loss.backward(retain_graph=retain_graph)


class LossReduction:
    """Reduction of a loss over its samples, as its graph shows."""

    def __init__(self, loss: Tensor) -> None:
        root: Any = loss.grad_fn
        self._reduction: Any = getattr(root, "_saved_reduction", None)
        found: list[Any] = []
        nodes = [root] if root else []
        levels = 6  # above it: factors, a smoothed part, other losses
        while levels and nodes:
            here = [node for node in nodes if node.name().startswith("NllLoss")]
            levels = 2 if here and not found else levels - 1  # of a sum, the next is near
            found += here
            nodes = [node for parent in nodes for node, _ in parent.next_functions if node]
        self._counts = None
        if len(found) == 1 and found[0]._saved_reduction == MEAN_REDUCTION:
            node = found[0]
            target, weight = node._saved_target, node._saved_weight
            ignored = to_signed(node._saved_ignore_index)
            counted = target != ignored
            each = 1.0 if weight is None else weight[target.masked_fill(~counted, 0)]
            self._counts = counted.float() * each

    def compare(self, probe: Probe) -> None:
        """Refuse norms that are not of the samples' own losses, as the probe expects them."""
        shares = probe.shares
        n = len(shares)
        if n < 2:
            return
        expected = {MEAN_REDUCTION: 1.0, SUM_REDUCTION: float(n)}.get(self._reduction)
        if expected is not None and not math.isclose(float(shares.sum()), expected, rel_tol=1e-3):
            kind = "mean" if self._reduction == MEAN_REDUCTION else "sum"
            raise refused_all(cause("reduction", kind=kind), probe.gradients("parameter"))
        if self._counts is None or not self._counts.numel() or self._counts.numel() % n:
            return
        rows = self._counts.cpu().double()
        orders = rows.reshape(n, -1).sum(1), rows.reshape(-1, n).sum(0)
        if not any(torch.allclose(each / each.sum(), shares / shares.sum()) for each in orders):
            raise refused_all("token_mean", probe.gradients("parameter"))


@overload
def grad_norms(
    model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, *, per: Model = "model",
    **options: Any,
) -> Tensor: ...  # fmt: skip


@overload
def grad_norms(
    model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, *, per: Parts, **options: Any
) -> dict[str, Tensor]: ...


def grad_norms(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any,
    *,
    per: str = "model",
    loss_reduction: str = "mean",
    check: str = "samples",
    **options: Any,
) -> Tensor | dict[str, Tensor]:
    """Norms of the gradient of each sample's own loss; `.grad` and the model stay as they are.

    Equivalent to::

        for n in range(N):
            gradients = torch.autograd.grad(loss_fn(model(x[n:n+1]), y[n:n+1]), model.parameters())
            norms[n] = torch.cat([g.flatten() for g in gradients]).norm()

    Args:
        model: any module, in train or eval mode.
        loss_fn: (output, targets) -> the batch's loss, reduced as `loss_reduction` says.
        inputs: a tensor, a tuple (positional arguments) or a dict (keywords).
        targets: handed to `loss_fn`.
        per: "model", "module" or "parameter", as in `Probe.norms`.
        loss_reduction: "mean" or "sum".
        check: as of `attach`; here two samples are also run alone, once per structure of the model.
        options: of `attach`: batch_dim, batch_size, layout, algorithm, backend, loss_scale.

    Returns:
        Tensor [N], or a dict of them by name; float32 (float64 for float64 models).

    Raises:
        CoverageError: some parameters' gradients are not accounted for sample by sample, or the
            loss is seen not to be reduced as said.
        ValueError, TypeError: an argument is not as above.
    """
    check_per(per)
    options["check"] = check
    return norms_alone(model, loss_fn, inputs, targets, per, loss_reduction, options)


def norms_alone(
    model: nn.Module, loss_fn: Loss, inputs: Any, targets: Any, per: str, loss_reduction: str,
    options: dict[str, Any], compare: bool = True,
) -> Tensor | dict[str, Tensor]:  # fmt: skip
    """See `grad_norms` and `sample_norms`."""
    check_loss(loss_fn)
    options = {**options, "loss_reduction": loss_reduction}
    with model_kept(model), grads_kept(inputs), norms_only(model, **options) as probe:
        output = call(model, inputs)
        compare = compare and options.get("sample_ids") is None  # what it reads is by sample
        return sample_norms(probe, output, targets, loss_fn, per, loss_reduction, compare)
