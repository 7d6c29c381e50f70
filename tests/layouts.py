"""The same numbers elsewhere in memory."""

from torch import Tensor


def strided_inside(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def cut_from_larger(x: Tensor) -> Tensor:
    larger = x.new_full([size + 3 for size in x.shape], float("nan"))
    return larger[tuple(slice(1, size + 1) for size in x.shape)].copy_(x)


def offset(x: Tensor) -> Tensor:
    """Contiguous, at an address that is a multiple of its itemsize alone."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
