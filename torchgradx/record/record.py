"""The record: the passes that backward has reached since the last read, and what is read from it.

A read gives [N1 + N2 + ...], the samples of all passes in the order of their forwards. A pass is
called `run`, a parameter's index in the table `place`. Squared norms are summed in float64.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..extension import _C, NATIVE, Pass
from ..options import Scale, check_scale, takes_call
from ..refusals import SECTIONS, refused_all
from ..sharding import local_part
from ..sites.site import ProbeParts
from .checkpoints import NOT_RECORDED, Answer, Frames
from .clipping import ClipTape, DeferredTape
from .factors import ClipGroup, factors_of, is_unscaled, unscaled_by
from .norms import Term, combine, combine_segments

MAX_SCALES = 1024  # loss scales that are remembered: forwards without a backward must not add up
FAKE = torch._C._TorchDispatchModeKey.FAKE
CPU = torch.device("cpu")
_Runs = list[tuple[Pass, Scale]]  # each with its loss scale
_Norms = Tensor | dict[str, Tensor]  # one Tensor for per="model", else by group


class Record:
    """The record of one probe."""

    def __init__(self, shared: ProbeParts) -> None:
        self._recorder, self._parameters, self._layers, self._options, *_ = shared
        scale = shared.options["loss_scale"]
        tape = ClipTape if shared.options["weight_grad"] else DeferredTape
        self.tape = tape(shared.recorder, shared.parameters, scale)
        self.frames = Frames(shared.recorder)
        self._serial = 0  # of the latest forward
        self._scale_function: Callable[..., Scale] | None = scale if callable(scale) else None
        # (serial of the first forward that it holds for, loss scale), in order.
        self._scales: list[tuple[int, Any]] = [(0, 1.0 if callable(scale) else scale)]
        self._is_read = False  # the next backward begins a new record
        self.fates: set[str] = set()  # keys of what became of forwards: why nothing is recorded
        self._lock = threading.RLock()
        self._needs_clean_grads = False  # .grad is compared with the norms: see gradients()
        self._grads_before: list[Tensor] = []  # largest elements of .grad before the first backward
        self.mismatched: set[tuple[int, int]] = set()  # (task, place): .grad is not the sum
        self.refused: dict[int, str] = {}  # cause by place: a sample alone has another norm
        self.runs: _Runs = []  # in the order of their forwards

    def answer(self, on: bool, *settings: Any, outside: bool = False) -> Answer:
        """Return the answer to a call of the model, or of a module outside of it. settings: of the
        answer, see there."""
        traced = torch._C._are_functorch_transforms_active() or torch._C._is_tracing()
        if traced or self.has_no_values():
            self.fates.add("traced")
            return NOT_RECORDED
        now = Answer(self.next_serial(), *settings)
        found = self.frames.answer(on, now, outside)
        if not on:
            self.fates.add("paused")
        elif not torch.is_grad_enabled():
            self.fates.add("no_grad")
        else:
            self.fates.add("called_directly" if outside else "no_backward")
        return found if torch.is_grad_enabled() else NOT_RECORDED

    def has_no_values(self) -> bool:
        """Return True if tensors have no values: they are fake, or on the meta device."""
        if torch._C._get_dispatch_mode(FAKE) is not None:
            return True
        return bool(self._parameters.names) and self._parameters.tensor(0).is_meta

    def next_serial(self) -> int:
        """Return a new serial number."""
        self._serial += 1
        return self._serial

    def begin(self, run: Pass) -> None:
        """Take a pass into the record at its first gradient."""
        with self._lock:  # two threads must not both begin a new record
            if self._is_read:
                self.clear()
            self.tape.begin([earlier for earlier, _ in self.runs])
            if self._needs_clean_grads and not self.runs:
                self._grads_before = self._largest_elements(run.trainable)
            if run.serial and any(other.serial == run.serial for other, _ in self.runs):
                self._recorder.refuse(-1, "run_twice")
            entry = run, self._scale_of(run.serial)
            insort(self.runs, entry, key=lambda entry: entry[0].serial)
            run.recorded = True
            for site, reason in run.refusals:
                self._recorder.refuse(site, reason)

    def reach_again(self, run: Pass) -> None:
        """Begin a new record if this pass of a record that was read gets another backward, and its
        .grad was zeroed since; else the backward adds to the record, as it does to .grad."""
        if not (self._is_read and self._options["weight_grad"]):
            return
        grads = (p.grad for p in map(self._parameters.tensor, run.trainable))
        if not any(bool(g.norm()) for g in grads if g is not None):
            self.clear()

    @property
    def scale(self) -> Any:
        """Return the loss scale of the passes to come, as the user gave it."""
        return self._scales[-1][1] if self._scale_function is None else self._scale_function

    @scale.setter
    def scale(self, scale: Any) -> None:
        self._scale_function = scale if callable(scale) else None
        if self._scale_function is None:
            self._scale_from(self._serial + 1, scale)
        if isinstance(scale, torch.amp.GradScaler):
            self.tape.loss_scale = scale

    def ask_scale(self, run: Pass, *call: Any) -> None:
        """Call the user's loss_scale for a pass. call: its args and kwargs; none if unknown."""
        if self._scale_function is None:
            return
        takes_arguments = takes_call(self._scale_function)
        if takes_arguments and not call:
            run.refuse(-1, "scale_in_graph")
            return
        scale = self._scale_function(*call) if takes_arguments else self._scale_function()
        check_scale(scale)
        self._scale_from(run.serial, scale)

    def _scale_from(self, serial: int, scale: Any) -> None:
        scale = scale.detach().clone() if isinstance(scale, Tensor) else scale
        entries = self._scales[-MAX_SCALES:]
        entries.insert(bisect_right(entries, serial, key=itemgetter(0)), (serial, scale))
        self._scales = entries

    def _scale_of(self, serial: int) -> Scale:
        """Return the loss scale set before a pass's forward, times a GradScaler's scale now."""
        place = bisect_right(self._scales, serial, key=itemgetter(0))
        scale: Any = self._scales[max(1, place) - 1][1]
        scaler = scale if isinstance(scale, torch.amp.GradScaler) else self.tape.loss_scale
        if not isinstance(scaler, torch.amp.GradScaler):
            return scale * 1.0  # a copy of a Tensor, which the user may write into
        held = scaler._get_scale_async() if scaler.is_enabled() else None  # get_scale() waits
        factor: Any = scaler.get_scale() if held is None else _in_double(held)
        if isinstance(scale, Tensor) and held is not None:
            scale = scale.to(factor.device)
        return factor if scale is scaler else factor * scale

    def clear(self) -> None:
        """Begin an empty record."""
        for run, _ in self.runs:
            run.clear()
        self.runs, self._grads_before = [], []
        self.tape.clear()
        self.mismatched = set()
        self.refused.clear()
        self._recorder.clear()
        self.fates = {"reset"} if self.fates else self.fates
        self._is_read = False

    def undo(self, tasks: Sequence[int]) -> None:
        """Drop what failed backwards left, and the passes that they began."""
        self.runs = [entry for entry in self.runs if entry[0].recorded]
        self.mismatched = {key for key in self.mismatched if key[0] not in tasks}
        self.tape.undo(alone=not self.runs)
        if not self.runs:
            self.fates.add("backward_failed")

    def finish(self, run: Pass, place: int) -> None:
        """Compute a parameter's squared norms from all of its uses, and drop their operands."""
        run.finish(place, self._combine(run, place))

    def _combine(self, run: Pass, place: int) -> Tensor:
        kept = run.terms(place)
        terms = [Term(self._layers[site] if site >= 0 else None, a, g) for site, a, g, _ in kept]
        owners = [segments.owners if segments else None for *_, segments in kept]
        with torch.no_grad():
            if any(rows is not None for rows in owners):
                return combine_segments(run.n, terms, owners)
            return combine(run.n, terms)

    def sq_norms(self, run: Pass, place: int) -> Tensor:
        """Return [N] of one parameter, for the gradients that have reached it so far."""
        total: Tensor = run.total([place])
        return total if place not in run.waiting() else total + self._combine(run, place).to(total)

    def norms(self, per: str, loss_scale: Scale | None) -> _Norms:
        """Return the norms, by group unless per="model". loss_scale: None for that of each pass."""
        sums_on, result = self._devices()
        factors = list(self._factors(loss_scale))

        def norms_of(places: Sequence[int] | None) -> Tensor:
            parts = []
            for (run, _), factor in zip(self.runs, factors, strict=True):
                total = run.total(places).to(sums_on)
                for place in run.waiting():
                    if places is None or place in places:
                        total += self._combine(run, place).to(total.device)
                parts.append(_norms(total, factor, **result))
            return _join(parts)

        if per == "model":
            return norms_of(None)
        return {name: norms_of(places) for name, places in self._groups(per).items()}

    def dots(self) -> Tensor:
        """Return the products of each sample's gradient with the directions."""
        sums_on, result = self._devices()
        runs = (run for run, _ in self.runs)
        found = [torch.zeros(r.n, device="cpu") if r.dots is None else r.dots for r in runs]
        whole = _join([dots.to(sums_on, torch.float64) for dots in found])
        return (whole * self._all_factors().to(sums_on)).to(**result)

    def shares(self) -> Tensor:
        """Return the share of each sample's own gradient that .grad holds."""
        if self.tape.closed:
            raise RuntimeError(".grad is clipped already: read it before clip_grad_norm_")
        if is_unscaled(self.tape.loss_scale):
            raise RuntimeError(".grad is unscaled already: read it before scaler.unscale_()")
        if self.tape.disturbed:
            raise RuntimeError(
                ".grad was changed between or after this record's backwards, as by zero_grad() or "
                "clipping: read it before that, and reset() where you zero it"
            )
        factors = self._all_factors()
        return torch.where(factors == 0, 0.0, 1 / factors)

    def _largest_elements(self, places: Sequence[int]) -> list[Tensor]:
        """Return the largest element of each .grad, on its device. set_to_none=False leaves 0."""
        tensors = self._parameters.tensors()
        grads = [g for place in places if (g := tensors[place].grad) is not None]
        dense = [g for g in map(local_part, grads) if g.layout is torch.strided and g.numel()]
        return list(torch._foreach_norm(dense, float("inf"))) if dense else []

    def gradients(self, per: str) -> dict[str, list[Tensor]]:
        """Return each .grad by group. From the next record on, raise if .grad is not its alone."""
        self._needs_clean_grads = True
        if any(map(float, self._grads_before)):
            raise RuntimeError(
                ".grad held a gradient before this record's first backward: zero it at every "
                "step, and read the norms of a step's micro-batches after the last of them"
            )
        tensors = self._parameters.tensors()
        return {
            key: [g for place in places if (g := tensors[place].grad) is not None]
            for key, places in self._groups(per).items()
        }

    def clip(self, per: str, max_norm: Scale | None, factors: Any, drops: bool) -> _Norms:
        """Clip .grad by sample, and return the norms before clipping."""
        unscaled = unscaled_by(self.tape.loss_scale)
        runs = [run for run, _ in self.runs]
        self.tape.check(unscaled, runs)
        norms = self.norms(per, None)
        by_group = norms if isinstance(norms, dict) else {"": norms}
        groups = [
            ClipGroup(places, factors_of(by_group[key], max_norm, factors, drops), runs)
            for key, places in self._groups(per).items()
        ]
        has_grads = self._options["weight_grad"] and factors is None and not drops
        if has_grads and getattr(max_norm, "shape", ()) == () and max_norm == float("inf"):
            groups = []  # on every process, unlike a Tensor [N]: .grad stays as it is
        self.tape.clip(groups, unscaled)
        return norms

    def _devices(self) -> tuple[torch.device, dict[str, Any]]:
        """Return the device to sum on, and the device and dtype of results."""
        first = self._parameters.tensor(0)
        wide = any(run.wide for run, _ in self.runs)
        result = {"device": first.device, "dtype": torch.float64 if wide else torch.float32}
        return first.device if first.is_cuda else CPU, result

    def _groups(self, per: str) -> dict[str, list[int]]:
        """Return the places of parameters that any pass trained, by parameter, module or model."""
        groups: dict[str, list[int]] = {}
        places = sorted(set().union(*(run.trainable for run, _ in self.runs)))
        if per == "model":
            return {"": places}
        for place in places:
            name = self._parameters.names[place]
            key = name.rpartition(".")[0] if per == "module" else name
            groups.setdefault(key, []).append(place)
        return groups

    def _all_factors(self) -> Tensor:
        """Return the factor of each sample that undoes the loss's reduction and scale."""
        factors = zip(self.runs, self._factors(None), strict=True)
        ones = [(torch.ones(r.n, dtype=torch.float64, device="cpu"), f) for (r, _), f in factors]
        return _join([one * (f.cpu() if isinstance(f, Tensor) else f) for one, f in ones])

    def _factors(self, loss_scale: Scale | None) -> Iterator[Scale]:
        """Yield the same for each pass: a number, or a Tensor [N] or []."""
        by_sample = loss_scale if isinstance(loss_scale, Tensor) and loss_scale.dim() else None
        if by_sample is not None:
            samples = sum(run.n for run, _ in self.runs)
            if by_sample.numel() != samples:
                raise ValueError(
                    f"loss_scale must be a number or a Tensor [{samples}], as the record holds "
                    f"that many samples; got shape {list(by_sample.shape)}"
                )
        start = 0
        for run, scale in self.runs:
            if loss_scale is not None:
                scale = loss_scale if by_sample is None else by_sample[start : start + run.n]
            start += run.n
            reduction = float(run.n) if self._options["loss_reduction"] == "mean" else 1.0
            if not isinstance(scale, Tensor):
                yield reduction / float(scale)  # a numpy scalar would divide in its own dtype
                continue
            scale = _in_double(scale)
            if scale.dim() and scale.shape != (run.n,):
                raise ValueError(
                    f"loss_scale must be a number or a Tensor [{run.n}], one a sample of the pass; "
                    f"got shape {list(scale.shape)}"
                )
            yield torch.where(scale == 0, 0.0, reduction / scale)  # a sample that counts for 0

    def require(self, attached: bool, under_way: bool) -> None:
        """Raise CoverageError if there is nothing to read. under_way: a backward still runs."""
        self._is_read |= not under_way  # even if this read fails
        if self.runs and not under_way:
            return
        names = [self._parameters.names[place] for place in self._parameters.trainable()]
        if under_way:
            raise refused_all("under_way", names)
        refusals = [why for _, why in self._recorder.refusals]
        if refusals:
            raise refused_all(refusals[0], names)
        known = ("removed",) * (not attached) + ("frozen",) * (not names)
        fates = (fate for fate in SECTIONS["Nothing is recorded"] if fate in self.fates)
        raise refused_all(next(iter((*known, *fates, "not_called"))), names)


def _in_double(scale: Tensor) -> Tensor:
    """Copy to float64. On a GPU it stays there: a copy would wait. Others may have no float64."""
    return scale.detach().to(scale.device if scale.is_cuda else CPU, torch.float64, copy=True)


def _norms(sq_norms: Tensor, factor: Scale, device: torch.device, dtype: torch.dtype) -> Tensor:
    if NATIVE and sq_norms.is_cpu and device.type == "cpu" and not isinstance(factor, Tensor):
        return _C.norms_of(sq_norms, abs(factor), dtype is torch.float64)
    factor = factor.abs().to(sq_norms.device) if isinstance(factor, Tensor) else abs(factor)
    return (sq_norms.clamp_min(0).sqrt() * factor).to(device, dtype)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
