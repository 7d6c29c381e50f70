"""Nothing is silently wrong: what is recorded is compared with what the parameters receive.

On the first pass of a new structure the places of the samples are proven (structure.py), and each
parameter's gradient is compared with the sum of what was recorded. In every backward, each edge of
the graph into a parameter must belong to a recorded use (csrc/record/pass.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from math import hypot
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import ops
from ..errors import CoverageError
from ..graph.layout import NOWHERE
from ..graph.modes import in_batched_backward
from ..graph.routes import routes_of
from ..hooks.copies import untraced
from ..hooks.listening import ParameterHooks, has_user_hooks
from ..record.backwards import Backwards
from ..record.record import Record
from ..refusals import cause
from ..sharding import is_sharded
from ..shared.frontier import LiftPlan
from ..shared.lift import Lift
from ..shared.stations import Match
from ..sites.site import ProbeParts
from .forwards import Forward, Forwards, ForwardTrace
from .structure import Examiner
from .verdict import Verdict, from_outside, is_finite

if ops.NATIVE:
    from .._C import undelivered

MAX_STRUCTURES = 4096  # sizes that never repeat must not add up
MAX_VERDICTS = 8  # paths through one structure
MAX_PENDING = 7  # forwards that wait for a backward
COMPARED_ELEMENTS = 1 << 18  # at a time, in float64


class Audit:
    def __init__(self, shared: ProbeParts, record: Record, backwards: Backwards) -> None:
        self._record, self._backwards = record, backwards
        self._recorder, self._parameters, self._layers, options, self._sites, known = shared
        recorder, parameters, layers = shared.recorder, shared.parameters, shared.layers
        self._proven: dict[Any, list[Verdict]] = known.setdefault("structures", {})
        self._alike: dict[Any, list[Verdict]] = known.setdefault("sizes", {})  # whatever the sizes
        self.forwards = Forwards(parameters, known.setdefault("memories", {}))
        self._lift = Lift(recorder, parameters, layers, self._compares, not options["weight_grad"])
        self.examiner = Examiner(shared, self.forwards, self._lift)
        # What their first pass has yet to agree with: (key, key whatever the sizes, verdict, pass).
        self._pending: list[tuple[Any, Any, Verdict, Any]] = []
        self._entry = threading.RLock()  # of what is pending, and of who listens
        self._midway: set[int] = set()  # backwards that had begun when the listening did
        self._listening, self._always_listening = ParameterHooks(), ParameterHooks()
        self._hooked_at = WeakIdKeyDictionary()  # tensors that we listen at in every backward
        self._deferred: set[int] = set()
        self._awaiting: dict[tuple[int, int], Tensor] = {}  # what deferred parameters received
        self._without_pass: set[tuple[int, int]] = set()  # backwards, and what they serve
        rerun = [set(layer.parameters) for layer in layers if layer.kind == "vmap"]
        native = [set(layer.parameters) for layer in layers if layer.kind != "vmap"]
        # Nothing counts the uses inside a module that is run again: its sum is compared every time.
        self.always = set().union(*rerun).difference(*native)
        self._muted: dict[int, tuple[dict[int, Any], int]] = {}  # by place: hooks, and backward

    # Forward

    def key(self, run: Any, trace: ForwardTrace) -> Any:
        """Return a structure's key. Less can be proven where a checkpoint runs the model again."""
        again = torch._C._current_graph_task_id() != -1
        return run.structure, run.n, again, trace.nodes, trace.kind, self._parameters.regime()

    def knows(self, key: Any) -> bool:
        verdicts = self._proven.get(key)
        return verdicts is not None and len(verdicts) == 1 and verdicts[0].lasting

    def recall(self, run: Any, key: Any, trace: ForwardTrace, outputs: Sequence[Tensor]) -> Any:
        """Return (verdict, where its plan's nodes are) where nothing else has to be examined."""
        cached = self._proven.get(key, ())
        if len(cached) != 1 or self._parameters.gathered():
            return None
        verdict, met = cached[0], None
        if verdict.lasting or not ops.NATIVE:
            return (verdict, None) if verdict.lasting else None
        more = verdict.routes or verdict.zeros is not None or verdict.refusals
        if not more and not trace.ends and all(pending[0] != key for pending in self._pending):
            with suppress(Exception):  # it is said where a forward is examined
                met = self._lift.recall(run, verdict.plan, outputs)
        return met and (verdict, met)

    def examine(self, forward: Forward, key: Any, recalled: Any) -> None:
        """Apply what is known of a forward's structure, or examine it. Never fails the forward."""
        run = forward.run
        try:
            if not recalled:
                self._examine(forward, key)
                return
            verdict, met = recalled
            self._tell(run, verdict)
            if met:
                self._lift.begin(run, met, self.forwards.first)
        except CoverageError:  # the user's backward would fail
            raise
        except Exception as error:
            run.refuse(-1, cause("not_examined", error=f"{type(error).__name__}: {error}"))

    def _examine(self, forward: Forward, key: Any) -> None:
        run = forward.run

        @cache
        def meet(plan: LiftPlan | None) -> Match | None:
            where = forward.uses, self._sites, forward.outputs
            return self._lift.match(run, plan, *where) if plan else None

        chosen = cache(partial(routes_of, forward.outputs, run.n, forward.trace.by_row))

        def fits(verdict: Verdict) -> bool:
            """Return True if this pass takes the path that was proven."""
            if not verdict.holds(self._parameters.tensors, chosen):
                return False
            met = meet(verdict.plan)
            return met is None or (met.stations is not None and not met.mute and met.same)

        cached = [v for k, _, v, _ in self._pending if k == key] + self._proven.get(key, [])
        verdict = next(filter(fits, cached), None) or self._transfer(forward, key, fits)
        verdict = verdict or self._new(forward, key, cached)
        self._tell(run, verdict)
        if self._parameters.gathered():
            self._follow(run, verdict.sites)
        met = meet(verdict.plan)
        if met:
            self._lift.begin(run, met, self.forwards.first)

    def _transfer(
        self, forward: Forward, key: Any, fits: Callable[[Verdict], bool]
    ) -> Verdict | None:
        """Return the verdict on the same calls with another size of batch, and cache it."""
        for other in self._alike.get(self._calls(key, forward.uses), ()):
            verdict = self.examiner.transfer(other, forward)
            if verdict is not None and fits(verdict):
                self._keep(self._proven, key, verdict)
                return verdict
        return None

    def _new(self, forward: Forward, key: Any, cached: Sequence[Verdict]) -> Verdict:
        """Examine a forward, and have its verdict cached once its backward has agreed."""
        verdict = self.examiner.verdict(forward)
        expired = [v for v in cached if v.zeros is not None]
        if expired and verdict.zeros is not None:  # zeros still: look less often
            verdict.looks = 1 + max(v.looks for v in expired)
            planned = verdict.plan.layouts if verdict.plan else ()
            sure = NOWHERE not in (*verdict.layouts, *planned)
            verdict.patience = 2 ** max(0, verdict.looks - 4) if sure else 1
        for old in expired:
            self._drop(key, old)
        if verdict.complete:
            self.expect(key, self._calls(key, forward.uses), verdict, forward.run)
        return verdict

    def expect(self, key: Any, calls: Any, verdict: Verdict, run: Any) -> None:
        """Cache a verdict once its pass's backward has agreed: under its key, or a list of keys,
        and under its calls, whatever the sizes."""
        with self._entry:
            self._pending.append((key, calls, verdict, run))
            self._listen()

    def _calls(self, key: Any, uses: Sequence[Any]) -> Any:
        """Return what a verdict holds for, whatever the sizes of a batch."""
        called = tuple((site, len(sizes), node is None) for site, sizes, node, _ in uses)
        return called, *key[2:]

    def _keep(self, verdicts: dict[Any, list[Verdict]], key: Any, verdict: Verdict) -> None:
        kept = verdicts.setdefault(key, [])
        kept.append(verdict)
        del kept[:-MAX_VERDICTS]
        if len(verdicts) > MAX_STRUCTURES:
            verdicts.pop(next(iter(verdicts)), None)

    def _drop(self, key: Any, verdict: Verdict) -> None:
        with self._entry:
            self._pending = [entry for entry in self._pending if entry[2] is not verdict]
        kept = self._proven.get(key, [])
        kept[:] = [other for other in kept if other is not verdict]

    def examine_compiled(self, run: Any) -> None:
        """Examine a pass of compiled graphs at its first gradient, by forwards that are not."""
        key = run.structure, run.n
        cached = [v for k, _, v, _ in self._pending if k == key] + self._proven.get(key, [])
        known = next((v for v in cached if not v.routes), None)  # what batches choose does not show
        verdict = known or from_outside(run)
        if known is None and verdict.complete:
            self.expect(key, None, verdict, run)
        self._tell(run, verdict)
        if verdict.plan is not None:
            run.refuse(-1, "tables_in_graph")
        elif not verdict.refusals and verdict.sites != [site for site, *_ in run.uses()]:
            run.refuse(-1, "other_layers")
        self._listen()  # each time: its edges into parameters say nothing of what uses them

    def _tell(self, run: Any, verdict: Verdict) -> None:
        run.layouts = run.layouts + verdict.layouts
        for site, reason in verdict.refusals:
            run.refuse(site, reason)

    # Backward

    def _compares(self, place: int) -> bool:
        """Return True if what is recorded of a parameter will be compared with what it receives."""
        return place in self.always or self._recorder.auditing

    def deliver(self, places: Iterable[int]) -> None:
        """Note that this backward counts their every edge: nothing else need be compared."""
        task = torch._C._current_graph_task_id()
        self._lift.delivered.update((task, place) for place in places)

    def attend(self) -> None:
        """Compare always what modules that run again receive."""
        self.always &= set(self._hook_each(self.always))

    def _hook_each(self, places: Iterable[int]) -> Iterator[int]:
        tensors = self._parameters.wholes()
        for place in places:
            p = tensors[place]
            if p.requires_grad and p.is_leaf:
                self._hook(place, p)
                yield place

    def _hook(self, place: int, p: Tensor) -> None:
        listening = self._always_listening if place in self.always else self._listening
        hook = partial(self._received, place)
        if ops.NATIVE:  # without Python where it would return at once
            hook = partial(undelivered, self._recorder, self._lift.delivered, place, hook)
        listening.before(p, hook)
        if place in self.always:
            self._hooked_at[p] = place

    def _follow(self, run: Any, sites: Sequence[int]) -> None:
        """Listen at the tensors that fully_shard makes in the first forward and computes with: a
        pass knows those alone that a module was called with."""
        called = {place for site in sites for place in self._layers[site].parameters}
        parts, wholes = self._parameters.parts(), self._parameters.wholes()
        for place, both in enumerate(zip(parts, wholes, strict=True)):
            if place not in called:
                run.expect(place, both[1])
            for p in both:
                if place in self.always and p.requires_grad and p not in self._hooked_at:
                    self._hook(place, p)

    def hooked(self) -> list[int]:
        """Return, for norms only, the parameters with the user's hooks, which get a gradient."""
        tensors = self._parameters.wholes() if self._recorder.shields else []
        return [place for place, p in enumerate(tensors) if has_user_hooks(p._backward_hooks)]

    def _listen(self) -> None:
        """Compare what each parameter receives with what is recorded, until settled."""
        with self._entry:
            if not ops.NATIVE:
                self._listening.stop()  # what is trained may be another
            if self._recorder.auditing and ops.NATIVE:
                return
            if not self._recorder.auditing:  # first: what begins from here on is recorded whole
                self._recorder.auditing = True
                self._midway = {*self._backwards.open} - {torch._C._current_graph_task_id()}
            list(self._hook_each(set(range(len(self._parameters.names))) - self.always))

    @untraced
    def _received(self, place: int, gradient: Tensor | None) -> None:
        key = torch._C._current_graph_task_id(), place
        always = place in self.always and key not in self._lift.delivered
        with self._entry:
            whole = self._recorder.auditing and key[0] not in self._midway
        if gradient is None or in_batched_backward() or not (always or whole):
            return
        has_pass = self._recorder.audited(key[0])
        if not has_pass:  # this backward has reached none yet
            self._backwards.reach(None)
            self._without_pass.add(key)
        if has_pass and place not in self._deferred:
            self._compare(key, gradient.detach())
        else:
            self._awaiting[key] = gradient.detach().clone()

    def mute(self, place: int) -> None:
        """Call no hook after this backward, which accumulates nothing: norms only."""
        hooks: Any = self._parameters.tensor(place)._post_accumulate_grad_hooks
        if hooks:
            self._muted[place] = dict(hooks), torch._C._current_graph_task_id()
            hooks.clear()

    def over(self, tasks: Sequence[int], done: bool) -> None:
        """End backwards, however they did. One inside of another has its passes."""
        delivered = self._lift.delivered
        if self._without_pass or self._muted or self._awaiting:
            self._clear(tasks, done)
        if done and self.always:  # what runs again may use other weights than its forward did
            left = {key for key in self._recorder.untaken(tasks) if key not in delivered}
            tensors = self._parameters.wholes() if left else []
            self._record.mismatched |= {key for key in left if tensors[key[1]] in self._hooked_at}
        delivered -= {key for key in list(delivered) if key[0] in tasks}

    def _clear(self, tasks: Sequence[int], done: bool) -> None:
        if torch._C._current_graph_task_id() == -1:
            ended = {key for key in list(self._without_pass) if key[0] in tasks}
            self._without_pass -= ended
            # One that reached a pass later is judged by its edges, where they are counted.
            inside = {key for key in ended if not (ops.NATIVE and self._recorder.audited(key[0]))}
            if done and any(map(self._recorder.audited, tasks)):
                self._record.mismatched |= inside
        for place in [p for p, (_, task) in list(self._muted.items()) if task in tasks]:
            hooks: Any = self._parameters.tensor(place)._post_accumulate_grad_hooks
            hooks.update(self._muted.pop(place)[0])
        for key in [key for key in list(self._awaiting) if key[0] in tasks]:
            gradient = self._awaiting.pop(key)  # of a use that no gradient came to
            if done and self._recorder.audited(key[0]):
                self._compare(key, gradient)

    @untraced
    def compare_deferred(self, places: Iterable[int]) -> None:
        """Compare what deferred parameters received, at the end of a backward."""
        for place in places:
            key = torch._C._current_graph_task_id(), place
            gradient = self._awaiting.pop(key, None)
            if gradient is not None:
                self._compare(key, gradient)

    def _compare(self, key: tuple[int, int], gradient: Tensor) -> None:
        if not self._agrees(key, gradient):
            self._record.mismatched.add(key)

    def _agrees(self, key: tuple[int, int], gradient: Tensor) -> bool:
        if is_sharded([gradient]):  # a part, and forwards use the whole
            return False
        recorded, rounding = self._recorder.take_recorded(*key)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if recorded is None or not bool(recorded.any()):  # of a use that is not recorded
            return not bool(gradient.any())
        gradient = gradient.reshape(-1)
        if recorded.dtype == gradient.dtype and torch.equal(gradient, recorded):
            return True
        difference = own = 0.0
        both = (t.split(COMPARED_ELEMENTS) for t in (gradient, recorded))
        for part, other in zip(*both, strict=True):
            part = part.double()
            difference = hypot(difference, float((part - other.double()).norm()))
            own = hypot(own, float(part.norm()))
        # The rounding of a sum is by its terms; a gradient that cancels is all rounding.
        allowed = 64 * (rounding + torch.finfo(recorded.dtype).eps * own)
        return not difference > allowed  # inf and nan are the scaler's to report

    def defer(self, places: Sequence[int]) -> None:
        """Compare these only at the end of the backward: their gradients by sample come then."""
        self._deferred.update(places)

    @property
    def unsettled(self) -> bool:
        busy = self._pending or self._recorder.auditing or self._listening.tensors
        return bool(busy or self.always)

    def settle(self) -> None:
        """Cache verdicts, outside of any backward, whose first backward has agreed."""
        with self._entry:
            waiting: list[Any] = []
            come: list[Any] = []
            for entry in self._pending:
                (come if entry[-1].recorded else waiting).append(entry)
            if not self._backwards.at_rest():  # all of `come` had begun before this
                return
            for key, calls, verdict, run in come:
                if self._record.mismatched or not is_finite(run):
                    self.forwards.watch_again()
                    continue
                for one in key if isinstance(key, list) else [key]:
                    if not self.knows(one):
                        self._keep(self._proven, one, verdict)
                if calls is not None and run.n > 1:  # one sample shows nothing of several
                    self._keep(self._alike, calls, verdict)
            self._pending = waiting[-MAX_PENDING:]
            if len(waiting) > MAX_PENDING:
                self.forwards.watch_again()
            if ops.NATIVE and not self._pending and (self._recorder.auditing or self.always):
                self._stop_listening()  # without the extension, which counts edges, it goes on
            self._listening.leave()  # if a backward kept it from that

    def _stop_listening(self) -> None:
        self._recorder.auditing = False
        self._listening.stop()

    def stop(self) -> None:
        self._pending = []
        self.forwards.stop()
        self._stop_listening()
        self._always_listening.stop()
