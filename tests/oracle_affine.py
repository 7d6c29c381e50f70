"""The oracle for layers whose parameters act element by element: the framework's own layer in
float64, one sample at a time.

Operands are [N, T, G, K], as the operators have them. Integers come with integer statistics, which
no layer would have, and are exact in float32; Gaussians with a layer's true statistics.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from oracle import Kind, _sq_norm, accumulation_epsilon, assert_within, draw, sum_of_squares
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5
LAYERS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", "scale", "prelu")
FROZEN = ("batch_norm", "scale", "prelu")  # nothing depends on the input's statistics


class Affine(NamedTuple):
    layer: str
    n: int
    t: int
    g: int
    k: int

    @property
    def over(self) -> tuple[int, ...]:
        """What the statistics are of, as dimensions of [N, T, G, K]"""
        return (1, 3) if self.layer == "group_norm" else (3,)


class Operands(NamedTuple):
    x: Tensor  # [N, T, G, K]
    g: Tensor  # [N, T, G, K]
    weight: Tensor  # [G, K]
    mean: Tensor | None
    rstd: Tensor | None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@cache
def operands(problem: Affine, dtype: torch.dtype, kind: Kind) -> Operands:
    layer, n, t, g, k = problem
    wide = _wide(dtype)
    x, b = draw((n, t, g, k), dtype, kind, 0), draw((n, t, g, k), dtype, kind, 1)
    if kind == "gaussians" and layer != "prelu":
        x = (x + 1.5).to(dtype)
    weight = draw((g, k), dtype, "gaussians", 2)
    if layer in ("scale", "prelu"):
        return Operands(x, b, weight, None, None)
    shape = {"batch_norm": (1, 1, g), "group_norm": (n, 1, g)}.get(layer, (n, t, 1))
    if kind == "integers" or layer == "batch_norm":
        mean = draw(shape, wide, kind, 3)
        rstd = 2.0 ** draw(shape, wide, "integers", 4)
    else:
        mean, rstd = statistics(x, layer, problem.over)
    return Operands(x, b, weight, None if layer == "rms_norm" else mean.to(wide), rstd.to(wide))


def statistics(x: Tensor, layer: str, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of [N, T, G, K], in float64"""
    mean = x.double().mean(over, keepdim=True) if layer != "rms_norm" else torch.zeros(1)
    square = (x.double() - mean).square().mean(over, keepdim=True)
    mean, square = torch.broadcast_tensors(mean, square)
    return mean[..., 0], (square + EPS).rsqrt()[..., 0]


def forward(layer, x, weight, bias, mean, rstd):
    """One sample [T, G, K] -> [T, G, K], with the layer's own statistics if these are None"""
    t, g, k = x.shape
    if layer == "prelu":
        return torch.where(x > 0, x, x * weight)
    if layer in FROZEN or rstd is not None:
        centred = x if mean is None else x - mean[..., None]
        return (centred if rstd is None else centred * rstd[..., None]) * weight + bias
    if layer == "group_norm":
        y = torch.group_norm(x.reshape(t, g * k).T[None], g, weight.flatten(), bias.flatten(), EPS)
        return y[0].T.reshape(t, g, k)
    rows = x.reshape(t, k)
    if layer == "layer_norm":
        return F.layer_norm(rows, (k,), weight[0], bias[0], EPS).reshape(x.shape)
    return (F.rms_norm(rows, (k,), weight[0], EPS) + bias[0]).reshape(x.shape)


@dataclass(frozen=True)
class Truth:
    terms: int  # of a parameter's gradient
    weight: Tensor  # [N, G, K]
    bias: Tensor
    weight_magnitude: Tensor  # [N, G, K]: sum_t |g| (|x| + |mean|) rstd
    bias_magnitude: Tensor
    input: Tensor  # [N, T, G, K]: grad_input
    input_magnitude: Tensor

    def sq_norms(self) -> Tensor:
        return torch.stack([_sq_norm(self.weight), _sq_norm(self.bias)])

    def allowance(self, dtype: torch.dtype) -> Tensor:
        """[2, N]: entries off by tolerance(T), and a few roundings of the feature; then squares."""
        pairs = (self.weight, self.weight_magnitude), (self.bias, self.bias_magnitude)
        size = self.weight[:1].numel()
        return torch.stack([sum_of_squares(g, m, self.terms + 4, size, dtype) for g, m in pairs])


def truth(problem: Affine, o: Operands, kind: Kind) -> Truth:
    layer = problem.layer
    x, g, w = o.x.double(), o.g.double(), o.weight.double()
    given = kind == "integers" or layer in FROZEN
    each = [_sample(layer, n, x, g, w, o, given) for n in range(len(x))]
    parts = [torch.stack(p) for p in zip(*each, strict=True)]
    parts = parts or [*torch.zeros(2, 0, *w.shape).double(), torch.zeros_like(x)]
    mean = 0 if o.mean is None else o.mean.double()[..., None].abs()
    rstd = torch.ones(1) if o.rstd is None else o.rstd.double()[..., None]
    feature = (x.abs() + mean) * rstd
    inner = (w * g).abs()
    spread = (inner * feature).mean(problem.over, keepdim=True)
    magnitude = rstd * (inner + inner.mean(problem.over, keepdim=True) + feature * spread)
    sizes = (g.abs() * feature).sum(1), g.abs().sum(1)
    return Truth(problem.t, *parts[:2], *sizes, parts[2], magnitude)


def _sample(layer, n, x, g, w, o, given):
    def of_sample(statistic):
        if statistic is None or not given:
            return None
        return statistic[min(n, len(statistic) - 1)].double()

    inputs = [t.clone().requires_grad_() for t in (w, torch.zeros_like(w), x[n])]
    y = forward(layer, inputs[2], inputs[0], inputs[1], of_sample(o.mean), of_sample(o.rstd))
    grads = torch.autograd.grad(y, inputs, g[n], allow_unused=True)
    return [torch.zeros_like(i) if d is None else d for i, d in zip(inputs, grads, strict=True)]


@cache
def case(problem: Affine, dtype: torch.dtype, kind: Kind) -> tuple[Operands, Truth]:
    o = operands(problem, dtype, kind)
    return o, truth(problem, o, kind)


def assert_sq_norms(actual: Tensor, t: Truth, dtype: torch.dtype, kind: Kind) -> None:
    """[1 + bias, N]"""
    expected = t.sq_norms()[: len(actual)]
    exact = 2 * accumulation_epsilon(dtype) * expected
    allowance = exact if kind == "integers" else t.allowance(dtype)[: len(actual)]
    assert_within(actual, expected, allowance, dtype)
