"""Three pictures of a file of results, beside it: overhead, scaling, roofline.

python benchmarks/plots.py [results.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import readme

RESULTS = Path(__file__).parent / "results/cpu.json"
COLORS = {
    "fused": "#c1272d",
    "direct": "#e8902a",
    "gram": "#1f6fb4",
    "rank1": "#2a9d5c",
    "weight_grad": "#777777",
}
NAMES = {"weight_grad": "the framework's weight gradient, no norms"}
OURS = {  # way: color, marker, label
    "fused": ("#c1272d", "o", "torchgradx, training step with norms"),
    "clip": ("#e8902a", "s", "torchgradx, training step with clipping"),
    "scoring": ("#1f6fb4", "D", "torchgradx, norms alone (scoring)"),
}
RIVAL = ("#333333", "P", "the best rival whose norms are right")
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 130,
    "savefig.bbox": "tight",
}
Results = dict[str, Any]


def overhead(results: Results) -> plt.Figure:
    """A line for each workload: ours, the best rival by name, and the other rivals in gray."""
    rows, rivals = readme.rows(results), results["rivals"]
    figure, axes = plt.subplots(figsize=(11, 0.62 * len(rows) + 1.4))
    axes.axvline(1, color="black", linewidth=1)
    for k, row in enumerate(rows):
        axes.axhline(k, color="#dddddd", linewidth=0.8, zorder=0)
        best, failed = readme.best(results, row["workload"]), []
        for r in (r for r in rivals if r["workload"] == row["workload"]):
            if "median" in r and r["rival"] != best[0]:
                axes.plot(r["median"], k, "o", color="#bbbbbb", markersize=5, mfc="white")
            elif "median" not in r and r["verdict"] != "not installed":
                failed.append(f"{r['rival']} {r['verdict'].partition(':')[0]}")
        axes.plot(best[1], k, RIVAL[1], color=RIVAL[0], markersize=9)
        axes.annotate(
            f"{best[0]} {readme.figure(best[1])}x", (best[1], k), (0, -12), va="center",
            textcoords="offset points", ha="left", fontsize=8.5, color=RIVAL[0],
        )  # fmt: skip
        axes.annotate(
            "\n".join(failed), (1.01, k), xycoords=("axes fraction", "data"),
            va="center", fontsize=8, color="#666666",
        )  # fmt: skip
        for way, (color, marker, _) in OURS.items():
            if way in row["ratios"]:
                axes.plot(row["ratios"][way]["median"], k, marker, color=color, markersize=9)
    for color, marker, label in (*OURS.values(), RIVAL):
        axes.plot([], [], marker, color=color, markersize=9, label=label)
    axes.plot([], [], "o", color="#bbbbbb", mfc="white", label="other rivals")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [t for t in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [r["workload"] for r in rows])
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time over that of the same step without norms (warm heap, one thread)")
    axes.set_title("What per-sample gradient norms cost", loc="left", weight="bold", pad=48)
    axes.set_ylabel("workload, N samples in a batch")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, frameon=False, fontsize=8.5)
    return figure


def scaling(results: Results) -> plt.Figure:
    """Time against each size; one thread solid, two dashed; the predicted crossovers."""
    titles = {
        "T": "positions T  (N = 8, I = O = 256)",
        "N": "samples N  (T = 128, I = O = 256)",
        "I = O": "features I = O  (N = 16, T = 64)",
        "I = O, T = 1": "features I = O at T = 1  (N = 64)",
    }
    figure, grid = plt.subplots(2, 2, figsize=(11, 8))
    for axes, (axis, title) in zip(grid.flat, titles.items(), strict=True):
        rows = [r for r in results["scaling"] if r["axis"] == axis]
        for name, color in COLORS.items():
            for threads, line in ((1, "-"), (2, ":")):
                those = [r for r in rows if (r["algorithm"], r["threads"]) == (name, threads)]
                marker = "o" if threads == 1 else None
                xs, ys = [r["x"] for r in those], [r["ms"] for r in those]
                axes.plot(xs, ys, line, color=color, marker=marker, markersize=3.5, linewidth=1.6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.25)
        for x, before, after in results["crossovers"][axis]:
            if x > max(r["x"] for r in rows):
                continue
            axes.axvline(x, color="black", linestyle="--", linewidth=1)
            axes.annotate(
                f"predicted:\n{before} | {after}", (x, 0.99), xycoords=("data", "axes fraction"),
                ha="center", va="top", fontsize=8, backgroundcolor="white",
            )  # fmt: skip
        axes.set_xlabel(title)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_ylabel("ms")
    for name, color in COLORS.items():
        grid[0, 0].plot([], [], color=color, label=NAMES.get(name, name))
    grid[0, 0].plot([], [], "-", color="black", label="1 thread")
    grid[0, 0].plot([], [], ":", color="black", label="2 threads")
    figure.suptitle("How the cost of each algorithm grows, one Linear", x=0.06, ha="left",
                    weight="bold", y=1.0)  # fmt: skip
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="upper left",
                  bbox_to_anchor=(0.05, 0.985), ncols=7, frameon=False, fontsize=9)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


def roofline(results: Results) -> plt.Figure:
    """FLOP/s over the GEMM's, against FLOP a byte."""
    figure, grid = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    roofs = results["roofs"]
    ridge = roofs["gemm_flop_per_second"] / roofs["bytes_per_second"]
    for axes, layer in zip(grid, ("linear", "conv2d"), strict=True):
        rows = [r for r in results["kernels"] if r["layer"] == layer]
        for name, color in reversed(COLORS.items()):
            those = [r for r in rows if r["algorithm"] == name]
            xs = [r["flop"] / r["bytes"] for r in those]
            ys = [r["flop"] / (2 * 512**3) / r["median"] for r in those]
            small = name == "weight_grad"
            axes.plot(xs, ys, "x" if small else "o", color=color, markersize=5, alpha=0.85,
                      label=NAMES.get(name, name))  # fmt: skip
        high = 600
        axes.plot([0.3, ridge, high], [0.3 / ridge, 1, 1], color="black", linewidth=1.2)
        axes.set_xlim(0.3, high)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(alpha=0.25)
        axes.set_title({"linear": "Linear", "conv2d": "Conv2d"}[layer], fontsize=10)
        axes.set_xlabel("FLOP a byte of the operands")
        axes.minorticks_off()
    labels = {0.01: "1%", 0.03: "3%", 0.1: "10%", 0.3: "30%", 1: "100%"}
    grid[0].set_yticks(list(labels), list(labels.values()))
    grid[0].set_ylabel("of a GEMM's FLOP/s")
    rate = f"{roofs['gemm_flop_per_second'] / 1e9:.0f} GFLOP/s"
    read = f"{roofs['bytes_per_second'] / 1e9:.0f} GB/s"
    title = f"Kernels under their roof: a GEMM at {rate}, a read of 1 MiB at {read}, one thread"
    figure.suptitle(title, x=0.06, ha="left", weight="bold")  # fmt: skip
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(0.05, 0.95),
                  ncols=5, frameon=False, fontsize=9)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    return figure


def draw(results: Results, folder: Path) -> list[Path]:
    mpl.use("Agg")
    made = []
    with mpl.rc_context(STYLE):
        for plot in (overhead, scaling, roofline):
            file = folder / f"{plot.__name__}.png"
            figure = plot(results)
            figure.savefig(file, metadata={"Software": None})
            plt.close(figure)
            made.append(file)
    return made


if __name__ == "__main__":
    file = Path(*(sys.argv[1:] or [RESULTS]))
    draw(json.loads(file.read_text()), file.parent)
