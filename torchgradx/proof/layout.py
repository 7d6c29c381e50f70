"""Where the samples are in a layer's rows: proven once a structure, never guessed from sizes.

Vector-Jacobian products from the model's outputs, the same random seeds each time, sample n
weighted by a power of two that a digit of n picks. Scaling by a power of two is exact, so each row
of a layer's output gradient comes back scaled by the weight of the sample it belongs to, or it
mixes samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..passes.unpacking import answers_again
from .sample_dims import GONE, Place

__all__ = [
    "BATCH",
    "LAST",
    "MINOR",
    "NOWHERE",
    "SECOND",
    "SEQUENCE",
    "SHARED",
    "Watched",
    "prove",
]

# rows n*T+t | rows t*N+n | of no sample, see shared | no gradient comes from the outputs, and if
# one does come it is refused | [T, N K, *] | [*, N K] | [*, K N, *]
BATCH, SEQUENCE, SHARED, NOWHERE, SECOND, LAST, MINOR = range(7)
WAYS = 16  # that are tried; a backward each, and more
# Where backwards may add up in another order each time: those of attention do. What mixes samples
# does so each time, by more than so many times what two answers to one question differ by.
ANEW, AGAIN, NOISY, LOOSE = ("cuda",), 4, 8.0, 1e-2
EITHER = (
    "the model's outputs have {n}, the number of samples, in two dimensions or more, and which of "
    "them holds the samples could not be followed"
)
MIXED = (
    "its rows mix the {n} samples, or stand in another order than n*T+t or t*N+n. If what it is "
    "given is of no sample, hold that in a buffer, or make it in the forward from sizes alone, by "
    "operations of torch"
)


@dataclass(frozen=True)
class Watched:
    """One use of a layer in a forward."""

    node: Any  # that made the output; None where it needs no gradient
    output_nr: int
    leads: Sequence[int]  # the leading dimensions of the layer's output, which count its rows
    second: bool = False  # it can find samples of several rows in the second dimension
    own: int | None = None  # where its module works on samples apart, and was seen to be given them
    samples: Tensor | None = None  # of each row, where they are packed: neither n*T+t nor t*N+n
    free: bool | None = False  # no sample enters it: its rows may well mix them; None: maybe
    minor: bool = False  # samples may be in its second dimension one after the other


def prove(
    outputs: Sequence[Tensor],
    places: Sequence[Place | None],
    uses: Sequence[Watched],
    n: int,
    batch_dim: int,
    unspent: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[int | str | None]:
    """For each use BATCH or SEQUENCE; a str says why neither; None: no proof could be had. NOWHERE:
    what comes from the outputs is zeros, of which nothing shows.

    `places`: where the samples are in the outputs, as far as that is known. `unspent`: what each
    backward of the graph runs under.
    """
    known = [k for k, use in enumerate(uses) if use.node is not None]
    if n <= 1 or not known:
        return [BATCH] * len(uses)
    heads = [(t, d) for t, d in zip(outputs, places, strict=True) if t.requires_grad]
    dims = [_sample_dims(t, n, batch_dim, d) for t, d in heads]

    def verdicts(way: Sequence[int | None]) -> list[int | str | None]:
        return _by_seeds([(t, d) for (t, _), d in zip(heads, way, strict=True)], uses, n, unspent)

    def mixes(found: Sequence[int | str | None], those: Sequence[bool | None]) -> bool:
        both = zip(found, uses, strict=True)
        return any(isinstance(v, str) and use.free in those for v, use in both)

    found = verdicts([first for first, *_ in dims])
    doubtful = [k for k, fits in enumerate(dims) if len(fits) > 1]
    if not doubtful or mixes(found, (False, None)):
        return found
    for k in doubtful if len(doubtful) > 1 else ():  # what one of them mixes, all of them do
        first, *others = dims[k]
        apart = [[d if j == k else None for j in range(len(dims))] for d in others]
        dims[k] = [first, *(way[k] for way in apart if not mixes(verdicts(way), (False,)))]
    either: list[int | str | None] = [EITHER.format(n=n)] * len(uses)
    for count, way in enumerate(product(*dims)):
        instead = verdicts(way) if count else found
        denied = any(v in {BATCH, SEQUENCE} - {use.own} and use.own is not None
                     for v, use in zip(instead, uses, strict=True))  # fmt: skip
        if count == WAYS or (instead != found and not denied and not mixes(instead, (False,))):
            return either
    return found


def _by_seeds(
    heads: Sequence[tuple[Tensor, int | None]],
    uses: Sequence[Watched],
    n: int,
    unspent: Callable[[], AbstractContextManager[None]],
) -> list[int | str | None]:
    """Verdicts, where the samples are in these dimensions of the outputs."""
    known = [k for k, use in enumerate(uses) if use.node is not None]
    seeded = [(t, d) for t, d in heads if d is not None]
    if not seeded:
        return [None] * len(uses)
    nodes = _below(seeded)
    if any(_is_python(node) or not answers_again(node) for node in nodes):
        return [None] * len(uses)  # a backward of the user's own may change things when it runs
    above = _above(nodes, {uses[k].node for k in known})
    half = any(_is_half(node) for node in nodes)  # under autocast, its ends may be wider
    digits = _digits(n, 4 if half else 16)

    def gradients(exponents: Tensor) -> dict[int, Rows]:
        """By use. What is kept of each is small: a copy of every gradient would double a step's
        memory, so the engine is asked for those alone below which no other is wanted."""
        found: dict[int, Rows] = {}

        def keep(k: int, g: Tensor | None) -> None:
            if g is not None:
                found[k] = Rows.of(g, prod(uses[k].leads), half)

        def arrive(k: int, grads: Sequence[Tensor | None]) -> None:
            keep(k, grads[uses[k].output_nr])

        last = [k for k in known if uses[k].node not in above]
        handles = [uses[k].node.register_prehook(partial(arrive, k)) for k in {*known} - {*last}]
        generator = torch.Generator().manual_seed(n)
        try:
            roots = [_weighted(t, exponents, d, generator) for t, d in seeded]
            edges = [GradientEdge(uses[k].node, uses[k].output_nr) for k in last]
            with unspent():
                ends = torch.autograd.grad(roots, edges, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for k, g in zip(last, ends, strict=True):
            keep(k, g)
        return found

    def loudest() -> int:
        """The exponent up to which all stays finite: float16 has few numbers below 1e-4."""
        for exponent in (12, 9, 6, 3):
            found = gradients(torch.full((n,), exponent + 3, dtype=torch.int32))
            if all(bool(rows.sizes.isfinite().all()) for rows in found.values()):
                return exponent
        return 0

    def verdicts(close: float = 0.0) -> tuple[list[int | str | None], dict[int, Rows]]:
        plain = {k: replace(r, close=max(r.close, close)) for k, r in gradients(loud).items()}
        scaled = [gradients(loud + digit) for digit in digits]
        return [
            BATCH
            if use.node is None
            else _verdict(use, plain.get(k), [s.get(k) for s in scaled], digits, n)
            for k, use in enumerate(uses)
        ], plain

    try:
        loud = torch.full((n,), loudest() if half else 0, dtype=torch.int32)
        found, plain = verdicts()
        noise = 0.0
        for _ in range(AGAIN if seeded[0][0].device.type in ANEW else 0):
            if not any(isinstance(v, str) for v in found):
                break
            noise = max(noise, *(r.off(plain[k]) for k, r in gradients(loud).items() if k in plain))
            again, plain = verdicts(min(NOISY * noise, LOOSE))
            found = [w if isinstance(v, str) else v for v, w in zip(found, again, strict=True)]
    except (
        Exception
    ):  # reentrant checkpointing forbids autograd.grad; hooks may raise what they like
        return [None] * len(uses)
    return found


def _weighted(t: Tensor, exponents: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    """A number whose gradient by `t` is random, that of sample n times 2^exponents[n]."""
    gradient = torch.randn(t.shape, generator=generator).to(t)
    shape = [-1 if k == dim else 1 for k in range(t.dim())]
    gradient.ldexp_(exponents.to(t.device).view(shape))
    with torch.enable_grad():
        root = t.sum()  # autograd.grad given a gradient imports sympy, 35 MiB
    assert root.grad_fn
    root.grad_fn.register_hook(lambda *_: (gradient,))
    return root


def _below(seeded: Sequence[tuple[Tensor, int]]) -> list[Any]:
    """The graph's nodes below the outputs, each before those it is made of."""
    order: list[Any] = []
    todo: list[tuple[Any, bool]] = [(t.grad_fn, False) for t, _ in seeded]
    seen = set()
    while todo:
        node, left = todo.pop()
        if left:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(child, False) for child, _ in node.next_functions]
    return order[::-1]


