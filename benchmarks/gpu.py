"""What norms cost on a GPU: whole training steps, and layers against their floors and the rivals.

    python benchmarks/gpu.py [models] [layers] [firststep] [--limit 150] [--profile]

Writes models.json, layers.json or firststep.json row by row into --out (benchmarks/results/<gpu>).
Each model runs in a process of its own. What fails is a row with an "error", what --limit leaves no
time for is "skipped"; after an error the exit status is 1. `--device cpu --tiny` tries the same
code where there is no GPU; its times mean nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a check that spoils no fork

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from facts import facts
from gpu_clock import CpuClock, GpuClock, ceilings
from gpu_layers import RIVALS, measured
from gpu_models import MODELS
from gpu_plan import ROWS, TINY, Ceilings
from gpu_profile import text_of
from gpu_steps import WAYS, Settings, model_messages
from isolated import Message, Processes, Task, said
from rich.console import Console
from rich.table import Table

from torchgradx import extension

RESULTS = Path(__file__).parent / "results"
PARTS = ("models", "layers", "firststep")
PACKAGES = (
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")),
    *("timm", "opacus.grad_sample", "opacus.validators"),
)
NO_TIME = "no time left under --limit"
ANSWERS = 60.0  # seconds for a child that measures ceilings


# What runs in child processes: the parent never touches CUDA


def known_messages(device_name: str, tiny: bool) -> Iterator[Message]:
    """Yield what the results are of: commit, versions, machine, ceilings."""
    if reason := why_not(device_name):
        yield {"error": reason}
        return
    device = torch.device(device_name)
    clock = clock_of(device)
    peak = ceilings(clock, device, tiny)
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
    yield {"known": known}


def why_not(device: str) -> str:
    if device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: `--device cpu --tiny` tries the code alone"
    why = extension.WHY_NOT_CUDA
    return f"torchgradx._cuda does not serve: {why}" if why else ""


def asked_of_the_driver(*queries: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    answers = [part.strip() for part in answer.partition("\n")[0].split(",")]
    return dict(zip(queries, answers, strict=False)) if len(answers) == len(queries) else {}


def clock_of(device: torch.device) -> Any:
    return GpuClock(device) if device.type == "cuda" else CpuClock()


def exact_float32() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def layer_messages(
    begin: int,
    device_name: str,
    tiny: bool,
    seconds: float,
    rivals: bool,
    peak: Ceilings,
    deadline: float,
) -> Iterator[Message]:
    """Yield one row for each layer from number `begin` on."""
    exact_float32()
    device = torch.device(device_name)
    clock = clock_of(device)
    for row in planned(tiny)[begin:]:
        layer = row.layer
        about = {"layer": layer.name, "dtype": row.dtype}
        if time.monotonic() > deadline:
            yield {**about, "skipped": NO_TIME}
            continue
        try:
            ways = measured(row, clock, peak, device, seconds, rivals)
        except Exception as error:
            yield {**about, "error": said(error)}
        else:
            yield {**about, **{letter: getattr(layer, letter) for letter in "ntio"}, "ways": ways}
        if device.type == "cuda":
            torch.cuda.empty_cache()


def planned(tiny: bool) -> list:
    return TINY if tiny else ROWS


# The parent


class Bench:
    """Runs the parts, and keeps their rows in files while they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begin = time.monotonic()
        self.deadline = self.begin + options.limit
        self.processes = Processes()
        self.known = self.facts_of_the_device()
        out = options.out
        if out is None and "gpu" in self.known:
            name = self.known["gpu"]["name"].lower()
            out = RESULTS / re.sub(r"[^a-z0-9]+", "-", name).strip("-")
        self.out = out

    def facts_of_the_device(self) -> dict:
        task = Task(known_messages, (self.options.device, self.options.tiny))
        for method in ("fork", "spawn"):
            self.processes = Processes(method)
            first = next(self.processes.run(task, time.monotonic() + ANSWERS))
            if "known" in first:
                return first["known"]
        sys.exit(f"benchmarks/gpu.py: {first['error']}")

    def keep(self, name: str, rows: list[dict]) -> None:
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self.known, "rows": rows}, indent=1)
            (self.out / f"{name}.json").write_text(text + "\n")

    def show(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def layers(self) -> list[dict]:
        o, rows = self.options, []
        peak = Ceilings(*self.known["ceilings"].values())
        count = len(planned(o.tiny))
        while len(rows) < count:
            arguments = (len(rows), o.device, o.tiny, o.seconds, o.rivals, peak, self.deadline)
            for row in self.processes.run(Task(layer_messages, arguments), self.deadline):
                if "layer" not in row:  # the process died: the next one goes on behind this row
                    row = {"layer": planned(o.tiny)[len(rows)].layer.name, **row}
                rows.append(row)
                self.keep("layers", rows)
                self.show(line_of_layer(row))
        return rows

    def models(self, part: str) -> list[dict]:
        """`part` is "models", or "firststep" for the first steps alone."""
        o, rows = self.options, []
        names = [name for name in MODELS if re.search(o.models, name)]
        ways = tuple(way for way in WAYS if re.fullmatch(o.ways, way))
        if part == "firststep":
            ways = ("fused",)
        settings = Settings(o.device, o.tiny, 2 * o.seconds, ways, part == "firststep", o.profile)
        for name in names:
            row: dict[str, Any] = {"model": name, "dtype": MODELS[name].regime}
            rows.append(row)
            if needs := missing(MODELS[name].needs):
                row["skipped"] = f"{needs} is not installed"
            elif time.monotonic() > self.deadline:
                row["skipped"] = NO_TIME
            else:
                self.model(row, settings)
            self.keep(part, rows)
            self.show(line_of_model(row))
        return rows

    def model(self, row: dict, settings: Settings) -> None:
        """Fill in the row as messages come: what was measured before a crash stays."""
        row["ways"] = {}
        profiles: dict[str, dict] = {}
        deadline = min(self.deadline, time.monotonic() + self.options.each)
        task = Task(model_messages, (row["model"], settings, deadline))
        for message in self.processes.run(task, deadline):
            if "way" in message:
                row["ways"][message.pop("way")] = message
            elif "profile" in message:
                profiles[message["profile"]] = message["kernels"]
            elif trace := message.pop("traceback", None):
                print(trace, file=sys.stderr)
                row |= message
            else:
                row |= message
        if profiles:
            row["kernels"] = {
                way: {
                    "launches": sum(int(count) for count, _ in kernels.values()),
                    "busy_ms": round(sum(us for _, us in kernels.values()) / 1e3, 4),
                }
                for way, kernels in profiles.items()
            }
            if self.out:
                folder = self.out / "profiles"
                folder.mkdir(parents=True, exist_ok=True)
                file = re.sub(r"[^a-z0-9]+", "-", row["model"].lower()).strip("-")
                (folder / f"{file}.txt").write_text(text_of(row["model"], profiles))


def missing(package: str) -> str:
    """Return the package's name if it does not import, for whatever reason."""
    with suppress(Exception):
        if package:
            import_module(package)
        return ""
    return package


def line_of_layer(row: dict) -> str:
    if "ways" not in row:
        return f"{row['layer']}: {row.get('error') or row['skipped']}"
    found = (f"{way} {f['us']:.0f}" for way, f in row["ways"].items())
    return f"{row['layer']}, {row['dtype']}: {', '.join(found)} us"


def line_of_model(row: dict) -> str:
    parts = [row["model"]]
    if "plain" in row:
        parts.append(f"plain {row['plain']['ms']:.1f} ms")
    for way, f in row.get("ways", {}).items():
        text = f.get("error") or f.get("skipped") or ""
        if "median" in f:
            text = f"{f['median']:.2f}"
        if "first" in f:
            text += f" (first {f['first']['plain_steps']:.0f} steps, {f['first']['backwards']} bw)"
        parts.append(f"{way} {text[:120]}")
    parts += [row[key] for key in ("error", "skipped") if key in row]
    return "; ".join(parts)


# Tables


def table_of_layers(rows: list[dict], known: dict) -> Table:
    peak = known["ceilings"]
    reached = f"{peak['bytes_per_second'] / 1e12:.2f} TB/s"
    for dtype, flop in peak["flop_per_second"].items():
        reached += f", {flop / 1e12:.0f} TFLOP/s in {dtype}"
    table = Table(title=f"layers: median us (x floor); the device reaches {reached}")
    table.add_column("layer")
    table.add_column("dtype")
    columns = ["fused", "direct", "gram", "rank1", *RIVALS]
    for column in ["fused / weight gradient", "norms / weight gradient", *columns]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ways = row.get("ways")
        if not ways:
            continue
        norms = [ways[w]["to_weight_gradient"] for w in ("direct", "gram", "rank1") if w in ways]
        cells = [row["layer"], row["dtype"], f"{ways['fused']['to_weight_gradient']:.2f}"]
        cells.append(f"{min(norms):.2f}" if norms else "")
        for way in columns:
            figures = ways.get(way, {})
            floor = f" [dim]({figures['to_floor']:.1f})[/]" if "to_floor" in figures else ""
            cells.append(f"{figures['us']:.0f}{floor}" if figures else "")
        table.add_row(*cells)
    return table


def table_of_models(rows: list[dict]) -> Table:
    title = "training steps: with norms / plain forward + backward, median (20%-80%)"
    table = Table(title=title)
    ways = [way for way in WAYS if any("median" in r.get("ways", {}).get(way, {}) for r in rows)]
    for column in ("model", "plain ms", *ways, "first step", "memory"):
        table.add_column(column, justify="right" if column != "model" else "left")
    for row in rows:
        if "plain" not in row:
            continue
        figures = [row["ways"].get(way, {}) for way in ways]
        cells = [
            f"{f['median']:.2f} [dim]({f['p20']:.2f}-{f['p80']:.2f})[/]" if "median" in f else "-"
            for f in figures
        ]
        fused = row["ways"].get("fused", {})
        first, peak = fused.get("first"), fused.get("peak_ratio")
        cells.append(
            f"{first['plain_steps']:.0f} steps, {first['seconds']:.2f} s, {first['backwards']} bw"
            if first
            else "-"
        )
        cells.append(f"{peak:.2f}" if peak else "-")
        table.add_row(row["model"], f"{row['plain']['ms']:.1f}", *cells)
    return table


def unmeasured(rows: list[dict], kind: str) -> list[str]:
    """Return lines for what has an error or was skipped (`kind`)."""
    lines = []
    for row in rows:
        name = row.get("model") or row["layer"]
        lines += [f"{name}: {row[kind]}"] if kind in row else []
        for way, figures in row.get("ways", {}).items():
            lines += [f"{name}, {way}: {figures[kind]}"] if kind in figures else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What norms cost on a GPU.")
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), help="models and layers if none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing for each layer")
    parser.add_argument("--limit", type=float, default=600, help="no row begins after so many s")
    parser.add_argument("--each", type=float, default=30, help="seconds for one model at most")
    parser.add_argument("--models", default="", help="a pattern: the models to run")
    parser.add_argument("--ways", default=".*", help="a pattern of whole names: the ways to run")
    rivals = argparse.BooleanOptionalAction
    parser.add_argument("--rivals", action=rivals, default=True, help="gradients by sample, too")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each model")
    parser.add_argument("--out", type=Path, help="the folder for the results")
    options = parser.parse_args()
    for package in PACKAGES:  # once, for all processes to come
        missing(package)

    bench = Bench(options)
    tables, rows = [], []
    for part in options.parts or ["models", "layers"]:
        if part == "layers":
            found = bench.layers()
            tables.append(table_of_layers(found, bench.known))
        else:
            found = bench.models(part)
            tables.append(table_of_models(found))
        rows += found
    console = Console()
    console.width = max(console.width, 200)
    for table in tables:
        console.print(table)
    for kind in ("skipped", "error"):
        for line in unmeasured(rows, kind):
            console.print(f"{kind}: {line}", markup=False)
    sys.exit(bool(unmeasured(rows, "error")))


if __name__ == "__main__":
    main()
