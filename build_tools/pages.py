"""What mkdocs is told of our pages: benchmark tables, and how our docstrings introduce code."""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
COLUMNS = ("fused", "clip", "fused=False", "scoring")
DEFAULTS = {"MEAN": '"mean"', "ONE": "1.0"}  # of attach(): objects of our own with these values
WRONG = 0.1  # of a norm: a rival that is off by more is not quoted
GPU_COLUMNS = ("deferred clip", "Opacus hooks", "Opacus ghost", "Opacus ghost, clips")


def on_page_markdown(markdown, **kwargs):
    """A line `{{ benchmarks cpu.json }}` becomes the tables of that file, `{{ gpu models.json }}`
    the one of a GPU's, `{{ zoo zoo.json }}` and `{{ corpus corpus.json }}` those of real models."""
    makers = {"benchmarks": tables, "gpu": gpu_table, "zoo": zoo_table, "corpus": corpus_table}
    lines = []
    for line in markdown.splitlines():
        mark, kind, file, *_ = [*line.split(), "", "", ""]
        made = makers.get(kind) if mark == "{{" else None
        lines.append(made(json.loads((RESULTS / file).read_text())) if made else line)
    return "\n".join(lines)


def on_page_content(html, **kwargs):
    for name, value in DEFAULTS.items():
        html = re.sub(rf"(?<=>){name}(?=</)", value, html)
    return html.replace("::</p>", ":</p>")  # as reStructuredText ends a line before code


def measured_on(result):
    machine = result["machine"]
    return (
        f"{machine['cpu']}, {machine['capability']}, torch {result['torch']}, commit "
        f"`{result['commit'][:7]}`, {result['date']}; median of interleaved runs, warm heap.\n"
    )


def tables(result):
    text = [measured_on(result)]
    peaks = {row["workload"]: row["ratio"] for row in result["memory"] if row["way"] == "fused"}
    for threads in sorted({row["threads"] for row in result["rows"]}):
        rows = [r for r in result["rows"] if r["threads"] == threads and r["heap"] == "warm"]
        if not rows:
            continue
        text += [f"\n{threads} thread{'s' * (threads > 1)}:\n"]
        text += [f"| workload | plain step | {' | '.join(COLUMNS)} | memory |", "|---" * 7 + "|"]
        for row in rows:
            found = [row["ratios"].get(name) for name in COLUMNS]
            cells = [f"{f['median']:.2f}" if f else "" for f in found]
            cells += [f"{peaks[row['workload']]:.2f}" if row["workload"] in peaks else ""]
            text += [f"| {row['workload']} | {row['plain_ms']:.1f} ms | {' | '.join(cells)} |"]
    return "\n".join([*text, *rivals_table(result), *hooks(result.get("hooks", []))])


def hooks(rows):
    """Return what an attached layer costs that computes next to nothing."""
    if not rows:
        return []
    plain = [row["plain_us"] for row in rows]
    fused, apart = ([row["extra_us"][way] for row in rows] for way in ("fused", "fused=False"))
    return [
        f"\nAn attached layer that computes next to nothing costs a step at most {max(fused):.1f} "
        f"us beside the {min(plain):.0f} to {max(plain):.0f} that it takes; with `fused=False` "
        f"{min(apart):.1f} to {max(apart):.1f}, its norms included."
    ]


