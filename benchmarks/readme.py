"""The README's table, made of a file of results: what stands between its two marks.

python benchmarks/readme.py [results.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results/cpu.json"
BEGIN, END = "<!-- benchmarks: make bench -->\n", "<!-- /benchmarks -->\n"

OURS = {  # column: way, threads
    "fused step, 1 thread": ("fused", 1),
    "2 threads": ("fused", 2),
    "clipping": ("clip", 1),
    "scoring": ("scoring", 1),
}


def section(results: dict[str, Any]) -> str:
    """Under the table: who refuses what, and why."""
    rows, reasons = results["rows"], {}
    ways = {key: how for key, how in OURS.items() if how[0] in rows[0]["ratios"]}
    rivals = list(dict.fromkeys(row["rival"] for row in results["rivals"]))
    columns = [*ways, "peak memory", *rivals]
    lines = [f"| workload | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    for name in dict.fromkeys(row["workload"] for row in rows):
        cells = []
        for way, threads in ways.values():
            (row,) = (r for r in rows if key(r) == (name, "warm", threads))
            cells.append(bold(row["ratios"][way]["median"]))
        cells.append(bold(memory(results, name)))
        for rival in rivals:
            (row,) = (r for r in results["rivals"] if (r["workload"], r["rival"]) == (name, rival))
            verdict, _, reason = row["verdict"].partition(": ")
            if reason:
                reasons.setdefault(f"{rival}: {reason}", []).append(name)
            cells.append(figure(row["median"]) if "median" in row else verdict)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    refused = [f"{reason} ({'; '.join(names)})" for reason, names in reasons.items()]
    lines += ["", f"Refusals: {'. '.join(refused)}." if refused else ""]
    lines += [hooks(results["hooks"])] if "hooks" in results else []
    lines += [facts(results)]
    return "\n".join(lines) + "\n"


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["workload"], row["heap"], row["threads"]


def memory(results: dict[str, Any], name: str) -> float:
    (row,) = (r for r in results["memory"] if (r["workload"], r["way"]) == (name, "fused"))
    return row["ratio"]


def bold(ratio: float) -> str:
    return f"**{ratio:.2f}**"


def figure(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def hooks(rows: list[dict[str, Any]]) -> str:
    plain = [row["plain_us"] for row in rows]
    fused, apart = ([row["extra_us"][way] for row in rows] for way in ("fused", "fused=False"))
    return (
        "An attached layer that computes next to nothing costs a step at most "
        f"{max(fused):.1f} us beside the {min(plain):.0f} to {max(plain):.0f} that it takes; with "
        f"`fused=False` {min(apart):.1f} to {max(apart):.1f}, its norms included."
    )


def facts(results: dict[str, Any]) -> str:
    machine, commit = results["machine"], results["commit"][:8]
    versions = [f"torch {results['torch']}"]
    versions += [f"{package} {version}" for package, version in results["rivals_versions"].items()]
    return (
        f"{machine['cpu']} ({machine['capability']}), {', '.join(versions)}; commit {commit}, "
        f"{results['date']}."
    )


def rewritten(text: str, results: dict[str, Any]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"README.md has lost a mark: {BEGIN.strip()} or {END.strip()}")
    return before + BEGIN + section(results) + END + after


def rewrite(results: dict[str, Any]) -> None:
    README.write_text(rewritten(README.read_text(), results))


if __name__ == "__main__":
    rewrite(json.loads(Path(*(sys.argv[1:] or [RESULTS])).read_text()))
