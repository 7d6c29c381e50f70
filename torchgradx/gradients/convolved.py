"""Per-sample gradients of a convolution's weight, as images and output gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from .. import ops
from ..reference import chunks
from ..reference.chunks import accumulation_dtype
from .by_sample import OfWeight, sq_norms


@dataclass(frozen=True)
class Convolved(OfWeight):
    """Gradients [N, A, C / groups, *] of a convolution's weight, from K images per sample.
    For a transposed convolution, images and grads are exchanged."""

    images: Tensor  # [N, K, C, *]
    grads: Tensor  # [N, K, A, *]
    shape: Sequence[int]  # of the weight
    geometry: Sequence[Sequence[int]]  # stride, padding, dilation
    groups: int

    def times(self, rows: Tensor) -> Convolved:
        return replace(self, grads=self.grads * rows.view(-1, *[1] * (len(self.shape) - 2)))

    def along_rows(self, matrix: Tensor) -> Tensor:
        rows = len(matrix) if self.groups == 1 else self.shape[0]
        return (self.grads * self._convolve(matrix.expand(rows, -1))).flatten(3).sum((1, 3))

    def along(self, direction: Tensor) -> Tensor:
        return (self.grads.to(direction.dtype) * self._convolve(direction)).flatten(1).sum(1)

    def _convolve(self, weight: Tensor) -> Tensor:
        """Return the images convolved with another weight [A or 1, *]: [N, K, A or 1, *]."""
        images, weight = self.images.flatten(0, 1), weight.reshape(-1, *self.shape[1:])
        (stride, padding, dilation), none = self.geometry, [0] * len(self.geometry[0])
        operands = images.to(weight.dtype), weight, None, stride, padding, dilation
        out: Tensor = torch.ops.aten.convolution(*operands, False, none, self.groups)
        return out.unflatten(0, self.grads.shape[:2])

    def _weight_grad(self, images: Tensor, grads: Tensor, samples: int = 1) -> Tensor:
        """Return the weight gradient [samples * A, C / groups, *], summed over the images.
        images: [M, samples * C, *]. grads: [M, samples * A, *]."""
        (stride, padding, dilation), none = self.geometry, [0] * len(self.geometry[0])
        weight = grads.new_empty(1).expand(samples * self.shape[0], *self.shape[1:])
        operands = grads, images, weight, None, stride, padding, dilation, False, none
        backward = torch.ops.aten.convolution_backward
        grad: Tensor = backward(*operands, samples * self.groups, [False, True, False])[1]
        return grad

    def in_full(self) -> Tensor:
        """Return [N, A, C / groups, *], by one convolution in which each sample is a group."""
        images, grads = (t.transpose(0, 1).flatten(1, 2) for t in self.operands)
        return self._weight_grad(images, grads, len(self)).view(len(self), *self.shape)

    def total(self) -> Tensor:
        return self._weight_grad(self.images.flatten(0, 1), self.grads.flatten(0, 1))

    def size(self) -> float:
        images, grads = (chunks.norms(t.flatten(1)[:, None]) for t in self.operands)
        return float((images * grads).norm()) * prod(self.shape[2:]) ** 0.5

    def weighted(self, factors: Tensor) -> Tensor:
        wide = accumulation_dtype(self.dtype)
        by_image = factors.to(wide).view(-1, *[1] * (self.grads.dim() - 1))
        operands = self.images, self.grads * by_image
        return self.replaced(*(torch.where(by_image != 0, t, 0).to(wide) for t in operands)).total()

    def sq_norms(self) -> Tensor:
        ones = [1] * (4 - len(self.shape))
        if self.images.shape[1] != 1 or len(self.shape) > 4:  # the kernel takes one 2-D image each
            return torch.cat(list(map(sq_norms, self.parts())))
        images, grads = (t[:, 0].unflatten(1, (-1, *ones)) for t in self.operands)
        stride, padding, dilation = ([fill] * len(ones) + [*sizes] for fill, sizes in
                                     zip((1, 0, 1), self.geometry, strict=True))  # fmt: skip
        return ops.conv2d_sq_norms(
            images, grads, (*ones, *self.shape[2:]), stride=stride, padding=padding,
            dilation=dilation, groups=self.groups)  # fmt: skip
