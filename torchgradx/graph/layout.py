"""Where the samples are in a layer's rows: proven once per structure, never guessed from sizes.

Backwards from the model's outputs, with the same random seeds each time, sample n scaled by a power
of two that a digit of n picks. Scaling by a power of two is exact, so each row of a layer's output
gradient comes back scaled by the weight of the sample it belongs to, or it mixes samples. That is
1 + ceil(log16 N) backwards, whatever the number of layers; they go down to the layers' outputs
only and compute no weight gradient. All comparisons stay on the device until one read at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..refusals import cause, refused_all
from .rows import SILENT, Rows, digits_of, halves, seeded_root
from .unpacking import can_run_twice, has_checkpoints

# rows n*T+t | rows t*N+n | of no sample, see shared | no gradient comes from the outputs, and if
# one does come it is refused | [T, N K, *] | [*, N K] | [*, K N, *]
BATCH, SEQUENCE, SHARED, NOWHERE, SECOND, LAST, MINOR = range(7)
FLEX, COMPILED = "FlexAttentionAutogradOpBackward", "CompiledFunctionBackward"
SEGMENTS = 16  # and from there on: as one of a pass's vectors says, see segments.py
Heads = Sequence[tuple[Tensor, int]]  # outputs, and the dimension in which each has the samples
# Of a row's size: what it is off by at most where sums come in another order each time.
LOOSE = 0.25


@dataclass(frozen=True)
class Watched:
    """One output of a graph node, whose rows are looked at."""

    node: Any  # that made the output; None where it needs no gradient
    output_nr: int
    leads: Sequence[int]  # the leading dimensions of the output, which count its rows
    second: bool = False  # it can find samples of several rows in the second dimension
    samples: Tensor | None = None  # of each row, where they are packed: neither n*T+t nor t*N+n
    minor: bool = False  # samples may be in its second dimension one after the other


@dataclass(frozen=True)
class Finding:
    """The answer of weighted backwards on one output."""

    layout: int | str | None  # a str says why there is none; None: nothing was shown
    sure: bool = False  # no other layout that the sizes allow has the same rows


class Seeding:
    """Weighted backwards of one forward, from outputs that have the samples in these dimensions."""

    def __init__(
        self,
        heads: Sequence[tuple[Tensor, int | Tensor]],
        uses: Sequence[Watched],
        n: int,
        unspent: Callable[[], AbstractContextManager[None]] = nullcontext,
        compiled: bool = False,
    ) -> None:
        """unspent: what each backward of the graph runs under. compiled: parts may be run again."""
        self._heads, self._uses, self._n, self._unspent = heads, uses, n, unspent
        self._known = [k for k, use in enumerate(uses) if use.node is not None]
        self._nodes = nodes = nodes_in_order(t for t, _ in heads)
        self.able = bool(heads) and not any(
            is_python(v, compiled) or not can_run_twice(v) for v in nodes
        )
        wanted = {uses[k].node for k in self._known}
        above: set[Any] = set()  # those that lead to another one that is wanted
        for node in reversed(nodes):
            if any(child in above or child in wanted for child, _ in node.next_functions):
                above.add(node)
        # The engine is asked for those alone below which no other is wanted.
        self._last = [k for k in self._known if uses[k].node not in above]
        self._half = any(map(_is_half, nodes))  # under autocast, its ends may be wider
        self._loud, self._ran = 0, False
        self._plain: dict[int, Rows] = {}  # what prove() found of the unscaled backward
        self._owned: dict[Any, dict[int, Tensor]] = {}  # by sizes

    def prove(self) -> list[Finding] | None:
        """Run 1 + ceil(log16 N) backwards (more in float16, and where sums tremble). None: they
        cannot run."""
        if not self.able:
            return None
        digits = digits_of(self._n, 4 if self._half else 16)
        try:
            if self._half:
                self._loud = self._loudest()
            plain = self._plain = self._gradients(torch.full((self._n,), self._loud))
            scaled = [self._gradients(self._loud + digit) for digit in digits]
            found = self._findings(plain, scaled, digits)
            if any(isinstance(finding.layout, str) for finding in found):
                found = self._silenced(found, self._findings(plain, scaled, digits, LOOSE))
        except Exception as error:  # reentrant checkpointing forbids it; hooks raise what they like
            if self._ran and has_checkpoints(self._nodes):  # the user's backward would fail as well
                raise refused_all("one_context", ()) from error
            return None
        return found

    def confirms(self, layouts: Sequence[int | None]) -> bool:
        """Run one backward with some samples' seeds zero: exactly their rows must be zero."""
        if not self.able:
            return False
        kept = torch.rand(self._n, generator=torch.Generator().manual_seed(self._n)) < 0.5
        kept[0], kept[-1] = True, False
        try:
            found = self._gradients(torch.where(kept, 0, SILENT))
        except Exception:
            return False
        flags = [torch.zeros((), dtype=torch.bool, device=self._heads[0][0].device)]
        for k, rows in found.items():
            layout = layouts[k]
            if layout is None or not rows.elements:
                continue
            owner = self._owners(k).get(layout)
            if owner is None or rows.sizes.numel() != len(owner):
                return False
            flags.append(_leaks(rows, kept[owner]))
        return not bool(torch.stack(flags).any())

    def _silenced(self, found: list[Finding], loose: Sequence[Finding]) -> list[Finding]:
        """Look again at rows that were off by little, as where a GPU adds up in another order each
        time: whose sample's seed is zero must be zero, and a sum of zeros is, in any order.

        For any two samples there is a backward in which the one is silent and the other is not.
        """
        doubts = [k for k, (one, two) in enumerate(zip(found, loose, strict=True))
                  if isinstance(one.layout, str) and isinstance(two.layout, int)]  # fmt: skip
        if not doubts:
            return found
        owned = {}
        for k in doubts:
            layout = loose[k].layout
            assert isinstance(layout, int)
            owned[k] = self._owners(k)[layout]
        flags = []
        for kept in halves(self._n):
            rows = self._gradients(torch.where(kept, self._loud, SILENT))
            shown = {k: self._plain[k].sizes.isfinite() for k in doubts}
            flags += [torch.stack([_leaks(rows[k], kept[owned[k]], shown[k]) for k in doubts])]
        leaks = torch.stack(flags).any(0).tolist()
        for k, mixes in zip(doubts, leaks, strict=True):
            found[k] = found[k] if mixes else loose[k]
        return found

    def differs(self, heads: Heads, found: Sequence[Finding]) -> bool:
        """Run one backward from other dimensions: True if its rows could be other samples'."""
        digit = torch.arange(self._n) % (4 if self._half else 16)
        try:
            other = self._gradients(self._loud + digit, heads)
        except Exception:
            return True
        instead = self._findings(self._plain, [other], [digit])
        live = [(one, two) for one, two in zip(found, instead, strict=True)
                if isinstance(one.layout, int) and one.layout != NOWHERE]  # fmt: skip
        mixes = any(isinstance(two.layout, str) for _, two in live)
        return not mixes and any(one.layout != two.layout for one, two in live)

    def _gradients(
        self, exponents: Tensor, heads: Sequence[tuple[Tensor, int | Tensor]] | None = None
    ) -> dict[int, Rows]:
        """Return small facts of rows by use: a copy of each gradient would take memory."""
        found: dict[int, Rows] = {}

        def keep(k: int, g: Tensor | None) -> None:
            if g is not None:
                found[k] = Rows.of(g, prod(self._uses[k].leads), self._half)

        def arrive(k: int, grads: Sequence[Tensor | None]) -> None:
            keep(k, grads[self._uses[k].output_nr])

        between = {*self._known} - {*self._last}
        handles = [self._uses[k].node.register_prehook(partial(arrive, k)) for k in between]
        try:
            roots = [seeded_root(t, exponents, d) for t, d in heads or self._heads]
            edges = [GradientEdge(self._uses[k].node, self._uses[k].output_nr) for k in self._last]
            if not edges:
                return found
            with self._unspent():
                ends = torch.autograd.grad(roots, edges, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        self._ran = True
        for k, g in zip(self._last, ends, strict=True):
            keep(k, g)
        return found

    def _loudest(self) -> int:
        """Return the exponent up to which all stays finite: float16 has few numbers below 1e-4."""
        for exponent in (12, 9, 6, 3):
            found = self._gradients(torch.full((self._n,), exponent + 3))
            if all(bool(rows.sizes.isfinite().all()) for rows in found.values()):
                return exponent
        return 0

    def _findings(
        self,
        plain: dict[int, Rows],
        scaled: Sequence[dict[int, Rows]],
        digits: Sequence[Tensor],
        close: float = 0.0,
    ) -> list[Finding]:
        """Return a finding for each use, by one read from the device for all."""
        found = [Finding(BATCH if use.node is None else None) for use in self._uses]
        groups: dict[Any, list[int]] = {}  # of uses that are asked together
        for k in self._known:
            if k not in plain or any(k not in one for one in scaled):
                continue
            if not plain[k].elements:
                found[k] = Finding(BATCH)
            elif plain[k].elements % prod(self._uses[k].leads):
                found[k] = Finding(cause("mixes", n=self._n))
            else:
                groups.setdefault((id(self._owners(k)), plain[k].key), []).append(k)
        asked = [
            _asked([plain[k] for k in group], [[one[k] for k in group] for one in scaled],
                   digits, self._owners(group[0]), close)
            for group in groups.values()
        ]  # fmt: skip
        answers = iter(torch.cat([flags.flatten() for flags in asked]).tolist() if asked else ())
        for group, flags in zip(groups.values(), asked, strict=True):
            for k in group:
                live, *fit = islice(answers, flags.shape[1])
                finding = self._finding(self._owners(k), live, fit, plain[k].half)
                fixed = (
                    layout_from_sizes(self._uses[k].leads, self._n) == finding.layout is not None
                )
                found[k] = replace(finding, sure=finding.sure or fixed)
        return found

    def _owners(self, k: int) -> dict[int, Tensor]:
        use = self._uses[k]
        key = *use.leads, use.second, use.minor, id(use.samples)
        if key not in self._owned:
            self._owned[key] = (
                owners(use.leads, self._n, use.second, use.minor)
                if use.samples is None
                else {BATCH: use.samples.cpu()}
            )
        return self._owned[key]

    def _finding(
        self, owned: dict[int, Tensor], live: bool, flags: Sequence[bool], half: bool
    ) -> Finding:
        """Return the finding by flags: for each layout whether all rows fit, whether all but faint
        ones do, and whether what fits is of every sample."""
        if not live:
            return Finding(NOWHERE)
        by_layout = dict(zip(owned, zip(*[iter(flags)] * 3, strict=True), strict=True))
        fits = [layout for layout, (all_fit, *_) in by_layout.items() if all_fit]
        if not fits:
            most = [layout for layout, (_, loud_fit, _) in by_layout.items() if loud_fit]
            fits = [layout for layout in most if half and by_layout[layout][2]]
            if not fits:
                return Finding(None if most else cause("mixes", n=self._n))
        alike = all(torch.equal(owned[fits[0]], owned[layout]) for layout in fits)
        if not alike:  # neither zeros nor nan are evidence
            return Finding(None)
        usual = [layout for layout in fits if layout in (BATCH, SEQUENCE)]
        return Finding(fits[0], len(usual or fits) == 1)


def _leaks(rows: Rows, kept: Tensor, shown: Tensor | None = None) -> Tensor:
    """Tell whether a row has a gradient that is not of the samples kept: [rows], as `shown`."""
    leaks = (rows.sizes != 0) & ~kept.to(rows.sizes.device)[:, None]
    return (leaks if shown is None else leaks & shown).any()


def _asked(
    plain: Sequence[Rows],
    scaled: Sequence[Sequence[Rows]],
    digits: Sequence[Tensor],
    owned: dict[int, Tensor],
    close: float,
) -> Tensor:
    """Return flags [uses, 1 + 3 layouts] of uses with as many rows: see Seeding._finding."""
    sizes = torch.stack([rows.sizes for rows in plain])  # [uses, rows, 1]
    projections = torch.stack([rows.projections for rows in plain])
    device, n, close = sizes.device, len(digits[0]), max(plain[0].close, close)
    nan = ~sizes.isfinite()
    faint = nan | (sizes < plain[0].floor)
    loud = ((sizes > 0) & ~faint).flatten(1)
    every = [sizes, *(torch.stack([rows.sizes for rows in one]) for one in scaled)]
    flags = [torch.stack([one.ne(0).flatten(1).any(1) for one in every]).any(0)]
    for owner in owned.values():
        fits = torch.ones_like(nan)
        for one, digit in zip(scaled, digits, strict=True):
            exponents = digit[owner].to(device)[:, None]
            wanted, size = torch.ldexp(projections, exponents), torch.ldexp(sizes, exponents)
            off = (torch.stack([rows.projections for rows in one]) - wanted).abs()
            fits = fits & off.le(close * size).all(-1, True)
        of_each = torch.zeros(len(plain), n, dtype=torch.int32, device=device)
        of_each.index_add_(1, owner.to(device), loud.int())
        flags += [(fits | nan).flatten(1).all(1), (fits | faint).flatten(1).all(1),
                  (of_each > 0).all(1)]  # fmt: skip
    return torch.stack(flags, 1)


def heads_of(
    outputs: Sequence[Tensor], n: int, dims: dict[tuple[int, int], int], batch_dim: int
) -> tuple[Heads, Sequence[Heads]]:
    """Return outputs with the dimension of the samples; and with each other one of that size."""
    heads, rests = [], []
    for k, t in enumerate(outputs):
        fits = [d for d, size in enumerate(t.shape) if size == n]
        if not fits or not t.requires_grad or not t.is_floating_point():
            continue
        remembered = dims.get((k, t.dim()))
        first = batch_dim if batch_dim in fits else fits[0]
        if remembered in fits:
            first, fits = remembered, [remembered]
        heads.append((t, first))
        rests.append([d for d in fits if d != first])
    others = [
        [(t, rest[min(j, len(rest) - 1)] if rest else first)
         for (t, first), rest in zip(heads, rests, strict=True)]
        for j in range(max(map(len, rests), default=0))
    ]  # fmt: skip
    return heads, others


def nodes_in_order(outputs: Iterable[Tensor]) -> list[Any]:
    """Return the graph's nodes below these, each before those it is made of."""
    order: list[Any] = []
    todo: list[tuple[Any, bool]] = [(t.grad_fn, False) for t in outputs]
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


def is_python(node: Any, compiled: bool = False) -> bool:
    """Return True if a backward may do what it likes; compiled: that of a compiled part may not."""
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return own and node.name() != FLEX and not (compiled and node.name() == COMPILED)


def _is_half(node: Any) -> bool:
    return any(m.dtype == torch.float16 for m in getattr(node, "_input_metadata", ()))


def owners(
    leads: Sequence[int], n: int, second: bool = False, minor: bool = False
) -> dict[int, Tensor]:
    """Return each layout that sizes allow, and each row's sample in it (as csrc/nodes/site.cpp)."""
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


def layout_from_sizes(leads: Sequence[int], n: int) -> int | None:
    """Return the layout, if one dimension alone has size N and no other hides the samples."""
    first, *rest = leads or [1]
    if n == 1:
        return BATCH
    if first == n and n not in rest:
        return BATCH
    if rest[:1] == [n] and first % n and n not in rest[1:]:
        return SEQUENCE
    return None
