"""Hopper's kernel (csrc/cuda/direct_sm90.cuh) under emulation, through the operators, against the
float64 oracle. Ragged shapes as they ran on an H200; every order of threads; one launch each."""

import pytest
import torch
from backends import EMULATED, needs_emulation, same_in_every_order
from emulation.operators import operator, operators
from oracle import Conv2d, Linear, assert_gradient, assert_sq_norms, case, truth_of

pytestmark = needs_emulation
HALVES = (torch.bfloat16, torch.float16)
LINEAR = (
    Linear(3, 7, 8, 8),  # less than a step
    Linear(3, 7, 64, 72), Linear(8, 63, 72, 64),  # a step that is not whole, at the end
    Linear(3, 64, 192, 128),  # whole tiles, whole steps
    Linear(1, 65, 200, 200), Linear(3, 130, 200, 136),  # rectangles of a sample that differ
    Linear(1, 197, 192, 8),  # one box of outputs
    Linear(3, 48, 8, 392),  # and of inputs
    Linear(21, 33, 72, 200), Linear(5, 16, 136, 264),
    Linear(2, 400, 64, 64),  # more rectangles than stages
    Linear(2, 40, 200, 133),  # rows that begin at no multiple of 16 bytes: copied first
)  # fmt: skip
CONV2D = (
    Conv2d(3, 8, 8, (5, 7), (3, 3), padding=(1, 1)),
    Conv2d(2, 64, 64, (7, 7), (3, 3), padding=(1, 1)), Conv2d(2, 72, 128, (13, 14), (3, 3)),
    Conv2d(2, 128, 72, (8, 13), (3, 3), padding=(2, 2)),
    Conv2d(3, 64, 128, (14, 14), (3, 3), (2, 2), (1, 1)), Conv2d(2, 72, 8, (13, 7), (3, 3), (2, 2)),
    Conv2d(3, 8, 72, (7, 5), (5, 5), padding=(2, 2)),
    Conv2d(2, 64, 64, (14, 14), (5, 5), (2, 2), (2, 2)),
    Conv2d(2, 128, 64, (13, 14), (1, 1), (2, 2)),
    Conv2d(3, 72, 72, (9, 8), (1, 1)),  # rows of pixels
    Conv2d(2, 64, 8, (7, 14), (3, 3), (2, 2), (2, 2)),
    Conv2d(2, 16, 64, (20, 20), (3, 3), padding=(1, 1)),  # several rectangles each way
    Conv2d(2, 8, 16, (9, 11), (3, 2), (2, 1), (1, 0), (2, 3)),  # nothing square, dilated
    Conv2d(2, 8, 16, (1, 40), (1, 3), padding=(0, 1)),  # of one dimension
    Conv2d(2, 8, 8, (7, 301), (1, 3), (2, 2)),  # several rectangles each way, apart by the stride
    Conv2d(2, 3, 16, (17, 15), (7, 7), (2, 2), (3, 3)),  # few channels: a row of the kernel is one
    Conv2d(2, 3, 8, (9, 14), (4, 4), (2, 2), (1, 1)),
    Conv2d(3, 1, 72, (9, 9), (3, 3), padding=(1, 1)),
    Conv2d(2, 5, 8, (12, 10), (3, 5), (1, 3), (0, 2), (2, 1)),
    Conv2d(2, 3, 16, (8, 12), (4, 4), (4, 4)),  # patches that stand apart: rows
)  # fmt: skip
LONG = Linear(5, 2000, 8, 72)
CLUSTERS = (  # of two blocks, and on how many multiprocessors
    (Linear(3, 130, 192, 256), 4),  # one tile, which teams share
    (Linear(2, 64, 400, 200), 2),  # whole tiles, of which none is full
    (Linear(2, 400, 184, 504), 4),  # more rectangles than stages
    (Conv2d(2, 192, 200, (9, 13), (1, 1)), 6),
)
CLUSTER = "Li192ELb1ELb1ELi2E"  # of such a kernel's name
each_problem = pytest.mark.parametrize("problem", LINEAR + CONV2D)


@pytest.fixture(autouse=True)
def _hopper():
    with operators().hopper():
        yield


def operands(problem, dtype, kind):
    """As the kernel takes them without a copy."""
    given = problem.operands(dtype, kind)
    if isinstance(problem, Conv2d):
        return tuple(x.to(memory_format=torch.channels_last) for x in given)
    return given


def scales(problem):
    return torch.arange(problem.n, dtype=torch.float32) - 1  # -1, 0, 1, ...


def norms(problem, a, b, bias=True):
    return EMULATED.norms("direct", a, b, problem, bias)


