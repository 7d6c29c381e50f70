"""Normalisations, scales and PReLU against the oracle: norms, gradients, statistics, layouts."""

import layouts
import oracle_affine
import pytest
import torch
from backends import each_dtype, each_kind, to
from oracle import assert_gradient, tolerance
from oracle_affine import FROZEN, Affine, Operands, assert_sq_norms, case, operands, truth
from torch import nn

# n, t, and features: of a vector's lanes, one more, one less, and tails of all kinds
SIZES = [(0, 3, 5), (1, 1, 1), (5, 1, 13), (3, 2, 16), (2, 5, 33), (3, 7, 64), (2, 17, 127),
         (2, 49, 12), (1, 257, 6), (33, 3, 31)]  # fmt: skip


def _problems():
    found = []
    for n, t, features in SIZES:
        for layer in oracle_affine.LAYERS:
            if layer == "group_norm":
                splits = {(g, features // g) for g in (1, 2, 3, 4, features) if features % g == 0}
            elif layer in FROZEN:
                splits = {(features, 1)}
            else:
                splits = {(1, features)}
            found += [Affine(layer, n, t, g, k) for g, k in sorted(splits)]
    found += [Affine("prelu", 3, t, 1, 1) for t in (1, 40, 10007)]  # a single parameter
    found += [Affine("scale", 3, 11, 2, 6), Affine("group_norm", 2, 10007, 2, 2)]
    return found


PROBLEMS = _problems()
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "-".join(map(str, p)))


def _to(backend, o):
    return Operands(*(None if t is None else to(backend, t)[0] for t in o))


def norms(backend, layer, o, bias=True):
    o = _to(backend, o)
    if layer == "prelu":
        return backend.operator("prelu_sq_norms")(o.x, o.g)
    return backend.operator("affine_sq_norms")(o.x, o.g, o.mean, o.rstd, bias)


def fused(backend, layer, o, scale=None, bias=True):
    """grad_input, grad_weight, grad_bias, sq_norms"""
    o = _to(backend, o)
    scale = None if scale is None else to(backend, scale)[0]
    if layer == "prelu":
        x, w, sq_norms = backend.operator("prelu_fused")(o.x, o.g, o.weight, scale)
        return x, w, w.new_empty(0), sq_norms
    arguments = (o.x, o.g, o.weight, o.mean, o.rstd, layer in FROZEN, scale, bias)
    return backend.operator("affine_fused")(*arguments)


@pytest.mark.grid("backend")
@each_dtype
@each_kind
@each_problem
def test_norms_agree_with_the_oracle(backend, problem, kind, dtype):
    o, expected = case(problem, dtype, kind)
    sq_norms = norms(backend, problem.layer, o)
    assert_sq_norms(sq_norms, expected, dtype, kind)
    assert torch.equal(norms(backend, problem.layer, o, False), sq_norms[:1])


def assert_fused_right(backend, problem, o, expected, scale, kind="gaussians"):
    dtype = o.x.dtype
    x, w, b, sq_norms = fused(backend, problem.layer, o, scale)
    assert x.dtype == w.dtype == dtype
    assert w.shape == o.weight.shape
    assert b.shape == ((0,) if problem.layer == "prelu" else w.shape)
    assert_sq_norms(sq_norms, expected, dtype, kind)
    s = torch.ones(problem.n).double() if scale is None else scale.double()
    terms = problem.n * (problem.t + 4)

    def total(each):
        return torch.tensordot(s, each, dims=1)

    magnitude = torch.tensordot(s.abs(), expected.weight_magnitude, dims=1)
    assert_gradient(w, total(expected.weight), magnitude, terms)
    if problem.layer != "prelu":
        magnitude = torch.tensordot(s.abs(), expected.bias_magnitude, dims=1)
        assert_gradient(b, total(expected.bias), magnitude, terms)
    count = problem.k * (problem.t if problem.layer == "group_norm" else 1)
    assert_gradient(x, expected.input, expected.input_magnitude, count + 8)


@pytest.mark.grid("backend")
@each_dtype
@pytest.mark.parametrize("weights", [None, (-2.0, 3.0), (0.0, 0.0)])
@each_problem
def test_fused_makes_every_gradient(backend, problem, weights, dtype):
    o, expected = case(problem, dtype, "gaussians")
    scale = None if weights is None else torch.linspace(*weights, problem.n)
    assert_fused_right(backend, problem, o, expected, scale)


@pytest.mark.grid("backend")
@each_dtype
@pytest.mark.parametrize("makes_input", [True, False])
@each_problem
def test_each_samples_gradients_are_given(backend, problem, makes_input, dtype):
    if problem.layer == "prelu":
        pytest.skip("its operands are kept")
    o, expected = case(problem, dtype, "gaussians")
    there, frozen = _to(backend, o), problem.layer in FROZEN
    for bias in (True, False):
        arguments = there.weight if makes_input else None, there.mean, there.rstd, frozen, bias
        x, sq_norms, each = backend.operator("affine_by_sample")(there.x, there.g, *arguments)
        assert_sq_norms(sq_norms, expected, dtype, "gaussians")
        assert (len(sq_norms), *each.shape[:2]) == (1 + bias, 1 + bias, problem.n)
        assert each.dtype == sq_norms.dtype
        whole = each.double().sum(2).cpu()  # over their parts
        parts = (expected.weight, expected.bias)
        sizes = (expected.weight_magnitude, expected.bias_magnitude)
        for found, gradients, magnitude in zip(whole, parts, sizes, strict=False):
            off = (found - gradients.flatten(1)).abs()
            allowance = tolerance(each.dtype, problem.t + 4) * magnitude.flatten(1)
            assert bool((off <= allowance + 1e-30).all()), f"off by {off.max():.3g}"
        if makes_input:
            assert torch.equal(x, fused(backend, problem.layer, o, bias=bias)[0])
        else:
            assert x.shape == (0,)


@pytest.mark.grid("backend")
@each_dtype
@pytest.mark.parametrize("centred", [True, False])
@each_problem
def test_moments_are_those_of_the_layers(backend, problem, centred, dtype):
    layer = {"group_norm": "group_norm"}.get(problem.layer, "layer_norm" if centred else "rms_norm")
    x = operands(problem, dtype, "gaussians").x
    over_positions = layer == "group_norm"
    if over_positions and not centred:
        pytest.skip("no layer")
    given = *to(backend, x), oracle_affine.EPS, centred, over_positions
    mean, rstd = backend.operator("moments")(*given)
    expected = oracle_affine.statistics(x, layer, (1, 3) if over_positions else (3,))
    eps = tolerance(dtype, problem.k * (problem.t if over_positions else 1))
    assert rstd.shape == expected[1].shape
    torch.testing.assert_close(rstd.cpu().double(), expected[1], rtol=eps * 10, atol=0)
    if centred:
        torch.testing.assert_close(mean.cpu().double(), expected[0], rtol=0, atol=eps * 4)
    else:
        assert mean.shape == (0,)


def test_moments_of_a_small_variance_about_a_large_mean(backend):
    """x = 4096 + r, r of size 1: sum x^2 - (sum x)^2 / n in float32 would have no digit right."""
    r = torch.randint(-3, 4, (3, 40, 2, 6)).float()
    for over_positions in (False, True):
        _, rstd = backend.operator("moments")(*to(backend, r + 4096), 0.0, True, over_positions)
        _, expected = backend.operator("moments")(*to(backend, r), 0.0, True, over_positions)
        torch.testing.assert_close(rstd, expected, rtol=1e-5, atol=0)
    flat = to(backend, torch.full((1, 1 << 13, 2, 4), 0.3))  # a long sum of equal terms
    mean, _ = backend.operator("moments")(*flat, 1.0, True, True)
    assert mean.flatten().tolist() == pytest.approx([0.3, 0.3], rel=1e-6)


def _in_order(*order):
    """[N, T, G, K] with its memory in another order of dimensions"""
    return lambda x: x.permute(order).contiguous().permute([order.index(d) for d in range(4)])


LAYOUTS = layouts.LAYOUTS | {
    "planes": _in_order(0, 2, 3, 1),
    "groups_inside": _in_order(0, 1, 3, 2),
    "samples_inside": _in_order(1, 2, 3, 0),
}
OF_LAYOUTS = [
    Affine("layer_norm", 3, 5, 1, 33), Affine("layer_norm", 3, 9, 1, 32),
    Affine("rms_norm", 3, 5, 1, 32), Affine("group_norm", 3, 6, 4, 5),
    Affine("group_norm", 3, 6, 1, 16), Affine("group_norm", 3, 6, 7, 1),  # an InstanceNorm
    Affine("group_norm", 3, 9, 4, 4), Affine("batch_norm", 3, 6, 19, 1),
    Affine("scale", 3, 6, 17, 1), Affine("scale", 3, 1, 17, 1),
    Affine("prelu", 3, 6, 5, 1), Affine("prelu", 3, 24, 1, 1),
]  # fmt: skip


@pytest.mark.grid("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("float32", "bfloat16"))
@pytest.mark.parametrize("problem", OF_LAYOUTS, ids=lambda p: "-".join(map(str, p)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(backend, layout, problem, dtype):
    o, laid = operands(problem, dtype, "integers"), LAYOUTS[layout]
    for x, g in ((laid(o.x), o.g), (o.x, laid(o.g)), (laid(o.x), laid(o.g))):
        these = o._replace(x=x, g=g)
        expected = truth(problem, these, "integers")
        assert_sq_norms(norms(backend, problem.layer, these), expected, dtype, "integers")
        plain = [t.contiguous() for t in (x, g)]
        contiguous = fused(backend, problem.layer, o._replace(x=plain[0], g=plain[1]))
        results = fused(backend, problem.layer, these)
        assert_sq_norms(results[3], expected, dtype, "integers")
        for result, same in zip(results[1:3], contiguous[1:3], strict=True):
            assert torch.equal(result, same)
        torch.testing.assert_close(results[0], contiguous[0], rtol=1e-2, atol=1e-5)
        assert results[0].shape == x.shape


@pytest.mark.parametrize("problem", OF_LAYOUTS, ids=lambda p: "-".join(map(str, p)))
@pytest.mark.parametrize("layout", ["contiguous", "planes", "sequence_first"])
def test_grad_input_lies_as_its_input(backend, layout, problem):
    o = operands(problem, torch.float32, "gaussians")
    x = LAYOUTS[layout](o.x)
    by_row = problem.layer in ("layer_norm", "rms_norm")
    if (layout == "planes" and by_row) or (layout == "sequence_first" and problem[3:] == (1, 1)):
        pytest.skip("made contiguous along the lines that it is read by")
    grad_input = fused(backend, problem.layer, o._replace(x=x))[0]
    wide = [d for d in range(4) if x.shape[d] > 1]
    assert [grad_input.stride(d) for d in wide] == [x.stride(d) for d in wide]


@pytest.mark.parametrize("operator", ["affine_fused", "prelu_fused"])
def test_a_weight_in_another_order_is_refused(backend, operator):
    """Its elements are as many, and would be taken for others'."""
    x, stat, weight = torch.randn(2, 5, 2, 3), torch.ones(2, 1, 2), torch.randn(3, 2)
    affine = [*to(backend, stat, stat), False, None, True]
    call, others = backend.operator(operator), affine if operator == "affine_fused" else [None]
    x, weight = to(backend, x, weight)
    for wrong in (weight, weight[None], weight.flatten()[:4]):
        with pytest.raises((ValueError, RuntimeError)):
            call(x, x, wrong, *others)
    call(x, x, weight.flatten(), *others)
    call(x, x, weight.view(2, 3), *others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=("float16", "bfloat16"))
@pytest.mark.parametrize("layout", ["contiguous", "strided_inside"])
def test_halves_are_rounded_to_nearest_even(backend, layout, dtype):
    """A scale's grad_input is g w: every half, by weights that reach ties, subnormals and overflow;
    read in place, and by way of scratch."""
    g = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 2, -1, 1)
    weight = 2.0 ** torch.randint(-20, 20, (g.shape[2], 1)) * (1 + torch.rand(g.shape[2], 1))
    ties = 1 + torch.randint(0, 2**5, (g.shape[2], 1)) / 2**4
    for w in (weight, ties):
        o = Operands(LAYOUTS[layout](g), LAYOUTS[layout](g), w, None, None)
        grad_input = fused(backend, "scale", o)[0].cpu()
        expected = (g.float() * w).to(dtype)
        torch.testing.assert_close(grad_input, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("planes", [False, True])
def test_prelu_at_zero_takes_the_weight_as_the_framework_does(backend, planes):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), 2.0, 0.0]).repeat(20).view(2, 70, 1, 1)
    x = x if planes else x.view(2, 1, 70, 1)
    g, weight = torch.ones_like(x), torch.full(x.shape[2:], 0.25)
    grad_input = fused(backend, "prelu", Operands(x, g, weight, None, None))[0].cpu()
    inputs = x.clone().requires_grad_()
    nn.functional.prelu(inputs, torch.tensor([0.25])).sum().backward()
    torch.testing.assert_close(grad_input, inputs.grad, rtol=0, atol=0, equal_nan=True)
