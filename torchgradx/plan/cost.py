"""The algorithm, and why: integers in, a printable AlgorithmPlan out; no tensors, nothing is run.

Problem -> ALGORITHMS that do not refuse -> least seconds under the device model -> Plan

The model of a CPU is here, that of a GPU in gpu.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .gpu import Problem, seconds_on_gpu


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
# (Zen 4, AVX-512), torch 2.13, float32; of a Linear's rank1 and gram on an Intel Xeon (AVX-512), by
# their ratio to direct there. Only ratios matter, and only near a crossover.
# Not modelled: caches, threads, halves' conversion, strides.
RATES: dict[str, dict[str, Rates]] = {
    "linear": {
        "weight_grad": Rates(flop=8.6e10, bytes=5.3e10),  # the framework's own
        "rank1": Rates(flop=1.0e11, bytes=5.0e10),
        "gram": Rates(flop=1.5e11, bytes=2.5e10),
        "direct": Rates(flop=1.9e11, bytes=6.9e10),
        "fused": Rates(flop=1.9e11, bytes=6.9e10),
    },
    "conv2d": {
        "weight_grad": Rates(flop=1.7e11, bytes=2.8e10),
        "rank1": Rates(flop=4.6e10, bytes=2.3e10),
        "gram": Rates(flop=1.5e11, bytes=9.4e10),
        "direct": Rates(flop=2.4e11, bytes=6.3e10),
        "fused": Rates(flop=1.8e11, bytes=6.3e10),
    },
}

CODES = {"rank1": 0, "gram": 1, "direct": 2, "fused": 3}  # Algorithm in csrc/layers/layer.h
# A call of an operator, whatever it does: 3 us for linear_fused against 8 for rank1, mm and sum.
CALL_SECONDS = 2.5e-6


def _operands(p: Problem) -> int:
    """Return bytes of activations and grad_output, each read once (patches stay in cache)."""
    return p.itemsize * p.n * p.t * p.groups * (p.i + p.o)


def weight_grad(p: Problem) -> Cost:
    """Return the cost of a weight gradient: one product over all N T positions."""
    return Cost(2 * p.n * p.t * p.groups * p.i * p.o, _operands(p))


def _rank1(p: Problem) -> Cost:
    return Cost(2 * p.n * p.t * p.groups * (p.i + p.o), _operands(p))


def _gram(p: Problem) -> Cost:
    return Cost(p.n * p.groups * p.t * (p.t + 1) * (p.i + p.o + 1), _operands(p))


def _direct(p: Problem) -> Cost:
    tiles = p.n * p.groups * p.i * p.o
    return Cost(2 * tiles * p.t + 2 * tiles, _operands(p) + 4 * tiles)


NORMS = {"rank1": _rank1, "gram": _gram, "direct": _direct}
ALGORITHMS = (*NORMS, "fused")

# Costs that add up to an algorithm's, with the rates that they run at
CostParts = tuple[tuple[str, Cost], ...]


def parts_of(p: Problem, algorithm: str) -> CostParts:
    """Return the norms' part, and the wanted weight gradient: the framework's but for fused.

    fused makes the gradient in tiles that it squares as well; or takes a Gram or rank1 for small T.
    """
    if algorithm != "fused":
        norms = (algorithm, NORMS[algorithm](p))
        return (norms, ("weight_grad", weight_grad(p))) if p.weight_grad else (norms,)
    tiles = p.n * p.groups * p.i * p.o
    ends, gram = ("fused", Cost(4 * tiles, 12 * tiles)), ("gram", _gram(p))
    ways = (ends, gram, ("rank1", _rank1(p))) if p.t <= 1 else (ends, gram)
    return ("fused", weight_grad(p)), min(ways, key=lambda way: _seconds(p, (way,)))


def cost_of(p: Problem, algorithm: str) -> Cost:
    return sum((cost for _, cost in parts_of(p, algorithm)), Cost(0, 0))


def _seconds(p: Problem, parts: CostParts) -> float:
    rates = RATES[p.layer]
    return sum(c.flop / rates[name].flop + c.bytes / rates[name].bytes for name, c in parts)


def seconds(p: Problem, algorithm: str) -> float:
    if p.device:
        return seconds_on_gpu(p, algorithm)
    beside = p.weight_grad and algorithm != "fused"
    return _seconds(p, parts_of(p, algorithm)) + CALL_SECONDS * (3 if beside else 1)


def refusal(p: Problem, algorithm: str) -> str:
    """Return why an algorithm cannot serve, as a sentence; nothing if it can."""
    if algorithm == "rank1" and p.t > 1:
        return f"rank1 needs T = 1: a sum over T = {p.t} positions is not of rank one"
    if algorithm == "fused" and not p.weight_grad:
        return "fused computes the weight gradient with the norms, and none is wanted"
    return ""


@dataclass(frozen=True)
class AlgorithmPlan:
    """The choice, what it takes, and what else there was."""

    algorithm: str
    seconds: float
    refused: dict[str, str]  # algorithm -> why
    alternatives: dict[str, float]  # algorithm -> seconds
    problem: Problem

    @property
    def _sizes(self) -> str:
        p = self.problem
        groups = f" groups={p.groups}" if p.groups > 1 else ""
        return f"{p.layer} N={p.n} T={p.t} I={p.i} O={p.o}{groups}"

    @property
    def _where(self) -> str:
        return f" on {self.problem.device.name}" if self.problem.device else ""

    def brief(self) -> str:
        """Return one line: sizes, what was chosen, its time, and what was refused."""
        refused = "".join(f"; {name} refused: {why}" for name, why in self.refused.items())
        return f"{self._sizes}: {self.algorithm}, {self.seconds * 1e6:.1f} us{self._where}{refused}"

    def __repr__(self) -> str:
        p = self.problem
        wanted = "weight gradient and norms" if p.weight_grad else "norms"
        lines = [f"{self._sizes}: {wanted}{self._where}"]
        times = {self.algorithm: self.seconds, **self.alternatives}
        for name, seconds in times.items():
            cost = cost_of(p, name)
            mark = "  <- chosen" if name == self.algorithm else ""
            lines.append(
                f"  {name:<7}{cost.flop / 1e6:>12.2f} MFLOP{cost.bytes / 1e6:>10.2f} MB"
                f"{seconds * 1e6:>12.1f} us{mark}"
            )
        lines += [f"  {name:<7} refused: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


def make_plan(problem: Problem, algorithm: str | None = None) -> AlgorithmPlan:
    """Return the cheapest algorithm that does not refuse, or the one asked for.

    Raises:
        ValueError: `algorithm` is unknown, or refuses; the text is its reason.
    """
    if algorithm is not None and algorithm not in ALGORITHMS:
        names = ", ".join(repr(name) for name in ALGORITHMS)
        raise ValueError(f"algorithm must be None or one of {names}; got {algorithm!r}")
    reasons = {name: refusal(problem, name) for name in ALGORITHMS}
    refused = {name: reason for name, reason in reasons.items() if reason}
    if algorithm in refused:
        raise ValueError(f"algorithm={algorithm!r} refuses: {refused[algorithm]}")
    times = {name: seconds(problem, name) for name in ALGORITHMS if name not in refused}
    fastest = next(iter(times))
    for name, time in times.items():  # min() by a key of symbolic sizes breaks Dynamo's graph
        fastest = name if time < times[fastest] else fastest
    chosen = algorithm or fastest
    return AlgorithmPlan(chosen, times.pop(chosen), refused, times, problem)


plan = lru_cache(maxsize=4096)(make_plan)


def rounded(size: int) -> int:
    """Return a size with three leading bits, enough to choose by: lengths that never repeat would
    be planned anew each time."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step
