"""What is true of per-sample norms whatever computes them, and what must not go wrong."""

import pytest
import torch
from backends import CONV2D_ALGORITHMS, LINEAR_ALGORITHMS, algorithms_of, set_threads, supports, to
from oracle import Conv2d, Linear, assert_sq_norms, case, conv2d_truth, linear_truth, truth_of

# Every way to norms, as (operands, norms of operands): the properties hold of each.
LINEAR = Linear(6, 9, 33, 17)
CONV2D = Conv2d(6, 4, 6, (9, 7), (3, 3), (2, 1), (1, 1), (1, 1), 2)
DEPTHWISE = Conv2d(6, 9, 9, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1), 9)
PROBLEMS = {"conv2d": CONV2D, "depthwise": DEPTHWISE}
WAYS = [
    *(("linear", algorithm) for algorithm in LINEAR_ALGORITHMS),
    *(("conv2d", algorithm) for algorithm in CONV2D_ALGORITHMS),
    *(("depthwise", algorithm) for algorithm in ("direct", "fused")),
]
each_way = pytest.mark.parametrize("way", WAYS, ids="-".join)


def operands(way, kind="gaussians"):
    layer, algorithm = way
    if layer in PROBLEMS:
        return PROBLEMS[layer].operands(torch.float32, kind)
    t = LINEAR.t if supports(algorithm, LINEAR.t) else 1
    return LINEAR._replace(t=t).operands(torch.float32, kind)


def norms(backend, way, a, b):
    """sq_norms [2, N]"""
    layer, algorithm = way
    return backend.norms(algorithm, *to(backend, a, b), PROBLEMS.get(layer)).cpu()


SHARED_OUT = [  # enough work for several threads, by samples or, with few of them, by features
    Linear(1, 64, 130, 70), Linear(7, 64, 130, 70), Linear(64, 1, 300, 200), Linear(40, 4, 130, 70),
    Conv2d(1, 16, 24, (12, 12), (3, 3)), Conv2d(7, 16, 24, (12, 12), (3, 3)),
    Conv2d(5, 32, 32, (16, 16), (3, 3), padding=(1, 1), groups=32),
    Conv2d(5, 16, 24, (12, 12), (1, 1)),
]  # fmt: skip


@pytest.mark.grid("backend")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("problem", SHARED_OUT)
def test_any_number_of_threads_is_right(backend, problem, count, threads):
    set_threads(backend, threads, count)
    a, b, truth = case(problem, torch.float32, "integers")
    a, b = to(backend, a, b)
    scale = torch.arange(problem.n, dtype=torch.float32, device=backend.device) - 3
    for way in algorithms_of(problem):
        assert_sq_norms(backend.norms(way, a, b, problem), truth, way, torch.float32, "integers")
    grad_weight, grad_bias, _ = backend.fused(a, b, problem, scale)
    spread = problem.operands(torch.float32, "gaussians")
    first, *others = (backend.fused(*to(backend, *spread), problem)[0] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)
    weights = scale.cpu().double()
    assert torch.equal(grad_weight.cpu().double(), torch.tensordot(weights, truth.weight, dims=1))
    assert torch.equal(grad_bias.cpu().double(), weights @ truth.bias)


@pytest.mark.grid("backend")
@each_way
@pytest.mark.parametrize(("activation", "gradient"), [(-83, 33), (33, -83), (70, -70), (-70, 70)])
def test_extreme_operands_give_the_norm_that_float32_can_hold(backend, way, activation, gradient):
    """1e-25 by 1e+10: a Gram of the activations alone underflows; 1e+21 by 1e-21: and overflows.
    Both of them; test_affine_properties.py has gradients alone."""
    activation, gradient = 2.0**activation, 2.0**gradient
    a, b = operands(way)
    expected = norms(backend, way, a, b)[0].double() * (activation * gradient) ** 2
    actual = norms(backend, way, a * activation, b * gradient)[0].double()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", [w for w in WAYS if w[0] != "conv2d"], ids="-".join)
