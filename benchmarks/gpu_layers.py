"""Measures one layer: ours and the rivals in the same rounds, each from a cold cache.

Every way is first held against float64 sums of two samples. Convolutions are channels_last, as
cuDNN's tensor-core kernels want them.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from gpu_clock import Clock
from gpu_plan import Ceilings, Layer, Row
from torch import Tensor
from torch.func import vjp, vmap

from torchgradx import ops

Step = Callable[[], Tensor | None]  # sq_norms [N], if it makes them
HELD = 2**31  # bytes of per-sample gradients that a rival may hold at a time
OFF = {"bfloat16": 2e-2, "float32": 1e-4}  # of any norm: a rival's gradients are rounded to dtype
FEWEST, MOST = 3, 50  # rounds


# Ways: (layer, x, g) -> a step. x [N, T, I] or [N, C, H, W], g [N, T, O] or [N, O, H', W']


def operands(row: Row, device: torch.device) -> tuple[Tensor, Tensor]:
    layer, conv = row.layer, row.layer.conv
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        drawn = torch.randn(shape, device=device).to(getattr(torch, row.dtype))
        return drawn.contiguous(memory_format=torch.channels_last) if conv else drawn

    if conv is None:
        return random(layer.n, layer.t, layer.i), random(layer.n, layer.t, layer.o)
    side = round(layer.t**0.5)
    x = random(layer.n, conv.channels, conv.size, conv.size)
    return x, random(layer.n, layer.o, side, side)


def ours(way: str, layer: Layer, x: Tensor, g: Tensor) -> Step:
    c = layer.conv
    if c is None:
        if way == "fused":
            return lambda: ops.linear_weight_grad(x, g)[1]
        return lambda: ops.linear_sq_norms(x, g, algorithm=way)
    geometry = {"stride": c.stride, "padding": c.padding}
    if way == "fused":
        return lambda: ops.conv2d_weight_grad(x, g, c.kernel, **geometry)[1]
    return lambda: ops.conv2d_sq_norms(x, g, c.kernel, **geometry, algorithm=way)


def rows(layer: Layer, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """[N, T, I], [N, T, O]"""
    c = layer.conv
    if c is None:
        return x, g
    patches = F.unfold(x, c.kernel, padding=c.padding, stride=c.stride)
    return patches.mT, g.flatten(2).mT


def held_at_once(layer: Layer, x: Tensor) -> int:
    return max(1, min(layer.n, HELD // (layer.i * layer.o * x.itemsize)))


def by_weight_gradient(layer: Layer, x: Tensor, g: Tensor) -> Step:
    """The batch's alone, no norms: what cuBLAS or cuDNN makes of it."""
    c = layer.conv
    if c is None:
        return lambda: (g.flatten(0, 1).mT @ x.flatten(0, 1), None)[1]
    weight = x.new_empty(layer.o, c.channels, c.kernel, c.kernel)
    weight = weight.contiguous(memory_format=torch.channels_last)
    geometry = [c.stride] * 2, [c.padding] * 2, [1, 1], False, [0, 0], 1
    only_weight = [False, True, False]
    backward = torch.ops.aten.convolution_backward.default
    return lambda: (backward(g, x, weight, None, *geometry, only_weight), None)[1]


def by_bmm(layer: Layer, x: Tensor, g: Tensor) -> Step:
    chunk = held_at_once(layer, x)

    def step() -> Tensor:
        parts = zip(x.split(chunk), g.split(chunk), strict=True)
        pairs = (rows(layer, *part) for part in parts)
        return torch.cat([(b.mT @ a).flatten(1).float().square().sum(1) for a, b in pairs])

    return step


def by_vmap(layer: Layer, x: Tensor, g: Tensor) -> Step:
    c = layer.conv
    shape = (layer.o, c.channels, c.kernel, c.kernel) if c else (layer.o, layer.i)
    weight = x.new_zeros(shape)

    def forward(w: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(x, w, None, c.stride, c.padding) if c else F.linear(x, w)

    def sq_norm(x: Tensor, g: Tensor) -> Tensor:
        pull = vjp(lambda w: forward(w, x[None]), weight)[1]
        return pull(g[None])[0].float().square().sum()

    norms = vmap(sq_norm, chunk_size=held_at_once(layer, x))
    return lambda: norms(x, g)


BASE = "weight gradient"
RIVALS: dict[str, Callable[[Layer, Tensor, Tensor], Step]] = {
    BASE: by_weight_gradient,
    "bmm + norm": by_bmm,
    "vmap": by_vmap,
}


# One row


def measured(
    row: Row,
    clock: Clock,
    peak: Ceilings,
    device: torch.device,
    budget: float,
    rivals: bool = True,
) -> dict:
    """Return {way: figures}; budget in seconds for all ways together.

    The framework's own weight gradient is always among them, the other rivals if asked for.
    """
    layer = row.layer
    x, g = operands(row, device)
    steps = {way: ours(way, layer, x, g) for way in layer.ways()}
    others = RIVALS if rivals else {BASE: RIVALS[BASE]}
    steps |= {name: make(layer, x, g) for name, make in others.items()}
    off = {way: error(step(), layer, x, g) for way, step in steps.items()}
    wrong = {way: e for way, e in off.items() if not (e is None or e < OFF[row.dtype])}
    if wrong:
        raise AssertionError(f"{layer.name}: off the float64 norms: {wrong}")
    memory = {way: clock.extra_bytes(step) for way, step in steps.items()}
    times = rounds(clock, steps, budget)
    plain = times[BASE]
    figures = {}
    for way, taken in times.items():
        low, *_, high = quantiles(taken, n=5, method="inclusive")
        ratio = median(t / p for t, p in zip(taken, plain, strict=True))
        figures[way] = {
            "us": round(1e6 * median(taken), 2),
            "p20_us": round(1e6 * low, 2),
            "p80_us": round(1e6 * high, 2),
            "to_weight_gradient": round(ratio, 4),
            "extra_mib": round(memory[way] / 2**20, 2),
            "off": off[way],
        }
        if way in layer.ways() or way == BASE:
            floor = peak.floor(layer, way, row.dtype)
            figures[way]["floor_us"] = round(1e6 * floor, 2)
            figures[way]["to_floor"] = round(median(taken) / floor, 3)
            figures[way]["tflops"] = round(layer.flop(way) / median(taken) / 1e12, 2)
    return figures


def error(sq_norms: Tensor | None, layer: Layer, x: Tensor, g: Tensor) -> float | None:
    """Of the first norms, relative to float64's."""
    if sq_norms is None:
        return None
    a, b = rows(layer, x[:2].double(), g[:2].double())
    expected = (b.mT @ a).flatten(1).norm(dim=1)
    return float(((sq_norms[:2].double().sqrt() - expected) / expected).abs().max())


def rounds(clock: Clock, steps: dict[str, Step], budget: float) -> dict[str, list[float]]:
    once = sum(clock.seconds(step) for step in steps.values())
    count = min(max(int(budget / once), FEWEST), MOST)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(count):
        for way, step in steps.items():
            times[way].append(clock.seconds(step))
    return times
