"""What norms cost on a GPU: layers against their floors and the rivals, and whole training steps.

    python benchmarks/gpu.py [--out benchmarks/results/<gpu>] [--seconds 0.5] [--limit 600]

Ceilings first (a copy, GEMMs), then models.json and layers.json, written row by row. What fails is
a row that says so, as is one that --limit leaves no time for; the exit status is then 1. `--device
cpu --tiny` tries the same code where there is no GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from facts import facts
from gpu_clock import CpuClock, GpuClock, ceilings
from gpu_layers import RIVALS, measured
from gpu_models import MODELS
from gpu_plan import ROWS, TINY, Ceilings, Row
from rich.console import Console
from rich.table import Table
from timing import Budget, interleaved
from torch import Tensor
from tqdm import tqdm
from workloads import OURS, Workload, by_loop

from torchgradx import ops

RESULTS = Path(__file__).parent / "results"
OFF = 0.1  # of a bfloat16 model's norms: the rounding of activations, not that of sums
CHECKED = 2  # samples


class Bench:
    """The device, how it is timed and what it reaches."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.deadline = time.monotonic() + options.limit
        self.device = torch.device(options.device)
        self.tiny, self.budget = options.tiny, options.seconds
        self.clock = GpuClock(self.device) if self.device.type == "cuda" else CpuClock()
        self.peak = ceilings(self.clock, self.device, self.tiny)

    def rows(self, measures: Mapping[str, Callable[[], dict]]) -> Iterator[dict]:
        """One that runs out of memory or answers wrongly must not hide the others."""
        for name, measure in tqdm(measures.items(), unit="row"):
            try:
                if time.monotonic() > self.deadline:
                    raise TimeoutError("no time left under --limit")
                yield measure()
            except Exception as error:
                yield {"error": f"{name}: {type(error).__name__}: {error}"}

    def layers(self) -> Iterator[dict]:
        planned = TINY if self.tiny else ROWS
        return self.rows({f"{r.layer.name}, {r.dtype}": partial(self.layer, r) for r in planned})

    def layer(self, row: Row) -> dict:
        sizes = {letter: getattr(row.layer, letter) for letter in "ntio"}
        ways = measured(row, self.clock, self.peak, self.device, self.budget)
        return {"layer": row.layer.name, "dtype": row.dtype, **sizes, "ways": ways}

    def models(self) -> Iterator[dict]:
        return self.rows({name: partial(self.model, name) for name in MODELS})

    def model(self, name: str) -> dict:
        torch.manual_seed(0)
        w = placed(MODELS[name](self.tiny), self.device)
        ways = {way: make(w.copied()) for way, make in OURS.items()}
        few = w._replace(inputs=w.inputs[:CHECKED], targets=w.targets[:CHECKED])
        alone = by_loop(few)().float()
        off = {way: worst(step()[:CHECKED], alone) for way, step in ways.items()}
        if not all(e < OFF for e in off.values()):
            raise AssertionError(f"off the norms of single samples: {off}")
        steps = {way: finished(step, self.device) for way, step in ways.items()}
        plain = finished(lambda: w.step(w.model), self.device)
        plain()
        ratios = interleaved(plain, steps, Budget(4, 2 * self.budget))
        figures = {way: {**r._asdict(), "off": off[way]} for way, r in ratios.items()}
        return {"model": name, "dtype": "bfloat16", "ways": figures}


def placed(w: Workload, device: torch.device) -> Workload:
    """In bfloat16; images channels_last on a GPU, as cuDNN's tensor-core kernels want them."""
    inputs, model = w.inputs.to(device), w.model.to(device, torch.bfloat16)
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    if inputs.dim() == 4 and device.type == "cuda":
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    return w._replace(model=model, inputs=inputs, targets=w.targets.to(device))


def worst(norms: Tensor, expected: Tensor) -> float:
    return float(((norms.float() - expected) / expected).abs().max())


def finished(step: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A whole step, for the host's clock."""

    def waited() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return waited


def about(device: torch.device, peak: Ceilings) -> dict:
    """COMMIT, where the tree does not know its own."""
    known = facts()
    known["commit"] = os.environ.get("COMMIT") or known["commit"]
    known["ceilings"] = {"bytes_per_second": peak.bandwidth, "flop_per_second": peak.flop}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            **asked_of_the_driver("driver_version", "clocks.sm", "power.draw"),
        }
    return known


def asked_of_the_driver(*queries: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    answers = [answer.strip() for answer in said.partition("\n")[0].split(",")]
    return dict(zip(queries, answers, strict=False)) if len(answers) == len(queries) else {}


# Tables


def table_of_layers(rows: list[dict], peak: Ceilings) -> Table:
    reached = f"{peak.bandwidth / 1e12:.2f} TB/s"
    for dtype, flop in peak.flop.items():
        reached += f", {flop / 1e12:.0f} TFLOP/s in {dtype}"
    table = Table(title=f"layers: median us (x floor); the device reaches {reached}")
    table.add_column("layer")
    table.add_column("dtype")
    columns = ["fused", "direct", "gram", "rank1", *RIVALS]
    for column in ["fused / weight gradient", *columns]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            continue
        ways = row["ways"]
        cells = [row["layer"], row["dtype"], f"{ways['fused']['to_weight_gradient']:.2f}"]
        for way in columns:
            figures = ways.get(way, {})
            floor = f" [dim]({figures['to_floor']:.1f})[/]" if "to_floor" in figures else ""
            cells.append(f"{figures['us']:.0f}{floor}" if figures else "")
        table.add_row(*cells)
    return table


def table_of_models(rows: list[dict]) -> Table:
    table = Table(title="training steps: with norms / plain forward + backward, median (20%-80%)")
    table.add_column("model")
    for column in ("plain ms", *OURS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            continue
        plain = row["ways"]["fused"]["plain_milliseconds"]
        cells = [
            f"{r['median']:.2f} [dim]({r['low']:.2f}-{r['high']:.2f})[/]"
            for r in row["ways"].values()
        ]
        table.add_row(row["model"], f"{plain:.1f}", *cells)
    return table


def why_not(device: str) -> str:
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: `--device cpu --tiny` tries the code alone"
    return f"torchgradx._cuda does not serve: {ops.WHY_NOT_CUDA}" if ops.WHY_NOT_CUDA else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="What norms cost on a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing for each layer")
    parser.add_argument("--limit", type=float, default=600, help="no row begins after so many s")
    parser.add_argument("--out", type=Path, help="the folder for layers.json and models.json")
    options = parser.parse_args()
    if reason := why_not(options.device):
        sys.exit(f"benchmarks/gpu.py: {reason}")

    # float32 is exact for all, cuDNN included
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(options)
    known = about(bench.device, bench.peak)
    out = options.out
    if out is None and "gpu" in known:
        name = known["gpu"]["name"].lower()
        out = RESULTS / re.sub(r"[^a-z0-9]+", "-", name).strip("-")

    def kept(name: str, measured: Iterable[dict]) -> list[dict]:
        rows: list[dict] = []
        for row in measured:
            rows.append(row)
            if out:
                out.mkdir(parents=True, exist_ok=True)
                text = json.dumps({**known, "rows": rows}, indent=1)
                (out / f"{name}.json").write_text(text + "\n")
        return rows

    of_models = kept("models", bench.models())
    of_layers = kept("layers", bench.layers())
    console = Console()
    console.width = max(console.width, 160)
    console.print(table_of_layers(of_layers, bench.peak))
    console.print(table_of_models(of_models))
    errors = [row["error"] for row in of_layers + of_models if "error" in row]
    for error in errors:
        console.print(f"failed: {error}", markup=False)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
