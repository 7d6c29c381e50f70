"""Ratios of times that hold on a busy machine: every step is timed between two plain ones.

A round times each way once, a plain step before it (but for the very first) and after it. What is
reported are quantiles of the ratios to the mean of such neighbours, never a ratio of two far apart
in time. Rounds go on until each way's median is known, or its time is spent. A step of a few
milliseconds is repeated for BURST seconds at each turn: in training no other model runs in between
and leaves the caches cold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

Step = Callable[[], object]
Pair = tuple[float, float]  # seconds: the plain step's, the mean of its neighbours; the step's
BURST = 0.05
FEW = 3


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
    """Of a way: so many rounds; then more, while there is time, until the median is known."""

    rounds: int
    seconds: float = 0  # times the ways, as they share their rounds
    error: float = 0.01  # of the median, as a part of it: known
    far: float = math.inf  # so many times the plain step is far: FEW rounds will do, if in time


def interleaved(
    plain: Step, steps: Mapping[str, Step], budget: Budget, burst: float = BURST
) -> dict[str, Ratio]:
    """All are expected to have run once: caches and buffers are warm."""
    pairs: dict[str, list[Pair]] = {name: [] for name in steps}
    begin, turn, before = time.perf_counter(), 0, math.nan
    while names := due(pairs, budget, time.perf_counter() - begin):
        for name in names[:: -1 if turn % 2 else 1]:
            step, after = seconds(steps[name], burst), seconds(plain, burst)
            pairs[name].append((after if math.isnan(before) else (before + after) / 2, step))
            before = after
        turn += 1
    return {name: ratio(times) for name, times in pairs.items()}


def due(pairs: Mapping[str, list[Pair]], budget: Budget, elapsed: float) -> list[str]:
    """The ways that another round is for, `elapsed` seconds after the first began."""
    in_time = elapsed < budget.seconds * len(pairs)
    return [name for name, times in pairs.items() if unsettled(times, budget, in_time)]


def unsettled(times: list[Pair], budget: Budget, in_time: bool) -> bool:
    if len(times) < min(budget.rounds, 2):
        return True
    r = ratio(times)
    if r.median > budget.far:
        return in_time and r.rounds < FEW
    unknown = error(r.low, r.high, r.rounds) > budget.error * r.median
    return r.rounds < budget.rounds or (in_time and unknown)


def error(low: float, high: float, rounds: int) -> float:
    """Standard error of the median: that of so many normal ratios with such quantiles."""
    return 0.745 * (high - low) / rounds**0.5 if rounds > 1 else math.inf


def seconds(step: Step, burst: float) -> float:
    """Of one run: the median of as many as a burst has room for, one at least."""
    times = [time.perf_counter()]
    while len(times) < 2 or times[-1] - times[0] < burst:
        step()
        times.append(time.perf_counter())
    return median(after - before for before, after in pairwise(times))


def ratio(times: list[Pair]) -> Ratio:
    ratios = [step / plain for plain, step in times]
    low, *_, high = quantiles(ratios, n=5, method="inclusive") if len(ratios) > 1 else ratios * 2
    plain, step = (1e3 * median(column) for column in zip(*times, strict=True))
    return Ratio(median(ratios), low, high, step, plain, len(times))
