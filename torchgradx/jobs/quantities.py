"""What a pool can be scored by: one forward of a batch, and one number a sample for each kind.

A kind is a function here, or the norms of a backward. Kinds of the forward alone read the outputs;
"norm" and "egl" run backwards through the graph of the same forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..probe import Probe
from ..scoring import Loss, call, one_sample, sample_norms

__all__ = ["KINDS", "OF_OUTPUT", "OF_TARGETS", "Quantities", "logits_of"]

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


def own_loss(output: Any, _: Any) -> Tensor:
    """Return what a model gave as its loss, for loss_fn=None."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss_fn=None takes the loss that the model returns, as .loss: got "
            f"{type(output).__name__} without one. Give a loss_fn, or labels to the model"
        )
    return loss


# ---- Of the outputs alone: (logits [N, C], targets) -> [N] ---------------------------------------
def margin(logits: Tensor, _: Any) -> Tensor:
    first, second = logits.softmax(1).topk(2, dim=1).values.unbind(1)
    return first - second


def entropy(logits: Tensor, _: Any) -> Tensor:
    return torch.special.entr(logits.softmax(1)).sum(1)


def error_norm(logits: Tensor, targets: Any) -> Tensor:
    """|softmax(logits) - onehot(target)|: the norm of the loss's gradient by the logits."""
    shapes = logits.shape, logits.shape[:1]
    if not isinstance(targets, Tensor) or targets.shape not in shapes:
        got = list(targets.shape) if isinstance(targets, Tensor) else targets
        raise ValueError(
            'kind="el2n" needs targets [N] of class indices, or [N, C] of their probabilities, '
            f"with N, C = {list(logits.shape)}; got {got}"
        )
    if targets.dim() == 1:
        targets = F.one_hot(targets.long(), logits.shape[1])
    return (logits.softmax(1) - targets).norm(dim=1)


OF_LOGITS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "el2n": error_norm,
    "margin": margin,
    "entropy": entropy,
}
OF_OUTPUT = ("loss", *OF_LOGITS)  # a forward is enough
OF_TARGETS = ("norm", "loss")  # these call loss_fn
KINDS = ("norm", "egl", *OF_OUTPUT)


class Quantities:
    """Scores batches by several kinds at once: [n] by kind, or the norms of one kind by name."""

    def __init__(
        self,
        kinds: Sequence[str],
        per: str,
        loss_fn: Loss | None,
        loss_reduction: str,
        logits: Logits | None,
        top_classes: int | None,
    ) -> None:
        self.kinds, self.per = tuple(kinds), per
        self.loss_fn, self.loss_reduction = loss_fn or own_loss, loss_reduction
        self.needs_loss = any(kind in OF_TARGETS for kind in kinds)
        self.needs_targets = self.needs_loss and loss_fn is not None
        self.needs_probe = any(kind not in OF_OUTPUT for kind in kinds)
        self._asks_model = loss_fn is None  # it alone knows the loss of a sample
        self._logits, self._top_classes = logits or logits_of, top_classes

    def __call__(
        self, model: nn.Module, probe: Probe | None, inputs: Any, targets: Any, batch_dim: int
    ) -> Mapping[str, Tensor]:
        with torch.set_grad_enabled(self.needs_probe):
            output = call(model, inputs)
        found: dict[str, Any] = {}
        left = sum(kind not in OF_OUTPUT for kind in self.kinds)
        for kind in self.kinds:
            if kind in OF_OUTPUT:
                with torch.no_grad():
                    found[kind] = self._of_output(kind, model, inputs, output, targets, batch_dim)
                continue
            assert probe is not None
            left -= 1
            if kind == "egl":
                found[kind] = self._expected_length(probe, output, keep=left > 0)
            else:
                found[kind] = self._norms(probe, output, targets, self.loss_fn, keep=left > 0)
        return found if self.per == "model" else found[self.kinds[0]]

    def _of_output(
        self, kind: str, model: nn.Module, inputs: Any, output: Any, targets: Any, batch_dim: int
    ) -> Tensor:
        if kind in OF_LOGITS:
            return OF_LOGITS[kind](self._classes(output), targets)
        count = self._count(output, targets, batch_dim)
        losses = []
        for n in range(count):
            if self._asks_model:
                # its .loss is of the batch; a paused probe records nothing of this
                alone = call(model, one_sample(inputs, n, count, batch_dim))
                losses.append(own_loss(alone, None))
            else:
                alone = one_sample(output, n, count, batch_dim)
                losses.append(self.loss_fn(alone, one_sample(targets, n, count, 0)))
        return torch.stack([loss.detach().reshape(()) for loss in losses])

    def _count(self, output: Any, targets: Any, batch_dim: int) -> int:
        if isinstance(targets, Tensor) and targets.dim():
            return len(targets)
        return int(self._logits(output).shape[batch_dim])

    def _norms(self, probe: Probe, output: Any, targets: Any, loss_fn: Loss, keep: bool) -> Any:
        """keep: another backward of this forward is to come."""
        norms = sample_norms(
            probe, output, targets, loss_fn, self.per, self.loss_reduction, retain_graph=keep
        )
        probe.reset()  # the same pass is recorded anew
        return norms

    def _expected_length(self, probe: Probe, output: Any, keep: bool) -> Any:
        """Expected gradient length, sum over classes of p_c |g_c|; a backward a class.

        g_c is the gradient of the cross entropy were c the label. With z the logits and J their
        Jacobian, g_c = J^T (p - e_c): the C norms of a sample need C products with J, however they
        are arranged.
        """
        with torch.no_grad():
            given = self._classes(output).softmax(1)
        classes = given.shape[1] if self._top_classes is None else self._top_classes
        p, likely = given.topk(min(classes, given.shape[1]), dim=1)

        def cross_entropy(output: Any, labels: Tensor) -> Tensor:
            return F.cross_entropy(self._classes(output), labels, reduction=self.loss_reduction)

        total: Any = None
        for k in range(likely.shape[1]):
            more = keep or k + 1 < likely.shape[1]
            norms = self._norms(probe, output, likely[:, k], cross_entropy, more)
            total = _plus(total, norms, p[:, k])
        return total

    def _classes(self, output: Any) -> Tensor:
        """[N, C] logits, float32 at least"""
        logits = self._logits(output)
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise ValueError(
                f"logits must be [N, C] with C = 2 or more; got {list(logits.shape)}: say logits="
            )
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _plus(total: Any, norms: Any, p: Tensor) -> Any:
    if isinstance(norms, Mapping):
        return {k: _plus(total and total[k], v, p) for k, v in norms.items()}
    return norms * p.to(norms.dtype) + (0 if total is None else total)
