"""Token means: the sample weights of a loss that is a mean over all tokens of a batch.

Such a mean weights each sample by its share of the counted tokens. attach() cannot know that from
its options. So TokenWatch looks for rows of the outputs' gradient that are zero (a row is one
token's features), and warns if some samples have more of them than others.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph.modes import in_batched_backward, without_user_modes

# The defaults of attach(loss_reduction=, loss_scale=): objects of their own, so that `is` tells a
# default from the same value passed by the user.
DEFAULT_REDUCTION: str = "".join(["me", "an"])
DEFAULT_SCALE: float = float("1.0")

RECTIFIERS = ("Relu", "Threshold", "Clamp", "Hardtanh")  # nodes whose gradient has zeros anyway
MAX_LOOKS = 64  # results that are kept while nobody reads
WARNING = (
    "token mean? Some tokens of the outputs received no gradient (padding, ignore_index), more of "
    "them in some samples than in others. Under a loss that is a mean over all tokens of the "
    "batch, norms are then those of a sample's share in it. For the norm of each sample's own "
    'token mean say attach(..., loss_reduction="sum") and, before each forward, '
    "probe.loss_scale = torchgradx.token_weights(targets), or read "
    "norms(loss_scale=token_weights(targets)). If the loss averages each sample's own tokens "
    'first, say attach(..., loss_reduction="mean")'
)


def token_weights(
    targets: Tensor, ignore_index: int = -100, sample_ids: Tensor | None = None
) -> Tensor:
    """Return each sample's share of the counted targets, [N] float64 that sums to 1.

    For a loss that is a mean over all tokens of a batch::

        probe = torchgradx.attach(model, loss_reduction="sum")
        probe.loss_scale = torchgradx.token_weights(y)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        probe.norms()  # of each sample's own token mean; 0 for a sample without tokens

    For a causal language model's own `.loss`, whose targets are its labels shifted by one, pass
    `labels[:, 1:]`. For micro-batches that are divided by the tokens of a whole step, multiply by
    the micro-batch's share of these tokens.

    Args:
        targets: [N, ...], samples first, of any dtype.
        ignore_index: the target that does not count.
        sample_ids: for packed documents, the sample of each target, in the shape of `targets`.
            Negative ids are padding. N is the highest id + 1.

    Returns:
        The shares. Zeros if nothing counts.

    Raises:
        TypeError: `targets` is no Tensor, or has no dimension.
        ValueError: `sample_ids` has another shape.
    """
    if not isinstance(targets, Tensor) or not targets.dim():
        got = "a Tensor []" if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"targets must be a Tensor [N, ...]; got {got}")
    counted = targets.detach() != ignore_index
    if sample_ids is None:
        counts = counted.reshape(len(counted), -1).sum(1) if len(counted) else counted.sum(0)
    else:
        if sample_ids.shape != targets.shape:
            raise ValueError(
                f"sample_ids must be of the shape of targets, {list(targets.shape)}; got "
                f"{list(sample_ids.shape)}"
            )
        ids = sample_ids.detach().flatten()
        size = int(ids.max()) + 1 if ids.numel() else 0
        within = counted.flatten() & (ids >= 0)
        counts = torch.bincount(ids[within], minlength=max(size, 0))
    return counts.double() / counts.sum().clamp_min(1)


class TokenWatch:
    """Looks at the gradients of a model's outputs until it has warned of a token mean."""

    def __init__(self, options: Any) -> None:
        # Nothing to warn of where the user gave either option, even with its default value.
        is_default = options["loss_reduction"] is DEFAULT_REDUCTION
        self.on = is_default and options["loss_scale"] is DEFAULT_SCALE
        self._batch_dim: int = options["batch_dim"]
        self._reads = 0
        self._found: list[Tensor] = []  # bool [] on the outputs' device: unequal counts of zeros

    def watch(self, outputs: Sequence[Tensor], n: int) -> None:
        """Look at the gradients that a forward's outputs will receive."""
        for tensor in outputs if n > 1 else ():
            if tensor.is_nested:  # it has no sizes
                continue
            if tensor.device.type != "cpu" and self._reads & (self._reads - 1):
                continue  # reading a gradient takes time there: only after 0, 1, 2, 4, 8, ... reads
            node, dim = tensor.grad_fn, self._sample_dim(tensor, n)
            if node is not None and dim is not None and not node.name().startswith(RECTIFIERS):
                # Not a hook on the tensor, which the user would see.
                node.register_prehook(partial(self._look, tensor.output_nr, n, dim))

    def _sample_dim(self, tensor: Tensor, n: int) -> int | None:
        """Return the dimension of the samples in [N, T, F], [T, N, F] or [N, F, H, W]; -1 for rows
        [N * T, F]; None if tokens cannot be told."""
        if tensor.dim() > 2:
            found = [d for d in (self._batch_dim, 0) if tensor.shape[d] == n]
            return found[0] if found else None
        rows = tensor.shape[0] if tensor.dim() == 2 else 0
        return -1 if rows > n and rows % n == 0 and not self._batch_dim else None

    def _look(self, number: int, n: int, dim: int, grads: tuple[Tensor | None, ...]) -> None:
        """Note if samples have different counts of zero rows in an output's gradient."""
        grad = grads[number]
        if grad is None or grad.layout is not torch.strided or not grad.numel() or not self.on:
            return
        if in_batched_backward() or torch._C._are_functorch_transforms_active():
            return
        with torch.no_grad(), without_user_modes():
            grad = grad.detach()
            if dim < 0:
                grad, dim = grad.view(n, -1, grad.shape[1]), 0
            elif grad.dim() > 3:
                grad = grad.movedim(1, -1)
            zero = grad.select(-1, 0) == 0
            if zero.device.type == "cpu":  # the first feature rules most rows out
                if not bool(zero.any()):
                    return
                zero[zero.clone()] = (grad[zero] == 0).all(-1)
            else:
                zero = (grad == 0).all(-1)
            counts = zero.movedim(dim, 0).flatten(1).sum(1)
            self._found = [*self._found[-MAX_LOOKS:], (counts != counts[0]).any()]

    def warn(self) -> None:
        """Warn, once, if a pass since the last call had unequal counts of zeros."""
        self._reads += 1
        found, self._found = self._found, []
        if self.on and any(map(bool, found)):
            self.on = False
            warnings.warn(WARNING, stacklevel=4)
