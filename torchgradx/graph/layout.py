"""Proves the layout of the samples in a layer's rows, once per structure; sizes are never trusted.

The proof runs backwards from the model's outputs with the same random seeds each time. In all but
the first, the seed of sample n is scaled by 2^d, where d is a digit of n. Such a scaling is exact.
So each row of a layer's output gradient comes back scaled by the 2^d of its sample, or it mixes
samples. That takes 1 + ceil(log16 N) backwards, whatever the number of layers. They stop at the
layers' outputs and compute no weight gradient. Comparisons stay on the device until one read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from ..refusals import cause, refused_all
from .functions import COMPILED
from .nodes import shape_of
from .rows import SILENT, RowSummary, digits_of, halves, seeded_root
from .unpacking import can_run_twice, has_checkpoints

# Layouts. BATCH: rows n*T+t. SEQUENCE: rows t*N+n. SHARED: rows of no sample (shared/).
# NOWHERE: no gradient comes from the outputs; if one comes after all, it is refused.
# SECOND: [T, N K, *]. LAST: [*, N K]. MINOR: [*, K N, *]. TAKEN: rows that indices took, whose
# samples each pass shows (heads.py).
BATCH, SEQUENCE, SHARED, NOWHERE, SECOND, LAST, MINOR, TAKEN = range(8)
SEGMENTS = 16  # layout 16 + k: the k-th owner vector of the pass (proof/segments.py)
FRAMEWORK = {"BackwardHookFunctionBackward", "FlexAttentionAutogradOpBackward"}  # torch's own
# Outputs, each with the dimension of the samples, or with the sample of each leading row, -1: none.
Heads = Sequence[tuple[Tensor, int | Tensor]]
Summaries = dict[int, RowSummary]  # of one backward, by use
LOOSE = 0.25  # error relative to a row's norm, where sums change their order from run to run


@dataclass(frozen=True)
class Watched:
    """One output of a graph node, whose rows are examined."""

    node: Any  # that computed the output; None if the output needs no gradient
    output_nr: int
    leads: Sequence[int]  # the leading sizes, whose product is the number of rows
    second: bool = False  # SECOND is a possible layout: each sample has several columns
    samples: Tensor | None = None  # of each row, if packed: neither n*T+t nor t*N+n
    minor: bool = False  # MINOR is a possible layout

    @property
    def shape(self) -> Sequence[int]:
        return self.leads if self.node is None else shape_of(self.node, self.output_nr)

    def hides(self, n: int) -> bool:
        """Return True if its features may be the samples, so that rows seem to mix."""
        return list(self.shape).count(n) > list(self.leads).count(n)


@dataclass(frozen=True)
class Finding:
    """Result of the weighted backwards for one output."""

    layout: int | str | None  # a str is the cause of a refusal; None: nothing was shown
    sure: bool = False  # no other layout that the sizes allow has the same rows


class Seeding:
    """Weighted backwards of one forward, from outputs whose dimension of the samples is known."""

    def __init__(
        self,
        heads: Heads,
        uses: Sequence[Watched],
        n: int,
        unspent: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """unspent: the context of each backward."""
        self._heads, self._uses, self._n, self._unspent = heads, uses, n, unspent
        self._known = [k for k, use in enumerate(uses) if use.node is not None]
        self.nodes = nodes = nodes_in_order(t for t, _ in heads)
        self._can_run = bool(heads) and all(
            can_run_twice(node) and (node.name() == COMPILED or not is_python(node))
            for node in nodes
        )
        wanted = {uses[k].node for k in self._known}
        above: set[Any] = set()  # nodes that lead to a wanted node
        for node in reversed(nodes):
            if any(child in above or child in wanted for child, _ in node.next_functions):
                above.add(node)
        # The engine is asked for the gradients of the lowest alone. Prehooks see the others.
        self._lowest = [k for k in self._known if uses[k].node not in above]
        metadata = (m for node in nodes for m in getattr(node, "_input_metadata", ()))
        self._half = any(m.dtype == torch.float16 for m in metadata)  # inside autocast, perhaps
        self._exponent, self._has_run = 0, False
        self._plain: Summaries = {}  # of the unscaled backward of prove()
        self._owners_by_sizes: dict[Any, dict[int, Tensor]] = {}

    def prove(self) -> list[Finding] | None:
        """Return a finding for each use, or None if backwards cannot run.
        It runs 1 + ceil(log16 N) backwards, more in float16 or where the order of sums changes."""
        if not self._can_run:
            return None
        digits = digits_of(self._n, 4 if self._half else 16)
        try:
            if self._half:
                self._exponent = self._largest_exponent()
            plain = self._plain = self._summaries(self._exponent + 0 * digits[0])
            scaled = [self._summaries(self._exponent + digit) for digit in digits]
            found = self._findings(plain, scaled, digits)
            if any(isinstance(finding.layout, str) for finding in found):
                loose = self._findings(plain, scaled, digits, LOOSE)
                self._prove_by_zeros(found, loose)
        except Exception as error:  # reentrant checkpoints forbid it; hooks may raise anything
            if self._has_run and has_checkpoints(self.nodes):  # the user's backward would fail too
                raise refused_all("one_context", ()) from error
            return None
        return found

    def confirms(self, layouts: Sequence[int | None]) -> bool:
        """Run one backward in which the seeds of some samples are zero, and return True if all rows
        of these samples are zero. layouts: of each use; None is not compared."""
        if not self._can_run:
            return False
        generator = torch.Generator().manual_seed(self._n)
        loud = torch.rand(self._n, generator=generator, device="cpu") < 0.5
        loud[0], loud[-1] = True, False
        try:
            found = self._summaries(torch.where(loud, 0, SILENT))
        except Exception:
            return False
        flags: list[Tensor] = []
        for k, rows in found.items():
            if (layout := layouts[k]) is None or not rows.elements:
                continue
            owner = self._owners(k).get(layout)
            if owner is None or rows.norms.numel() != len(owner):
                return False
            flags.append(_leaks(rows, loud[owner]))
        return not any(read_flags(flags))

    def _prove_by_zeros(self, found: list[Finding], loose: Sequence[Finding]) -> None:
        """Replace a refusal by the loose finding if the rows of silent samples are always zero.
        On a GPU a sum may have another order, and another rounding, in each backward. But a sum of
        zeros is zero in any order. For any two samples, one backward silences only one of them."""
        owned = {}
        for k, (finding, other) in enumerate(zip(found, loose, strict=True)):
            if isinstance(finding.layout, str) and isinstance(other.layout, int):
                owned[k] = self._owners(k)[other.layout]
        if not owned:
            return
        finite = {k: self._plain[k].norms.isfinite() for k in owned}
        flags: list[Tensor] = []
        for loud in halves(self._n):
            rows = self._summaries(torch.where(loud, self._exponent, SILENT))
            flags += [_leaks(rows[k], loud[owner], finite[k]) for k, owner in owned.items()]
        answers = read_flags(flags)
        for place, k in enumerate(owned):
            found[k] = found[k] if any(answers[place :: len(owned)]) else loose[k]

    def differs(self, heads: Heads, found: Sequence[Finding]) -> bool:
        """Run one backward from other dimensions of the outputs, and return True if the samples may
        as well be there: rows do not mix, and some layouts differ from `found`."""
        digit = torch.arange(self._n, device="cpu") % (4 if self._half else 16)
        try:
            other = self._summaries(self._exponent + digit, heads)
        except Exception:
            return True
        pairs = zip(found, self._findings(self._plain, [other], [digit]), strict=True)
        layouts = [(one.layout, two.layout) for one, two in pairs
                   if isinstance(one.layout, int) and one.layout != NOWHERE]  # fmt: skip
        mixes = any(isinstance(two, str) for _, two in layouts)
        return not mixes and any(one != two for one, two in layouts)

    def _summaries(self, exponents: Tensor, heads: Heads | None = None) -> Summaries:
        """Run one backward, and return a summary of each use's rows."""
        found: Summaries = {}

        def record(k: int, grads: Any) -> None:
            """grads: by the outputs of the use's node."""
            g = grads[self._uses[k].output_nr]
            if g is not None:
                found[k] = RowSummary.of(g, prod(self._uses[k].leads), self._half)

        higher = {*self._known} - {*self._lowest}
        handles = [self._uses[k].node.register_prehook(partial(record, k)) for k in higher]
        try:
            roots = [seeded_root(t, exponents, d) for t, d in heads or self._heads]
            lowest = (self._uses[k] for k in self._lowest)
            edges = [GradientEdge(use.node, use.output_nr) for use in lowest]
            if not edges:
                return found
            with self._unspent():
                grads = torch.autograd.grad(roots, edges, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        self._has_run = True
        for k, g in zip(self._lowest, grads, strict=True):
            record(k, {self._uses[k].output_nr: g})
        return found

    def _largest_exponent(self) -> int:
        """Return an exponent that leaves all finite: float16 has few numbers below 1e-4."""
        for exponent in (12, 9, 6, 3):
            found = self._summaries(torch.full((self._n,), exponent + 3, device="cpu"))
            if all(bool(rows.norms.isfinite().all()) for rows in found.values()):
                return exponent
        return 0

    def _findings(
        self, plain: Summaries, scaled: list[Summaries], digits: list[Tensor], tolerance: float = 0
    ) -> list[Finding]:
        """Return a finding for each use, with one read from the device for all of them."""
        found = [Finding(BATCH if use.node is None else None) for use in self._uses]
        groups: dict[Any, list[int]] = {}  # uses that are compared at once
        for k in self._known:
            if k not in plain or any(k not in rows for rows in scaled):
                continue
            if not plain[k].elements:
                found[k] = Finding(BATCH)
            elif plain[k].elements % prod(self._uses[k].leads):
                found[k] = Finding(cause("mixes", n=self._n))
            else:
                groups.setdefault((id(self._owners(k)), plain[k].key), []).append(k)
        compared = [
            _compare([plain[k] for k in group], [[rows[k] for k in group] for rows in scaled],
                     digits, self._owners(group[0]), tolerance)
            for group in groups.values()
        ]  # fmt: skip
        answers = iter(read_flags(compared))
        for group, flags in zip(groups.values(), compared, strict=True):
            for k in group:
                live, *fit = islice(answers, flags.shape[1])
                finding = self._finding(self._owners(k), live, fit)
                sized = layout_from_sizes(self._uses[k].leads, self._n)
                agree = sized == finding.layout is not None
                found[k] = replace(finding, sure=finding.sure or agree)
        return found

    def _owners(self, k: int) -> dict[int, Tensor]:
        """Return the possible layouts of a use, each with the sample of each row."""
        use = self._uses[k]
        key = *use.leads, use.second, use.minor, id(use.samples)
        if key not in self._owners_by_sizes:
            packed = None if use.samples is None else {BATCH: use.samples.cpu()}
            possible = packed or owners(use.leads, self._n, use.second, use.minor)
            self._owners_by_sizes[key] = possible
        return self._owners_by_sizes[key]

    def _finding(self, owned: dict[int, Tensor], live: bool, flags: Sequence[bool]) -> Finding:
        """Return the finding for one use from the flags of _compare()."""
        if not live:
            return Finding(NOWHERE)
        by_layout = dict(zip(owned, zip(*[iter(flags)] * 3, strict=True), strict=True))
        fits = [layout for layout, (all_fit, *_) in by_layout.items() if all_fit]
        if not fits:
            loud = [layout for layout, (_, loud_fit, _) in by_layout.items() if loud_fit]
            fits = [layout for layout in loud if self._half and by_layout[layout][2]]
            if not fits:
                return Finding(None if loud else cause("mixes", n=self._n))
        if any(not torch.equal(owned[fits[0]], owned[layout]) for layout in fits):
            return Finding(None)  # rows of zeros or nan fit every layout, and show nothing
        usual = [layout for layout in fits if layout in (BATCH, SEQUENCE)]
        return Finding(fits[0], len(usual or fits) == 1)


def _leaks(rows: RowSummary, loud: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return a bool []: True if a row of a silent sample has a gradient.
    loud: [rows], False for rows of silent samples. counts: [rows, 1], False for rows to ignore."""
    leaks = (rows.norms != 0) & ~loud.to(rows.norms.device)[:, None]
    return (leaks if counts is None else leaks & counts).any()


def _compare(
    plain: Sequence[RowSummary],
    scaled: Sequence[Sequence[RowSummary]],
    digits: Sequence[Tensor],
    owned: dict[int, Tensor],
    tolerance: float,
) -> Tensor:
    """Return flags [uses, 1 + 3 layouts] of uses whose summaries have the same key.
    The first: a row has a gradient. Then for each layout: all rows fit; all rows fit but faint
    ones; each sample has a row that is not faint."""
    norms = torch.stack([rows.norms for rows in plain])  # [uses, rows, 1]
    projections = torch.stack([rows.projections for rows in plain])
    device, n, tolerance = norms.device, len(digits[0]), max(plain[0].tolerance, tolerance)
    nan = ~norms.isfinite()
    faint = nan | (norms < plain[0].floor)
    loud = ((norms > 0) & ~faint).flatten(1)
    every = [norms, *(torch.stack([rows.norms for rows in summaries]) for summaries in scaled)]
    flags = [torch.stack([one.ne(0).flatten(1).any(1) for one in every]).any(0)]
    for owner in owned.values():
        fits = torch.ones_like(nan)
        for summaries, digit in zip(scaled, digits, strict=True):
            exponents = digit[owner].to(device)[:, None]
            expected, size = torch.ldexp(projections, exponents), torch.ldexp(norms, exponents)
            error = (torch.stack([rows.projections for rows in summaries]) - expected).abs()
            fits = fits & error.le(tolerance * size).all(-1, True)
        loud_rows = torch.zeros(len(plain), n, dtype=torch.int32, device=device)
        loud_rows.index_add_(1, owner.to(device), loud.int())
        some = ~nan.flatten(1).all(1)  # rows of nan fit anything
        flags += [(fits | nan).flatten(1).all(1) & some, (fits | faint).flatten(1).all(1),
                  (loud_rows > 0).all(1)]  # fmt: skip
    return torch.stack(flags, 1)


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """Return the values of bool tensors, with one read for all. A model may be on several GPUs."""
    return torch.cat([t.flatten().to(flags[0].device) for t in flags]).tolist() if flags else []


def nodes_in_order(outputs: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of a graph, each before the nodes that it consumes."""
    order: list[Any] = []
    todo: list[tuple[Any, bool]] = [(t.grad_fn, False) for t in outputs]
    seen = set()
    while todo:
        node, is_done = todo.pop()
        if is_done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(child, False) for child, _ in node.next_functions]
    return order[::-1]


def is_python(node: Any) -> bool:
    """Return True if a node's backward is a user's Python, which may have side effects."""
    return node.name() not in FRAMEWORK and isinstance(node, BackwardCFunction)


def owners(
    leads: Sequence[int], n: int, second: bool = False, minor: bool = False
) -> dict[int, Tensor]:
    """Return each layout that the sizes allow, with the sample of each row [prod(leads)].
    csrc/nodes/site.cpp has the same."""
    row, found, leads = torch.arange(prod(leads), device="cpu"), {}, leads or [1]
    if leads[0] % n == 0:
        found[BATCH] = row // (len(row) // n)
    if len(leads) > 1 and leads[1] == n:
        found[SEQUENCE] = row // prod(leads[2:]) % n
    elif leads[0] % n == 0:
        found[SEQUENCE] = row // prod(leads[1:]) % n
    if second and len(leads) > 1 and leads[1] % n == 0:
        found[SECOND] = row // prod(leads[2:]) % leads[1] // (leads[1] // n)
    if minor and leads[1] % n == 0:
        found[MINOR] = row // prod(leads[2:]) % leads[1] % n
    return found


def layout_from_sizes(leads: Sequence[int], n: int) -> int | None:
    """Return the layout if only one dimension has size N and no other can hold the samples."""
    first, *rest = leads or [1]
    if n == 1 or (first == n and n not in rest):
        return BATCH
    if rest[:1] == [n] and first % n and n not in rest[1:]:
        return SEQUENCE
    return None
