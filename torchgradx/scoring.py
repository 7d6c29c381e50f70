"""Norms without a training step: one line, no hooks to manage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .attach import Probe, attach
from .options import check_per

__all__ = ["Loss", "call", "grad_norms", "gradients_put_by", "sample_norms"]

Loss = Callable[[Any, Any], Tensor]


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on a tensor, a tuple (positional arguments) or a dict (keywords)."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@contextlib.contextmanager
def gradients_put_by(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, and however it ends, every .grad is as before."""
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient


def sample_norms(
    probe: Probe, output: Any, targets: Any, loss_fn: Loss, per: str, loss_reduction: str
) -> Tensor | dict[str, Tensor]:
    """One backward from the attached model's output: the norms of its samples, and of no others."""
    loss = loss_fn(output, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return one number, the batch's {loss_reduction} loss; got {got}: "
            "reduce it"
        )
    loss.backward()
    return probe.norms(per)


def grad_norms(
    model: nn.Module,
    loss_fn: Loss,
    inputs: Any,
    targets: Any,
    *,
    per: str = "model",
    loss_reduction: str = "mean",
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
        options: of `attach`: batch_dim, batch_size, layout, algorithm, backend, loss_scale.

    Returns:
        Tensor [N], or a dict of them by name; float32 (float64 for float64 models).

    Raises:
        CoverageError: some parameters' gradients are not accounted for sample by sample.
        ValueError, TypeError: an argument is not as above.
    """
    check_per(per)
    options.setdefault("weight_grad", False)
    with (
        gradients_put_by(model),
        attach(model, loss_reduction=loss_reduction, **options) as probe,
        torch.enable_grad(),
    ):
        return sample_norms(probe, call(model, inputs), targets, loss_fn, per, loss_reduction)
