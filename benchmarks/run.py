"""The whole suite: `make bench`. Writes the results, the plots beside them and the README's table.

    python benchmarks/run.py [--out benchmarks/results/cpu.json] [--quick]

What is measured is in steps.py (training steps, ours and the rivals'), memory.py, kernels.py and
hooks.py; each measurement has a process of its own (fresh.py). --quick, a minute or two of fewer
rounds, leaves the repository's results as they are unless --out is given.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path
from typing import Any

import plots
import readme
from facts import ROOT, facts
from fresh import rows_of
from grid import COUNT
from hooks import KINDS
from kernels import SWEEPS, crossovers, regret
from memory import AT_ONCE
from rich.console import Console
from rich.table import Table
from rivals import RIVALS
from tqdm import tqdm
from workloads import OURS, QUICK, WORKLOADS

OUT = ROOT / "benchmarks/results/cpu.json"
THREADS = (1, 2)
WAYS = {"warm": list(OURS), "default": ["fused"]}
HELD = [None, *(way for way in OURS if way != "fused=False")]  # whose memory is measured
Rows = list[dict[str, Any]]


class Suite:
    """Its stages, each a part of the file of results."""

    def __init__(self, quick: bool, bar: tqdm) -> None:
        self.flags = ["--quick"] if quick else []
        self.names = QUICK if quick else list(WORKLOADS)
        self.bar = bar

    def rows(self, *command: str, heap: str, threads: int) -> Iterator[Any]:
        name = command[0].removesuffix(".py") + ": rivals" * ("--rivals" in command)
        self.bar.set_description(f"{name}, {heap} heap, {threads} thread{'s' * (threads > 1)}")
        for row in rows_of(*command, *self.flags, heap=heap, threads=threads):
            self.bar.update()
            yield row

    def steps(self, oracles: str) -> Rows:
        rows = []
        for threads, heap in product(THREADS, WAYS):
            where = {"heap": heap, "threads": threads}
            command = ["steps.py", "--oracles", oracles, "--ways", ",".join(WAYS[heap])]
            rows += [{**where, **row} for row in self.rows(*command, **where)]
        return rows

    def rivals(self, oracles: str) -> Rows:
        where = {"heap": "warm", "threads": 1}
        rows = self.rows("steps.py", "--rivals", "--oracles", oracles, **where)
        return [{**where, **row} for row in rows]

    def memory(self) -> Rows:
        where = {"heap": "tight", "threads": 1}

        def alone(task: tuple[str, str | None]) -> Any:
            name, way = task
            command = ["memory.py", "--workload", name, *(["--way", way] if way else [])]
            (row,) = self.rows(*command, **where)
            return row

        with ThreadPoolExecutor(AT_ONCE) as pool:
            ours = list(pool.map(alone, product(self.names, HELD)))
        return ratios_of(ours, list(self.rows("memory.py", "--rivals", **where)))

    def kernels(self) -> dict[str, Any]:
        where = {"heap": "warm", "threads": 1}
        (roofs,) = self.rows("kernels.py", "roofs", **where)
        kernels = list(chain(*self.rows("kernels.py", "grid", **where)))
        return {"roofs": roofs, "kernels": kernels, "regret": regret(kernels)}

    def scaling(self) -> Rows:
        return [
            {"threads": threads, **row}
            for threads in THREADS
            for rows in self.rows("kernels.py", "scaling", heap="warm", threads=threads)
            for row in rows
        ]

    def hooks(self) -> Rows:
        return list(self.rows("hooks.py", heap="warm", threads=1))

    def all(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as oracles:
            parts = {"rows": self.steps(oracles), "rivals": self.rivals(oracles)}
        parts |= {"memory": self.memory(), **self.kernels(), "scaling": self.scaling()}
        parts["hooks"] = self.hooks()
        return {**parts, "crossovers": {axis: crossovers(axis) for axis in SWEEPS}}


def ratios_of(ours: Rows, rivals: Rows) -> Rows:
    """Peaks over the plain step's. Rivals' processes have loaded more: theirs are what they take
    beyond the plain step there, and the same plain step as ours."""
    plain = {row["workload"]: row["peak_mib"] for row in ours if row["way"] == "plain"}
    rows = []
    for group in (ours, rivals):
        base = {row["workload"]: row["peak_mib"] for row in group if row["way"] == "plain"}
        for row in group:
            name = row["workload"]
            if "peak_mib" in row:
                row["extra_mib"] = round(row["peak_mib"] - base[name], 1)
                row["ratio"] = round(1 + row["extra_mib"] / plain[name], 4)
            rows.append(row)
    return rows


def count(quick: bool) -> int:
    workloads, rivals = len(QUICK if quick else WORKLOADS), len(RIVALS)
    steps = workloads * (len(THREADS) * len(WAYS) + rivals)
    memory = workloads * (len(HELD) + 1 + rivals)
    problems = -(-COUNT // 8) if quick else COUNT
    ticks = sum(2 if quick else len(ticks) for ticks, _ in SWEEPS.values())
    return steps + memory + 1 + problems + len(THREADS) * ticks + len(KINDS)


def table_of(results: dict[str, Any]) -> Table:
    table = Table(title="time of a step with norms / plain forward + backward: median (20%-80%)")
    table.add_column("workload")
    for column in ("threads", "heap", "plain ms", *OURS):
        table.add_column(column, justify="right", no_wrap=True)
    order = list(WORKLOADS)
    rows = sorted(results["rows"], key=lambda row: (order.index(row["workload"]), row["threads"]))
    for k, row in enumerate(rows):
        last = k + 1 == len(rows) or rows[k + 1]["workload"] != row["workload"]
        cells = [row["workload"], str(row["threads"]), row["heap"], f"{row['plain_ms']:.1f}"]
        for r in (row["ratios"].get(way) for way in OURS):
            cells.append(
                "" if r is None else f"{r['median']:.2f} [dim]({r['p20']:.2f}-{r['p80']:.2f})[/]"
            )
        table.add_row(*cells, end_section=last, style="" if row["heap"] == "warm" else "dim")
    return table


def table_of_rivals(results: dict[str, Any]) -> Table:
    table = Table(title="rivals: warm heap, one thread")
    table.add_column("workload")
    for column in RIVALS:
        table.add_column(column, justify="right")
    for name in dict.fromkeys(row["workload"] for row in results["rivals"]):
        cells = []
        for rival in RIVALS:
            (r,) = (r for r in results["rivals"] if (r["workload"], r["rival"]) == (name, rival))
            cells.append(f"{r['median']:.2f}" if "median" in r else r["verdict"][:60])
        table.add_row(name, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="What norms cost beside a plain training step.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and problems")
    parser.add_argument("--out", type=Path, help="JSON; the plots go beside it")
    options = parser.parse_args()
    begin = time.monotonic()
    with tqdm(total=count(options.quick)) as bar:
        results = {**facts(), **Suite(options.quick, bar).all()}
    results["seconds"] = round(time.monotonic() - begin)
    console = Console()
    console.width = max(console.width, 140)
    console.print(table_of(results), table_of_rivals(results))
    console.print(f"the cost model's regret: {results['regret']}")
    out = options.out or (None if options.quick else OUT)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        plots.draw(results, out.parent)
    if out == OUT:
        readme.rewrite(results)


if __name__ == "__main__":
    main()
