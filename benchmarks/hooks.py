"""What an attached layer costs a step where its arithmetic is next to nothing: microseconds.

A stack of DEPTH tiny layers less a stack of one, attached less plain: what a step costs whatever
its layers has gone. With fused=False the norms are in it, which have kernels of their own there.

    python benchmarks/hooks.py [--quick]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fresh import say
from timing import Budget, interleaved
from torch import nn
from workloads import OURS, Workload

DEPTH = 32
WAYS = ("fused", "fused=False")
LEAST, FIRST_STEPS = Budget(1), 8  # the first ones prove the structure
OFTEN = Budget(12, 3)


class Kind(NamedTuple):
    layer: Callable[[], nn.Module]
    size: tuple[int, ...]  # of its input and output


KINDS = {
    "Linear, T=1": Kind(partial(nn.Linear, 16, 16), (8, 16)),
    "Linear, T=3": Kind(partial(nn.Linear, 16, 16), (8, 3, 16)),
    "Conv2d 1x1": Kind(partial(nn.Conv2d, 8, 8, 1), (8, 8, 4, 4)),
    "Conv2d 3x3": Kind(partial(nn.Conv2d, 4, 4, 3, padding=1), (8, 4, 4, 4)),
    "LayerNorm": Kind(partial(nn.LayerNorm, 16), (8, 3, 16)),
    "RMSNorm": Kind(partial(nn.RMSNorm, 16), (8, 3, 16)),
    "GroupNorm": Kind(partial(nn.GroupNorm, 2, 8), (8, 8, 4, 4)),
}


def cost(kind: Kind, budget: Budget) -> dict[str, Any]:
    """Of one layer in a step: plain, and what each way adds."""
    deep, one = stack(kind, DEPTH, budget), stack(kind, 1, budget)
    a_layer = {way: (deep[way] - one[way]) / (DEPTH - 1) for way in deep}
    rounded = {way: round(microseconds, 2) for way, microseconds in a_layer.items()}
    return {"plain_us": rounded.pop("plain"), "extra_us": rounded}


def stack(kind: Kind, depth: int, budget: Budget) -> dict[str, float]:
    """Microseconds of a step: the plain one's, and what each way adds to it."""
    torch.manual_seed(0)
    x = torch.randn(kind.size)
    model = nn.Sequential(*(kind.layer() for _ in range(depth)))
    w = Workload(model, x, torch.randn(kind.size), F.mse_loss)
    plain, steps = partial(w.step, w.model), {way: OURS[way](w.copied()) for way in WAYS}
    for step in (plain, *steps.values()):
        for _ in range(FIRST_STEPS):
            step()
    ratios = interleaved(plain, steps, budget)
    times = {way: 1e3 * (r.median - 1) * r.plain_milliseconds for way, r in ratios.items()}
    return {"plain": 1e3 * ratios[WAYS[0]].plain_milliseconds, **times}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name, kind in KINDS.items():
        say({"layer": name, **cost(kind, LEAST if options.quick else OFTEN)})


if __name__ == "__main__":
    main()
