"""Which algorithm, and why: integers in, a printable Plan out; no tensors, nothing is run.

Problem -> ALGORITHMS that do not refuse -> least seconds under the device model -> Plan
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

__all__ = ["ALGORITHMS", "Algorithm", "Cost", "Plan", "Problem", "make_plan", "plan"]


@dataclass(frozen=True)
class Problem:
    """One layer's backward as integers.

    For a convolution t is H'W' and i and o are of one group: i = C / groups * kH * kW.
    """

    layer: Literal["linear", "conv2d"]
    n: int
    t: int
    i: int
    o: int
    groups: int = 1
    itemsize: int = 4
    weight_grad: bool = False


@dataclass(frozen=True)
class Cost:
    flop: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flop + other.flop, self.bytes + other.bytes)


@dataclass(frozen=True)
class Rates:
    """What one thread does in a second: the device model's two numbers, a pair an algorithm."""

    flop: float
    bytes: float


# Least squares over the layers of benchmarks/calibrate.py, 2026-11-20, one thread of an AMD EPYC
# (Zen 4, AVX-512), torch 2.13, float32. Only ratios matter, and only near a crossover.
# Not modelled: caches, threads, a call's fixed cost, halves' conversion, strides, other devices.
RATES: dict[str, dict[str, Rates]] = {
    "linear": {
        "weight_grad": Rates(flop=9.4e10, bytes=1.8e10),  # the framework's own
        "rank1": Rates(flop=6.8e10, bytes=3.4e10),
        "gram": Rates(flop=1.7e11, bytes=8.9e09),
        "direct": Rates(flop=2.0e11, bytes=7.3e10),
        "fused": Rates(flop=2.0e11, bytes=7.3e10),
    },
    "conv2d": {
        "weight_grad": Rates(flop=1.4e11, bytes=3.1e10),
        "rank1": Rates(flop=6.8e10, bytes=2.3e09),
        "gram": Rates(flop=1.5e11, bytes=2.3e09),
        "direct": Rates(flop=1.9e11, bytes=7.9e10),
        "fused": Rates(flop=1.8e11, bytes=9.5e10),
    },
}


FUSED_FROM = 16  # positions; csrc/cpu/direct.cpp has the same


def _operands(p: Problem) -> int:
    """Bytes of activations and grad_output, each read once (a convolution's patches are built
    in cache)."""
    return p.itemsize * p.n * p.t * p.groups * (p.i + p.o)


def weight_grad(p: Problem) -> Cost:
    return Cost(2 * p.n * p.t * p.groups * p.i * p.o, _operands(p))


def _rank1(p: Problem) -> Cost:
    return Cost(2 * p.n * p.t * p.groups * (p.i + p.o), _operands(p))


def _gram(p: Problem) -> Cost:
    return Cost(p.n * p.groups * p.t * (p.t + 1) * (p.i + p.o + 1), _operands(p))


def _direct(p: Problem) -> Cost:
    tiles = p.n * p.groups * p.i * p.o
    return Cost(2 * tiles * p.t + 2 * tiles, _operands(p) + 4 * tiles)


def _fused(p: Problem) -> Cost:
    """Beside the gradient a tile is squared and added to the total; or, where T is so small that
    this would be most of the work, the norms come from a Gram."""
    if p.layer == "linear" and p.t < FUSED_FROM:
        return weight_grad(p) + _gram(p)
    tiles = p.n * p.groups * p.i * p.o
    return weight_grad(p) + Cost(4 * tiles, 12 * tiles)


def _never(p: Problem) -> str | None:
    return None


def _unless_one_position(p: Problem) -> str | None:
    if p.t <= 1:
        return None
    return f"rank1 needs T = 1: a sum over T = {p.t} positions is not of rank one"


def _unless_weight_grad(p: Problem) -> str | None:
    if p.weight_grad:
        return None
    return "fused computes the weight gradient with the norms, and none is wanted"


@dataclass(frozen=True)
class Algorithm:
    name: str
    formula: str
    refuses: Callable[[Problem], str | None]  # the reason, as a sentence
    norms: Callable[[Problem], Cost]

    def cost(self, problem: Problem) -> Cost:
        """Of everything the problem asks for: the framework's weight gradient too, if wanted
        and not made by this algorithm."""
        norms = self.norms(problem)
        beside = problem.weight_grad and self.name != "fused"
        return norms + weight_grad(problem) if beside else norms

    def seconds(self, problem: Problem) -> float:
        seconds = _seconds(self.norms(problem), RATES[problem.layer][self.name])
        if problem.weight_grad and self.name != "fused":
            seconds += _seconds(weight_grad(problem), RATES[problem.layer]["weight_grad"])
        return seconds


def _seconds(cost: Cost, rates: Rates) -> float:
    return cost.flop / rates.flop + cost.bytes / rates.bytes


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("rank1", "|a|^2 |b|^2", _unless_one_position, _rank1),
        Algorithm("gram", "sum_st (a_s.a_t)(b_s.b_t)", _never, _gram),
        Algorithm("direct", "|sum_t b_t a_t^T|^2", _never, _direct),
        Algorithm("fused", "direct, and the weight gradient", _unless_weight_grad, _fused),
    )
}


@dataclass(frozen=True)
class Plan:
    """The choice, what it costs, and what else there was."""

    algorithm: str
    cost: Cost
    seconds: float
    refused: dict[str, str]  # algorithm -> why
    alternatives: dict[str, float]  # algorithm -> seconds
    problem: Problem

    def __repr__(self) -> str:
        p = self.problem
        groups = f" groups={p.groups}" if p.groups > 1 else ""
        wanted = "weight gradient and norms" if p.weight_grad else "norms"
        lines = [f"{p.layer} N={p.n} T={p.t} I={p.i} O={p.o}{groups}: {wanted}"]
        times = {self.algorithm: self.seconds, **self.alternatives}
        for name, seconds in times.items():
            cost = ALGORITHMS[name].cost(p)
            mark = "<- chosen" if name == self.algorithm else ""
            line = (
                f"  {name:<7}{cost.flop / 1e6:>12.2f} MFLOP{cost.bytes / 1e6:>10.2f} MB"
                f"{seconds * 1e6:>12.1f} us  {mark}"
            )
            lines.append(line.rstrip())
        lines += [f"  {name:<7} refused: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


def make_plan(problem: Problem, algorithm: str | None = None) -> Plan:
    """The cheapest algorithm that does not refuse, or the one asked for.

    Raises:
        ValueError: `algorithm` is unknown, or refuses; the text is its reason.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        names = ", ".join(repr(name) for name in ALGORITHMS)
        raise ValueError(f"algorithm must be None or one of {names}; got {algorithm!r}")
    refused: dict[str, str] = {}
    times: dict[str, float] = {}
    fastest = ""
    for name, candidate in ALGORITHMS.items():
        reason = candidate.refuses(problem)
        if reason is not None:
            refused[name] = reason
            continue
        times[name] = candidate.seconds(problem)
        if not fastest or times[name] < times[fastest]:
            fastest = name
    if algorithm in refused:
        raise ValueError(f"algorithm={algorithm!r} refuses: {refused[algorithm]}")
    chosen = algorithm or fastest
    seconds = times.pop(chosen)
    cost = ALGORITHMS[chosen].cost(problem)
    return Plan(chosen, cost, seconds, refused, times, problem)


plan = lru_cache(maxsize=4096)(make_plan)
