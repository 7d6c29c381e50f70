"""Peak memory of training steps with norms, and of the plain step, each in a process of its own.

VmHWM: the most that the process ever had resident, its start and the first step, in which an
attachment proves itself, included; "later" is the peak of a second step alone, after the mark was
reset. The heap is "tight" (fresh.py). Rivals, and the plain step that they are held against, take
the first step alone: a second would add 16 MiB at most, and the time of one that fills gigabytes.

    python benchmarks/memory.py --workload name [--way fused]
    python benchmarks/memory.py --rivals [--quick]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fresh import forked, say
from rivals import RIVALS, NotInstalledError, loaded
from workloads import OURS, QUICK, WORKLOADS

AT_ONCE = 2  # processes: nothing is timed here


def peaks(name: str, way: str | None, again: bool) -> dict[str, Any]:
    """of `way`; of the plain step, for None; `again`: in a second step too"""
    row = {"workload": name, "way": way or "plain"}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    w = WORKLOADS[name]()
    try:
        step = (OURS | RIVALS)[way](w) if way else partial(w.step, w.model)
        step()
        first = high_water()
        if again:
            Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is resident now
            step()
    except NotInstalledError:
        return {**row, "verdict": "not installed"}
    except Exception:
        return {**row, "verdict": "refuses"}  # steps.py has the reason
    later = high_water()
    row["peak_mib"] = round(max(first, later), 1)
    return {**row, "later_mib": round(later, 1)} if again else row


def high_water() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--way", choices=OURS, help="of ours; else the plain step")
    parser.add_argument("--rivals", action="store_true", help="all of them, and the plain step")
    parser.add_argument("--quick", action="store_true", help="two workloads")
    options = parser.parse_args()
    if not options.rivals:
        say(peaks(options.workload, options.way, again=True))
        return
    loaded(rivals=True)
    tasks = product(QUICK if options.quick else WORKLOADS, [None, *RIVALS])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(lambda task: forked(peaks, *task, False), tasks):
            say(row)


if __name__ == "__main__":
    main()
