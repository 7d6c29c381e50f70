"""What an operation does with the samples of data, found by asking it: it runs a few times more,
with others in the place of some samples, and what comes out otherwise came of these.

No graph shows what is done to data, and an operation that is not known would have to be trusted.
Sample j is another in those runs that its code names. No code holds another (Sperner, "Ein Satz
ueber Untermengen einer endlichen Menge", 1928), so each two samples are told apart, by as many runs
as it takes for choose(runs, runs // 2) >= N: 4 for 6 samples, 8 for 70, 13 for 1,716. One more,
with nothing changed, tells whether it draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, islice
from math import comb
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .operation import name_of, real
from .order import SOURCES
from .sample_dims import GONE, Fed, Place

__all__ = [
    "NOTHING",
    "Answer",
    "answer_of",
    "answers",
    "codes_of",
    "differing",
    "runs",
    "unlike",
    "with_others",
]


class Answer(NamedTuple):
    """Of one result."""

    place: Place | None  # of the samples, if they are apart
    astray: bool  # they are not: rows are another's, or of several


NOTHING = Answer(None, False)


def runs(func: Any, args: Any, kwargs: Any, fed: Sequence[Fed], n: int) -> Iterator[list[Any]]:
    """The results of each, the first with nothing changed; `fed`: the operands that samples
    entered, and where they are in each. Random numbers come as if there were no runs."""
    if name_of(func) in SOURCES:  # as indices of what is written they count other samples' rows
        fed = [(t, place) for t, place in fed if real(t)]
    for changed in (torch.zeros(n, dtype=torch.bool), *codes_of(n).unbind(1)):
        with torch.random.fork_rng([t.device for t, _ in fed if t.is_cuda]):
            results = tree_leaves(_run(func, args, kwargs, fed, changed))
        yield results


def answers(out: Any, others: Iterable[Sequence[Any]], n: int) -> list[Answer]:
    """Of each result of the operation itself, against those of its runs."""
    results, found = tree_leaves(out), []
    differs = [[differing(*pair) for pair in zip(results, other, strict=True)] for other in others]
    for same, *seen in zip(*differs, strict=True):
        comparable = [dims for dims in seen if dims is not None]
        whole = len(comparable) == len(seen)  # else as many rows as the batch's values choose
        steady = same is not None and not same[0]  # else it draws random numbers
        found.append(answer_of(comparable, codes_of(n)) if whole and steady else NOTHING)
    return found


@lru_cache(maxsize=8)
def codes_of(n: int) -> Tensor:
    """bool [N, runs]: in which of them a sample is another."""
    runs = next(runs for runs in range(2, n + 2) if comb(runs, runs // 2) >= n)
    codes = torch.zeros(n, runs, dtype=torch.bool)
    for code, chosen in zip(codes, islice(combinations(range(runs), runs // 2), n), strict=True):
        code[list(chosen)] = True
    return codes


def _run(func: Any, args: Any, kwargs: Any, fed: Sequence[Fed], changed: Tensor) -> Any:
    """Without touching what it is given, into which it may write, as into running statistics."""
    places = {id(t): place for t, place in fed}

    def instead(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        place = places.get(id(t))
        if "as_strided" in func._schema.name:  # it looks beyond the view that it is given
            base = t if t._base is None else t._base
            other = base.clone().as_strided(t.shape, t.stride(), t.storage_offset())
        else:
            other = t.clone()
        if place is not None and place != GONE:
            others = with_others(_dense(t), place, changed.to(t.device))
            sparse = t.layout is not torch.strided  # how many numbers there are may be others
            other = others.to_sparse(layout=t.layout) if sparse else other.copy_(others)
        return other

    return func(*tree_map(instead, args), **tree_map(instead, kwargs))


def with_others(t: Tensor, place: Place, changed: Tensor) -> Tensor:
    """With the next sample in the place of each that changes; numbers that are alike in all change
    otherwise."""
    n, inner = len(changed), place.inner
    rows = torch.arange(t.shape[place.dim], device=t.device)
    sample = rows // inner % n
    following = rows + torch.where(sample == n - 1, inner * (1 - n), inner)
    taken = t.index_select(place.dim, torch.where(changed[sample], following, rows))
    if t.is_floating_point() and torch.equal(taken, t):
        shape = [-1 if dim == place.dim else 1 for dim in range(t.dim())]
        taken = taken + changed[sample].view(shape).to(t.dtype) / 2
    return taken


def _dense(t: Tensor) -> Tensor:
    return t if t.layout is torch.strided else t.to_dense()


def differing(a: Any, b: Any) -> list[Tensor] | None:
    """By dimension, at which of its indices two results differ. None: their sizes do."""
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return None
    differs = _differs(_dense(a), _dense(b))
    dims = range(a.dim())
    return [differs.any().view(1)] + [
        differs.movedim(dim, 0).flatten(1).any(1) if len(dims) > 1 else differs for dim in dims
    ]


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """By more than the same sum in another order would; that of halves is made in float32."""
    if not real(a):
        return a != b
    sums = torch.promote_types(a.dtype, torch.float32)
    return unlike(a, b, 2 * torch.finfo(a.dtype).eps, 64 * torch.finfo(sums).eps)


def unlike(a: Tensor, b: Tensor, own: float, rounding: float) -> Tensor:
    """Where real numbers differ by more than parts of each, and of the largest."""
    if a.is_complex():
        return unlike(torch.view_as_real(a), torch.view_as_real(b), own, rounding).any(-1)
    largest = a.nan_to_num(0, 0, 0).abs().max() if a.numel() else a.new_zeros(())
    return ~torch.isclose(a, b, own, rounding * float(largest), equal_nan=True)


def answer_of(differs: Sequence[Sequence[Tensor]], codes: Tensor) -> Answer:
    """`differs`: by run, whether anything did, and by dimension where."""
    if not any(bool(dims[0]) for dims in differs):
        return NOTHING
    by_dim = [torch.stack(rows).cpu() for rows in list(zip(*differs, strict=True))[1:]]
    apart = [
        place
        for dim, rows in enumerate(by_dim)  # bool [runs, rows]
        for place in _places(dim, rows.shape[1], len(codes))
        if not (rows & ~codes[torch.arange(rows.shape[1]) // place.inner % len(codes)].T).any()
    ]
    if not apart and all(rows.shape[1] % len(codes) for rows in by_dim):
        return Answer(GONE, True)
    return Answer(apart[0] if len(apart) == 1 else None, not apart)


def _places(dim: int, size: int, n: int) -> Iterator[Place]:
    whole, rest = divmod(size, n)
    if not rest:
        yield from (Place(dim, inner) for inner in range(1, whole + 1) if whole % inner == 0)