def fused(problem, a, b, scale, bias=True):
    return EMULATED.fused(a, b, problem, scale, bias)


def results(problem, a, b):
    weight, bias, scaled = fused(problem, a, b, scales(problem))
    return {"norms": norms(problem, a, b), "weight": weight, "bias": bias, "with gradients": scaled}


def assert_right(problem, a, b, truth, kind):
    given = results(problem, a, b)
    for name in ("norms", "with gradients"):
        assert_sq_norms(given[name], truth, "direct", a.dtype, kind)
    assert_gradients(problem, given["weight"], given["bias"], truth, scales(problem))


def assert_gradients(problem, weight, bias, truth, scale):
    for actual, each, magnitude in (
        (weight, truth.weight, truth.weight_magnitude),
        (bias, truth.bias, truth.bias_magnitude),
    ):
        w = scale.double()
        sums = (torch.tensordot(k, x, dims=1) for k, x in ((w, each), (w.abs(), magnitude)))
        assert_gradient(actual, *sums, truth.terms[0] * problem.n)


EXACT = [*LINEAR[:3], *LINEAR[6:10], *CONV2D[:2], *CONV2D[5:7]]  # where float32 holds every sum


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("dtype", HALVES)
@each_problem
def test_it_is_right(problem, dtype):
    for kind in ("gaussians", "integers") if problem in EXACT else ("gaussians",):
        a, b = operands(problem, dtype, kind)
        assert_right(problem, a, b, case(problem, dtype, kind)[2], kind)


@each_problem
def test_one_launch_each(problem):
    a, b = operands(problem, torch.bfloat16, "integers")
    library = operators()
    calls = {
        "norms": lambda: norms(problem, a, b),
        "norms of the weight": lambda: norms(problem, a, b, False),
        "fused": lambda: fused(problem, a, b, None),
        "scaled": lambda: fused(problem, a, b, scales(problem)),
    }
    took = {}
    for name, call in calls.items():
        before = library.launches(), library.launches("direct_sm90")
        with library.dry():
            call()
        took[name] = library.launches() - before[0], library.launches("direct_sm90") - before[1]
    assert took == dict.fromkeys(calls, (1, 1))


ORDERED = (LINEAR[5], LINEAR[8], LINEAR[10], CONV2D[2], CONV2D[4], CONV2D[11])


@pytest.mark.parametrize(("problem", "count"), [*((p, 5) for p in ORDERED), *CLUSTERS[:3]])
def test_the_order_of_threads_does_not_matter(problem, count):
    a, b = operands(problem, torch.bfloat16, "gaussians")
    with operators().multiprocessors(count):
        same_in_every_order(lambda: results(problem, a, b))


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("problem", "count"), CLUSTERS)
def test_clusters_are_right(problem, count, dtype):
    a, b = operands(problem, dtype, "gaussians")
    before = operators().launches(CLUSTER)
    with operators().multiprocessors(count):
        assert_right(problem, a, b, case(problem, dtype, "gaussians")[2], "gaussians")
    assert operators().launches(CLUSTER) == before + 1
    with operators().multiprocessors(count + 1):  # one would stand alone
        assert_right(problem, a, b, case(problem, dtype, "gaussians")[2], "gaussians")
    assert operators().launches(CLUSTER) == before + 1


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("count", [1, 2, 3, 13])
@pytest.mark.parametrize("problem", [LINEAR[8], LINEAR[5], CONV2D[2]])
def test_any_number_of_multiprocessors_is_right(problem, count):
    """From all tiles whole to every tile shared."""
    a, b = operands(problem, torch.float16, "gaussians")
    with operators().multiprocessors(count):
        assert_right(problem, a, b, case(problem, torch.float16, "gaussians")[2], "gaussians")


@pytest.mark.parametrize(("problem", "count"), [*((p, 5) for p in ORDERED), CLUSTERS[2]])
def test_without_a_bias(problem, count):
    a, b = operands(problem, torch.bfloat16, "gaussians")
    truth = case(problem, torch.bfloat16, "gaussians")[2]
    assert_sq_norms(norms(problem, a, b, False), truth, "direct", a.dtype, "gaussians")
    with operators().multiprocessors(count):
        weight, bias, sq_norms = fused(problem, a, b, None, False)
    assert bias.numel() == 0
    assert_sq_norms(sq_norms, truth, "direct", a.dtype, "gaussians")
    assert_gradients(problem, weight, truth.bias.sum(0).to(a.dtype), truth, torch.ones(problem.n))


