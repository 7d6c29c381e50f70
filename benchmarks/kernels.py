"""How fast each algorithm runs on one layer, beside a square GEMM in the same rounds.

    python benchmarks/kernels.py roofs|grid|scaling [--quick]

Rows have the time of a run over that GEMM's, its FLOP and its bytes; a line has a problem's.
`regret` is what a wrong choice of the cost model costs: the time of what it chooses over that of
the fastest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from fresh import say
from grid import Case, alone, cases, linear
from timing import Budget, interleaved

from torchgradx.plan import cost

GEMM = 512  # rows, columns
READ = 1 << 18  # floats: 1 MiB
BURST = 0.004
GEMM_FLOP = 2 * GEMM**3
ONCE, A_FEW, OFTEN = Budget(1), Budget(3), Budget(4, 0.06, error=0.02)

Row = dict[str, Any]

# The x axis, and the problem N, T, I, O at each of its ticks.
SWEEPS: dict[str, tuple[list[int], Callable[[int], tuple[int, int, int, int]]]] = {
    "T": ([1 << k for k in range(12)], lambda t: (8, t, 256, 256)),
    "N": ([1 << k for k in range(8)], lambda n: (n, 128, 256, 256)),
    "I = O": ([1 << k for k in range(4, 12)], lambda d: (16, 64, d, d)),
    "I = O, T = 1": ([1 << k for k in range(4, 12)], lambda d: (64, 1, d, d)),
}


def measured(case: Case, budget: Budget) -> list[Row]:
    x = torch.randn(GEMM, GEMM)

    def gemm() -> object:
        return x @ x

    for run in (gemm, *case.runs.values()):
        run()
    p = case.problem
    sizes = {"layer": p.layer, "n": p.n, "t": p.t, "i": p.i, "o": p.o, "groups": p.groups}
    rows = []
    for name, ratio in interleaved(gemm, case.runs, budget, BURST).items():
        work = asdict(alone(name, p))
        rows.append({**sizes, "algorithm": name, **work, **ratio.row()})
    return rows


def roofs(quick: bool) -> Iterator[Row]:
    """FLOP/s of the GEMM, and bytes/s of a read from the second-level cache."""
    x, operand = torch.randn(GEMM, GEMM), torch.randn(READ)
    ways = {"read": operand.sum}
    ratio = interleaved(lambda: x @ x, ways, Budget(3, 0.1 if quick else 1))["read"]
    gemm = 1e-3 * ratio.plain_milliseconds
    yield {
        "gemm_flop_per_second": round(GEMM_FLOP / gemm),
        "bytes_per_second": round(4 * READ / (gemm * ratio.median)),
    }


def grid(quick: bool) -> Iterator[list[Row]]:
    for case in islice(cases(), 0, None, 8 if quick else 1):
        yield measured(case, ONCE if quick else OFTEN)


def scaling(quick: bool) -> Iterator[list[Row]]:
    for axis, (ticks, sizes) in SWEEPS.items():
        for x in ticks[:2] if quick else ticks:
            rows = measured(linear(*sizes(x)), ONCE if quick else A_FEW)
            yield [{"axis": axis, "x": x, **row} for row in rows]


# What is made of the rows


def by_problem(rows: Iterable[Row]) -> dict[cost.Problem, dict[str, float]]:
    """Times of the runs, in those of the GEMM."""
    problems: dict[cost.Problem, dict[str, float]] = {}
    for row in rows:
        sizes = (row[key] for key in ("layer", "n", "t", "i", "o", "groups"))
        problems.setdefault(cost.Problem(*sizes), {})[row["algorithm"]] = row["median"]
    return problems


def with_gradient(times: dict[str, float], wanted: bool) -> dict[str, float]:
    """By algorithm: norms alone, or with the weight gradient, the framework's if need be."""
    return {
        name: time + (times["weight_grad"] if wanted and name != "fused" else 0)
        for name, time in times.items()
        if name != "weight_grad" and (wanted or name != "fused")
    }


def regrets(rows: Iterable[Row]) -> list[tuple[float, cost.Problem, str, str]]:
    """Regret, problem, chosen and best, the worst first."""
    found = []
    for problem, times in by_problem(rows).items():
        for wanted in (False, True):
            p = replace(problem, weight_grad=wanted)
            seconds = with_gradient(times, wanted)
            best = min(seconds, key=seconds.__getitem__)
            chosen = cost.plan(p).algorithm
            # Not measured, as hopeless: as bad as can be.
            found.append((seconds.get(chosen, float("inf")) / seconds[best], p, chosen, best))
    return sorted(found, key=lambda entry: -entry[0])


def regret(rows: Iterable[Row]) -> Row:
    found = regrets(rows)
    worst, p, chosen, best = found[0]
    return {
        "problems": len(found),
        "median": round(median(entry[0] for entry in found), 4),
        "worst": round(worst, 4),
        "worst_at": f"{p.layer} N={p.n} T={p.t} I={p.i} O={p.o} groups={p.groups}, "
        f"weight_grad={p.weight_grad}: {chosen}, not {best}",
    }


def crossovers(axis: str) -> list[tuple[int, str, str]]:
    """x, before and after: where the cost model changes its choice of norms alone."""
    ticks, sizes = SWEEPS[axis]
    found, last = [], ""
    for x in range(ticks[0], ticks[-1] + 1):
        chosen = cost.make_plan(cost.Problem("linear", *sizes(x))).algorithm
        if last and chosen != last:
            found.append((x, last, chosen))
        last = chosen
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["roofs", "grid", "scaling"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    measure = {"roofs": roofs, "grid": grid, "scaling": scaling}[options.what]
    for rows in measure(options.quick):
        say(rows)


if __name__ == "__main__":
    main()
