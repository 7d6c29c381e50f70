"""What mkdocs is told of our pages: benchmark tables, and how our docstrings introduce code."""

import json
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
COLUMNS = ("fused", "clip", "fused=False", "scoring")


def on_page_markdown(markdown, **kwargs):
    """A line `{{ benchmarks cpu.json }}` becomes the tables of that file, `{{ gpu models.json }}`
    the one of a GPU's."""
    lines = []
    for line in markdown.splitlines():
        mark, kind, file, *_ = [*line.split(), "", "", ""]
        made = {"benchmarks": tables, "gpu": gpu_table}.get(kind) if mark == "{{" else None
        lines.append(made(json.loads((RESULTS / file).read_text())) if made else line)
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


def gpu_table(result):
    """Of whole steps, or of layers beside the weight gradient alone."""
    gpu, of_models = result["gpu"], "model" in result["rows"][0]
    text = [
        f"{gpu['name']}, CUDA {gpu['cuda']}, torch {result['torch']}, commit "
        f"`{result['commit'][:7]}`, {result['date']}.\n"
    ]
    columns = COLUMNS if of_models else ("fused", "direct", "gram", "rank1", "bmm + norm", "vmap")
    first = "plain step" if of_models else "weight gradient"
    text += [f"| | {first} | {' | '.join(columns)} |", f"|---|{'---|' * (len(columns) + 1)}"]
    ratio = "median" if of_models else "to_weight_gradient"
    for row in result["rows"]:
        ways = row.get("ways", {})
        if "fused" not in ways:  # failed or skipped
            continue
        name = row["model"] if of_models else f"{row['layer']}, {row['dtype']}"
        if not of_models:
            plain = f"{ways[first]['us']:.1f} us"
        elif "plain" in row:
            name, plain = f"{name}, {row['dtype']}", f"{row['plain']['ms']:.1f} ms"
        else:  # results of before 2026-11-27
            plain = f"{ways['fused']['plain_milliseconds']:.1f} ms"
        ratios = [ways.get(c, {}).get(ratio) for c in columns]
        cells = [f"{r:.2f}" if r is not None else "" for r in ratios]
        text += [f"| {name} | {plain} | {' | '.join(cells)} |"]
    return "\n".join(text)
