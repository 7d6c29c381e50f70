"""Sizes of what a node makes, as far as they say where samples may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def rows_of(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Return the dimensions that may hold samples: the first two that are not a leading 1."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    several = len(shape) > 2 or shape[1:] == (n,)  # else the second is of features
    return shape[: 1 + several] or (1,)


def look_of(shape: Sequence[int], n: int) -> tuple[Any, ...]:
    """Return what sizes say of where samples may be: a layout proven in one shape holds in another
    that looks the same. At T = 1 rows t*N+n and n*T+t are the same, and a leading 1 may be T."""
    ones = next((d for d, size in enumerate(shape) if size != 1), len(shape))
    whole = n > 0 and ones < len(shape) and shape[ones] % n == 0
    return ones, whole, *(size == n for size in shape)
