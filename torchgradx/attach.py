"""attach(): hooks on an existing model, and the probe that reads what they caught.

One Pass a training forward of the root; one site a module that owns parameters. A site swaps its
module's class for one whose forward calls the fused operator, or listens at the module's output.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .options import Scale, fitting
from .options import check as check_options
from .passes import plain
from .passes.backwards import Backwards, weakly
from .passes.frames import Told, runs
from .passes.modes import unheard
from .passes.record import Record
from .proof.arguments import batch_size, one_of_several, tensors_in
from .proof.audit import Audit
from .proof.samples import Samples
from .proof.verdict import Verdict, known
from .reading import Reader
from .sharding import uncovered
from .sites.native import Hooks, call_of_hook, is_running
from .sites.recurrent import Site, site_of
from .sites.standing import Standing
from .sites.trace import Call, Trace, outside, root_of
from .table import COMPUTED, Context, Parameters, find_layers
from .tokens import MEAN, ONE, TokenWatch

if ops.NATIVE:
    from ._C import Pass, Recorder
else:
    Pass, Recorder = plain.Pass, plain.Recorder

__all__ = ["Probe", "attach", "attached", "set_aside"]

_probes: weakref.WeakSet[Probe] = weakref.WeakSet()  # those that are attached
_leaving: set[Probe] = set()  # removed, and a graph in flight may run their layers again

UNSHOWN = "the model was called without a tensor that shows N: say batch_size="
INSIDE = (
    "paused() was called within what torch.utils.checkpoint runs, and will run again: pause around "
    "the checkpoint"
)
MIXED = "same_samples() met forwards of a whole compiled graph and others"


def attach(
    model: nn.Module,
    *,
    loss_reduction: str = MEAN,
    loss_scale: Scale | torch.amp.GradScaler | Callable[..., Scale] = ONE,
    batch_dim: int = 0,
    batch_size: int | Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None,
    layout: Mapping[str, str] | None = None,
    fused: bool = True,
    weight_grad: bool = True,
    clip: bool = False,
    directions: Mapping[str, Tensor] | None = None,
    algorithm: str | None = None,
    backend: str = "auto",
    check: str = "graph",
) -> Probe:
    """Attach to a model: its next training steps leave the norm of each sample's gradient.

    Equivalent to, but for speed and memory::

        for n in range(N):
            model.zero_grad()
            loss_fn(model(x[n:n+1]), y[n:n+1]).backward()
            norms[n] = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()

    Args:
        model: any module; it is used as it is, and given back as it was by `Probe.remove`.
        loss_reduction: how the loss combines its samples: "mean" (the 1/N is undone, so that
            norms are those of each sample's own loss) or "sum".
        loss_scale: what the loss is multiplied by before `backward()`: a number, a Tensor [N], a
            GradScaler, or a callable (args, kwargs) or () that returns a number or a Tensor [N]
            for each forward; norms come back divided by it, and are 0 where it is 0.
            `probe.loss_scale = ...` sets it for the passes to come. For token means see
            `torchgradx.token_weights`.
        batch_dim: where the samples are in inputs and activations: 0, or 1 (sequence first).
        batch_size: N, or a callable (args, kwargs) -> N, where the model's first tensor argument
            does not show it.
        layout: {module name or pattern: "batch" or "sequence"} for modules fed rows `n*T+t` or
            `t*N+n`.
        fused: weight gradient and norms from one pass where a kernel has it.
        weight_grad: False computes norms only, and leaves `.grad` as it is. A parameter's
            `register_hook` still sees its gradient; post-accumulate hooks are not called.
        clip: keep what `clip_grad_norm_` needs: inputs and output gradients of the layers, until it
            is called or the next record begins, those too that a checkpoint let go. With
            weight_grad=False backward makes norms only, and `clip_grad_norm_` adds the clipped
            gradients to `.grad`: one weight gradient for each layer in place of two.
        directions: {parameter name: tensor of its shape} for `dot`.
        algorithm: None lets the cost model choose; "rank1", "gram" or "direct" forces.
        backend: "auto", "native" (kernels or an error) or "vmap" (the pure-Python fallback).
        check: how the place of the samples is proven. "graph": by the graph of the forward, once
            per structure. "samples": two samples are also run through the model alone and their
            norms compared, once per structure. "off": `batch_dim`, `layout` and sizes are believed.

    Returns:
        The probe. `norms()` after `loss.backward()` gives a Tensor [N].

    Raises:
        ValueError, TypeError: an argument is not as above; the text names it.
        RuntimeError: the model, or a module of it, is attached already.
        CoverageError: backend="native" and a module with no kernel.
    """
    return Probe(
        model,
        loss_reduction=loss_reduction,
        loss_scale=loss_scale,
        batch_dim=batch_dim,
        batch_size=batch_size,
        layout=layout,
        fused=fused,
        weight_grad=weight_grad,
        clip=clip,
        directions=directions,
        algorithm=algorithm,
        backend=backend,
        check=check,
    )


def attached(model: nn.Module) -> Probe | None:
    """The probe that is attached to a model, or None."""
    on = (probe for probe in list(_probes) if probe._standing.on)  # and does not stand aside
    return next((probe for probe in on if probe._model() is model), None)


class _Seen(threading.local):
    def __init__(self) -> None:
        self.calls: list[FrameType] = []  # of the model, under way; an interrupt leaves them here
        self.last: list[Any] | None = None  # looking from outside at the model of a compiled graph
        self.inner: Sequence[Any] = ()  # uses of a forward under way, up to the end of an inner one


def _unattached() -> Probe:
    probe = attach(nn.Module())
    probe.remove()
    return probe


class Probe(Reader):
    """The handle of an attachment; see `attach`. Also a context manager that removes itself."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        check_options(model, options)
        self._standing = Standing(model)
        self._model = weakref.ref(model)
        self._options = options
        self._parameters = Parameters(model)
        with self._standing.apart():
            self._layers = find_layers(model, self._parameters, options)
            verdicts = known(model, options)
        forward_to = partial(weakly, weakref.ref(self))  # the graph owns what it calls
        methods = ("_began", "_finish", "_drained", "_met", "_booked", "_astray")
        count = len(self._parameters.names)
        self._recorder = Recorder(count, *map(forward_to, methods))
        shared = (self._recorder, self._parameters, self._layers, options)
        self._record = Record(*shared)
        checked = verdicts.setdefault("samples", {})
        norms = self._record.sq_norms
        self._samples = Samples(self._recorder, self._parameters, options, norms, checked)
        self._record.refused = self._samples.refused
        self._audit = Audit(*shared, self._record, verdicts, forward_to("_began"))
        self._backwards = Backwards(self._recorder, forward_to("_over"), forward_to("_finished"))
        given = options["directions"]
        self.directions = {} if given is None else given
        self._tokens = TokenWatch(options)
        self._joint: list[Pass] | None = None
        self._paused = 0
        self._asides = 0  # contexts in which another probe has the model
        self._seen = _Seen()
        self._sites: list[Site] = []
        self._hooks: Hooks | None = None
        self._listen(model)
        _probes.add(self)

    # Attaching

    def _listen(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        try:
            # The model holds none of what calls the probe: one that is lost lets go.
            call = partial(weakly, weakref.ref(self))
            self._trace = Trace(self._options, call("_open_in_graph"))
            shared = (self._recorder, self._audit, self._parameters, self._options, self._trace)
            context = Context(*shared, self._standing)
            self._standing.enter(self._recorder)
            for index, layer in enumerate(self._layers):
                site = site_of(modules[layer.name], layer, index, context)
                self._sites.append(site)
                self._trace.add(modules[layer.name], layer, getattr(site, "core", None))
            if not self._options["weight_grad"]:
                self._audit.shield(range(len(self._parameters.names)))
            self._audit.attend()
            if self._options["clip"]:
                scaled = isinstance(self._options["loss_scale"], torch.amp.GradScaler)
                self._record.books.open(scaled)
            root = root_of(model)
            self._hooks = Hooks(root)
            add, told = self._hooks.add, {"with_kwargs": True}
            enter, leave = self._trace.enter, self._trace.leave
            add(root.register_forward_pre_hook, call("_enter"), enter, prepend=True, **told)
            add(root.register_forward_hook, call("_leave"), leave, always_call=True, **told)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Leave the model as it was, at once or when the last checkpointed graph in flight dies."""
        self._standing.on = self._trace.on = False
        _probes.discard(self)
        self._audit.stop()
        self._record.frames.turn(False)
        self._record.books.close()
        self._drained()

    def _drained(self) -> None:
        self._unwind()
        busy = self._asides or self._recorder.held > 0 or self._recorder.depth()
        if self._standing.on:
            return
        if busy:
            _leaving.add(self)  # a forward under way leaves at its end
        else:
            self._leave_model()
            _leaving.discard(self)

    def _leave_model(self) -> None:
        for part in (self._hooks, *self._sites):
            if part is not None:
                part.remove()
        self._hooks, self._sites = None, []
        self._standing.leave()

    @property
    def _attached(self) -> bool:  # type: ignore[override]
        return self in _probes

    def __reduce__(self) -> tuple[Callable[[], Probe], tuple[()]]:
        """A copy or a pickle, as of a trainer that holds the probe, is attached to nothing."""
        return _unattached, ()

    def __del__(self) -> None:
        """Leave the model, as nobody holds the probe any more."""
        with contextlib.suppress(Exception):  # it may be half made, or the interpreter at its end
            if self._standing.on:
                self.remove()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    # Forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self._hooks is None or self._samples.silent:
            return  # left since torch listed the hooks of this call; or a sample runs alone
        with unheard():
            self._unwind()
            if not self._standing.on:
                self._drained()
            if self._hooks is not None:
                outer = self._recorder.depth() and self._recorder.current()
                self._recorder.push(outer or self._begin(module, args, kwargs))
                self._seen.calls.append(call_of_hook())

    def _unwind(self) -> None:
        """End the forwards that an interrupt ended, which runs no hooks."""
        calls = self._seen.calls
        while calls and not is_running(calls[-1]):
            calls.pop()
            self._recorder.pop()
            self._audit.forwards.stop()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Pass | None:
        self._settle()
        on, now = self._standing.on and not self._paused, Told(self._joint, self._directed)
        serial, told = self._record.takes(on, now)
        if not serial:
            return None
        n = batch_size(self._options, args, kwargs)
        if n is None:
            self._recorder.refuse(-1, UNSHOWN)
            return None
        run, new = self._open(module, n, serial, told)
        if run is not None and new:
            self._record.ask_scale(run, args, kwargs)
        self._samples.begin()
        if new or told.joint:
            batch_dim = self._options["batch_dim"]
            self._audit.forwards.start(n, module, (args, kwargs), batch_dim)
        return run

    def _astray(self) -> Pass | None:
        """Of a module called outside of the model's forward: refused once a gradient comes."""
        if not self._record.takes(self._standing.on and not self._paused, outside=True).serial:
            return None
        run = Pass(self._recorder, 0, self._parameters.tensors())
        run.astray = True
        self._recorder.enlist(run)  # a checkpoint's recomputation finds it there
        return run

    def _open(self, module: nn.Module, n: int, serial: int, told: Told) -> tuple[Pass | None, bool]:
        """A pass of n samples, and whether it is a new one."""
        parameters = self._parameters.parts()
        if self._parameters.changed():
            why_not: str | None = "the model's modules, ties or options changed: attach again"
        elif self._parameters.computed:
            why_not = COMPUTED
        else:
            why_not = uncovered(module, parameters)
        if why_not:
            self._recorder.refuse(-1, why_not)
            return None, False
        if told.joint:
            if told.joint[0].n != n:
                self._recorder.refuse(-1, f"same_samples() met {told.joint[0].n} and {n} samples")
            return told.joint[0], False
        run = Pass(self._recorder, n, parameters)
        if told.directed:
            run.directions = fitting(told.directed, parameters)
        if self._recorder.books:
            self._record.books.within(module)
        if told.joint is not None:
            run.keep = True
            told.joint.append(run)
        run.serial = serial
        return run, True

    def _open_in_graph(self, n: int, call: Call, inputs: Sequence[Tensor]) -> Pass | None:
        """The pass of a compiled graph that runs now."""
        if not self._standing.on or self._paused:
            return None
        self._settle()
        told = Told(self._joint, self._directed)
        run, new = self._open(root_of(self._model()), n, self._record.next(), told)
        if run is not None:
            if new:
                self._recorder.enlist(run)
                self._record.ask_scale(run)
            elif not run.in_graph:
                run.refuse(-1, MIXED)
            again: Any = weakref.WeakMethod(self._outside)  # the graph must not own the probe
            run.outside = [*(run.outside or ()), lambda: again()(call, inputs)]
        return run

    def _outside(self, call: Call, inputs: Sequence[Tensor]) -> tuple[Verdict, list[Any]]:
        """Call the model as it is without the compiler, for what is to be said of its structure."""
        module = root_of(self._model())
        joint, self._joint, self._seen.last = self._joint, None, []
        try:
            with outside(module, call, inputs) as (args, kwargs):
                module._call_impl(*args, **kwargs)
            return self._seen.last[-1]
        finally:
            self._joint, self._seen.last = joint, None

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
        if self._hooks is None or self._samples.silent:
            return
        self._unwind()
        if self._seen.calls[-1:] == [call_of_hook()]:  # else it failed before _enter
            with unheard():
                self._end(module, args, kwargs, out)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        run = self._recorder.current()
        whole = self._recorder.depth() == 1
        looked = self._audit.forwards.stop(whole, out)
        key: Any = None if run is None else self._audit.key(run, looked)
        seen = self._seen.last
        known = whole and seen is None and self._audit.knows(key)
        uses = [] if run is None or known else [*self._seen.inner, *run.uses()]
        self._recorder.pop()
        self._seen.calls.pop()
        inner = run and self._recorder.depth() and self._recorder.current() is run
        self._seen.inner = uses if inner else []  # a root called itself: the outer outputs tell
        if not self._standing.on and sys.exc_info()[0] is None:  # else torch walks the hooks
            self._drained()
        if inner or not run or out is None or not self._standing.on:
            return
        if self._tokens.on:
            self._tokens.watch(out, run.n)
        if run.silent:  # a reentrant checkpoint's graph holds no use until it runs again
            for node in {t.grad_fn for t in tensors_in(out) if t.grad_fn is not None}:
                metadata: Any = node.metadata
                metadata.setdefault("torchgradx", []).append(run)
        outputs = tensors_in(out) if uses else []
        if run.in_graph:
            run.refuse(-1, MIXED)
        elif seen is None:
            alone = run.n == 1 and one_of_several(self._options, (args, kwargs), out)
            with self._samples.quiet():
                self._audit.examine(run, key, looked, alone, uses, outputs, self._sites)
            self._audit.forwards.listen(run.layouts)
        else:
            verdict = self._audit.examiner.verdict(run, uses, outputs, self._sites, looked)
            seen.append((verdict, [(site, sizes) for site, sizes, *_ in uses]))
        if seen is None and not run.in_graph:
            self._samples.listen(run, (key[0], *key[2:]), module, (args, kwargs or {}), out)
        if not uses and not known and run.refusals:  # nothing else would tell of its backward
            for node in {t.grad_fn for t in tensors_in(out) if t.grad_fn is not None}:
                node.register_prehook(lambda _: run.arrive(run.trainable, True) and None)

    def _met(self, site: int, given: Tensor) -> None:
        self._audit.forwards.meet(site, [given])

    # Backward

    def _began(self, run: Pass | None) -> None:
        self._backwards.meet(run)
        if not run or run.recorded:
            return
        self._unwind()
        if run.in_graph and run.outside:
            self._audit.look(run)
            run.outside = None
        self._record.begin(run)
        run.hooked = self._audit.hooked()

    def _finished(self, runs: list[Pass]) -> None:
        self._samples.check(runs)

    def _over(self, tasks: list[int], done: bool) -> None:
        self._audit.over(tasks, done)
        if not done:
            self._record.undo(tasks)

    def _finish(self, run: Pass, parameter: int) -> None:
        self._record.finish(run, parameter)

    def _booked(self, run: Pass, use: Any) -> None:
        self._record.books.keep(run, use)

    # What the user says of forwards

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside.

        Raises:
            RuntimeError: within what a checkpoint runs, of which all is recorded or nothing.
        """
        if runs("_checkpoint_hook"):
            raise RuntimeError(INSIDE)
        self._paused += 1
        self._trace.on = False
        try:
            yield
        finally:
            self._paused -= 1
            self._trace.on = self._standing.on and not self._paused

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Let another probe have the model inside; see `set_aside`."""
        self._asides += 1
        try:
            with self.paused():
                self._standing.on = False
                try:
                    yield
                finally:
                    self._standing.on = self in _probes and self._asides == 1
        finally:
            self._asides -= 1
            if self not in _probes:  # it was removed inside
                self._drained()

    @contextlib.contextmanager
    def same_samples(self) -> Iterator[None]:
        """All forwards inside are of the same samples: their gradients add up before the norm."""
        before, self._joint = self._joint, []
        try:
            yield
        finally:
            self._joint = before


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Let another probe attach to a model, or to modules of it, that has one; for that time.

    What runs inside leaves nothing in the record of the probe that stands aside, whose passes in
    flight are as if it had not run.
    """
    modules = set(model.modules())
    with contextlib.ExitStack() as stack:
        for probe in list(_probes):
            held = probe._model()
            if held is not None and not modules.isdisjoint(held.modules()):
                stack.enter_context(probe._aside())
        yield
