"""Times whole training steps of one model: plain, with norms in each way, and the rivals.

A way is held against a loop over single samples before it is timed. It is timed between plain steps
of the same process, each step finished before the clock is read. `Settings` says what is measured;
`model_messages` is the generator that runs in a child process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_models import MODELS, Case
from gpu_profile import kernels_of
from isolated import Message, said
from rivals import RIVALS, NotInstalledError
from timing import BURST, Budget, interleaved
from torch import Tensor
from workloads import MAX_NORM, OURS, Way, Workload, attached

OFF = 0.1  # of a bfloat16 model's norms: the rounding of activations, not that of sums
CHECKED = 2  # samples
FEW = 5  # steps, for a median without rounds

DEFERRED = "deferred clip"
OPACUS = ("Opacus hooks", "Opacus ghost", "Opacus ghost, clips")
WAYS: dict[str, Way] = {
    "fused": OURS["fused"],
    "scoring": OURS["scoring"],
    "clip": OURS["clip"],
    DEFERRED: attached(lambda p: p.clip_grad_norm_(MAX_NORM), clip=True, weight_grad=False),
    "fused=False": OURS["fused=False"],
    **{name: RIVALS[name] for name in OPACUS},
}
NO_AUTOCAST = ("Opacus ghost, clips",)  # writes its own step


class Settings(NamedTuple):
    device: str = "cuda"
    tiny: bool = False
    seconds: float = 1.0  # of timing for each way
    ways: tuple[str, ...] = tuple(WAYS)
    first_only: bool = False  # the first steps and the check alone
    profile: bool = False


class AutocastWorkload(Workload):
    def step(self, model: torch.nn.Module) -> None:
        model.zero_grad()
        with torch.autocast(self.inputs.device.type, torch.bfloat16):
            loss = self.loss(model(self.inputs), self.targets)
        loss.backward()


def placed(case: Case, settings: Settings) -> Workload:
    """Build a case on the device, where random weights take no time."""
    torch.manual_seed(0)
    with torch.device(settings.device):
        w = case.build(settings.tiny)
    model, inputs = w.model.train(), w.inputs
    if not case.autocast:
        model = model.to(torch.bfloat16)
        inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    kind = AutocastWorkload if case.autocast else Workload
    return kind(model, inputs, w.targets, w.loss)


def alone(w: Workload) -> Tensor:
    """Return the norms of CHECKED samples, each through the plain model by itself."""
    norms = []
    for n in range(CHECKED):
        w._replace(inputs=w.inputs[n : n + 1], targets=w.targets[n : n + 1]).step(w.model)
        grads = [p.grad.float() for p in w.model.parameters() if p.grad is not None]
        norms.append(torch.stack([g.norm() for g in grads]).norm())
    w.model.zero_grad()
    return torch.stack(norms)


def worst(norms: Tensor, expected: Tensor) -> float:
    return float(((norms.float() - expected) / expected).abs().max())


class Device:
    """What differs between a GPU and the CPU that the same code is tried on."""

    def __init__(self, name: str) -> None:
        self.on_gpu = name == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def finished(self, step: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            step()
            self.synchronize()

        return run

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def peak(self, step: Callable[[], object]) -> int:
        """Return the most bytes allocated during a step; 0 on the CPU."""
        if not self.on_gpu:
            step()
            return 0
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def release(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def seconds_of(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


@contextmanager
def counted_backwards() -> Iterator[list[int]]:
    """Count the calls of autograd's engine, those of a proof and of rematerialisation included."""
    engine = torch.autograd._engine_run_backward
    count = [0]

    def run(*arguments: Any, **keywords: Any) -> Any:
        count[0] += 1
        return engine(*arguments, **keywords)

    torch.autograd._engine_run_backward = run
    try:
        yield count
    finally:
        torch.autograd._engine_run_backward = engine


