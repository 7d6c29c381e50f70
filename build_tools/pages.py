"""What mkdocs is told of our pages: benchmark tables, and how our docstrings introduce code."""

import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
COLUMNS = ("fused", "clip", "fused=False", "scoring")


def on_page_markdown(markdown, **kwargs):
    """A line `{{ benchmarks cpu.json }}` becomes the tables of that file."""
    lines = []
    for line in markdown.splitlines():
        words = line.split()
        is_call = words[:2] == ["{{", "benchmarks"]
        lines.append(tables(json.loads((RESULTS / words[2]).read_text())) if is_call else line)
    return "\n".join(lines)


def on_page_content(html, **kwargs):
    return html.replace("::</p>", ":</p>")  # as reStructuredText ends a line before code


def tables(result):
    machine = result["machine"]
    text = [
        f"{machine['cpu']}, {machine['capability']}, torch {result['torch']}, commit "
        f"`{result['commit'][:7]}`, {result['date']}; median of interleaved runs, warm heap.\n"
    ]
    for threads in sorted({row["threads"] for row in result["rows"]}):
        rows = [r for r in result["rows"] if r["threads"] == threads and r["heap"] == "warm"]
        if not rows:
            continue
        text += [f"\n{threads} thread{'s' * (threads > 1)}:\n"]
        text += [f"| workload | plain step | {' | '.join(COLUMNS)} |", "|---|---|---|---|---|---|"]
        for row in rows:
            found = [row["ratios"].get(name) for name in COLUMNS]
            cells = [f"{f['median']:.2f}" if f else "" for f in found]
            text += [f"| {row['workload']} | {row['plain_ms']:.1f} ms | {' | '.join(cells)} |"]
    return "\n".join(text)
