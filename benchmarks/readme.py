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


def section(results: dict[str, Any]) -> str:
    """Return a row for each workload; docs/benchmarks.md has the rest."""
    lines = ["| model | torchgradx | best rival |", "|---|---:|---|"]
    for row in rows(results):
        name, ratio = best(results, row["workload"])
        ours = row["ratios"]["fused"]["median"]
        lines.append(f"| {row['workload']} | **{ours:.2f}** | {figure(ratio)} {name} |")
    return "\n".join([*lines, "", facts(results)]) + "\n"


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if (row["heap"], row["threads"]) == ("warm", 1)]


def best(results: dict[str, Any], workload: str) -> tuple[str, float]:
    """Return the fastest rival whose norms are right, and its ratio to the plain step."""
    right = [r for r in results["rivals"] if r["workload"] == workload and "median" in r]
    fastest = min(right, key=lambda r: r["median"])
    return fastest["rival"], fastest["median"]


def figure(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


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
