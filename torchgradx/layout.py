"""Where the samples are in a layer's rows: proven once a structure, never guessed from sizes.

Vector-Jacobian products from the model's outputs, the same random seeds each time, sample n
weighted by a power of two that a digit of n picks. Scaling by a power of two is exact, so each row
of a layer's output gradient comes back scaled by the weight of the sample it belongs to, or it
mixes samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

__all__ = [
    "BATCH",
    "NOWHERE",
    "SECOND",
    "SEQUENCE",
    "SHARED",
    "Watched",
    "batch_size",
    "prove",
    "tensors_in",
]

# rows n*T+t | rows t*N+n | of no sample, see shared.py | no output shows a way there | [T, N K, *]
BATCH, SEQUENCE, SHARED, NOWHERE, SECOND = range(5)
MIXED = "its rows mix the {n} samples, or stand in another order than n*T+t or t*N+n"


@dataclass(frozen=True)
class Watched:
    """One use of a layer in a forward."""

    node: Any  # that made the output; None where it needs no gradient
    output_nr: int
    leads: Sequence[int]  # the leading dimensions of the layer's output, which count its rows
    second: bool = False  # it can find samples of several rows in the second dimension


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a model's arguments or outputs, in order; dataclasses too."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in(list(vars(leaf).values()))
    return found


def batch_size(options: Mapping[str, Any], args: Any, kwargs: Any) -> int | None:
    """N: as the user says, or off the first tensor that a model is called with."""
    given = options["batch_size"]
    if callable(given):
        n = given(args, kwargs)
        return n if isinstance(n, int) else int(n)  # of a graph, a symbol
    if given is not None:
        return int(given)
    dim = options["batch_dim"]
    plain = args and isinstance(args[0], Tensor) and args[0].dim()
    for tensor in args[:1] if plain else tensors_in((args, kwargs)):
        if tensor.dim():
            return tensor.shape[dim if tensor.dim() > dim else 0]
    return None


def prove(
    outputs: Iterable[Tensor],
    uses: Sequence[Watched],
    n: int,
    batch_dim: int,
    unspent: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[int | str | None]:
    """For each use BATCH or SEQUENCE; a str says why neither; None: no proof could be had.

    `unspent`: what each backward of the graph runs under.
    """
    known = [u.node is not None for u in uses]
    if n <= 1 or not any(known):
        return [BATCH] * len(uses)
    heads = [(t, _sample_dim(t, n, batch_dim)) for t in outputs if t.requires_grad]
    seeded = [(t, d) for t, d in heads if d is not None]
    if not seeded:
        return [None] * len(uses)
    edges = [GradientEdge(u.node, u.output_nr) for u in uses if u.node is not None]
    digits = _digits(n, 4 if any(t.dtype == torch.float16 for t, _ in seeded) else 16)
    generator = torch.Generator().manual_seed(n)
    seeds = [torch.randn(t.shape, generator=generator).to(t) for t, _ in seeded]

    def gradients(exponents: Tensor) -> tuple[Tensor | None, ...]:
        weighted = []
        for seed, (t, d) in zip(seeds, seeded, strict=True):
            shape = [-1 if k == d else 1 for k in range(t.dim())]
            weighted.append(torch.ldexp(seed, exponents.to(seed.device).view(shape)).to(seed.dtype))
        roots = [t for t, _ in seeded]
        with unspent():
            return torch.autograd.grad(roots, edges, weighted, retain_graph=True, allow_unused=True)

    if any(_is_python(node) for node in _below(seeded)):
        return [None] * len(uses)  # a backward of the user's own may change things when it runs
    try:
        plain = gradients(torch.zeros(n, dtype=torch.int32))
        scaled = [gradients(digit) for digit in digits]
    except (
        Exception
    ):  # reentrant checkpointing forbids autograd.grad; hooks may raise what they like
        return [None] * len(uses)
    verdicts: list[int | str | None] = []
    place = iter(range(len(edges)))
    for use in uses:
        if use.node is None:
            verdicts.append(BATCH)
            continue
        k = next(place)
        verdicts.append(_verdict(use, plain[k], [s[k] for s in scaled], digits, n))
    return verdicts


def _below(seeded: Sequence[tuple[Tensor, int]]) -> Iterator[Any]:
    """The graph's nodes below the outputs."""
    todo, seen = [t.grad_fn for t, _ in seeded], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [child for child, _ in node.next_functions]


def _is_python(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _sample_dim(t: Tensor, n: int, batch_dim: int) -> int | None:
    if not t.is_floating_point():
        return None
    if t.dim() > batch_dim and t.shape[batch_dim] == n:
        return batch_dim
    return 0 if t.dim() and t.shape[0] == n else None


def _digits(n: int, base: int) -> list[Tensor]:
    """Exponents [N] below `base`, whose combination is another for each sample."""
    samples = torch.arange(n, dtype=torch.int32)
    digits: list[Tensor] = []
    while not digits or base ** len(digits) < n:
        digits.append(samples // base ** len(digits) % base)
    return digits


def _verdict(
    use: Watched, plain: Tensor | None, scaled: list[Tensor | None], digits: list[Tensor], n: int
) -> int | str | None:
    if plain is None or any(s is None for s in scaled):
        return None
    leads, count = use.leads, prod(use.leads)
    if not plain.numel():
        return BATCH
    if plain.numel() % count:
        return MIXED.format(n=n)
    held = [s.reshape(count, -1) for s in scaled if s is not None]
    fits = {}
    for layout, owner in _owners(leads, n, use.second):
        pairs = zip(held, digits, strict=True)
        if all(_scaled_by(plain.reshape(count, -1), s, digit[owner]) for s, digit in pairs):
            fits[layout] = owner
    if fits:
        first = next(iter(fits))
        alike = all(torch.equal(owner, fits[first]) for owner in fits.values())
        return first if alike or bool(plain.isfinite().all()) else None  # nan is no evidence
    return MIXED.format(n=n)


def _owners(leads: Sequence[int], n: int, second: bool) -> Iterator[tuple[int, Tensor]]:
    """Each layout that the sizes allow, and the sample of each row under it (as csrc/site.cpp)."""
    place = torch.arange(prod(leads))
    if leads[0] % n == 0:
        yield BATCH, place // (len(place) // n)
    if len(leads) > 1 and leads[1] == n:
        yield SEQUENCE, place // prod(leads[2:]) % n
    elif leads[0] % n == 0:
        yield SEQUENCE, place // prod(leads[1:]) % n
    if second and len(leads) > 1 and leads[1] % n == 0:
        yield SECOND, place // prod(leads[2:]) % leads[1] // (leads[1] // n)


def _scaled_by(plain: Tensor, scaled: Tensor, exponents: Tensor) -> bool:
    """Whether each row came back scaled by 2^exponent; another's factor is off by 2 at least."""
    wide = torch.float64 if plain.dtype == torch.float64 else torch.float32
    plain, scaled = plain.to(wide), scaled.to(wide)
    wanted = torch.ldexp(plain, exponents.to(plain.device)[:, None])
    # A row far below its tensor's largest may have lost bits to subnormal numbers on the way.
    finite = plain.isfinite()
    floor = 1e-6 * wanted.abs().where(finite, 0).amax(1, keepdim=True)
    close = (scaled - wanted).abs() <= 0.01 * wanted.abs() + floor
    return bool((close | ~finite).all())
