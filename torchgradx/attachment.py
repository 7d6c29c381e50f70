"""A probe attached to a model: its sites, its hooks on the root module, and what these call.

Each training forward of the root makes one Pass. Each module that owns parameters has one site,
which swaps the module's class or hooks its output. What a user can ask is in probe.py.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn

from .extension import NATIVE
from .graph.arguments import batch_size, is_broadcast, sample_rows, tensors_in
from .graph.layout import NOWHERE
from .graph.modes import without_user_modes
from .hooks.copies import Hooks
from .hooks.engine import weakly
from .layers.table import Parameters, find_layers
from .options import check as check_options
from .options import move_directions, place_directions
from .proof.audit import Audit
from .proof.forwards import Forward
from .proof.samples import Samples
from .proof.segments import SegmentExaminer
from .proof.verdict import Verdict, cache_of
from .record.backwards import Backwards
from .record.checkpoints import Answer
from .record.record import Record
from .record.tokens import TokenWatch
from .refusals import cause
from .sharding import why_not_recorded
from .sites.experts import may_route
from .sites.keeping import Keeping
from .sites.native import Context, call_of_hook, is_running
from .sites.site import ProbeParts, Site, site_of
from .sites.standing import StandIns
from .sites.trace import Trace, TracedCall, outside, root_of

if NATIVE:
    from ._C import Pass, Recorder
else:
    from .record.plain import Pass, Recorder  # type: ignore[assignment]

attachments: weakref.WeakSet[Any] = weakref.WeakSet()  # the attached probes
# Removed probes whose layers a checkpointed graph may still recompute; kept alive until it is gone
_leaving: set[Attachment] = set()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.calls: list[FrameType] = []  # running calls of the root; an interrupt leaves some here
        self.eager: list[Any] | None = None  # verdicts of eager forwards of a compiled graph
        self.inner: Sequence[Any] = ()  # uses so far, where the root calls itself
        self.ids: Tensor | None = None  # the sample of each row, under sample_ids=


class Attachment:
    """A probe's sites and hooks on a model, and what they call."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        check_options(model, options)
        self._standing = StandIns(model)
        self._model = weakref.ref(model)
        self._options = options
        self._parameters = Parameters(model)
        self._layers = find_layers(model, self._parameters, options)
        verdicts = cache_of(model, options)
        forward_to = partial(weakly, weakref.ref(self))  # the graph owns these callbacks
        note_call = "_audit.forwards.note_call"
        methods = "_began", "_record.finish", "_drained", note_call, "_received", "_outside"
        count = len(self._parameters.names)
        self._recorder = Recorder(count, *map(forward_to, methods))
        self._sites: list[Site] = []
        common = (self._recorder, self._parameters, self._layers, options)
        shared = ProbeParts(*common, self._sites, verdicts)
        self._record = Record(shared)
        self._samples = Samples(shared, self._record)
        at_the_end = map(forward_to, ("_audit.end_backward", "_samples.check"))
        self._backwards = Backwards(self._recorder, *at_the_end)
        self._audit = Audit(shared, self._record, self._backwards)
        self._segments = SegmentExaminer(shared, self._audit)
        directions = {} if options["directions"] is None else options["directions"]
        self._directed = place_directions(directions, self._parameters)  # by place; empty: none
        self._directions = dict(directions)
        self._tokens = TokenWatch(options)
        self._joint: list[Pass] | None = None
        self._paused = 0
        self._asides = 0  # open contexts that lend the model to another probe
        self._local = _OfThread()
        self._hooks: list[Hooks] = []  # empty: all are removed
        self._keeping: Keeping | None = None
        self._listen(model)
        attachments.add(self)

    # Sites and hooks

    def _listen(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        try:
            # Hooks hold the probe weakly: a probe without references removes itself.
            call = partial(weakly, weakref.ref(self))
            self._trace = Trace(self._options, call("_open_in_graph"))
            shared = (self._recorder, self._audit, self._parameters, self._options, self._trace)
            context = Context(*shared, self._standing, self._hooks)
            self._standing.enter()
            for index, layer in enumerate(self._layers):
                site = site_of(modules[layer.name], layer, index, context)
                self._sites.append(site)
                self._trace.add(modules[layer.name], layer, getattr(site, "core", None))
            blocks = [m for m in modules.values() if may_route(m) and m is not root_of(model)]
            self._keeping = Keeping(blocks, self._hooks)
            self._recorder.shields = not self._options["weight_grad"]
            self._recorder.keeps_tape = self._options["clip"]
            root = root_of(model)
            add, more = Hooks(root, self._hooks).add, {"with_kwargs": True}
            enter, leave = self._trace.enter, self._trace.leave
            add(root.register_forward_pre_hook, call("_enter"), enter, prepend=True, **more)
            add(root.register_forward_hook, call("_leave"), leave, always_call=True, **more)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Detach from the model, at once or when its last checkpointed graph is gone."""
        self._standing.on = self._trace.on = False
        attachments.discard(self)
        self._audit.stop()
        self._record.frames.turn(False)
        self._recorder.shields = False
        self._record.tape.close(run for run, _ in self._record.runs)
        self._drained()

    def _drained(self) -> None:
        """Take hooks and classes off the model, once nothing needs a removed probe any more."""
        self._unwind()
        busy = self._asides or self._recorder.held > 0 or self._recorder.depth()
        if self._standing.on:
            return
        if busy:
            _leaving.add(self)
            return
        _leaving.discard(self)
        while self._hooks:
            self._hooks.pop().remove()
        self._sites.clear()
        self._standing.leave()

    def __del__(self) -> None:
        """Remove a probe that nobody references any more."""
        with contextlib.suppress(Exception):  # half made, or at the interpreter's exit
            if self._standing.on:
                self.remove()

    # Forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not self._hooks or self._samples.is_silent:
            return  # removed since torch listed the hooks of this call; or a sample runs alone
        with without_user_modes():
            self._unwind()
            if not self._standing.on:
                self._drained()
            if self._hooks:
                outer = self._recorder.depth() and self._recorder.current()
                self._recorder.push(outer or self._begin(module, args, kwargs))
                self._local.calls.append(call_of_hook())

    def _unwind(self) -> None:
        """End forwards that an interrupt ended, for which torch ran no hooks."""
        calls = self._local.calls
        while calls and not is_running(calls[-1]):
            run = self._recorder.current()
            self._pop(run, [*self._local.inner, *run.uses()] if run else [], None)
            self._audit.forwards.stop()
            if self._keeping is not None:
                self._keeping.end()

    def _pop(self, run: Any, uses: Sequence[Any], out: Any) -> bool:
        """End the latest forward. Return True if it ran inside another one of its pass."""
        self._recorder.pop()
        self._local.calls.pop()
        inner = run and self._recorder.depth() and self._recorder.current() is run
        self._local.inner = uses if inner else []  # of a root that calls itself
        if out is None and run and not inner and run.n > 1 and self._options["check"] != "off":
            # It failed, or returned nothing: no gradient can come from its outputs.
            run.layouts = [*run.layouts, *[NOWHERE] * len(uses)]
        return bool(inner)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Pass | None:
        self._settle()
        answer = self._record.answer(self._trace.on, self._joint, self._directed)
        if not answer.serial:
            return None
        rows = sample_rows(self._options, args, kwargs)
        self._local.ids, n = rows or (None, batch_size(self._options, args, kwargs))
        if n is None:
            self._recorder.refuse(-1, "no_batch_size")
            return None
        run = self._open(module, n, answer, args, kwargs)
        self._samples.begin()
        if run is not None:
            batch_dim = self._options["batch_dim"]
            self._audit.start_forward(n, module, (args, kwargs), batch_dim)
        return run

    def _outside(self) -> Pass | None:
        """Return a pass for a module called outside of the model's forward, which is refused."""
        if not self._record.answer(self._trace.on, outside=True).serial:
            return None
        run = Pass(self._recorder, 0, self._parameters.tensors())
        run.called_directly = True
        self._recorder.enlist(run)  # for a checkpoint's recomputation to find
        return run

    def _open(self, module: nn.Module, n: int, answer: Answer, *call: Any) -> Pass | None:
        """Return a pass of n samples: a new one, which has the answer's serial number, or that of
        the same samples; None where it is refused. call: args and kwargs; none if unknown."""
        parameters = self._parameters.parts()
        if self._parameters.changed():
            why_not: str | None = "model_changed"
        elif self._parameters.computed:
            why_not = "computed"
        else:
            why_not = why_not_recorded(module, parameters)
        if why_not:
            self._recorder.refuse(-1, why_not)
            return None
        if answer.joint:
            if answer.joint[0].n != n:
                why_not = cause("two_sizes", one=answer.joint[0].n, other=n)
                self._recorder.refuse(-1, why_not)
            return answer.joint[0]
        run = Pass(self._recorder, n, parameters)
        if answer.directed:
            run.directions = move_directions(answer.directed, parameters)
        self._record.tape.note_model(module)
        if answer.joint is not None:
            run.keep = True
            answer.joint.append(run)
        run.serial = answer.serial
        self._record.ask_scale(run, *call)
        return run

    def _open_in_graph(self, n: int, call: TracedCall, inputs: Sequence[Tensor]) -> Pass | None:
        """Return the pass of the compiled graph that runs now."""
        if not self._trace.on:
            return None
        self._settle()
        answer = Answer(self._record.next_serial(), self._joint, self._directed)
        run = self._open(root_of(self._model()), n, answer)
        if run is not None:
            self._recorder.enlist(run)
            if run.serial != answer.serial and not run.in_graph:
                run.refuse(-1, "graph_and_eager")
            again: Any = weakref.WeakMethod(self._run_eagerly)  # the graph must not own the probe
            run.outside = [*(run.outside or ()), lambda: again()(call, inputs)]
        return run

    def _run_eagerly(self, call: TracedCall, inputs: Sequence[Tensor]) -> tuple[Verdict, list[Any]]:
        """Run a compiled graph's model without the compiler; return its verdict and uses."""
        module = root_of(self._model())
        joint, self._joint, self._local.eager = self._joint, None, []
        try:
            with outside(module, call, inputs) as (args, kwargs):
                module._call_impl(*args, **kwargs)
            return self._local.eager[-1]
        finally:
            self._joint, self._local.eager = joint, None

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
        if not self._hooks or self._samples.is_silent:
            return
        self._unwind()
        if self._local.calls[-1:] == [call_of_hook()]:  # else it failed before _enter
            with without_user_modes():
                self._end(module, args, kwargs, out)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        run: Any = self._recorder.current()
        whole = self._recorder.depth() == 1
        trace = self._audit.forwards.stop(whole, out)
        verdicts, recalled = self._local.eager, None
        forward = Forward(run, [], tensors_in(out), trace, self._sites)
        if whole and run and verdicts is None and not self._segments.applies(self._local.ids):
            recalled = self._audit.recall(forward)
        if run and not recalled:
            forward.uses = [*self._local.inner, *run.uses()]
        inner = self._pop(run, forward.uses, out)
        if not self._standing.on and sys.exc_info()[0] is None:  # else torch iterates over hooks
            self._drained()
        if out is None and run and not NATIVE:  # a structure that nobody sees, and no edges counted
            self._audit.start_comparing()
        if inner or not run or out is None or not self._standing.on:
            return
        if run.silent:  # a reentrant checkpoint: its graph owns no use until it is recomputed
            for node in _nodes_of(out):
                node.metadata.setdefault("torchgradx", []).append(run)
        arguments = args, kwargs or {}
        self._examine(forward, recalled, arguments, out)
        if self._tokens.on and self._local.ids is None:  # after the proof's own backwards
            self._tokens.watch(forward.outputs, run.n)
        if verdicts is None and not run.in_graph:
            self._samples.listen(forward, module, arguments)
        if not forward.uses and not recalled:  # no use will announce its backward

            def arrive(_: Any) -> None:
                run.arrive(run.trainable, True)

            for node in _nodes_of(out):
                node.register_prehook(arrive)

    def _examine(self, forward: Forward, recalled: Any, arguments: Any, out: Any) -> None:
        """Look up or prove where the samples are in a forward's uses."""
        run, verdicts = forward.run, self._local.eager
        if run.in_graph:
            run.refuse(-1, "graph_and_eager")
        elif self._segments.examine(forward, self._local.ids):
            self._audit.hear()
            forward.trace.listen(run.layouts)
        elif verdicts is None:
            if run.n == 1 and is_broadcast(self._options, arguments, out):
                run.refuse(-1, "one_row")
            if recalled:
                self._audit.examine(forward, recalled)
            else:
                with self._samples.quiet():
                    self._audit.examine(forward, None)
                    self._segments.rescue(forward)
            forward.trace.listen(run.layouts)
        else:
            uses = [(site, sizes) for site, sizes, *_ in forward.uses]
            verdicts.append((self._audit.examiner.verdict(forward), uses))

    # Backward

    def _began(self, run: Pass | None) -> None:
        if run is not None and run.recorded:
            self._record.reach_again(run)
        self._backwards.reach(run)
        if run is None or run.recorded:
            return
        self._unwind()
        if run.in_graph and run.outside:
            self._audit.examine_compiled(run)
            run.outside = None
        self._record.begin(run)
        run.hooked = self._audit.places_with_user_hooks()

    def _received(self, place: int, gradient: Tensor | None) -> None:
        if self._recorder.shields:
            self._audit.mute_user_hooks(place)
        elif gradient is not None and not (self._samples.is_silent or self._asides):
            self._record.tape.add_other(place, gradient)

    def _settle(self) -> None:
        """Cache the verdicts whose first backward has ended and matched .grad."""
        if not (self._backwards.open or self._audit.is_unsettled):
            return
        if self._local.eager is None and not self._record.has_no_values():
            self._backwards.end_failed()
            self._audit.settle()


def _nodes_of(out: Any) -> set[Any]:
    """Return the nodes that made the outputs."""
    return {t.grad_fn for t in tensors_in(out) if t.grad_fn is not None}
