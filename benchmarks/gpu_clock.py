"""How one run is timed on a GPU, and what the GPU reaches: the ceilings of every floor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from gpu_plan import Ceilings


class Clock(Protocol):
    def seconds(self, step: Callable[[], object]) -> float:
        """Of one run on operands that no cache holds."""

    def extra_bytes(self, step: Callable[[], object]) -> int:
        """Peak memory of one run beyond what is held before, results included."""


class CpuClock:
    """So that all of this can be tried without a GPU."""

    def seconds(self, step: Callable[[], object]) -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    def extra_bytes(self, step: Callable[[], object]) -> int:
        step()
        return 0


class GpuClock:
    """Events on the stream. The flush keeps the device busy while the host enqueues the step, so
    that only a step slower to enqueue than that is timed as the host's."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(4 * cache, dtype=torch.uint8, device=device)

    def seconds(self, step: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def extra_bytes(self, step: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before


def ceilings(clock: Clock, device: torch.device, tiny: bool) -> Ceilings:
    """Of a copy and of square GEMMs on random numbers: zeros would draw less power."""

    def best(step: Callable[[], object]) -> float:
        step()
        return min(clock.seconds(step) for _ in range(3 if tiny else 20))

    source = torch.empty(2**16 if tiny else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / best(lambda: target.copy_(source))
    flop = {}
    for dtype, size in (("bfloat16", 8192), ("float32", 4096)):
        size = 64 if tiny else size
        x = torch.randn(size, size, device=device).to(getattr(torch, dtype))
        flop[dtype] = 2 * size**3 / best(lambda x=x: x @ x)
    return Ceilings(bandwidth, flop)
