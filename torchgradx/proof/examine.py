"""A first look at a structure: where the samples are in each layer, as proven (layout.py), as
followed (unproven.py), or as they must be by their sizes; and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..rules import Layer
from ..shared.frontier import Graph
from ..shared.lift import Lift
from ..sites.native import NativeSite
from .contracted import contracts
from .layout import BATCH, NOWHERE, SEQUENCE, SHARED, Watched, prove
from .routes import routes
from .sample_dims import GONE
from .several import CONFLICT, End, ends_of_node
from .unproven import stands
from .verdict import Verdict, barriers
from .witness import Looked, Way, Witness

if TYPE_CHECKING:
    from ..sites.recurrent import Site
    from ..table import Parameters

__all__ = ["Examiner"]

BROADCAST = "the first tensor has one row, others more: say batch_size=, or give the samples first"
SORTED = (
    "the model puts its samples in another order, or mixes them, where no gradient shows it: do so "
    "before it is called, and give a frozen BatchNorm eval()"
)
ELSEWHERE = "the {n} samples are not where its batch_first says: set that, or transpose its input"


class Examiner:
    """Of one probe."""

    def __init__(
        self,
        parameters: Parameters,
        layers: Sequence[Layer],
        options: Mapping[str, Any],
        witness: Witness,
        lift: Lift,
    ) -> None:
        self._parameters, self._layers, self._options = parameters, layers, options
        self._witness, self._lift = witness, lift

    def verdict(
        self,
        run: Any,
        uses: Sequence[Any],
        outputs: Sequence[Tensor],
        sites: Sequence[Site],
        looked: Looked,
    ) -> Verdict:
        """What a forward shows."""
        n, graph = run.n, Graph(outputs)
        way = run.structure, looked.way
        went = self._witness.went(way, n)
        watched, ends = self._watched(n, uses, outputs, sites, looked, graph, went)
        asked = [] if self._parameters.gathered() else outputs
        ends_of_way = self._witness.places(asked, n, uses, way)
        places = [None] * len(asked) if ends_of_way is None else ends_of_way
        batch_dim = self._options["batch_dim"]

        def proof(watched: Sequence[Watched]) -> list[int | str | None]:
            return prove(asked, places, watched, n, batch_dim, self._witness.unspent)

        def but_zeros(watched: Sequence[Watched]) -> list[int | str | None]:
            return [None if verdict == NOWHERE else verdict for verdict in proof(watched)]

        shown = proof([*watched, *(end.watched for _, end in ends)])
        of_use = [*range(len(uses)), *(k for k, _ in ends)]
        zeros = {k for k, v in zip(of_use, shown, strict=True) if v == NOWHERE}
        proven = any(v is not None for v in shown)
        found = [None if v == NOWHERE else v for v in shown]
        found, of_ends = found[: len(uses)], found[len(uses) :]
        for (k, end), verdict in zip(ends, of_ends, strict=True):
            found[k] = end.joined(found[k], verdict, sites[uses[k][0]].presumed, n)
        seen = self._witness.followed(found, n, went, uses, watched, graph, looked.taint)
        beside: list[list[End]] = [[] for _ in uses]
        for k, end in ends:
            beside[k].append(end)

        def fits(k: int, layout: int) -> bool:
            """Without a proof, followed or presumed: whether all outputs can only be so."""
            fixed = sites[uses[k][0]].fixed
            return fixed or all(end.clear(watched[k], layout, n) for end in beside[k])

        for k, layout in enumerate(seen):
            if beside[k] and found[k] is None and sites[uses[k][0]].fixed:
                continue
            doubt = found[k] is None and isinstance(layout, int) and not fits(k, layout)
            found[k] = CONFLICT if doubt else layout
        plan = self._lift.plan(n, uses, sites, found, went, outputs, looked.taint, but_zeros)
        for k, _ in plan.starts if plan else ():
            if k >= 0:
                found[k] = SHARED
        blind = barriers(self._layers, self._parameters.tensors()) if proven and n > 1 else []
        layouts: list[int] = []
        refusals = [(-1, BROADCAST)] if looked.broadcast else []
        sure = None not in shown and all(node is not None for _, _, node, _ in uses)
        complete = ends_of_way is not None and (sure or not went.borrowed)
        for k, ((site, sizes, node, _), use, verdict) in enumerate(
            zip(uses, watched, found, strict=True)
        ):
            presumed = sites[site].presumed
            says = sites[site].fixed and use.samples is None and n > 1
            if says and verdict in {BATCH, SEQUENCE} - {presumed}:
                refusals.append((site, f"of shape {list(sizes)}, {ELSEWHERE.format(n=n)}"))
            trusted = sites[site].declared >= 0
            # No node: it runs again in backward (reentrant checkpointing), where nothing is proven.
            known = isinstance(verdict, int) and (node is not None or n <= 1)
            reason = verdict if isinstance(verdict, str) else None
            doubt = not trusted and not known
            runs = node is not None and self._layers[site].kind == "vmap"
            if runs and not self._lift.own(k, uses, graph):
                doubt = False  # of its own parameters it used none: what comes to them is compared
            elif doubt and not reason and went.over(uses[k]):
                doubt = False
            elif doubt and not reason:
                given = went.given_to(uses[k])
                stood = given is not None and stands(given, sizes, use.leads, n, presumed)
                stood = stood and (n in use.leads or sites[site].keeps_rows)
                doubt = not (went.orderly and stood and fits(k, presumed))
                self._witness.believed()
                if given is None:
                    self._witness.watch()
                    complete = False
            apart = bool(outputs) and node is not None and node not in graph.parents
            if doubt and (apart or k in zeros):
                layouts.append(NOWHERE)  # as where it was detached: if a gradient comes, refused
                if not apart:
                    self._witness.watch()  # once it is more than zeros it is proven
                complete = complete and (apart or bool(blind))
                continue
            if doubt:
                complete = complete and bool(reason or not proven)  # a pass to come may show it
                say = f'say layout={{"{self._layers[site].name}": "batch"}} or "sequence"'
                unproven = f"no proof could be had of where the {n} samples are in it; {say}"
                refusals.append((site, f"of shape {list(sizes)}, {reason or unproven}"))
            proves = known and node is not None and not trusted and (n > 1 or verdict != BATCH)
            layouts.append(int(verdict) if proves else presumed)  # type: ignore[arg-type]
        taint = looked.taint
        if taint is not None and taint.rows is not None:
            layers = zip(watched, found, strict=True)
            stand = any(use.leads[:1] == [taint.rows] and v == BATCH for use, v in layers)
            self._witness.rows_alone(stand or not refusals, stand and taint.mixed)
        if self._witness.seen.sorts and n > 1:  # the last reason is the one that is given
            again = any(node is None for _, _, node, _ in uses)  # checkpoints have advice of theirs
            refusals.insert(0 if again else len(refusals), (-1, SORTED))
        others = looked.others if outputs and n > 1 and not refusals else None
        if taint is not None and others is not None and others.mix(outputs, taint.ends):
            self._witness.seen.sorts = True
            refusals.append((-1, SORTED))
        called = [site for site, *_ in uses]
        reach = _reach(uses, graph, outputs, looked)
        reach = () if all(reach) else reach
        chosen = routes(outputs, n)
        if n > 1 and any(0 in use.leads for use in watched):  # of rows to come nothing was shown
            self._witness.watch()
            chosen.append(None)
        held = [t for t, at in zip(asked, places, strict=True) if n in t.shape and at != GONE]
        starts = [*watched, *(end.watched for _, end in ends)]
        rows, flat = [*found, *of_ends], looked.flat
        if n > 1 and ((flat and plan) or contracts(held, starts, rows, n, flat)):
            chosen.append(None)
        looked_at = taint is not None
        return Verdict(layouts, refusals, plan, complete, called, chosen, blind, looked_at, reach)

    def variant(
        self,
        key: Any,
        held: Verdict | None,
        uses: Sequence[Any],
        outputs: Sequence[Tensor],
        looked: Looked,
    ) -> Any:
        """Of a structure of which a part has outputs that were not used when it was proven: those
        that are used now are proven by themselves."""
        if held is None or not held.reach:
            return key
        reach = _reach(uses, Graph(outputs), outputs, looked)
        return key if reach == held.reach else (key, reach)

    def _watched(
        self,
        n: int,
        uses: Sequence[Any],
        outputs: Sequence[Tensor],
        sites: Sequence[Site],
        looked: Looked,
        graph: Graph,
        went: Way,
    ) -> tuple[list[Watched], list[tuple[int, End]]]:
        """The first output of each use, and the others, by use."""
        watched: list[Watched] = []
        ends: list[tuple[int, End]] = []
        for k, (site, sizes, node, number) in enumerate(uses):
            trusted = sites[site].declared >= 0
            leads = sizes[: sites[site].leads(len(sizes))]
            second = isinstance(sites[site], NativeSite)
            given = went.given_to(uses[k])
            own = sites[site].presumed if sites[site].fixed else None
            own = own if given and given.dim == own else None  # BATCH is 0, SEQUENCE 1
            others = looked.ends.get((site, node), ()) if node is not None else ()
            packed = next((end.watched.samples for end in others), None)
            asked = None if trusted else node
            # Of what was not watched nobody knows; ids [1, T] at T = N look like samples'.
            ids = self._layers[site].type_name.startswith("Embedding")
            fed = self._witness.fed(uses[k]) if given is None else given.fed
            free = True if given and not fed else None if ids or not fed else False
            watched.append(Watched(asked, number, leads, second, own, packed, free))
            if self._layers[site].inside and node is not None and not trusted and n > 1:
                ends += [(k, end) for end in ends_of_node(node, graph, outputs, leads, n)]
            elif not trusted:
                ends += [(k, end) for end in others]
        return watched, ends


def _reach(
    uses: Sequence[Any], graph: Graph, outputs: Sequence[Tensor], looked: Looked
) -> tuple[bool, ...]:
    """Which outputs, of parts with several, come into the model's."""
    whole = {(t.grad_fn, t.output_nr) for t in outputs}
    ends = [end.watched for site, _, node, _ in uses for end in looked.ends.get((site, node), ())]
    return tuple(
        (end.node, end.output_nr) in whole or end.output_nr in graph.numbers(end.node)
        for end in ends
    )
