"""What is true of every operator's norms, whatever computes them: of layers and of tables."""

import pytest
import test_affine as affine
import test_properties as products
import torch
from backends import set_threads, to
from oracle_affine import Affine, Operands, assert_sq_norms, operands, truth
from oracle_gather import Gather

# Each way through the kernels: rows and planes, statistics by row, by column and none, T = 1.
PROBLEMS = {
    "layer_norm of one position": Affine("layer_norm", 6, 1, 1, 33),
    **{name: Affine(name, 6, 9, 1, 33) for name in ("layer_norm", "rms_norm")},
    **{name: Affine("group_norm", 6, 9, 3, 5) for name in ("group_norm", "group_norm of planes")},
    **{name: Affine(name, 6, 9, 17, 1) for name in ("batch_norm", "scale", "prelu")},
    "prelu of planes": Affine("prelu", 6, 9, 17, 1),
}
ELEMENTWISE = [(name, how) for name in PROBLEMS for how in ("norms", "fused")]
WAYS = [*products.WAYS, *ELEMENTWISE, ("gather", "norms")]
each_way = pytest.mark.parametrize("way", WAYS, ids="-".join)
GATHER = Gather(6, 40, 9, 17)


def draw(way, kind="gaussians"):
    name = way[0]
    if way in products.WAYS:
        a, b = products.operands(way, kind)
        return Operands(a, b, b, None, None)
    if name == "gather":
        indices, g = GATHER.operands(torch.float32, kind)
        return Operands(indices, g, g, None, None)
    o = operands(PROBLEMS[name], torch.float32, kind)
    return o._replace(x=_laid(name, o.x.clone()), g=_laid(name, o.g.clone()))


def _laid(name, x):
    return affine.LAYOUTS["planes"](x) if name.endswith("planes") else x


def norms(backend, way, o):
    """sq_norms [1 + bias, N]"""
    name, how = way
    if way in products.WAYS:
        return products.norms(backend, way, o.x, o.g)
    if name == "gather":
        return backend.operator("gather_sq_norms")(*to(backend, o.x, o.g), 3)[None].cpu()
    layer = PROBLEMS[name].layer
    if how == "fused":
        return affine.fused(backend, layer, o)[3].cpu()
    return affine.norms(backend, layer, o).cpu()


def _sample_of(o, which):
    def some(t):
        return t if t is None or len(t) != len(o.g) else t[which]

    return Operands(some(o.x), o.g[which], o.weight, some(o.mean), some(o.rstd))


@each_way
def test_a_samples_norms_do_not_depend_on_its_batch_or_place(backend, way):
    o, order = draw(way, "integers"), torch.tensor([3, 0, 5, 1, 4, 2])
    alone = [norms(backend, way, _sample_of(o, slice(n, n + 1))) for n in range(6)]
    assert torch.equal(torch.cat(alone, 1), norms(backend, way, o))
    assert torch.equal(norms(backend, way, _sample_of(o, order)), torch.cat(alone, 1)[:, order])


@each_way
def test_a_zero_gradient_has_exactly_zero_norm(backend, way):
    o = draw(way)
    o.g[2] = 0
    assert norms(backend, way, o).eq(0).any(0).tolist() == [n == 2 for n in range(6)]


@each_way
@pytest.mark.parametrize("count", [1, 2])
def test_repeated_runs_are_bitwise_equal(backend, way, count, threads):
    set_threads(backend, threads, count)
    o = draw(way)
    first = norms(backend, way, o)
    assert all(torch.equal(norms(backend, way, o), first) for _ in range(5))


@each_way
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_spoils_no_other(backend, way, poison):
    o = draw(way)
    if way[0] == "gather":
        o.x[1, 0] = 0  # not the padding
    clean = norms(backend, way, o)
    o.g[(1, *[0] * (o.g.dim() - 1))] = poison
    spoilt, fine = norms(backend, way, o), [0, 2, 3, 4, 5]
    assert torch.equal(spoilt[:, fine], clean[:, fine])
    assert not spoilt[:, 1].isfinite().any()


@each_way
@pytest.mark.parametrize("gradient", [2.0**-60, 2.0**50])
def test_extreme_gradients_give_the_norm_that_float32_can_hold(backend, way, gradient):
    o = draw(way)
    expected = norms(backend, way, o).double() * gradient**2
    actual = norms(backend, way, o._replace(g=o.g * gradient)).double()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("layer", ["layer_norm", "batch_norm"])
def test_squares_below_float32s_range_still_add_up(backend, layer, t):
    """90 000 squares of 2.5 times float32's smallest number: rounded one by one, 2 or 3 of it."""
    size = (2, t, 1, 90_000) if layer == "layer_norm" else (2, t, 90_000, 1)
    g = torch.full(size, (2.5 * 2.0**-149) ** 0.5 / t)
    rstd = torch.ones((2, t, 1) if layer == "layer_norm" else (1, 1, 90_000))
    operands = to(backend, torch.ones(size), g, rstd)
    actual = backend.operator("affine_sq_norms")(operands[0], operands[1], None, operands[2], True)
    expected = torch.full((2, 2), 90_000 * 2.5 * 2.0**-149, dtype=torch.float64)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-4, atol=0)


SHARED_OUT = [  # enough work for several threads: by samples, or with few of them by T or by G
    Affine("layer_norm", 1, 300, 1, 257), Affine("layer_norm", 7, 60, 1, 257),
    Affine("layer_norm", 300, 1, 1, 257), Affine("group_norm", 1, 900, 5, 16),
    Affine("group_norm", 9, 900, 5, 3), Affine("batch_norm", 1, 900, 80, 1),
    Affine("prelu", 3, 30_000, 1, 1),
]  # fmt: skip


@pytest.mark.grid("backend")
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("problem", SHARED_OUT)
def test_any_number_of_threads_is_right(backend, problem, count, planes, threads):
    set_threads(backend, threads, count)
    o = operands(problem, torch.float32, "integers")
    o = o._replace(x=_laid("planes" if planes else "", o.x))
    expected = truth(problem, o, "integers")
    scale = torch.arange(problem.n, dtype=torch.float32) - 3
    sq_norms = affine.norms(backend, problem.layer, o)
    _, grad_weight, grad_bias, also = affine.fused(backend, problem.layer, o, scale)
    assert_sq_norms(sq_norms, expected, torch.float32, "integers")
    assert_sq_norms(also, expected, torch.float32, "integers")
    for actual, each in ((grad_weight, expected.weight), (grad_bias, expected.bias)):
        if len(actual):  # a PReLU has no bias
            assert torch.equal(actual.cpu().double(), torch.tensordot(scale.double(), each, dims=1))
