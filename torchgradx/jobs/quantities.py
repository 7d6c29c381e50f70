"""What a pool can be scored by: (model, inputs, targets) -> [n, K] numbers, K columns by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attach import Probe
from ..scoring import Loss, call, sample_norms

__all__ = ["KINDS", "Quantity", "logits_of"]

Logits = Callable[[Any], Tensor]


def logits_of(output: Any) -> Tensor:
    """[N, C] of what a classifier returns: a tensor, or the `logits` of a dict or an object."""
    found = output.get("logits") if isinstance(output, Mapping) else output
    found = getattr(found, "logits", found)
    if not isinstance(found, Tensor):
        raise TypeError(
            "the model must return its logits, a Tensor [N, C] or something with .logits; got "
            f"{type(output).__name__}: say logits="
        )
    return found


class Quantity:
    """The norm of the gradient of each sample's own loss (GraNd, of one model)."""

    name = "norm"
    needs_loss, needs_probe = True, True

    def __init__(
        self,
        per: str,
        loss_fn: Loss | None,
        loss_reduction: str,
        logits: Logits | None,
        top_classes: int | None,
    ) -> None:
        self.per, self.loss_fn, self.loss_reduction = per, loss_fn, loss_reduction
        self.logits, self.top_classes = logits or logits_of, top_classes

    def __call__(self, model: nn.Module, probe: Probe | None, inputs: Any, targets: Any) -> Any:
        assert probe is not None
        assert self.loss_fn is not None
        return sample_norms(
            probe, call(model, inputs), targets, self.loss_fn, self.per, self.loss_reduction
        )

    def _classes(self, output: Any) -> Tensor:
        """[N, C] logits, float32 at least"""
        logits = self.logits(output)
        if logits.dim() != 2:
            raise ValueError(f"logits must be [N, C]; got {list(logits.shape)}: say logits=")
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class ErrorNorm(Quantity):
    """EL2N, |softmax(logits) - onehot(label)|: the norm of the loss's gradient by the logits."""

    name = "el2n"
    needs_loss, needs_probe = False, False

    def __call__(self, model: nn.Module, probe: Probe | None, inputs: Any, targets: Any) -> Tensor:
        with torch.no_grad():
            given = self._classes(call(model, inputs)).softmax(1)
            if not isinstance(targets, Tensor) or targets.shape not in (
                given.shape,
                given.shape[:1],
            ):
                got = list(targets.shape) if isinstance(targets, Tensor) else targets
                raise ValueError(
                    f'kind="el2n" needs targets [N] of class indices, or [N, C] of their '
                    f"probabilities, with N, C = {list(given.shape)}; got {got}"
                )
            if targets.dim() == 1:
                targets = F.one_hot(targets.long(), given.shape[1])
            return (given - targets).norm(dim=1)


class ExpectedLength(Quantity):
    """Expected gradient length, sum over classes of p_c |g_c|; a backward a class.

    g_c is the gradient of the cross entropy were the label c. With z the logits and J their
    Jacobian, g_c = J^T (p - e_c): the C norms of a sample need C products with J, however they are
    arranged. A forward again is cheaper than a graph retained, whose operands are kept.
    """

    name = "egl"
    needs_loss = False

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.loss_reduction = "sum"  # of the cross entropy below

    def __call__(self, model: nn.Module, probe: Probe | None, inputs: Any, targets: Any) -> Any:
        assert probe is not None
        output = call(model, inputs)
        with torch.no_grad():
            given = self._classes(output).softmax(1)
        classes = given.shape[1] if self.top_classes is None else self.top_classes
        p, likely = given.topk(min(classes, given.shape[1]), dim=1)
        total: Any = None
        for k in range(likely.shape[1]):
            output = call(model, inputs) if k else output

            def entropy(output: Any, labels: Tensor) -> Tensor:
                return F.cross_entropy(self._classes(output), labels, reduction="sum")

            norms = sample_norms(
                probe, output, likely[:, k], entropy, self.per, self.loss_reduction
            )
            total = _plus(total, norms, p[:, k])
        return total


def _plus(total: Any, norms: Any, p: Tensor) -> Any:
    if isinstance(norms, Mapping):
        return {k: _plus(total and total[k], v, p) for k, v in norms.items()}
    return norms * p.to(norms.dtype) + (0 if total is None else total)


KINDS = {kind.name: kind for kind in (Quantity, ErrorNorm, ExpectedLength)}
