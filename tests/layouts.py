"""The same numbers elsewhere in memory."""

from torch import Tensor


def strided_inside(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def cut_from_larger(x: Tensor) -> Tensor:
    beyond = float("nan") if x.is_floating_point() else -1
    larger = x.new_full([size + 3 for size in x.shape], beyond)
    return larger[tuple(slice(1, size + 1) for size in x.shape)].copy_(x)


def offset(x: Tensor) -> Tensor:
    """Contiguous, at an address that is a multiple of its itemsize alone."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS = {
    "contiguous": lambda x: x, "one_sample_expanded": lambda x: x[:1].expand_as(x),
    "one_number_expanded": lambda x: x.flatten()[:1].view([1] * x.dim()).expand_as(x),
    "sequence_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "cut_from_larger": cut_from_larger, "strided_inside": strided_inside, "offset": offset,
}  # fmt: skip