def rivals_table(result):
    """Return the lines of a table of rivals, and why some refuse."""
    found = {(r["workload"], r["rival"]): r for r in result["rivals"]}
    workloads, rivals = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    rivals = [name for name in rivals if any("median" in found[w, name] for w in workloads)]
    text = [
        "\nRivals, 1 thread, as ratios to the same plain step. `loop`, `copies` and `vmap` make "
    ]
    text += [
        "norms alone; the others beside the batch's gradient. Each was compared with a float64 "
    ]
    text += [
        "loop over single samples before it was timed:\n",
        f"| workload | {' | '.join(rivals)} |",
    ]
    text += ["|---" * (len(rivals) + 1) + "|"]
    reasons = []
    for workload in workloads:
        cells = []
        for row in (found[workload, name] for name in rivals):
            verdict, _, reason = row["verdict"].partition(": ")
            reasons += [f"{row['rival']}: {reason} ({workload})"] if reason else []
            cells.append(f"{row['median']:.2f}" if "median" in row else verdict)
        text.append(f"| {workload} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in result["rivals_versions"].items())
    return [*text, f"\nRefusals: {'; '.join(reasons) or 'none'}. Versions: {versions}."]


def gpu_table(result):
    """Return the table of whole steps, or of layers beside the weight gradient alone."""
    gpu, rows = result["gpu"], [row for row in result["rows"] if "fused" in row.get("ways", {})]
    text = [
        f"{gpu['name']}, CUDA {gpu['cuda']}, torch {result['torch']}, commit "
        f"`{result['commit'][:7]}`, {result['date']}.\n"
    ]
    titles, cells = of_models(rows) if "model" in result["rows"][0] else of_layers(rows)
    text += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    text += [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(text)


def of_models(rows):
    """Return titles and cells: ratios, and the first step and the memory where they are known."""
    more = [way for way in GPU_COLUMNS if any("median" in row["ways"].get(way, {}) for row in rows)]
    ways = [*COLUMNS, *more]
    titles, cells = ["", "plain step", *ways], []
    known = any("first" in row["ways"]["fused"] for row in rows)
    titles += ["first step", "memory"] if known else []
    for row in rows:
        fused, name = row["ways"]["fused"], row["model"]
        if "plain" in row:
            name, plain = f"{name}, {row['dtype']}", row["plain"]["ms"]
        else:  # results of before 2026-11-27
            plain = fused["plain_milliseconds"]
        cells.append([name, f"{plain:.1f} ms", *(ratio(row, way, "median") for way in ways)])
        if known:
            first, peak = fused.get("first"), fused.get("peak_ratio")
            cells[-1].append(f"{first['plain_steps']:.0f} plain steps" if first else "")
            cells[-1].append(f"{peak:.2f}" if peak else "")
    return titles, cells


def of_layers(rows):
    base, ways = "weight gradient", ("fused", "direct", "gram", "rank1", "bmm + norm", "vmap")
    ways = [way for way in ways if any(way in row["ways"] for row in rows)]
    cells = []
    for row in rows:
        plain = f"{row['ways'][base]['us']:.1f} us"
        ratios = (ratio(row, way, "to_weight_gradient") for way in ways)
        cells.append([f"{row['layer']}, {row['dtype']}", plain, *ratios])
    return ["", base, *ways], cells


def ratio(row, way, key):
    figures = row["ways"].get(way, {})
    if figures.get("off") is not None and figures["off"] > WRONG:
        return "wrong"
    return f"{figures[key]:.2f}" if key in figures else ""


def zoo_table(result):
    text = [measured_on(result)]
    text += ["| model | step with norms | first step, in plain steps | memory | Opacus | layers |"]
    text += ["|---|---:|---:|---:|---:|---|"]
    for row in result["rows"]:
        median, first, peak = row["ratio"]["median"], row["first_step"], row["peak"]
        text += [f"| {row['model']} | {median:.2f} | {first:.1f} | {peak:.2f} | {best(row)} "
                 f"| {row['layers']} |"]  # fmt: skip
    return "\n".join(text)


def corpus_table(result):
    text = [f"Commit {result['commit'][:10]}, torch {result['torch']}."]
    verdicts = "exact", "refused", "wrong", "crashed", "left out"
    text += ["", f"| models | {' | '.join(verdicts)} |", f"|---|{'---:|' * len(verdicts)}"]
    for task, counts in result["counts"].items():
        numbers = (counts.get(verdict, 0) for verdict in verdicts)
        name = task if task == "timm" else f"transformers, {task.replace('_', ' ').lower()}"
        text += [f"| {name} | {' | '.join(map(str, numbers))} |"]
    return "\n".join(text)


def best(row):
    """The quicker of Opacus' two ways that is right; else what it does."""
    rivals = row["rivals"].values()
    right = [figures["median"] for figures in rivals if "median" in figures]
    wrong = [figures["off"] for figures in rivals if "off" in figures]
    if right:
        return f"{min(right):.2f}"
    return f"off by {100 * min(wrong):.1f} %" if wrong else "refuses" if rivals else ""
