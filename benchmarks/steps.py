"""Time of a training step with norms over the plain step's, forward and backward.

Each workload's ways are checked against a float64 loop over single samples, then timed in the same
rounds (timing.py). Rivals are judged and timed one by one, on the warm heap: their best case.

    python benchmarks/steps.py --oracles folder [--ways fused,clip] [--rivals] [--quick]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fresh import forked, say
from rivals import RIVALS, VMAP_CHUNK, judged, loaded
from timing import Budget, interleaved
from torch import Tensor
from workloads import OURS, QUICK, WORKLOADS, Workload, by_loop, check

ONCE, A_FEW = Budget(1), Budget(1, 0.3, error=0.03, far=2)
OFTEN = Budget(4, 0.5, far=2)


def made(name: str, oracles: Path) -> tuple[Workload, Tensor]:
    """The same in every process, and the norms that it has."""
    torch.manual_seed(0)
    w = WORKLOADS[name]()
    if not kept(name, oracles).exists():
        torch.save(by_loop(w.double())().detach(), kept(name, oracles))
    return w, torch.load(kept(name, oracles))


def kept(name: str, oracles: Path) -> Path:
    return oracles / f"{list(WORKLOADS).index(name)}.pt"


def ours(name: str, oracles: Path, ways: list[str], budget: Budget) -> dict[str, Any]:
    w, oracle = made(name, oracles)
    steps = {way: OURS[way](w.copied()) for way in ways}
    for way, step in steps.items():
        check(f"{name}, {way}", step(), oracle)
    plain = partial(w.step, w.model)
    plain()
    ratios = interleaved(plain, steps, budget)
    return {
        "workload": name,
        "plain_ms": round(ratios["fused"].plain_milliseconds, 3),
        "ratios": {way: ratio.row() for way, ratio in ratios.items()},
    }


def rival(name: str, way: str, oracles: Path, budget: Budget) -> dict[str, Any]:
    w, oracle = made(name, oracles)
    step, verdict = judged(RIVALS[way], w.copied(), oracle)
    if step is None:
        return {"verdict": verdict}
    plain = partial(w.step, w.model)
    plain()
    ratio = interleaved(plain, {way: step}, budget)[way]
    return {"verdict": verdict, **ratio.row()}


def rivals(name: str, oracles: Path, budget: Budget) -> Iterator[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for way in RIVALS:
        if way == "vmap, chunks" and len(torch.load(kept(name, oracles))) <= VMAP_CHUNK:
            rows[way] = rows["vmap"]  # the same: one chunk has all samples
        else:
            rows[way] = forked(rival, name, way, oracles, budget)
        yield {"workload": name, "rival": way, **rows[way]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--oracles", type=Path, required=True)
    parser.add_argument("--ways", default=",".join(OURS))
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loaded(rivals=options.rivals)
    for name in QUICK if options.quick else WORKLOADS:
        if options.rivals:
            for row in rivals(name, options.oracles, ONCE if options.quick else A_FEW):
                say(row)
        else:
            ways, budget = options.ways.split(","), ONCE if options.quick else OFTEN
            say(forked(ours, name, options.oracles, ways, budget))


if __name__ == "__main__":
    main()
