"""Measures the kernels and prints the constants of torchgradx/cost.py.

For each algorithm the two rates that fit its times best: least squares of the relative error of
flop / rate + bytes / rate. Then how well the model chooses: for each problem the time of what it
chooses over the time of the fastest.

    python benchmarks/calibrate.py [--layer linear|conv2d] [--rounds 15]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from torchgradx import cost, ops

Run = Callable[[], object]

SIZES = [(64, 64), (256, 256), (512, 512), (1024, 256), (768, 3072)]  # I, O
POSITIONS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
IMAGES = [  # C, O, side, kernel, groups
    (3, 32, 32, 3, 1),
    (32, 32, 64, 3, 1),
    (32, 64, 16, 3, 1),
    (64, 64, 8, 3, 1),
    (128, 128, 8, 3, 1),
    (256, 256, 4, 3, 1),
    (512, 512, 4, 3, 1),
    (512, 512, 2, 3, 1),
    (64, 128, 16, 1, 1),
    (256, 512, 4, 1, 1),
    (64, 64, 16, 3, 64),
    (64, 64, 16, 3, 8),
]
ELEMENTS = 1 << 22  # of the larger operand, or of N gradients: N follows, from 4 to 64


def linear_runs(t: int, i: int, o: int) -> tuple[cost.Problem, dict[str, Run]]:
    n = max(4, min(64, ELEMENTS // (max(t, 1) * max(i, o))))
    a, b = torch.randn(n, t, i), torch.randn(n, t, o)
    rows, grads = a.view(-1, i), b.view(-1, o)
    runs: dict[str, Run] = {
        "weight_grad": lambda: grads.t() @ rows,
        "gram": lambda: ops.gram_sq_norms(a, b, False),
        "direct": lambda: ops.direct_sq_norms(a, b, False),
        "fused": lambda: ops.linear_fused(a, b, None, False),
    }
    if t == 1:
        runs["rank1"] = lambda: ops.rank1_sq_norms(a, b, False)
    return cost.Problem("linear", n, t, i, o, weight_grad=True), runs


def conv2d_runs(
    c: int, o: int, side: int, kernel: int, groups: int
) -> tuple[cost.Problem, dict[str, Run]]:
    n = max(4, min(32, ELEMENTS // (side * side * max(c, o))))
    x, b = torch.randn(n, c, side, side), torch.randn(n, o, side, side)
    weight = torch.randn(o, c // groups, kernel, kernel)
    pair, margin = (kernel, kernel), (kernel // 2, kernel // 2)
    geometry = (pair, (1, 1), margin, (1, 1), groups)

    def weight_grad() -> Tensor:
        arguments = (None, (1, 1), margin, (1, 1), False, (0, 0), groups, [False, True, False])
        return torch.ops.aten.convolution_backward(b, x, weight, *arguments)[1]

    i = c // groups * kernel * kernel
    problem = cost.Problem("conv2d", n, side * side, i, o // groups, groups, weight_grad=True)
    return problem, {
        "weight_grad": weight_grad,
        "gram": lambda: ops.conv2d_gram_sq_norms(x, b, *geometry, False),
        "direct": lambda: ops.conv2d_direct_sq_norms(x, b, *geometry, False),
        "fused": lambda: ops.conv2d_fused(x, b, *geometry, None, False),
    }


def interleaved_medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds of this thread's processor time: what other processes take does not count. The runs
    take turns, so that a slow spell of the machine meets them all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            start = time.thread_time()
            run()
            if turn >= 2:  # the first two warm caches and buffers
                times[name].append(time.thread_time() - start)
    return {name: float(np.median(t)) for name, t in times.items()}


def fit(costs: list[cost.Cost], seconds: list[float]) -> cost.Rates:
    terms = np.array([(c.flop, c.bytes) for c in costs]) / np.array(seconds)[:, None]
    inverse = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)[0]
    if inverse.min() <= 0:  # one of the two explains it all
        keep = int(np.argmax(inverse))
        best = terms[:, keep].sum() / (terms[:, keep] ** 2).sum()
        inverse = np.full(2, 1e-18)
        inverse[keep] = best
    return cost.Rates(float(1 / inverse[0]), float(1 / inverse[1]))


def alone(name: str, p: cost.Problem) -> cost.Cost | None:
    """What a measured run consists of; None where it mixes two algorithms."""
    if name == "weight_grad":
        return cost.weight_grad(p)
    algorithm = cost.ALGORITHMS[name]
    if name == "fused":
        return algorithm.cost(p) if {part for part, _ in algorithm.parts(p)} == {"fused"} else None
    return algorithm.cost(replace(p, weight_grad=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layer", choices=["linear", "conv2d"], default="linear")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.layer == "linear":
        made = [linear_runs(t, i, o) for i, o in SIZES for t in POSITIONS]
    else:
        made = [conv2d_runs(*image) for image in IMAGES]
    measured = [(problem, interleaved_medians(runs, options.rounds)) for problem, runs in made]

    print(
        f"# {options.layer}, {platform.machine()}, torch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}, native = {ops.NATIVE}, one thread"
    )
    for name in ("weight_grad", *cost.ALGORITHMS):
        those = [(alone(name, p), times[name]) for p, times in measured if name in times]
        if those := [(c, seconds) for c, seconds in those if c is not None]:
            rates = fit([c for c, _ in those], [seconds for _, seconds in those])
            print(f'"{name}": Rates(flop={rates.flop:.1e}, bytes={rates.bytes:.1e}),')

    for weight_grad in (False, True):
        print(f"\nweight_grad = {weight_grad}: us, * fastest, < chosen; regret")
        for problem, times in measured:
            report(problem, times, weight_grad)


def report(problem: cost.Problem, times: dict[str, float], weight_grad: bool) -> None:
    p = replace(problem, weight_grad=weight_grad)
    plan = cost.plan(p)
    seconds = {
        name: times[name] + (times["weight_grad"] if weight_grad and name != "fused" else 0)
        for name in cost.ALGORITHMS
        if name in times and name not in plan.refused
    }
    best = min(seconds, key=seconds.__getitem__)
    chosen = plan.algorithm if plan.algorithm in seconds else best
    cells = [
        f"{name} {s * 1e6:9.0f}{'*' if name == best else ' '}{'<' if name == chosen else ' '}"
        for name, s in seconds.items()
    ]
    where = f"N={p.n} T={p.t} I={p.i} O={p.o} g={p.groups}"
    print(
        f"{where:<36} {'  '.join(cells)}  {seconds[chosen] / seconds[best]:.2f}"
        f"  of plain {seconds[chosen] / times['weight_grad']:.2f}"
    )


if __name__ == "__main__":
    main()
