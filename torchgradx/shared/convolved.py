"""Gradients by sample of a convolution's weight, as the images that they are made of.

What is asked of them is as of the rows of a matrix, in outer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import ops


@dataclass(frozen=True)
class Convolved:
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

    def to(self, dtype: torch.dtype) -> Convolved:
        return replace(self, images=self.images.to(dtype), grads=self.grads.to(dtype))

    def part(self, samples: slice) -> Convolved:
        return replace(self, images=self.images[samples], grads=self.grads[samples])

    def times(self, rows: Tensor) -> Convolved:
        return replace(self, grads=self.grads * rows.view(-1, *[1] * (len(self.shape) - 2)))

    def along_rows(self, weight: Tensor) -> Tensor:
        """[N, A]: the product of each row with that of a weight, of which one may be all rows'."""
        rows = len(weight) if self.groups == 1 else self.shape[0]
        return (self.grads * self._made_by(weight.expand(rows, -1))).flatten(3).sum((1, 3))

    def along(self, weight: Tensor) -> Tensor:
        """[N]"""
        return (self.grads.to(weight.dtype) * self._made_by(weight)).flatten(1).sum(1)

    def _made_by(self, weight: Tensor) -> Tensor:
        images, weight = self.images.flatten(0, 1), weight.reshape(-1, *self.shape[1:])
        (stride, padding, dilation), none = self.geometry, [0] * len(self.geometry[0])
        given = images.to(weight.dtype), weight, None, stride, padding, dilation
        made: Tensor = torch.ops.aten.convolution(*given, False, none, self.groups)
        return made.unflatten(0, self.grads.shape[:2])

    def summed(self, images: Tensor, grads: Tensor, samples: int = 1) -> Tensor:
        """[samples * A, C / groups, *]: the sum over images [M, samples * C, *]."""
        (stride, padding, dilation), none = self.geometry, [0] * len(self.geometry[0])
        weight = grads.new_empty(1).expand(samples * self.shape[0], *self.shape[1:])
        given = grads, images, weight, None, stride, padding, dilation, False, none
        backward = torch.ops.aten.convolution_backward
        grad: Tensor = backward(*given, samples * self.groups, [False, True, False])[1]
        return grad

    def in_full(self) -> Tensor:
        """[N, A, C / groups, *], by a convolution in which each sample is a group."""
        images, grads = (t.transpose(0, 1).flatten(1, 2) for t in (self.images, self.grads))
        return self.summed(images, grads, len(self)).view(len(self), *self.shape)

    def total(self) -> Tensor:
        return self.summed(self.images.flatten(0, 1), self.grads.flatten(0, 1))

    def sq_norms(self) -> Tensor | None:
        """[N]; None: of several images for a sample, or of three dimensions."""
        flat = [1] * (4 - len(self.shape))
        if self.images.shape[1] != 1 or len(self.shape) > 4:
            return None
        images, grads = (t[:, 0].unflatten(1, (-1, *flat)) for t in (self.images, self.grads))
        stride, padding, dilation = ([fill] * len(flat) + [*sizes] for fill, sizes in
                                     zip((1, 0, 1), self.geometry, strict=True))  # fmt: skip
        return ops.conv2d_sq_norms(
            images, grads, (*flat, *self.shape[2:]), stride=stride, padding=padding,
            dilation=dilation, groups=self.groups)  # fmt: skip
