"""What norms cost: a step with them over the plain step, forward and backward, in the same rounds.

Every way is first checked against a float64 loop over single samples, then timed (timing.py). Each
allocator and thread count has a process of its own: under "warm", glibc keeps freed memory, so that
no page faults are timed (a fault costs near two microseconds, and even the plain step moves with
it); "default" is what a user has who sets nothing.

    python benchmarks/run.py [--threads 1 2] [--quick] [--out benchmarks/results/cpu.json]

Writes the table as JSON; --quick, a minute of fewer rounds, writes nothing unless --out is given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from timing import Budget, interleaved
from tqdm import tqdm
from workloads import OURS, RIVALS, WORKLOADS, by_loop, check

import torchgradx

HEAPS = {
    "warm": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "100000000000",
        "MALLOC_TOP_PAD_": "67108864",
    },
    "default": {},
}
OUT = Path(__file__).parent / "results" / "cpu.json"


def measured(name: str, quick: bool) -> dict:
    """One row: a workload's ratios, by way."""
    torch.manual_seed(0)
    w = WORKLOADS[name]()
    oracle = by_loop(w.double())().detach()
    ours, rivals = ({way: make(w) for way, make in table.items()} for table in (OURS, RIVALS))
    for way, step in (ours | rivals).items():
        check(f"{name}, {way}", step(), oracle)

    def plain() -> None:
        w.step(w.model)

    ratios = interleaved(plain, ours, Budget(0.3, 3) if quick else Budget(4, 5))
    ratios |= interleaved(plain, rivals, Budget(0, 1))
    return {
        "workload": name,
        "plain_ms": round(ratios["fused"].plain_milliseconds, 3),
        "ratios": {
            way: {
                "median": round(r.median, 4),
                "p20": round(r.low, 4),
                "p80": round(r.high, 4),
                "ms": round(r.milliseconds, 3),
                "rounds": r.rounds,
            }
            for way, r in ratios.items()
        },
    }


def rows_of(heap: str, threads: int, quick: bool) -> Iterator[dict]:
    """The rows that a process of its own measures: one line of JSON each."""
    command = [sys.executable, __file__, "--measure", "--threads", str(threads)]
    command += ["--quick"] if quick else []
    environment = {**os.environ, **HEAPS[heap], "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            yield {"heap": heap, "threads": threads, **json.loads(line)}
    if child.returncode:
        raise SystemExit(f"the {heap} heap's process on {threads} threads failed: see above")


def facts() -> dict[str, object]:
    """Where and on what the rows were measured; neither host name nor paths."""
    git = ["git", "-C", str(OUT.parent.parent), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit or "unknown",
        "torchgradx": torchgradx.__version__,
        "torch": torch.__version__,
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def table_of(rows: list[dict]) -> Table:
    table = Table(title="time of a step with norms / plain forward + backward: median (20%-80%)")
    table.add_column("workload")
    for column in ("threads", "heap", "plain ms", *OURS, *RIVALS):
        table.add_column(column, justify="right", no_wrap=True)
    order = list(WORKLOADS)
    rows = sorted(rows, key=lambda row: (order.index(row["workload"]), row["threads"]))
    for k, row in enumerate(rows):
        last = k + 1 == len(rows) or rows[k + 1]["workload"] != row["workload"]
        cells = [row["workload"], str(row["threads"]), row["heap"], f"{row['plain_ms']:.1f}"]
        for way, r in row["ratios"].items():
            spread = f" [dim]({r['p20']:.2f}-{r['p80']:.2f})[/]" if way in OURS else ""
            cells.append(f"{r['median']:.2f}{spread}")
        table.add_row(*cells, end_section=last, style="" if row["heap"] == "warm" else "dim")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What norms cost beside a plain training step.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="fewer rounds; writes no file")
    parser.add_argument("--out", type=Path, help="JSON, with the machine and the versions")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(options.threads[0])
        for name in WORKLOADS:
            print(json.dumps(measured(name, options.quick)), flush=True)
        return

    processes = list(product(options.threads, HEAPS))
    rows = []
    with tqdm(total=len(processes) * len(WORKLOADS), unit="row") as bar:
        for threads, heap in processes:
            for row in rows_of(heap, threads, options.quick):
                bar.set_description(f"{heap} heap, {threads} threads")
                bar.update()
                rows.append(row)
    console = Console()
    console.width = max(console.width, 140)
    console.print(table_of(rows))
    out = options.out or (None if options.quick else OUT)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")
        console.print(f"written to {os.path.relpath(out)}")


if __name__ == "__main__":
    main()