def _is_half(node: Any) -> bool:
    return any(m.dtype == torch.float16 for m in getattr(node, "_input_metadata", ()))


def _above(nodes: Sequence[Any], wanted: set[Any]) -> set[Any]:
    """Those that lead to another one that is wanted."""
    above: set[Any] = set()
    for node in reversed(nodes):
        if any(child in above or child in wanted for child, _ in node.next_functions):
            above.add(node)
    return above


def _is_python(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _sample_dims(t: Tensor, n: int, batch_dim: int, place: Place | None) -> list[int | None]:
    """Where samples may be, the likeliest first."""
    if not t.is_floating_point() or place == GONE:
        return [None]
    if place is not None and place.dim < t.dim():
        return [place.dim if t.shape[place.dim] == n else None]
    fits = [d for d, size in enumerate(t.shape) if size == n]
    first = batch_dim if batch_dim in fits else 0
    return [first, *(d for d in fits if d != first)] if first in fits else [None]


def _digits(n: int, base: int) -> list[Tensor]:
    """Exponents [N] below `base`, whose combination is another for each sample."""
    samples = torch.arange(n, dtype=torch.int32)
    digits: list[Tensor] = []
    while not digits or base ** len(digits) < n:
        digits.append(samples // base ** len(digits) % base)
    return digits


def _verdict(
    use: Watched, plain: Rows | None, scaled: list[Rows | None], digits: list[Tensor], n: int
) -> int | str | None:
    if plain is None or any(s is None for s in scaled):
        return None
    if not plain.elements:
        return BATCH
    if plain.elements % prod(use.leads):
        return MIXED.format(n=n)
    held = [s for s in scaled if s is not None]
    owned = owners(use.leads, n, use.second, use.minor)
    if use.samples is not None:
        owned = {BATCH: use.samples.cpu()}

    def fitting(but: Tensor) -> list[int]:
        """The layouts under which all rows but these came back as their samples were scaled."""
        return [layout for layout, owner in owned.items()
                if all(plain.scaled_to(rows, digit[owner], but)
                       for rows, digit in zip(held, digits, strict=True))]  # fmt: skip

    if not any(rows.sizes.any() for rows in (plain, *held)):
        return NOWHERE
    nan, faint = ~plain.sizes.isfinite(), plain.faint()
    fits = fitting(nan)
    if not fits:
        most = fitting(nan | faint)
        loud = (plain.sizes.cpu() > 0).logical_and(~(nan | faint).cpu()).flatten()
        fits = [k for k in most if plain.half and len(owned[k][loud].unique()) == n]
        if not fits:
            return None if most else MIXED.format(n=n)
    alike = all(torch.equal(owned[fits[0]], owned[layout]) for layout in fits)
    return fits[0] if alike else None  # neither zeros nor nan are evidence


def owners(
    leads: Sequence[int], n: int, second: bool = False, minor: bool = False
) -> dict[int, Tensor]:
    """Each layout that the sizes allow, and the sample of each row under it (as csrc/site.cpp)."""
    place, found, leads = torch.arange(prod(leads)), {}, leads or [1]  # a number has none
    if leads[0] % n == 0:
        found[BATCH] = place // (len(place) // n)
    if len(leads) > 1 and leads[1] == n:
        found[SEQUENCE] = place // prod(leads[2:]) % n
    elif leads[0] % n == 0:
        found[SEQUENCE] = place // prod(leads[1:]) % n
    if second and len(leads) > 1 and leads[1] % n == 0:
        found[SECOND] = place // prod(leads[2:]) % leads[1] // (leads[1] // n)
    if minor and leads[1] % n == 0:
        found[MINOR] = place // prod(leads[2:]) % leads[1] % n
    return found


@dataclass(frozen=True)
class Rows:
    """What is kept of an output gradient: projections of its rows, which are scaled as they are.

    Each projection of what another sample added is a random number of that one's size, so that four
    of them miss nothing that is not as small as rounding.
    """

    elements: int
    projections: Tensor  # [rows, up to 4]
    sizes: Tensor  # [rows, 1]
    close: float  # how near a projection comes, over its row's size
    floor: float  # of sizes
    half: bool  # something on the way here had float16

    @staticmethod
    def of(g: Tensor, count: int, half: bool) -> Rows:
        # Scaling by powers of two rounds nothing, but for numbers that became subnormal: many do
        # in float16.
        close = 1e-2 if half else 1e-5
        count = count if count and g.numel() % count == 0 else 1
        elements = g.numel()
        g = torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        rows = g.detach().reshape(count, -1 if g.numel() else 0).to(wide)
        if not elements:
            return Rows(0, rows, rows, close, 0.0, half)
        generator = torch.Generator().manual_seed(count)  # the same each time
        onto = torch.randn(rows.shape[1], 4, generator=generator, dtype=wide).to(rows.device)
        short = rows.shape[1] <= 4  # and no larger for being projected
        sizes, most = (torch.linalg.vector_norm(rows, p, 1, True) for p in (2, inf))
        sizes = sizes.minimum(most * sqrt(rows.shape[1]))  # where squares overflow
        with torch.autocast(g.device.type, enabled=False):
            kept = rows.clone() if short else rows @ onto
        tiny = torch.finfo(torch.float16 if half else torch.float32).tiny
        floor = tiny * sqrt(rows.shape[1]) if half else tiny / close
        return Rows(elements, kept, sizes, close, floor, half)

    def scaled_to(self, scaled: Rows, exponents: Tensor, but: Tensor) -> bool:
        """Whether rows came back scaled by 2^exponent, all `but` some; another's is off by 2."""
        exponents = exponents.to(self.sizes.device)[:, None]
        wanted, size = (torch.ldexp(t, exponents) for t in (self.projections, self.sizes))
        close = (scaled.projections - wanted).abs() <= self.close * size
        return bool((close | but).all())

    def off(self, other: Rows) -> float:
        """How far another answer is, over a row's size."""
        if not self.elements:
            return 0.0
        off = (self.projections - other.projections).abs() / self.sizes
        return float(off.where(off.isfinite() & ~self.faint(), 0.0).max())

    def faint(self) -> Tensor:
        """Rows so small that subnormal numbers may have made the difference, as where a mask of
        -100 leaves a softmax 4e-44; in float16, where most of their numbers are."""
        return self.sizes < self.floor
