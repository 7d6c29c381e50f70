"""Ratios of times that hold on a busy machine: every step is timed beside a plain one.

A round times each way, and right before or after it (in turns) the plain step. What is reported
are quantiles of the ratios of such neighbours, never a ratio of two far apart in time. A step of a
millisecond is repeated for BURST seconds at each turn: in training no other model runs in between
and leaves the caches cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

Step = Callable[[], object]
BURST = 0.02


class Ratio(NamedTuple):
    """Of a step's time to the plain step's."""

    median: float
    low: float  # 20%
    high: float  # 80%
    milliseconds: float  # of the step itself, median
    plain_milliseconds: float
    rounds: int

    def row(self) -> dict[str, float]:
        """As the files of results have it."""
        return {
            "median": round(self.median, 4),
            "p20": round(self.low, 4),
            "p80": round(self.high, 4),
            "ms": round(self.milliseconds, 4),
            "rounds": self.rounds,
        }


class Budget(NamedTuple):
    """Rounds until both are used up: short steps get many, long ones at least so few."""

    seconds: float
    rounds: int


def interleaved(
    plain: Step, steps: Mapping[str, Step], budget: Budget, burst: float = BURST
) -> dict[str, Ratio]:
    """Steps are expected to have run once: caches and buffers are warm."""
    plain()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    begin, turn = time.perf_counter(), 0
    while turn < budget.rounds or time.perf_counter() - begin < budget.seconds:
        for name, step in steps.items():
            pairs[name].append(neighbours(plain, step, burst, swapped=turn % 2 == 1))
        turn += 1
    return {name: ratio(times) for name, times in pairs.items()}


def neighbours(plain: Step, step: Step, burst: float, swapped: bool) -> tuple[float, float]:
    """Seconds of the plain step and of the other, the one right after the other."""
    if swapped:
        other = seconds(step, burst)
        return seconds(plain, burst), other
    return seconds(plain, burst), seconds(step, burst)


def seconds(step: Step, burst: float) -> float:
    """Of one run: the median of as many as a burst has room for, one at least."""
    times = [time.perf_counter()]
    while len(times) < 2 or times[-1] - times[0] < burst:
        step()
        times.append(time.perf_counter())
    return median(after - before for before, after in pairwise(times))


def ratio(times: list[tuple[float, float]]) -> Ratio:
    ratios = [step / plain for plain, step in times]
    low, *_, high = quantiles(ratios, n=5, method="inclusive") if len(ratios) > 1 else ratios * 2
    plain, step = (1e3 * median(column) for column in zip(*times, strict=True))
    return Ratio(median(ratios), low, high, step, plain, len(times))
