"""Compares what was recorded with what the parameters receive, and caches verdicts that agree.

The first forward of a structure is examined (structure.py), and in its backward each parameter's
gradient is compared with the sum of what was recorded. In every backward, C++ checks that each edge
of the graph into a parameter belongs to a recorded use (csrc/record/pass.cpp).

`task` is the number that the engine gives a backward, `place` a parameter's index in the table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import CoverageError
from ..extension import _C, NATIVE, Pass
from ..graph.functions import COMPILED
from ..graph.layout import NOWHERE, TAKEN
from ..graph.modes import in_batched_backward
from ..hooks.copies import untraced
from ..hooks.listening import ParameterHooks, has_user_hooks
from ..record.backwards import Backwards
from ..record.record import Record
from ..refusals import cause
from ..sharding import is_sharded
from ..shared.frontier import LiftPlan
from ..shared.lift import EACH, Lift
from ..shared.stations import Match
from ..sites.site import ProbeParts
from .forwards import Forward, Forwards
from .structure import Examiner
from .verdict import Verdict, is_finite, is_same_sum, store, verdict_of_compiled

MAX_PENDING = 7  # forwards that wait for a backward


class _Pending(NamedTuple):
    """A verdict to be cached once the backward of its pass has ended and agreed."""

    keys: Sequence[Any]
    calls: Any  # a second key, for batches of other sizes; None: cache it under `keys` only
    verdict: Verdict
    run: Pass


class Audit:
    """The verdicts of one probe, and the comparison that confirms them."""

    def __init__(self, shared: ProbeParts, record: Record, backwards: Backwards) -> None:
        self._record, self._backwards = record, backwards
        self._recorder, self._parameters, self._layers, _, _, caches = shared
        self._verdicts: dict[Any, list[Verdict]] = caches.setdefault("structures", {})
        self._verdicts_by_calls: dict[Any, list[Verdict]] = caches.setdefault("sizes", {})
        self.forwards = Forwards(self._parameters, caches.setdefault("memories", {}))
        self.lift = Lift(shared, self.is_compared)
        self.examiner = Examiner(shared, self.forwards, self.lift)
        self._pending: list[_Pending] = []
        self.latest: Verdict | None = None
        self._lock = threading.RLock()  # for _pending, _midway and the hooks
        self._midway: set[int] = set()  # tasks that had begun when the comparison started
        self._hooks = ParameterHooks()
        self._lasting = WeakIdKeyDictionary()  # tensors hooked until the probe is removed
        self._deferred: set[int] = set()  # places, see defer()
        self._to_compare: dict[tuple[int, int], Tensor] = {}  # gradients, by task and place
        self._without_pass: set[tuple[int, int]] = set()  # the same keys, before a pass is reached
        rerun = [set(layer.parameters) for layer in self._layers if layer.kind == "vmap"]
        native = [set(layer.parameters) for layer in self._layers if layer.kind != "vmap"]
        # Places compared in every backward: no edge counts the uses inside a module that reruns.
        places = set().union(*rerun).difference(*native)
        self.always = {p for p in places if self._parameters.tensors()[p].is_leaf}
        self._unheard = set(self.always)  # those without hook so far
        self._muted: dict[int, tuple[dict[int, Any], int]] = {}  # by place: user hooks, task

    # Forward

    def start_forward(self, n: int, model: nn.Module, arguments: Any, batch_dim: int) -> None:
        """Begin the trace of a forward, and watch it if its pass will need a new verdict."""
        latest, saw_zeros = self.latest, self.latest and self.latest.zeros_version is not None
        if latest and saw_zeros and latest.has_expired(self._parameters.tensors()):
            self.forwards.watch_again()
        self.forwards.start(n, model, arguments, batch_dim)

    def knows(self, key: Any) -> bool:
        """Return True if passes with this key need no check."""
        verdicts = self._verdicts.get(key, ())
        return len(verdicts) == 1 and verdicts[0].is_final

    def recall(self, forward: Forward) -> tuple[Verdict, Match | None] | None:
        """Return the cached verdict and the nodes of its lift plan; None if examine() must look.
        Does not look at the forward's uses."""
        cached = self._verdicts.get(forward.key, ())
        if len(cached) != 1 or self._parameters.gathered():
            return None
        verdict, match = cached[0], None
        if verdict.is_final:
            return verdict, None
        checks = verdict.routes or verdict.zeros_version is not None or verdict.refusals
        pending = any(forward.key in entry.keys for entry in self._pending)
        if NATIVE and not (checks or forward.trace.ends or pending):
            with suppress(Exception):  # examine() will refuse
                match = self.lift.recall(forward.run, verdict.plan, forward.outputs)
        return (verdict, match) if match else None

    def examine(self, forward: Forward, recalled: Any) -> None:
        """Give a pass the verdict on its structure. An error refuses the pass, not the forward."""
        run = forward.run
        try:
            if not recalled:
                self._examine(forward)
                return
            verdict, match = recalled
            verdict.apply(run)
            self.begin(forward, match)
        except CoverageError:  # the user's backward would fail
            raise
        except Exception as error:
            run.refuse(-1, cause("not_examined", error=f"{type(error).__name__}: {error}"))

    def _examine(self, forward: Forward) -> None:
        """Apply a verdict that fits: a cached one, one of another batch size, or a new one."""
        run = forward.run

        @cache
        def match_plan(plan: LiftPlan | None) -> Match | None:
            return self.lift.match(forward, plan) if plan else None

        def fits(verdict: Verdict) -> bool:
            is_same = verdict.holds(self._parameters.tensors(), lambda: forward.routes)
            if not is_same or not forward.takes(verdict.layouts):
                return False
            match = match_plan(verdict.plan)
            return match is None or (match.stations is not None and not match.mute and match.same)

        cached = self._cached(forward.key)
        verdict = next(filter(fits, cached), None)
        if verdict is None:
            others = self._verdicts_by_calls.get(forward.calls, ())
            moved = (self.examiner.transfer(other, forward) for other in others)
            verdict = next((v for v in moved if v is not None and fits(v)), None)
            if verdict is not None:
                store(self._verdicts, forward.key, verdict)
        verdict = verdict or self._prove(forward, cached)
        self.latest = verdict
        verdict.apply(run)
        forward.place_segments()
        if self._parameters.gathered():
            self._hook_sharded(forward)
        self.begin(forward, match_plan(verdict.plan))

    def begin(self, forward: Forward, match: Match | None) -> None:
        """Serve what is lifted in a pass, and listen to what is not."""
        if match:
            self.lift.begin(forward.run, match, forward.trace.first)
            if EACH in match.costs.values():  # no backward proves another structure: observe it
                self.forwards.watch_again()
        self.hear(match.counted if match else ())

    def _cached(self, key: Any) -> list[Verdict]:
        pending = [entry.verdict for entry in self._pending if key in entry.keys]
        return pending + self._verdicts.get(key, [])

    def _prove(self, forward: Forward, cached: Sequence[Verdict]) -> Verdict:
        """Return a new verdict, which replaces `cached` ones that expired."""
        verdict = self.examiner.verdict(forward)
        has_compiled = any(node.name() == COMPILED for node in forward.graph.parents)
        if has_compiled or any(not isinstance(route, str) for route in verdict.routes):
            # The next batch may choose other routes; what compiles makes other nodes than later.
            self.forwards.watch_again()
        expired = [v for v in cached if v.zeros_version is not None]
        if expired and verdict.zeros_version is not None:  # zeros still: examine less often
            verdict.examinations = 1 + max(v.examinations for v in expired)
            planned = verdict.plan.layouts if verdict.plan else ()
            if NOWHERE not in (*verdict.layouts, *planned):
                verdict.patience = 2 ** max(0, verdict.examinations - 4)
        for old in expired:
            with self._lock:
                self._pending = [entry for entry in self._pending if entry.verdict is not old]
            verdicts = self._verdicts.get(forward.key, [])
            verdicts[:] = [v for v in verdicts if v is not old]
        if verdict.complete:
            self.cache_later([forward.key], forward.calls, verdict, forward.run)
        return verdict

    def cache_later(self, keys: Sequence[Any], calls: Any, verdict: Verdict, run: Pass) -> None:
        """Cache a verdict under these keys once a backward of its pass has ended and agreed."""
        with self._lock:
            self._pending.append(_Pending(keys, calls, verdict, run))
            self.start_comparing()

    def examine_compiled(self, run: Pass) -> None:
        """Examine a pass of compiled graphs at its first gradient, by running it uncompiled."""
        key = run.structure, run.n
        # A compiled graph does not show what the batch's values chose.
        cached = next((v for v in self._cached(key) if not v.routes), None)
        verdict = cached or verdict_of_compiled(run)
        if cached is None and verdict.complete:
            self.cache_later([key], None, verdict, run)
        verdict.apply(run)
        run.layouts = [NOWHERE if one == TAKEN else one for one in run.layouts]  # refused
        if verdict.plan is not None:
            run.refuse(-1, "tables_in_graph")
        self.start_comparing()  # in every pass: a compiled graph's edges say nothing of the uses

    # Backward

    def is_compared(self, place: int) -> bool:
        """Return True if this parameter's gradient will be compared with the recorded sum."""
        return place in self.always or self._recorder.auditing

    def deliver(self, places: Iterable[int]) -> None:
        """Note that this backward counts every edge into these parameters: no sum is compared."""
        self.lift.delivered.setdefault(torch._C._current_graph_task_id(), set()).update(places)

    def hear(self, counted: Iterable[int] = ()) -> None:
        """Hook, until the probe is removed, the parameters that are always compared, but for those
        whose edges a forward counts."""
        if rest := self._unheard.difference(counted):
            with self._lock:
                self._unheard -= self._hook_each(rest, lasts=True)

    def _hook_each(self, places: Iterable[int], lasts: bool) -> set[int]:
        """Hook the trainable leaves among these parameters, and return their places."""
        tensors = self._parameters.wholes()
        leaves = {place for place in places if (p := tensors[place]).requires_grad and p.is_leaf}
        for place in leaves:
            self._hook(place, tensors[place], lasts)
        return leaves

    def _hook(self, place: int, p: Tensor, lasts: bool) -> None:
        """Have _received called with each gradient of a tensor."""
        hook = partial(self._received, place)
        if NATIVE:  # calls Python only where a gradient is to be compared
            hook = partial(_C.undelivered, self._recorder, self.lift.delivered, place, hook)
        self._hooks.before(p, hook)
        if lasts:
            self._lasting[p] = place

    def _hook_sharded(self, forward: Forward) -> None:
        """Hook the tensors that fully_shard makes in the first forward and computes with, and have
        the pass expect those that no recorded call was given."""
        called = {place for site, *_ in forward.uses for place in self._layers[site].parameters}
        parts, wholes = self._parameters.parts(), self._parameters.wholes()
        for place, both in enumerate(zip(parts, wholes, strict=True)):
            if place not in called:
                forward.run.expect(place, both[1])
            for p in both:
                if place in self.always and p.requires_grad:
                    self._hook(place, p, lasts=True)

    def places_with_user_hooks(self) -> list[int]:
        """Return parameters with user hooks, which get a gradient even if only norms are wanted."""
        tensors = self._parameters.wholes() if self._recorder.shields else []
        return [place for place, p in enumerate(tensors) if has_user_hooks(p._backward_hooks)]

    def start_comparing(self) -> None:
        """Compare each gradient received with the recorded sum, until no verdict is pending."""
        with self._lock:
            if self._recorder.auditing and NATIVE:
                return
            if not self._recorder.auditing:  # first: backwards that begin after it record all
                self._recorder.auditing = True
                self._midway = {*self._backwards.open} - {torch._C._current_graph_task_id()}
            if not NATIVE:
                self._hooks.stop(self._lasting)  # other parameters may be trained now
            self._hook_each(range(len(self._parameters.names)), lasts=False)

    @untraced
    def _received(self, place: int, gradient: Tensor | None) -> None:
        key = torch._C._current_graph_task_id(), place
        always = place in self.always and place not in self.lift.delivered.get(key[0], ())
        with self._lock:
            whole = self._recorder.auditing and key[0] not in self._midway
        if gradient is None or in_batched_backward() or not (always or whole):
            return
        has_pass = self._recorder.audited(key[0])
        if not has_pass:  # perhaps this backward will reach one later
            self._backwards.reach(None)
            self._without_pass.add(key)
        if has_pass and place not in self._deferred:
            self._compare(key, gradient.detach())
        else:
            self._to_compare[key] = gradient.detach().clone()

    def mute_user_hooks(self, place: int) -> None:
        """Take away a parameter's post-accumulate hooks until this backward, which accumulates
        nothing into its .grad, has ended."""
        hooks: Any = self._parameters.tensor(place)._post_accumulate_grad_hooks
        if hooks:
            self._muted[place] = dict(hooks), torch._C._current_graph_task_id()
            hooks.clear()

    def end_backward(self, tasks: Sequence[int], done: bool) -> None:
        """Put muted hooks back, and compare the gradients that are left of a backward and of those
        inside it. done: none of them failed."""
        delivered = self.lift.delivered
        if self._without_pass and torch._C._current_graph_task_id() == -1:
            ended = {key for key in list(self._without_pass) if key[0] in tasks}
            self._without_pass -= ended
            # Where edges are counted, they judge a backward that reached a pass later.
            inside = {key for key in ended if not (NATIVE and self._recorder.audited(key[0]))}
            if done and any(map(self._recorder.audited, tasks)):
                self._record.mismatched |= inside
        for place in [p for p, (_, task) in list(self._muted.items()) if task in tasks]:
            hooks: Any = self._parameters.tensor(place)._post_accumulate_grad_hooks
            hooks.update(self._muted.pop(place)[0])
        for key in [key for key in list(self._to_compare) if key[0] in tasks]:
            gradient = self._to_compare.pop(key)
            if done and self._recorder.audited(key[0]):
                self._compare(key, gradient)
        if done and self.always:  # a module that reruns may use other weights than its forward did
            untaken = self._recorder.untaken(tasks)
            left = {key for key in untaken if key[1] not in delivered.get(key[0], ())}
            tensors = self._parameters.wholes() if left else []
            self._record.mismatched |= {k for k in left if tensors[k[1]] in self._lasting}
        for task in tasks:
            delivered.pop(task, None)
        if not done:
            self._record.undo(tasks)

    def defer(self, places: Sequence[int]) -> None:
        """Compare these parameters when a backward has ended: their terms are recorded there."""
        self._deferred.update(places)

    def _compare(self, key: tuple[int, int], gradient: Tensor) -> None:
        """Note a gradient that is not the recorded sum."""
        recorded = self._recorder.take_recorded(*key)
        # Only a part of a sharded gradient is here; the recorded sum is the whole.
        if is_sharded([gradient]) or not is_same_sum(gradient, *recorded):
            self._record.mismatched.add(key)

    @property
    def is_unsettled(self) -> bool:
        """Return True if settle() has something to do."""
        return bool(self._pending or self._recorder.auditing or self._hooks.left)

    def settle(self) -> None:
        """Cache the pending verdicts whose backward has ended and agreed."""
        with self._lock:
            waiting: list[_Pending] = []
            reached: list[_Pending] = []
            for entry in self._pending:
                (reached if entry.run.recorded else waiting).append(entry)
            if not self._backwards.is_idle():  # asked last: the backwards of `reached` have ended
                return
            for keys, calls, verdict, run in reached:
                if self._record.mismatched or not is_finite(run):
                    self.forwards.watch_again()
                    continue
                for key in keys:
                    if not self.knows(key):
                        store(self._verdicts, key, verdict)
                if calls is not None and run.n > 1:  # one sample says nothing of several
                    store(self._verdicts_by_calls, calls, verdict)
            self._pending = waiting[-MAX_PENDING:]
            if len(waiting) > MAX_PENDING:
                self.forwards.watch_again()
            # Without the extension no edges are counted: every backward is compared.
            if NATIVE and not self._pending and self._recorder.auditing:
                self._stop_comparing()
            self._hooks.leave()  # if a backward kept it from that

    def _stop_comparing(self) -> None:
        self._recorder.auditing = False
        self._hooks.stop(self._lasting)

    def stop(self) -> None:
        """Remove all hooks, and drop what is pending."""
        self._pending = []
        self.forwards.stop()
        self._lasting.clear()
        self._stop_comparing()
