"""Every operator, backend, dtype and problem against the oracle, and in every memory format."""

import layouts
import pytest
import torch
from backends import OPERATORS, algorithms_of, each_dtype, each_kind, to
from oracle import CONV2D, LINEAR, Conv2d, Linear, assert_gradient, assert_sq_norms, case, truth_of

from torchgradx import ops

each_linear = pytest.mark.parametrize("problem", LINEAR, ids=lambda p: "x".join(map(str, p)))


def _title(problem):
    if isinstance(problem, Linear):
        return f"linear-{'x'.join(map(str, problem))}"
    return f"conv2d-{CONV2D.index(problem)}"


PROBLEMS = [*LINEAR, *CONV2D]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=_title)
CASES = [
    pytest.param(algorithm, problem, id=f"{algorithm}-{_title(problem)}")
    for problem in PROBLEMS
    for algorithm in algorithms_of(problem)
]


@pytest.mark.grid("backend", "algorithm")
@each_dtype
@each_kind
@pytest.mark.parametrize(("algorithm", "problem"), CASES)
def test_norms_agree_with_the_oracle(backend, algorithm, problem, kind, dtype):
    a, b, truth = case(problem, dtype, kind)
    sq_norms = backend.norms(algorithm, *to(backend, a, b), problem)
    assert_sq_norms(sq_norms, truth, algorithm, dtype, kind)
    alone = backend.norms(algorithm, *to(backend, a, b), problem, bias=False)
    assert torch.equal(alone, sq_norms[:1])


@pytest.mark.grid("backend")
@each_dtype
@each_linear
def test_bias_sq_norms_agree_with_the_oracle(backend, problem, dtype):
    _, b, truth = case(problem, dtype, "gaussians")
    actual = backend.operator("bias_sq_norms")(*to(backend, b)).cpu()
    allowance = truth.allowance("direct", dtype)[1]
    assert actual.shape == (problem.n,)
    assert bool(((actual.double() - truth.sq_norms()[1]).abs() <= allowance).all())


SCALES = {  # and what they weight with
    "none": lambda n, device: (None, torch.ones(n)),
    "weights": lambda n, device: (torch.linspace(-2, 3, n).to(device), torch.linspace(-2, 3, n)),
    "zeros": lambda n, device: (torch.zeros(n, device=device), torch.zeros(n)),
}
each_scale = pytest.mark.parametrize("make_scale", SCALES.values(), ids=SCALES)


@pytest.mark.grid("backend", "dtype")
@each_dtype
@each_scale
@each_problem
def test_scale_weights_the_gradients_and_not_sq_norms(backend, problem, make_scale, dtype):
    a, b, truth = case(problem, dtype, "gaussians")
    scale, weights = make_scale(problem.n, backend.device)
    grad_weight, grad_bias, sq_norms = backend.fused(*to(backend, a, b), problem, scale)
    w, terms = weights.double(), truth.terms[0] * problem.n
    expected = torch.tensordot(w, truth.weight, dims=1)
    magnitude = torch.tensordot(w.abs(), truth.weight_magnitude, dims=1)
    assert grad_weight.dtype == grad_bias.dtype == dtype
    assert_gradient(grad_weight, expected, magnitude, terms)
    assert_gradient(grad_bias, w @ truth.bias, w.abs() @ truth.bias_magnitude, terms)
    assert_sq_norms(sq_norms, truth, "fused", dtype)


LAYOUTS = layouts.LAYOUTS | {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "features_outside": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "one_position_expanded": lambda x: x.narrow(2 if x.dim() == 4 else 1, 0, 1).expand_as(x),
}
OF_LAYOUTS = {
    "linear": Linear(3, 17, 33, 15),
    "linear of one position": Linear(3, 1, 33, 15),
    "linear of whole tiles": Linear(2, 5, 64, 32),
    "conv2d in groups": Conv2d(3, 4, 6, (7, 5), (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "conv2d": Conv2d(2, 8, 16, (6, 6), (3, 3), (1, 1), (1, 1)),
    "conv2d of rows": Conv2d(2, 8, 16, (6, 6), (1, 1)),
    "conv2d depthwise": Conv2d(3, 4, 4, (9, 8), (3, 2), (2, 1), (1, 0), (1, 2), 4),
    "conv2d depthwise, as many as to be lanes": Conv2d(
        3, 8, 8, (9, 8), (3, 2), (2, 1), (1, 0), (1, 2), 8),
}  # fmt: skip


@pytest.mark.grid("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("problem", OF_LAYOUTS.values(), ids=OF_LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(backend, layout, problem, dtype):
    a, b = problem.operands(dtype, "integers")
    if layout == "channels_last" and a.dim() != 4:
        pytest.skip("of four dimensions only")
    laid = LAYOUTS[layout]
    for x, y in ((laid(a), b), (a, laid(b)), (laid(a), laid(b))):
        truth = truth_of(x, y, problem)
        for algorithm in algorithms_of(problem):
            sq_norms = backend.norms(algorithm, *to(backend, x, y), problem)
            assert_sq_norms(sq_norms, truth, algorithm, dtype, "integers")
        grad_weight = backend.fused(*to(backend, x, y), problem)[0].cpu()
        assert torch.equal(grad_weight, truth.weight.sum(0).to(dtype))


def _elementwise_arguments(operator, bias):
    x, g = torch.randn(3, 5, 2, 4), torch.ones(3, 5, 2, 4)
    mean, rstd, scale = torch.zeros(3, 1, 2), torch.ones(3, 1, 2), torch.linspace(-1, 1, 3)
    weight, ids = torch.ones(2, 4), torch.randint(0, 6, (3, 5))
    return {
        "affine_sq_norms": (x, g, mean, rstd, bias),
        "affine_fused": (x, g, weight, mean, rstd, False, scale, bias),
        "affine_by_sample": (x, g, weight, mean, rstd, False, bias), "prelu_sq_norms": (x, g),
        "prelu_fused": (x, g, weight, scale), "moments": (x, 1e-5, bias, True),
        "turned": (x[:, :, 0].mT,), "gather_sq_norms": (ids, g[..., 0], 2),
        "gather_dots": (ids, g[..., 0], x[:, :3, 0, :2], torch.ones(3, 3, 6), None),
    }[operator]  # fmt: skip


def _arguments(operator, bias):
    if operator.startswith(("affine", "prelu", "moments", "turned", "gather")):
        return _elementwise_arguments(operator, bias)
    linear = Linear(3, 1 if operator.startswith("rank1") else 5, 7, 4)
    conv2d = Conv2d(3, 4, 6, (7, 5), (3, 3), (2, 1), (1, 1), (1, 1), 2)
    problem = conv2d if operator.startswith("conv2d") else linear
    a, b = problem.operands(torch.float32, "gaussians")
    if operator == "bias_sq_norms":
        return (b,)
    scale = (torch.linspace(-1, 1, 3),) if operator.endswith(("fused", "scaled")) else ()
    geometry = conv2d.geometry if problem is conv2d else ()
    return (a, b, *geometry, *scale, bias)


@pytest.mark.skipif(not ops.NATIVE, reason="torchgradx._C is not built")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator, bias):
    overload = getattr(torch.ops.torchgradx, operator).default
    torch.library.opcheck(overload, _arguments(operator, bias))
