"""Fits the constants of torchgradx/plan/cost.py to this machine: `make calibrate`.

For each algorithm the two rates that fit its times best: least squares of the relative error of
flop / rate + bytes / rate, on one thread. Then how well the model chooses with the constants that
it has. --write puts the fitted ones into torchgradx/plan/cost.py.

    python benchmarks/calibrate.py [--write]
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from facts import ROOT, facts
from fresh import rows_of
from grid import COUNT
from kernels import GEMM_FLOP, by_problem, regret, regrets
from tqdm import tqdm

from torchgradx.plan import cost

MODEL = ROOT / "torchgradx/plan/cost.py"
TABLE = re.compile(r"(?<=\nRATES: dict\[str, dict\[str, Rates\]\] = )\{.*?\n\}\n", re.DOTALL)
WORST = 10  # shown


def fit(costs: list[cost.Cost], seconds: list[float]) -> cost.Rates:
    terms = np.array([(c.flop, c.bytes) for c in costs]) / np.array(seconds)[:, None]
    inverse = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)[0]
    if inverse.min() <= 0:  # one of the two explains it all
        keep = int(np.argmax(inverse))
        best = terms[:, keep].sum() / (terms[:, keep] ** 2).sum()
        inverse = np.full(2, 1e-18)
        inverse[keep] = best
    return cost.Rates(float(1 / inverse[0]), float(1 / inverse[1]))


def fitted(rows: list[dict[str, Any]], gemm: float) -> dict[str, dict[str, cost.Rates]]:
    """By layer and algorithm; as it is in cost.py where nothing was measured."""
    made = {layer: dict(rates) for layer, rates in cost.RATES.items()}
    for layer, rates in made.items():
        problems = {p: t for p, t in by_problem(rows).items() if p.layer == layer}
        for name in rates:
            those = [(pure(name, p), gemm * t[name]) for p, t in problems.items() if name in t]
            those = [(c, seconds - cost.CALL_SECONDS) for c, seconds in those if c is not None]
            those = [(c, seconds) for c, seconds in those if seconds > cost.CALL_SECONDS]
            if those:
                costs, seconds = zip(*those, strict=True)
                rates[name] = fit(list(costs), list(seconds))
    return made


def pure(name: str, p: cost.Problem) -> cost.Cost | None:
    """What a run consists of; None where "fused" takes its norms from another algorithm."""
    if name == "weight_grad":
        return cost.weight_grad(p)
    parts = [part for part in cost.parts_of(p, name) if part[0] != "weight_grad"]
    if {part for part, _ in parts} != {name}:
        return None
    return sum((c for _, c in parts), cost.Cost(0, 0))


def table(rates: dict[str, dict[str, cost.Rates]]) -> str:
    lines = ["{"]
    for layer, by_name in rates.items():
        lines.append(f'    "{layer}": {{')
        for name, r in by_name.items():
            lines.append(f'        "{name}": Rates(flop={r.flop:.1e}, bytes={r.bytes:.1e}),')
        lines.append("    },")
    return "\n".join([*lines, "}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the cost model's constants.")
    parser.add_argument("--write", action="store_true", help="into torchgradx/plan/cost.py")
    parser.add_argument("--quick", action="store_true", help="a few problems, once each")
    options = parser.parse_args()
    quick = ["--quick"] if options.quick else []
    kernels = partial(rows_of, "kernels.py", *quick, heap="warm", threads=1)
    (roofs,) = kernels("roofs")
    problems = tqdm(kernels("grid"), total=0 if quick else COUNT, unit="problem")
    rows = list(chain.from_iterable(problems))
    made = table(fitted(rows, GEMM_FLOP / roofs["gemm_flop_per_second"]))
    machine = facts()["machine"]
    print(f"# {machine['cpu']}, {machine['capability']}, one thread\nRATES = {made}")
    print(f"regret with the constants of cost.py: {regret(rows)}")
    for ratio, p, chosen, best in regrets(rows)[:WORST]:
        print(f"  {ratio:.2f}  {chosen}, not {best}: {p}")
    if options.write:
        MODEL.write_text(TABLE.sub(lambda _: made, MODEL.read_text()))


if __name__ == "__main__":
    main()