@pytest.mark.parametrize("problem", [LINEAR[5], LINEAR[8], CONV2D[1], CONV2D[4]])
def test_gradients_alone(problem):
    """As deferred clipping wants them, once norms are known: the bits of both together."""
    a, b = operands(problem, torch.bfloat16, "gaussians")
    scale, before = scales(problem), operators().launches()
    if isinstance(problem, Linear):
        weight, bias = operator("linear_scaled")(a, b, scale, True)
    else:
        weight, bias = operator("conv2d_scaled")(a, b, *problem.geometry, scale, True)
    assert operators().launches() == before + 1
    both = fused(problem, a, b, scale)
    assert torch.equal(weight, both[0])
    assert torch.equal(bias, both[1])


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("problem", [LINEAR[5], LINEAR[8], CONV2D[2], CONV2D[11]])
def test_a_sample_of_factor_zero_is_left_out(problem, poison):
    """Whatever it holds, of the sums; its norm is its own, and no other's."""
    a, b = operands(problem, torch.bfloat16, "integers")
    truth = case(problem, torch.bfloat16, "integers")[2]
    a, b = a.clone(), b.clone()
    a[1, ..., -1], b[1, ..., -1] = poison, poison
    weight, bias, sq_norms = fused(problem, a, b, scales(problem))
    assert_gradients(problem, weight, bias, truth, scales(problem))
    others = torch.arange(problem.n) != 1
    assert not sq_norms[:, 1].isfinite().any()
    expected = truth.sq_norms()[:, others]
    assert torch.allclose(sq_norms[:, others].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("problem", [LINEAR[0], LINEAR[5], CONV2D[0], CONV2D[2]])
def test_operands_as_they_lie(problem):
    """Rows with gaps, samples out of order, and NCHW: the same numbers."""
    a, b = operands(problem, torch.float16, "integers")
    if isinstance(problem, Conv2d):
        views = a.contiguous(), b.contiguous()
    else:
        views = _turned(a), _turned(b)
    first, other = results(problem, a, b), results(problem, *views)
    assert [name for name in first if not torch.equal(first[name], other[name])] == []


def _turned(x):
    """[N, T, features] as [T, N, features] lies, with gaps between rows."""
    wide = torch.full((x.shape[1], x.shape[0], x.shape[2] + 8), 7.0, dtype=x.dtype)
    return wide.transpose(0, 1)[..., : x.shape[2]].copy_(x)


def test_only_where_it_serves():
    """Other numbers, groups, and channels that are no multiple of eight go elsewhere."""
    library = operators()
    before = library.launches("direct_sm90")
    for problem, dtype in (
        (Linear(2, 40, 200, 136), torch.float32),
        (Linear(2, 40, 201, 136), torch.bfloat16),
        (Conv2d(2, 12, 16, (6, 6), (3, 3)), torch.bfloat16),
        (Conv2d(2, 16, 16, (6, 6), (3, 3), groups=2), torch.bfloat16),
    ):
        a, b = operands(problem, dtype, "integers")
        assert_right(problem, a, b, truth_of(a, b, problem), "integers")
    assert library.launches("direct_sm90") == before


def test_no_samples_and_no_positions():
    for problem in (Linear(0, 16, 64, 64), Linear(2, 0, 64, 64)):
        a, b = problem.operands(torch.bfloat16, "integers")
        assert EMULATED.norms("direct", a, b).tolist() == [[0.0] * problem.n] * 2
        weight, bias, _ = operator("linear_fused")(a, b, None, True)
        assert not weight.any()
        assert not bias.any()


def battery():
    """What planted bugs are held to: every variant of the kernel, tiles whole and shared."""
    with operators().hopper():
        linear, conv2d = (0, 4, 5, 6, 8, 9, 10), (0, 1, 2, 4, 5, 6, 7, 11, 12, 13, 14)
        for problem in (*(LINEAR[i] for i in linear), *(CONV2D[i] for i in conv2d)):
            for count in (5, 2):
                with operators().multiprocessors(count):
                    a, b = operands(problem, torch.bfloat16, "gaussians")
                    truth = case(problem, torch.bfloat16, "gaussians")[2]
                    assert_right(problem, a, b, truth, "gaussians")
        with operators().multiprocessors(1):  # one block: every stage is filled again and again
            a, b = operands(LONG, torch.bfloat16, "gaussians")
            assert_right(LONG, a, b, case(LONG, torch.bfloat16, "gaussians")[2], "gaussians")
        for problem in (LINEAR[5], CONV2D[2]):
            test_a_sample_of_factor_zero_is_left_out(problem, float("nan"))
            with operators().order("shuffled"):
                test_without_a_bias(problem, 5)


def clusters():
    with operators().hopper():
        for problem, count in CLUSTERS:
            test_clusters_are_right(problem, count, torch.bfloat16)
        test_without_a_bias(*CLUSTERS[2])
