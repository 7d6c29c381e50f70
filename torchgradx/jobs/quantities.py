"""Kinds of scores: one forward of a batch, and one number a sample for each kind.

A kind is a function here, or the norms of a backward. Kinds of the forward alone read the outputs;
"norm" and "egl" run backwards through the graph of the same forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..graph.arguments import one_sample, size_of_batch, tensors_in
from ..probe import Probe
from ..scoring import Loss, call, sample_norms

Logits = Callable[[Any], Tensor]


def part(output: Any, name: str) -> Any:
    """Return the entry or attribute of this name of a model's output, or None."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def own_loss(output: Any, _: Any = None) -> Tensor:
    """Return what a model gave as its loss, for loss_fn=None."""
    loss = part(output, "loss")
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
    shape = list(targets.shape) if isinstance(targets, Tensor) else targets
    if shape not in (list(logits.shape), list(logits.shape[:1])):
        raise ValueError(
            'kind="el2n" needs targets [N] of class indices, or [N, C] of their probabilities, '
            f"with N, C = {list(logits.shape)}; got {shape}"
        )
    if targets.dim() == 1:
        targets = F.one_hot(targets.long(), logits.shape[1])
    return (logits.softmax(1) - targets.to(logits.device)).norm(dim=1)


OF_LOGITS = {"el2n": error_norm, "margin": margin, "entropy": entropy}
OF_OUTPUT = ("loss", *OF_LOGITS)  # a forward is enough
KINDS = ("norm", "egl", *OF_OUTPUT)


@dataclass
class Quantities:
    """Scores of batches by several kinds at once: [n] by kind, or the norms of one by name."""

    kinds: Sequence[str]
    per: str
    loss_fn: Loss | None
    loss_reduction: str
    logits: Logits | None
    top_classes: int | None
    options: Mapping[str, Any]  # of attach
    forwards: int = 0  # of single samples a batch, at least: a sharded model's need all ranks

    def __post_init__(self) -> None:
        self.batch_dim = self.options.get("batch_dim", 0)
        self.by_sample = self.options.get("sample_ids") is not None
        self.needs_loss = "norm" in self.kinds or "loss" in self.kinds
        self.backwards = [kind for kind in self.kinds if kind not in OF_OUTPUT]

    def __call__(
        self, model: nn.Module, probe: Probe | None, inputs: Any, targets: Any
    ) -> Mapping[str, Tensor]:
        with torch.set_grad_enabled(probe is not None):
            output = call(model, inputs)
        found: dict[str, Any] = {}
        for kind in self.kinds:
            if probe is not None and kind in self.backwards:
                keep = kind != self.backwards[-1]  # another backward of this forward is to come
                of = self._norms if kind == "norm" else self._expected_lengths
                found[kind] = of(probe, output, targets, keep)
                continue
            with torch.no_grad():
                if kind == "loss":
                    found[kind] = self._losses(model, inputs, output, targets)
                else:
                    found[kind] = OF_LOGITS[kind](self._classes(output), targets)
        return found if self.per == "model" else found[self.kinds[0]]

    def _losses(self, model: nn.Module, inputs: Any, output: Any, targets: Any) -> Tensor:
        known = isinstance(targets, Tensor) and targets.dim()
        sizes = [size_of_batch(t, self.batch_dim) for t in tensors_in((output, inputs)) if t.dim()]
        count = len(targets) if known else sizes[0]
        shapes = [t.shape for t in tensors_in(output)]
        dims = {d for d in (0, self.batch_dim) if any(s[d:][:1] == (count,) for s in shapes)}
        alone = self.loss_fn is None or len(dims) != 1  # the outputs do not show their samples
        losses = []
        for n in range(max(count, self.forwards) if alone else count):
            n = min(n, count - 1)
            if alone:
                one = call(model, one_sample(inputs, n, count, self.batch_dim))
            else:
                one = one_sample(output, n, count, *dims)
            loss = (self.loss_fn or own_loss)(one, one_sample(targets, n, count, 0))
            losses.append(loss.detach().reshape(()))
        return torch.stack(losses[:count])

    def _norms(
        self, probe: Probe, output: Any, targets: Any, keep: bool, loss_fn: Loss | None = None
    ) -> Any:
        norms = sample_norms(
            probe, output, targets, loss_fn or self.loss_fn or own_loss, self.per,
            self.loss_reduction, not self.by_sample, keep,
        )  # fmt: skip
        probe.reset()  # the same pass is recorded anew
        return norms

    def _expected_lengths(self, probe: Probe, output: Any, _: Any, keep: bool) -> Any:
        """Expected gradient length, sum over classes of p_c |g_c|; a backward a class.

        g_c is the gradient of the cross entropy were c the label. With z the logits and J their
        Jacobian, g_c = J^T (p - e_c): the C norms of a sample need C products with J.
        """
        with torch.no_grad():
            probabilities = self._classes(output).softmax(1)
        classes = min(self.top_classes or probabilities.shape[1], probabilities.shape[1])
        p, likely = probabilities.topk(classes, dim=1)

        def cross_entropy(output: Any, labels: Tensor) -> Tensor:
            return F.cross_entropy(self._classes(output), labels, reduction=self.loss_reduction)

        total: dict[str, Any] = {}
        for k in range(classes):
            more = keep or k + 1 < classes
            norms = self._norms(probe, output, likely[:, k], more, cross_entropy)
            for name, each in (norms if isinstance(norms, dict) else {"": norms}).items():
                total[name] = total.get(name, 0) + each * p[:, k].to(each)
        return total if self.per != "model" else total[""]

    def _classes(self, output: Any) -> Tensor:
        """[N, C] logits, float32 at least"""
        found = output if isinstance(output, Tensor) else part(output, "logits")
        logits = found if self.logits is None else self.logits(output)
        if not isinstance(logits, Tensor):
            raise TypeError(
                "the model must return its logits, a Tensor [N, C] or something with .logits; got "
                f"{type(output).__name__}: say logits="
            )
        if logits.dim() != 2 or logits.shape[1] < 2:
            raise ValueError(
                f"logits must be [N, C] with C = 2 or more; got {list(logits.shape)}: say logits="
            )
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