def test_squares_below_float32s_range_still_add_up(backend, way):
    """90 000 squares of 2.5 times float32's smallest number: rounded one by one, 2 or 3 of it."""
    layer, algorithm = way
    t = 2 if layer == "linear" and supports(algorithm, 2) else 1
    problem = Linear(2, t, 300, 300)
    if layer == "depthwise":
        problem = Conv2d(2, 8, 8, (18, 18), (18, 18), groups=8)
    a, b = (torch.ones_like(x) for x in problem.operands(torch.float32, "integers"))
    b *= (2.5 * 2.0**-149) ** 0.5 / t
    sq_norms = backend.norms(algorithm, *to(backend, a, b), problem)[0].cpu().double()
    torch.testing.assert_close(sq_norms, truth_of(a, b, problem).sq_norms()[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("exponent", [-70, -64, -50, 60, 64, 70])
def test_the_squares_of_a_long_row_may_leave_float32s_range(backend, exponent):
    """All of them, and one alone among ones: rank1 sums squares, and takes the product of sums."""
    a = torch.randn(3, 1, 700)
    a[0] *= 2.0**exponent
    a[1, 0, 300] *= 2.0**exponent
    b = torch.randn(3, 1, 650) * 2.0 ** -max(exponent, 0)
    sq_norms = backend.norms("rank1", *to(backend, a, b))[0].cpu().double()
    torch.testing.assert_close(sq_norms, linear_truth(a, b).sq_norms()[0], rtol=1e-6, atol=0)


@each_way
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_zeros_times_what_is_not_finite_have_no_norm(backend, way, number):
    a, b = operands(way)
    a[0], b[0], a[1], b[1] = 0, number, number, 0
    assert norms(backend, way, a, b)[0].isfinite().tolist() == [n > 1 for n in range(len(a))]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("sizes", [(40, 3, 2, 1), (42, 5, 2, 1), (9, 3, 1, 4)])
def test_pixels_that_no_output_sees_may_be_infinite(backend, sizes, form):
    """19 outputs along a side: two tiles of a GPU, the second cut in the middle of two rows."""
    size, *geometry = [(each, each) for each in sizes]
    problem = Conv2d(1, 8, 8, size, *geometry[:2], dilation=geometry[2], groups=8)
    x, b = (t.contiguous(memory_format=form) for t in problem.operands(torch.bfloat16, "gaussians"))
    unseen = [k for k in range(sizes[0]) if (k % 4 if sizes[3] > 1 else k == sizes[0] - 1)]
    x[..., unseen, :] = x[..., unseen] = float("inf")
    sq_norms = backend.norms("direct", *to(backend, x, b), problem)
    assert_sq_norms(sq_norms.cpu(), conv2d_truth(x, b, problem), "direct", x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", ["activations", "grad_output"])
def test_a_gram_that_cancels_is_noticed(backend, rows, dtype):
    """Alternating signs over nearly equal rows: sum_t b_t a_t^T all but vanishes."""
    n, t = 3, 64
    a, b = Linear(n, t, 24, 20).operands(dtype, "gaussians")
    sign = torch.tensor([1.0, -1.0], dtype=dtype).repeat(t // 2)[:, None]
    a = (a[:, :1] * (1 + (2.0**-12 if dtype != torch.bfloat16 else 2.0**-6) * a)).to(dtype)
    b = b[:, :1] * sign
    if rows == "grad_output":
        a, b = b, a
    truth = linear_truth(a, b)
    share = (truth.weight.square().sum((1, 2)), truth.weight_magnitude.square().sum((1, 2)))
    rho = share[0] / share[1]
    assert bool((rho < 1e-4).all()), f"nothing cancels: {rho}"
    a, b = to(backend, a, b)
    assert_sq_norms(backend.norms("gram", a, b), truth, "direct", dtype)


def test_a_conv2d_gram_that_cancels_is_noticed(backend):
    problem = Conv2d(2, 3, 4, (8, 8), (3, 3))
    x, b = problem.operands(torch.float32, "gaussians")
    x = 1 + 2.0**-12 * x
    b = b[:, :, :1, :1] * torch.tensor([1.0, -1.0]).repeat(18).view(6, 6)
    truth = conv2d_truth(x, b, problem)
    x, b = to(backend, x, b)
    assert_sq_norms(backend.norms("gram", x, b, problem), truth, "direct", torch.float32)


def test_long_sums_keep_their_digits(backend):
    """2051 equal steps: a half accumulator stops at 256 (bfloat16) or 2048 (float16). And 2^11 in
    float32: added one by one, each would be rounded as their sum is, all of them alike."""
    for dtype in (torch.bfloat16, torch.float16):
        a, b = to(backend, *torch.ones(2, 1, 2051, 1, dtype=dtype))
        for algorithm in ("gram", "direct", "fused"):
            assert backend.norms(algorithm, a, b).tolist() == [[2051.0**2], [2051.0**2]]
    many = to(backend, *torch.full((2, 1 << 11, 1, 1), 0.3))
    assert backend.fused(*many)[1].item() == pytest.approx(0.3 * (1 << 11), rel=1e-5)


@pytest.mark.parametrize("t", [4, 16])
def test_large_half_operands_do_not_overflow(backend, t):
    """A float16 Gram of activations of 300 is infinite; the norm is not."""
    a, b = to(backend, *torch.full((2, 1, t, 8), 300.0, dtype=torch.float16))
    for algorithm in ("gram", "direct", "fused"):
        expected = 64 * (t * 300.0**2) ** 2
        assert backend.norms(algorithm, a, b)[0].tolist() == [pytest.approx(expected, rel=1e-6)]
