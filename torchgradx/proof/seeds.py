"""Seeds of the backwards that prove where samples are (layout.py): random numbers, the same each
time, those of sample n times a power of two."""

from __future__ import annotations

from itertools import combinations, islice
from math import comb

import torch
from torch import Tensor

__all__ = ["SILENT", "digits_of", "halves", "weighted"]

SILENT = -10000  # an exponent: the seed is zero


def weighted(t: Tensor, exponents: Tensor, dim: int | Tensor) -> Tensor:
    """Return a number whose gradient by `t` is random, that of sample n times 2^exponents[n]; a
    Tensor says of which sample each leading row is, the last one being of none, and zero."""
    generator = torch.Generator(t.device).manual_seed(t.numel())
    gradient = torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype)
    exponents = exponents.to(t.device, torch.int32)
    if isinstance(dim, Tensor):
        rows = gradient.view(len(dim), -1)
        rows.ldexp_(exponents[dim][:, None]).masked_fill_(dim[:, None] == len(exponents) - 1, 0)
    else:
        gradient.ldexp_(exponents.view([-1 if k == dim else 1 for k in range(t.dim())]))
    with torch.enable_grad():
        root = t.sum()  # autograd.grad given a gradient imports sympy, 35 MiB
    assert root.grad_fn
    root.grad_fn.register_hook(lambda *_: (gradient,))
    return root


def digits_of(n: int, base: int) -> list[Tensor]:
    """Exponents [N] below `base`, whose combination is another for each sample."""
    samples = torch.arange(n)
    digits: list[Tensor] = []
    while not digits or base ** len(digits) < n:
        digits.append(samples // base ** len(digits) % base)
    return digits


def halves(n: int) -> list[Tensor]:
    """Masks [N], of which each sample is False in as many, and no two samples in the same ones."""
    count = next(k for k in range(2, n + 2) if comb(k, k // 2) >= n)
    chosen = list(islice(combinations(range(count), count // 2), n))
    return [torch.tensor([k not in mine for mine in chosen]) for k in range(count)]
