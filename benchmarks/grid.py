"""One layer's kernels, as the cost model sees them: problems, and what runs each algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchgradx import ops
from torchgradx.plan import cost

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
SLOWEST = 8  # times the fewest FLOP: an algorithm beyond is none that anyone would choose


class Case(NamedTuple):
    problem: cost.Problem
    runs: dict[str, Run]  # by algorithm, and the framework's "weight_grad"


def linear(n: int, t: int, i: int, o: int) -> Case:
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
    return worthwhile(cost.Problem("linear", n, t, i, o, weight_grad=True), runs)


def conv2d(n: int, c: int, o: int, side: int, kernel: int, groups: int) -> Case:
    x, b = torch.randn(n, c, side, side), torch.randn(n, o, side, side)
    weight = torch.randn(o, c // groups, kernel, kernel)
    pair, margin = (kernel, kernel), (kernel // 2, kernel // 2)
    geometry = (pair, (1, 1), margin, (1, 1), groups)

    def weight_grad() -> Tensor:
        arguments = (None, (1, 1), margin, (1, 1), False, (0, 0), groups, [False, True, False])
        return torch.ops.aten.convolution_backward(b, x, weight, *arguments)[1]

    i = c // groups * kernel * kernel
    problem = cost.Problem("conv2d", n, side * side, i, o // groups, groups, weight_grad=True)
    return worthwhile(problem, {
        "weight_grad": weight_grad,
        "gram": lambda: ops.conv2d_gram_sq_norms(x, b, *geometry, False),
        "direct": lambda: ops.conv2d_direct_sq_norms(x, b, *geometry, False),
        "fused": lambda: ops.conv2d_fused(x, b, *geometry, None, False),
    })  # fmt: skip


def worthwhile(problem: cost.Problem, runs: dict[str, Run]) -> Case:
    """Less a Gram whose FLOP are many times direct's."""
    flop = {name: cost.cost_of(problem, name).flop for name in ("gram", "direct")}
    if flop["gram"] > SLOWEST * flop["direct"]:
        del runs["gram"]
    return Case(problem, runs)


def cases() -> Iterator[Case]:
    for i, o in SIZES:
        for t in POSITIONS:
            yield linear(max(4, min(64, ELEMENTS // (t * max(i, o)))), t, i, o)
    for c, o, side, kernel, groups in IMAGES:
        n = max(4, min(32, ELEMENTS // (side * side * max(c, o))))
        yield conv2d(n, c, o, side, kernel, groups)


COUNT = len(SIZES) * len(POSITIONS) + len(IMAGES)


def alone(name: str, p: cost.Problem) -> cost.Cost:
    """FLOP and bytes of a run, which but for "fused" makes norms or the weight gradient alone."""
    if name == "weight_grad":
        return cost.weight_grad(p)
    parts = cost.parts_of(p, name)
    asked = (c for part, c in parts if part != "weight_grad")
    return sum(asked, cost.Cost(0, 0))
