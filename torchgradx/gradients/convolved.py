"""Gradients by sample of a convolution's weight, as the images that they are made of."""

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
    """[N, A, C / groups, *], of which a sample's is the gradient of a convolution's weight.

    Of a transposed one, images and grads are in each other's place.
    """

    images: Tensor  # [N, K, C, *]
    grads: Tensor  # [N, K, A, *]
    shape: Sequence[int]  # of the weight
    geometry: Sequence[Sequence[int]]  # stride, padding, dilation
    groups: int

    def __len__(self) -> int:
        return len(self.images)

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    @property
    def operands(self) -> list[Tensor]:
        return [self.images, self.grads]

    def to(self, dtype: torch.dtype) -> Convolved:
        return replace(self, images=self.images.to(dtype), grads=self.grads.to(dtype))

    def part(self, samples: slice) -> Convolved:
        return replace(self, images=self.images[samples], grads=self.grads[samples])

    def times(self, rows: Tensor) -> Convolved:
        return replace(self, grads=self.grads * rows.view(-1, *[1] * (len(self.shape) - 2)))

    def along_rows(self, weight: Tensor) -> Tensor:
        rows = len(weight) if self.groups == 1 else self.shape[0]
        return (self.grads * self._made_by(weight.expand(rows, -1))).flatten(3).sum((1, 3))

    def along(self, weight: Tensor) -> Tensor:
        return (self.grads.to(weight.dtype) * self._made_by(weight)).flatten(1).sum(1)

    def _made_by(self, weight: Tensor) -> Tensor:
        images, weight = self.images.flatten(0, 1), weight.reshape(-1, *self.shape[1:])
        (stride, padding, dilation), none = self.geometry, [0] * len(self.geometry[0])
        operands = images.to(weight.dtype), weight, None, stride, padding, dilation
        made: Tensor = torch.ops.aten.convolution(*operands, False, none, self.groups)
        return made.unflatten(0, self.grads.shape[:2])

    def summed(self, images: Tensor, grads: Tensor, samples: int = 1) -> Tensor:
        """[samples * A, C / groups, *]: the sum over images [M, samples * C, *]."""
        (stride, padding, dilation), none = self.geometry, [0] * len(self.geometry[0])
        weight = grads.new_empty(1).expand(samples * self.shape[0], *self.shape[1:])
        operands = grads, images, weight, None, stride, padding, dilation, False, none
        backward = torch.ops.aten.convolution_backward
        grad: Tensor = backward(*operands, samples * self.groups, [False, True, False])[1]
        return grad

    def in_full(self) -> Tensor:
        """[N, A, C / groups, *], by a convolution in which each sample is a group."""
        images, grads = (t.transpose(0, 1).flatten(1, 2) for t in (self.images, self.grads))
        return self.summed(images, grads, len(self)).view(len(self), *self.shape)

    def total(self) -> Tensor:
        return self.summed(self.images.flatten(0, 1), self.grads.flatten(0, 1))

    def size(self) -> float:
        images, grads = (chunks.norms(t.flatten(1)[:, None]) for t in (self.images, self.grads))
        return float((images * grads).norm()) * prod(self.shape[2:]) ** 0.5

    def weighted(self, factors: Tensor) -> Tensor:
        wide = accumulation_dtype(self.dtype)
        of_images = factors.to(wide).view(-1, *[1] * (self.grads.dim() - 1))
        images, grads = (torch.where(of_images != 0, t, 0).to(wide)  # whatever its numbers
                         for t in (self.images, self.grads * of_images))  # fmt: skip
        return replace(self, images=images, grads=grads).total()

    def sq_norms(self) -> Tensor:
        flat = [1] * (4 - len(self.shape))
        if self.images.shape[1] != 1 or len(self.shape) > 4:  # several images, or three dimensions
            return torch.cat(list(map(sq_norms, self.parts())))
        images, grads = (t[:, 0].unflatten(1, (-1, *flat)) for t in (self.images, self.grads))
        stride, padding, dilation = ([fill] * len(flat) + [*sizes] for fill, sizes in
                                     zip((1, 0, 1), self.geometry, strict=True))  # fmt: skip
        return ops.conv2d_sq_norms(
            images, grads, (*flat, *self.shape[2:]), stride=stride, padding=padding,
            dilation=dilation, groups=self.groups)  # fmt: skip
