"""The oracle: float64, one sample at a time, plain autograd. It shares nothing with torchgradx.

Operands are rounded to the dtype under test first: accumulation alone is left to tolerate. Small
integers are exact in float32, and one lost row or pixel is a difference of 1 or more. Gaussians
have a bound from epsilon and the lengths of the sums (`tolerance`).
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["integers", "gaussians"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Linear(NamedTuple):
    n: int
    t: int
    i: int
    o: int

    def operands(self, dtype, kind, seed=0):
        n, t, i, o = self
        return draw((n, t, i), dtype, kind, seed), draw((n, t, o), dtype, kind, seed + 1)


class Conv2d(NamedTuple):
    n: int
    c: int
    o: int
    size: tuple[int, int]
    kernel_size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def geometry(self):
        """As the operators take it: kernel_size, stride, padding, dilation, groups."""
        return self[4:]

    def operands(self, dtype, kind, seed=0):
        kernel = torch.zeros(self.o, self.c // self.groups, *self.kernel_size)
        output = F.conv2d(torch.zeros(1, self.c, *self.size), kernel, None, *self.geometry[1:])
        x = draw((self.n, self.c, *self.size), dtype, kind, seed)
        return x, draw((self.n, *output.shape[1:]), dtype, kind, seed + 1)


LINEAR = [
    # no samples; no positions; no input features, where the bias has a norm all the same; none out
    Linear(0, 5, 7, 3), Linear(3, 0, 7, 3), Linear(3, 5, 0, 3), Linear(3, 5, 7, 0),
    Linear(1, 1, 1, 1), Linear(5, 1, 13, 17), Linear(2, 1, 129, 65), Linear(3, 2, 3, 5),
    Linear(4, 3, 1, 33), Linear(4, 5, 31, 1), Linear(3, 13, 17, 31),  # one feature in, one out
    # whole tiles of the CPU kernel: 14 x 32; one more of each; and one less
    Linear(2, 16, 32, 14), Linear(2, 16, 33, 15), Linear(2, 17, 31, 13), Linear(2, 31, 64, 28),
    Linear(2, 33, 65, 33), Linear(2, 65, 127, 5), Linear(1, 127, 5, 129),
    Linear(3, 129, 16, 16), Linear(2, 257, 3, 2),  # T beyond a tile of a Gram
    Linear(9, 128, 17, 23), Linear(3, 130, 17, 133),  # several runs of samples; and of rows
    Linear(33, 4, 8, 8), Linear(10, 30, 33, 20),  # more samples than threads; than a chunk holds
]  # fmt: skip
CONV2D = [
    Conv2d(0, 3, 4, (5, 5), (3, 3)), Conv2d(1, 1, 1, (1, 1), (1, 1)),  # no samples
    Conv2d(2, 3, 5, (7, 6), (3, 3), (1, 1), (1, 1)), Conv2d(3, 4, 6, (8, 8), (1, 1)),  # 1x1
    Conv2d(2, 4, 6, (9, 7), (1, 1), (2, 3)),  # 1x1, strided
    Conv2d(2, 5, 6, (24, 23), (1, 1), (2, 2)),  # the same of many pixels
    Conv2d(2, 5, 3, (9, 8), (3, 2), (2, 1), (1, 0)),  # rectangular throughout
    Conv2d(2, 3, 4, (11, 12), (3, 3), (2, 2), (2, 1), (2, 3)),
    Conv2d(2, 2, 3, (7, 7), (3, 3), (1, 1), (4, 4), (3, 3)),  # some patches all padding
    Conv2d(2, 3, 4, (4, 5), (4, 5)),  # one output pixel
    Conv2d(2, 6, 4, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 2),  # groups
    Conv2d(3, 6, 6, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 6),  # depthwise
    Conv2d(2, 4, 12, (7, 5), (5, 3), (2, 1), (2, 1), (1, 1), 4),  # depthwise, three a channel
    Conv2d(2, 3, 33, (17, 13), (3, 3), (1, 1), (1, 1)),  # three input channels
    Conv2d(1, 33, 14, (9, 9), (3, 3), (1, 1), (1, 1)),
    Conv2d(2, 17, 31, (5, 5), (3, 3), (1, 1), (1, 1)),
    Conv2d(2, 32, 28, (4, 4), (3, 3), (1, 1), (1, 1)),  # whole tiles
    Conv2d(2, 64, 15, (3, 3), (3, 3), (1, 1), (1, 1)),  # more features than pixels
    Conv2d(1, 2, 3, (33, 31), (7, 7), (2, 2), (3, 3)), Conv2d(17, 2, 2, (5, 5), (2, 2)),
    Conv2d(3, 9, 9, (7, 6), (3, 3), (1, 1), (1, 1), (1, 1), 9),  # depthwise, as many as to be lanes
    Conv2d(2, 33, 33, (15, 14), (3, 2), (1, 1), (1, 1), (1, 2), 33),  # beyond a warp, two tiles
    Conv2d(2, 8, 24, (9, 8), (5, 3), (2, 1), (2, 1), (1, 1), 8),  # three a channel
    Conv2d(2, 16, 16, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 8),  # two channels a group
    Conv2d(2, 8, 8, (9, 9), (7, 7), (1, 1), (3, 3), (1, 1), 8),  # 49 taps
    Conv2d(2, 8, 8, (40, 7), (3, 3), (5, 3), (1, 1), (8, 1), 8),  # far apart
    Conv2d(2, 300, 3, (11, 11), (3, 3), (3, 3)),  # many more pixels than positions
]  # fmt: skip


def draw(shape, dtype, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind == "integers":
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def accumulation_epsilon(dtype):
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def tolerance(dtype, terms):
    """How far a sum of `terms` products may be off, relative to the sum of their absolute values.

    Each addition and the product round once, by u = epsilon / 2 at most. Taken as independent, the
    errors add up to k sqrt(terms) u at most, except with probability 2 terms exp(-k^2 / 2) (Higham
    and Mary 2019, theorem 2.4): under 1e-5 for k = 7 and all sums in these tests together.
    """
    return 7 * (terms + 1) ** 0.5 * accumulation_epsilon(dtype) / 2


@dataclass(frozen=True)
class Truth:
    """Every sample's gradient, in float64, and the same of the operands' absolute values."""

    terms: tuple[int, int, int]  # T, I, O
    weight: Tensor  # [N, O, ...]
    bias: Tensor  # [N, O]
    weight_magnitude: Tensor  # [N, O, ...]: sum_t |b_nt| |a_nt|^T
    bias_magnitude: Tensor  # [N, O]

    def sq_norms(self):
        """[2, N]: the weight's and the bias's"""
        return torch.stack([_sq_norm(self.weight), _sq_norm(self.bias)])

    def allowance(self, algorithm, dtype):
        """[2, N]: by how much sq_norms may be off.

        An entry g of a gradient is off by d <= tolerance(T) m, m its magnitude; the squares' sum by
        sum 2 |g| d + d^2, and by the summation of IO squares. A Gram's terms are off by
        tolerance(I) + tolerance(O), their sum by tolerance(T^2), relative to |m|^2.
        """
        t, i, o = self.terms
        bias = sum_of_squares(self.bias, self.bias_magnitude, t, o, dtype)
        if algorithm == "gram":
            lost = tolerance(dtype, i) + tolerance(dtype, o) + tolerance(dtype, t * t)
            return torch.stack([lost * _sq_norm(self.weight_magnitude), bias])
        weight = sum_of_squares(self.weight, self.weight_magnitude, t, i * o, dtype)
        return torch.stack([weight, bias])


def sum_of_squares(g, magnitude, terms, entries, dtype):
    """[N]: by how much sums of squared entries may be off: see Truth.allowance."""
    off = tolerance(dtype, terms)
    entrywise = (2 * g.abs() * magnitude * off).flatten(1).sum(1)
    return entrywise + off**2 * _sq_norm(magnitude) + tolerance(dtype, entries) * _sq_norm(g)


def _sq_norm(gradients):
    return gradients.flatten(1).square().sum(1)


def _sample_gradients(forward, weight_shape, input, grad_output):
    weight = torch.zeros(weight_shape, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(weight_shape[0], dtype=torch.float64, requires_grad=True)
    weights, biases = [torch.zeros(0, *weight_shape)], [torch.zeros(0, weight_shape[0])]
    for n in range(len(input)):
        output = forward(input[n : n + 1], weight, bias)
        g, h = torch.autograd.grad(output, (weight, bias), grad_output[n : n + 1])
        weights.append(g[None])
        biases.append(h[None])
    return torch.cat(weights).double(), torch.cat(biases).double()


def _truth(forward, weight_shape, t, input, grad_output):
    x, b = input.detach().cpu().double(), grad_output.detach().cpu().double()
    weight, bias = _sample_gradients(forward, weight_shape, x, b)
    magnitudes = _sample_gradients(forward, weight_shape, x.abs(), b.abs())
    return Truth((t, prod(weight_shape[1:]), weight_shape[0]), weight, bias, *magnitudes)


def linear_truth(activations, grad_output):
    """[N, *, I], [N, *, O]"""
    shape = (grad_output.shape[-1], activations.shape[-1])
    return _truth(F.linear, shape, activations.shape[1:-1].numel(), activations, grad_output)


def conv2d_truth(input, grad_output, problem):
    kernel_size, *options = problem.geometry
    shape = (problem.o, problem.c // problem.groups, *kernel_size)

    def forward(x, weight, bias):
        return F.conv2d(x, weight, bias, *options)

    return _truth(forward, shape, grad_output[0:1, 0].numel(), input, grad_output)


def truth_of(a, b, problem):
    return linear_truth(a, b) if isinstance(problem, Linear) else conv2d_truth(a, b, problem)


@cache
def case(problem, dtype, kind):
    """Operands and truth of a problem of the tables, made once."""
    a, b = problem.operands(dtype, kind)
    return a, b, truth_of(a, b, problem)


def assert_sq_norms(actual, truth, algorithm, dtype, kind="gaussians"):
    """actual: [1 + bias, N]"""
    expected = truth.sq_norms()[: len(actual)]
    if kind == "integers":
        largest = (_sq_norm(m) for m in (truth.weight_magnitude, truth.bias_magnitude))
        assert all(bool((m < 2**24).all()) for m in largest), "not every sum is exact in float32"
        allowance = 2 * accumulation_epsilon(dtype) * expected
    else:
        allowance = truth.allowance(algorithm, dtype)[: len(actual)]
    assert_within(actual, expected, allowance, dtype, algorithm)


def assert_within(actual, expected, allowance, dtype, what="it"):
    """Sums of operands of a dtype, in the one that such sums have."""
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert actual.shape == expected.shape
    off = (actual.cpu().double() - expected).abs()
    worst = torch.where(off > allowance, off, 0).max().item() if off.numel() else 0.0
    assert bool((off <= allowance).all()), (
        f"{what} is off by {worst:.3g}; expected {expected.tolist()}, "
        f"allowed {allowance.tolist()}, got {actual.tolist()}"
    )


def assert_gradient(actual, expected, magnitude, terms):
    """A weighted gradient against float64: `terms` products, then one rounding to its dtype."""
    dtype, of = actual.dtype, torch.finfo(actual.dtype)
    rounding = of.eps / 2 * expected.abs().clamp(min=of.smallest_normal)
    allowance = tolerance(dtype, terms) * magnitude + rounding
    off = (actual.cpu().double() - expected).abs()
    assert actual.shape == expected.shape
    assert bool((off <= allowance).all()), f"off by {(off - allowance).max():.3g} too much"
