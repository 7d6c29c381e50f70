"""Two files of results: what got slower, or takes more memory, than before.

    python benchmarks/compare.py old.json new.json

Slower is a median whose spread (20%-80% of the rounds) lies beyond the old one's, by 2% at least
and by three standard errors: few rounds may agree by chance. More memory is 2% of the plain step's
peak. Either ends it with status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import hypot
from pathlib import Path
from typing import Any

from timing import error

LEAST, ERRORS = 0.02, 3

Figures = dict[str, float]
Entry = tuple[str, str, str]  # what, before, now


def times(results: dict[str, Any]) -> Iterator[tuple[str, Figures]]:
    """Ours, named; rivals are no concern of ours."""
    for row in results["rows"]:
        where = f"{row['workload']}, {row['heap']} heap, {row['threads']} threads"
        for way, figures in row["ratios"].items():
            yield f"{where}: {way}", figures
    for row in results.get("kernels", ()):
        if row["algorithm"] != "weight_grad":
            sizes = " ".join(f"{letter.upper()}={row[letter]}" for letter in "ntio")
            groups = f" groups={row['groups']}" if row["groups"] > 1 else ""
            yield f"{row['layer']} {sizes}{groups}: {row['algorithm']} / GEMM", row


def peaks(results: dict[str, Any]) -> dict[str, float]:
    rows = results.get("memory", ())
    return {f"{r['workload']}: {r['way']}, memory": r["ratio"] for r in rows if "ratio" in r}


def slower(old: Figures, new: Figures) -> bool:
    errors = (error(f["p20"], f["p80"], int(f["rounds"])) for f in (old, new))
    least = max(LEAST * old["median"], ERRORS * hypot(*errors))
    return new["p20"] > old["p80"] and new["median"] - old["median"] > least


def compared(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[Entry], list[str]]:
    """What got worse, and what the new file lacks."""
    before, now = dict(times(old)), dict(times(new))
    worse = [
        (name, spread(figures), spread(now[name]))
        for name, figures in before.items()
        if name in now and slower(figures, now[name])
    ]
    peaks_before, peaks_now = peaks(old), peaks(new)
    worse += [
        (name, f"{peak:.3f}", f"{peaks_now[name]:.3f}")
        for name, peak in peaks_before.items()
        if name in peaks_now and peaks_now[name] > peak + LEAST
    ]
    lacking = [name for name in (before | peaks_before) if name not in (now | peaks_now)]
    return worse, lacking


def spread(figures: Figures) -> str:
    return f"{figures['median']:.3f} ({figures['p20']:.3f}-{figures['p80']:.3f})"


def main(old_file: str, new_file: str) -> int:
    old, new = (json.loads(Path(file).read_text()) for file in (old_file, new_file))
    if old["machine"] != new["machine"]:
        print(f"not the same machine: {old['machine']}, {new['machine']}")
    worse, lacking = compared(old, new)
    for name in lacking:
        print(f"not in {new_file}: {name}")
    rows = [("worse", f"{old['commit'][:8]}", f"{new['commit'][:8]}"), *worse]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    for row in rows if worse else ():
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"{len(worse)} of {len(list(times(old)))} times and {len(peaks(old))} peaks are worse")
    return bool(worse)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: compare.py old.json new.json")
    sys.exit(main(*sys.argv[1:]))