def model_messages(name: str, settings: Settings, deadline: float) -> Iterator[Message]:
    """Yield {"plain": figures}, then {"way": name, **figures} for each way of one model."""
    case = MODELS[name]
    device = Device(settings.device)
    w = placed(case, settings)
    others = device.allocated()
    expected = alone(w)
    plain = device.finished(lambda: w.step(w.model))
    plain()
    plain_peak = device.peak(plain)
    plain_seconds = median(seconds_of(plain) for _ in range(2 if settings.tiny else FEW))
    yield {
        "plain": {
            "ms": round(1e3 * plain_seconds, 4),
            "host_ms": host_ms(lambda: w.step(w.model), device),
            "peak_mib": round(plain_peak / 2**20, 1),
            "parameters": sum(p.numel() for p in w.model.parameters()),
        }
    }
    if settings.profile and not settings.first_only:
        yield {"profile": "plain", **kernels_of(plain, settings.device)}
    inputs = sum(t.numel() * t.element_size() for t in (w.inputs, w.targets))
    others = max(0, device.allocated() - inputs)  # the plain model and its gradients
    for way in settings.ways:
        if time.monotonic() > deadline:
            yield {"way": way, "skipped": "no time left"}
            continue
        try:
            yield from way_messages(way, case, w, plain, plain_seconds, expected, device,
                                    settings, others, plain_peak)  # fmt: skip
        except NotInstalledError as missing:
            yield {"way": way, "skipped": f"{missing} is not installed"}
        except Exception as error:
            yield {"way": way, "skipped" if way in OPACUS else "error": said(error)}
        device.release()


def way_messages(
    way: str,
    case: Case,
    w: Workload,
    plain: Callable[[], None],
    plain_seconds: float,
    expected: Tensor,
    device: Device,
    settings: Settings,
    others: int,
    plain_peak: int,
) -> Iterator[Message]:
    if case.autocast and way in NO_AUTOCAST:
        yield {"way": way, "skipped": "not written for autocast"}
        return
    copied = w.copied()
    device.synchronize()
    found: list[Tensor] = []
    with counted_backwards() as backwards:
        begin = time.perf_counter()
        step = WAYS[way](copied)
        found.append(step())
        device.synchronize()
        firsts = [time.perf_counter() - begin]
        first_backwards = backwards[0]
    waited = device.finished(step)
    firsts += [seconds_of(waited) for _ in range(2)]
    off = max(worst(norms[:CHECKED], expected) for norms in (*found, step()))
    figures: Message = {
        "way": way,
        "off": round(off, 6),
        "first": {
            "seconds": round(firsts[0], 4),
            "plain_steps": round(firsts[0] / plain_seconds, 2),
            "backwards": first_backwards,
            "later_seconds": [round(s, 4) for s in firsts[1:]],
        },
    }
    if not off < OFF and way not in OPACUS:  # a rival's error is shown beside its time
        raise AssertionError(f"off the norms of single samples by {off:.3g}")
    if not settings.first_only:
        peak = device.peak(step)
        figures["peak_ratio"] = round((peak - others) / plain_peak, 4) if plain_peak else None
        figures["host_ms"] = host_ms(step, device)
        budget = Budget(5, settings.seconds)
        ratios = interleaved(plain, {way: waited}, budget, 0 if settings.tiny else BURST)
        figures |= {**ratios[way].row(), "plain_ms": round(ratios[way].plain_milliseconds, 4)}
    yield figures
    if settings.profile and not settings.first_only and way in PROFILED:
        yield {"profile": way, **kernels_of(waited, settings.device)}


PROFILED = ("fused", "clip", "scoring", DEFERRED)


def host_ms(step: Callable[[], object], device: Device) -> float:
    """Return what a step takes to enqueue, milliseconds: the whole step where the host waits."""

    def once() -> float:
        device.synchronize()
        taken = seconds_of(step)
        device.synchronize()
        return taken

    return round(1e3 * median(once() for _ in range(3)), 4)
