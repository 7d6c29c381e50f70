"""check="samples": runs two samples alone, and compares their norms with the recorded ones.

The gradient does not show what a model does to its data before the first layer, or to frozen and
detached tensors. So the first and the last sample of a batch are run by themselves, once per
structure: the gradient that arrived at the outputs for that sample is pulled back, and the norm of
each parameter must be the recorded one. The model is called on a batch of one, not copied; its
buffers, its modes and the random generators are put back. This happens when the first backward of
a pass ends, before an optimizer can change the weights.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..extension import Pass
from ..graph.arguments import one_sample, size_of_batch, sized_tensors_in, tensors_in
from ..graph.heads import taken_rows
from ..graph.nodes import Graph
from ..kept import model_kept, random_state_kept
from ..record.checkpoints import Reentrant
from ..record.record import Record
from ..refusals import RefusedError, cause
from ..sharding import data_parallel
from ..sites.regime import Regime
from ..sites.site import ProbeParts
from .forwards import Forward

Mismatches = dict[int, str]  # cause by parameter
HALF_DTYPES = {torch.float16, torch.bfloat16}


@dataclass
class KeptForward:
    """One forward of a pass, kept until its backward has ended."""

    module: nn.Module
    arguments: Any  # (args, kwargs)
    regime: Regime
    key: Any  # of its structure
    may_share: Sequence[Tensor]  # arguments that are by sample or shared: shapes do not tell
    shared: Collection[int] = ()  # ids of those taken as shared
    task: int = -1  # the latest backward in which gradients arrived
    grads: dict[int, Tensor] = field(default_factory=dict)  # by output, in that backward
    # Outputs, with their versions and the samples of their rows: see taken_rows().
    outputs: dict[int, tuple[Tensor, int, Tensor | None]] = field(default_factory=dict)


class Samples:
    """Checks the passes of one probe."""

    def __init__(self, shared: ProbeParts, record: Record) -> None:
        self._recorder, self._parameters, _, self._options, _, caches = shared
        self._is_on = shared.options["check"] == "samples"
        self._local = threading.local()
        self._record = record
        # By structure, T = N being another: a note for explain(), or None.
        self._checked: dict[Any, str | None] = caches.setdefault("samples", {})
        self._regimes: list[Regime] = []  # by device, when the forward began
        self._arrived: dict[int, list[KeptForward]] = {}  # by serial number of the pass

    @property
    def notes(self) -> list[str]:
        """Return lines for explain()."""
        return list(dict.fromkeys(filter(None, self._checked.values())))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Mark the forwards and backwards inside as ours, on this thread."""
        before, self._local.silent = self.is_silent, True
        try:
            yield
        finally:
            self._local.silent = before

    @property
    def is_silent(self) -> bool:
        """Return True if one of our own forwards or backwards runs on this thread."""
        return getattr(self._local, "silent", False)

    # Forward

    def begin(self) -> None:
        """Note the random generators before a forward."""
        if self._is_on:
            devices = {p.device for p in self._parameters.tensors()}
            self._regimes = [Regime.current(device, draws=True) for device in devices]

    def listen(self, forward: Forward, module: nn.Module, arguments: Any) -> None:
        """Keep what the check needs at the end of a forward, if its structure is new."""
        run = forward.run
        if not self._is_on or run.n < 2:
            return
        tensors = [t for t in sized_tensors_in(arguments) if t.dim()]
        may_share = _may_share(tensors, run.n, self._options["batch_dim"])
        key = forward.run.structure, bool(may_share), *forward.key[2:]
        if key in self._checked and not run.keep:
            return  # known; of joint forwards, all run alone where one of them is new
        if reason := self._why_skipped(run.n, module, tensors):
            self._checked[key] = f"samples not checked alone: {reason}"
            return
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        regime = Regime.current(device, draws=False)
        call = KeptForward(module, arguments, regime, key, may_share)
        for k, t in enumerate(forward.outputs):
            if t.requires_grad and t.grad_fn is not None:
                rows = taken_rows([t], run.n)[0]
                call.outputs[k] = t.detach(), t._version, rows and rows.samples
                t.register_hook(partial(self._arrive, run.serial, call, k))

    def _why_skipped(self, n: int, module: nn.Module, tensors: Sequence[Tensor]) -> str | None:
        """Return the reason why the samples of a forward cannot be run alone, or None."""
        if any(regime.drew for regime in self._regimes):
            return "the forward draws random numbers"
        if data_parallel(module) is not None or self._parameters.gathered():
            return "the model is distributed"
        if self._options.get("sample_ids") is not None:
            return "sample_ids="
        if not tensors or size_of_batch(tensors[0], self._options["batch_dim"]) != n:
            return "no batch of one can be taken from its arguments"
        return None

    # Backward

    def _arrive(self, serial: int, call: KeptForward, output: int, g: Tensor) -> None:
        """Add up the gradient of an output: it may come in parts."""
        task = torch._C._current_graph_task_id()
        if self.is_silent or task == -1:
            return
        if call.task != task:  # autograd.grad came before, for example
            call.task, call.grads = task, {}
        before = call.grads.get(output)
        call.grads[output] = g.detach() if before is None else before + g.detach()
        calls = self._arrived.setdefault(serial, [])
        if all(call is not other for other in calls):
            calls.append(call)

    def check(self, runs: Sequence[Pass], tasks: Sequence[int]) -> None:
        """Check these passes at the end of their first backward. Never raises.
        tasks: that backward, and those that ran inside it."""
        for run in runs:
            calls = [call for call in self._arrived.pop(run.serial, []) if call.task in tasks]
            if not all(call.key in self._checked for call in calls):
                self._check(run, calls)
        self._arrived.clear()

    def _check(self, run: Pass, calls: Sequence[KeptForward]) -> None:
        refused: Mismatches = {}
        places = range(max(len(call.may_share) for call in calls))
        # All are by sample, or one or two of them shared.
        for some in chain.from_iterable(combinations(places, k) for k in range(3)):
            for call in calls:
                call.shared = {id(t) for k, t in enumerate(call.may_share) if k in some}
            mismatches = self._mismatches(run, calls)
            if not mismatches:
                note = "an argument of N = T rows was taken as shared by the samples"
                if mismatches is not None:
                    self._checked.update({call.key: note if some else None for call in calls})
                return
            refused = refused or mismatches
        self._record.refused.update(refused)

    def _mismatches(self, run: Pass, calls: Sequence[KeptForward]) -> Mismatches | None:
        """Return the parameters whose norm differs; None: norms are not finite."""
        sample, is_finite = 0, True
        try:
            for sample in (0, run.n - 1):
                mismatches = self._compare(run, calls, sample)
                is_finite &= mismatches is not None
                if mismatches:
                    return mismatches
        except Exception as error:
            why = cause("failed_alone", sample=sample, error=f"{type(error).__name__}: {error}")
            why = error.cause if isinstance(error, RefusedError) else why
            return dict.fromkeys(run.trainable, why)
        return {} if is_finite else None

    def _compare(self, run: Pass, calls: Sequence[KeptForward], sample: int) -> Mismatches | None:
        tensors = self._parameters.tensors()
        live = {place: tensors[place] for place in run.trainable}
        totals: dict[int, Tensor] = {}
        for call in calls:
            found = self._gradients(call, run.n, sample, list(live.values()))
            for place, g in zip(live, found, strict=True):
                if g is not None:
                    totals[place] = g + totals[place] if place in totals else g
        alone = {place: float(g.double().norm()) for place, g in totals.items()}
        batched = {place: float(self._record.sq_norms(run, place)[sample]) ** 0.5 for place in live}
        dtypes = {p.dtype for p in live.values()} | {call.regime.autocast for call in calls}
        overflows = alone.values() if torch.float16 in dtypes else ()  # of a sum that is float16
        if not all(map(np.isfinite, (*batched.values(), *overflows))):
            return None  # a GradScaler reports them
        wholes = (np.hypot.reduce([*norms.values(), 0.0]) for norms in (alone, batched))
        allowed = float(max(filter(np.isfinite, wholes))) * _tolerance(dtypes)
        return {
            place: cause("alone", sample=sample, alone=f"{other:.4g}", batched=f"{norm:.4g}")
            for place, norm in batched.items()
            if not abs(norm - (other := alone.get(place, 0.0))) <= allowed
        }

    def _gradients(
        self, call: KeptForward, n: int, sample: int, live: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Run the model on one sample, and return the gradients of its parameters."""
        dim, is_mean = self._options["batch_dim"], self._options["loss_reduction"] == "mean"
        args, kwargs = one_sample(call.arguments, sample, n, dim, shared=call.shared)
        with (
            self.quiet(),
            model_kept(call.module),
            random_state_kept(),
            call.regime.again(),
            torch.enable_grad(),
        ):
            self._recorder.push(None)
            try:
                compiled = "torch._dynamo" in sys.modules
                with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                    outputs = tensors_in(call.module._call_impl(*args, **kwargs))
            finally:
                self._recorder.pop()
            roots = {k: outputs[k] for k in call.grads if outputs[k].requires_grad}
            seeds: list[Tensor] = []
            for k, t in roots.items():
                self._check_output(call, k, t, n, sample)
                g, (*_, taken) = call.grads[k], call.outputs[k]
                is_whole = g.shape == t.shape and taken is None  # a loss, or what all samples share
                part = g if is_whole else _part(g, t, n, sample, dim, taken)
                seeds.append(part / n if is_whole and is_mean else part)
                # The seed is all that arrived: an encoder's output has its decoder's part already.
                t.register_hook(lambda _, seed=seeds[-1]: seed)
            return _pull_back(list(roots.values()), seeds, live) if roots else [None] * len(live)

    def _check_output(self, call: KeptForward, k: int, alone: Tensor, n: int, sample: int) -> None:
        """Raise RefusedError if an output of the sample is not what it was in the batch."""
        whole, version, taken = call.outputs[k]
        if (alone.shape == whole.shape and taken is None) or whole._version != version:
            return  # the model's own loss; or it was written into since
        batched = _part(whole, alone, n, sample, self._options["batch_dim"], taken)
        parts = (t[batched.isfinite()] for t in (alone.detach() - batched, batched))
        difference, size = (t.double().norm() for t in parts)
        if not difference <= _tolerance({alone.dtype, call.regime.autocast}) * size:
            raise RefusedError(cause("output_alone", sample=sample))


def _tolerance(dtypes: set[torch.dtype | None]) -> float:
    """Return the allowed difference, relative to the norm over all parameters."""
    return 1e-3 if HALF_DTYPES.isdisjoint(dtypes) else 5e-2


def _pull_back(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], live: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the gradients of the live tensors, with the user's hooks on these disabled."""
    both = (h for p in live for h in (p._backward_hooks, p._post_accumulate_grad_hooks) if h)
    hooks = [(table, dict(table)) for table in both]
    grads = [p.grad for p in live]
    try:
        for table, _ in hooks:
            table.clear()
        for p in live:  # a Function that runs a backward of its own adds to it
            p.grad = None
        if any(isinstance(node, Reentrant) for node in Graph(roots).parents):
            torch.autograd.backward(roots, seeds)  # a reentrant checkpoint allows no other
            return [p.grad for p in live]
        found = torch.autograd.grad(roots, live, seeds, allow_unused=True)
        return [g if p.grad is None else p.grad if g is None else p.grad + g
                for p, g in zip(live, found, strict=True)]  # fmt: skip
    finally:
        for table, before in hooks:
            table.update(before)
        for p, g in zip(live, grads, strict=True):
            p.grad = g


def _part(t: Tensor, alone: Tensor, n: int, sample: int, dim: int, taken: Tensor | None) -> Tensor:
    """Return the rows of one sample, in the shape of its output alone. taken: the sample of each
    row, where indices took these."""
    if taken is not None:
        return t[taken == sample].view_as(alone)
    sizes = alone.shape
    fits = [d for d, k in enumerate(sizes) if (*sizes[:d], n * k, *sizes[d + 1 :]) == t.shape]
    if not fits:
        shapes = f"{list(alone.shape)} and, in its batch, {list(t.shape)}"
        raise ValueError(f"an output has the shape {shapes}")
    d = dim if dim in fits else fits[0]
    if alone.shape[d] > 1 and dim == 1:  # rows t*N+n
        return t.unflatten(d, (-1, n)).select(d + 1, sample)
    return t.narrow(d, sample * alone.shape[d], alone.shape[d])


def _may_share(arguments: Sequence[Tensor], n: int, dim: int) -> list[Tensor]:
    """Return the arguments that all samples may share: a mask [T, T] with T = N, for example."""
    shape = arguments[0].shape if arguments else ()
    others = [t for t in arguments if t.dim() < 3 and t.shape != shape and shape[1 - dim :]]
    return [t for t in others if shape[1 - dim] == size_of_batch(t, dim) == n]
