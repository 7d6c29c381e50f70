"""A sample whose factor is 0 is left out of weighted sums, whatever its numbers: 0 * nan is nan."""

import pytest
import torch
from backends import to

from torchgradx import reference

OPS = torch.ops.torchgradx
BAD = (1, 3)  # samples whose numbers are nan and inf
SCALE = torch.tensor([0.5, 0.0, -2.0, 0.0, 1.0, 3.0])
N = len(SCALE)
LINEAR = [(1, 5, 3), (1, 64, 64), (2, 64, 48), (2, 7, 5), (20, 16, 24), (20, 33, 9), (300, 16, 8)]
CONV = {  # C, O, side, kernel, stride, padding, groups
    "general": (3, 5, 7, 3, 1, 1, 1),
    "small images of many channels": (64, 64, 4, 3, 1, 1, 1),
    "pointwise": (5, 7, 4, 1, 1, 0, 1),
    "groups": (8, 6, 6, 3, 2, 1, 2),
    "depthwise": (8, 8, 6, 3, 1, 1, 8),
    "depthwise, of a large kernel": (40, 40, 9, 7, 1, 3, 40),
}
AFFINE = ["layer_norm of a row", "layer_norm", "rms_norm", "group_norm", "frozen", "prelu"]
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def spoiled(t):
    t = t.clone()
    t[BAD[0]] = float("nan")
    t[BAD[1]] = float("inf")
    return t


def of_each(operator, batched, rest, place):
    """{output: sum of what each sample gives alone, in float64, times its factor}"""
    total = None
    for n in range(N):
        if SCALE[n] != 0:
            alone = [None if t is None else t[n : n + 1].double() for t in batched]
            found = operator(*alone, *(None if r is place else r for r in rest))
            made = [SCALE[n].double() * t for t in found]
            total = made if total is None else [a + b for a, b in zip(total, made, strict=True)]
    return total


def check(found, wanted, dtype):
    for got, want in zip(found, wanted, strict=True):
        got = got.cpu().double()
        rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        assert got.isfinite().all()
        assert (got - want).norm() <= rtol * (want.norm() + 1), (got, want)


def run(backend, name, batched, rest, place):
    """The operator on spoiled operands, with SCALE in its place."""
    given = [None if t is None else to(backend, spoiled(t))[0] for t in batched]
    scale = SCALE.to(backend.device)
    with_scale = [scale if r is place else r.to(backend.device) if torch.is_tensor(r) else r
                  for r in rest]  # fmt: skip
    return backend.operator(name)(*given, *with_scale)


@pytest.mark.grid("backend")
@each_dtype
@pytest.mark.parametrize("name", ["linear_fused", "linear_scaled"])
@pytest.mark.parametrize(("t", "i", "o"), LINEAR)
def test_linear(backend, dtype, name, t, i, o):
    a, b = torch.randn(N, t, i).to(dtype), torch.randn(N, t, o).to(dtype)
    rest, place = [SCALE, True], SCALE
    found = run(backend, name, (a, b), rest, place)
    check(found[:2], of_each(reference.linear_fused, (a, b), rest, place)[:2], dtype)
    if name == "linear_fused":
        assert found[2].isfinite().all(0).tolist() == [n not in BAD for n in range(N)]


@pytest.mark.grid("backend")
@each_dtype
@pytest.mark.parametrize("name", ["conv2d_fused", "conv2d_scaled"])
@pytest.mark.parametrize("kind", CONV)
def test_convolutions(backend, dtype, name, kind):
    c, o, side, kernel, stride, padding, groups = CONV[kind]
    out = (side + 2 * padding - kernel) // stride + 1
    x = torch.randn(N, c, side, side).to(dtype)
    b = torch.randn(N, o, out, out).to(dtype)
    rest = [(kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), groups, SCALE, True]
    found = run(backend, name, (x, b), rest, SCALE)
    check(found[:2], of_each(reference.conv2d_fused, (x, b), rest, SCALE)[:2], dtype)
    if name == "conv2d_fused":
        assert found[2].isfinite().all(0).tolist() == [n not in BAD for n in range(N)]


@each_dtype
@pytest.mark.parametrize("kind", AFFINE)
def test_layers_whose_parameters_act_element_by_element(backend, dtype, kind):
    t, g, k = {"layer_norm of a row": (1, 1, 9), "group_norm": (7, 2, 3)}.get(kind, (7, 1, 9))
    if kind in ("frozen", "prelu"):
        g, k = 9, 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, b = torch.randn(N, t, g, k).to(dtype), torch.randn(N, t, g, k).to(dtype)
    weight = torch.randn(g, k, dtype=wide)
    if kind == "prelu":
        found = run(backend, "prelu_fused", (x, b), [weight, SCALE], SCALE)
        want = of_each(reference.prelu_fused, (x, b), [weight.double(), SCALE], SCALE)
        check(found[1:2], want[1:2], dtype)
        return
    rows = (N, t, 1) if k > 1 and g == 1 else (N, 1, g)
    rstd = None if kind == "frozen" else torch.rand(rows, dtype=wide) + 0.5
    mean = None if rstd is None or kind == "rms_norm" else torch.randn(rows, dtype=wide)

    def operator(x, b, mean, rstd, scale):
        one = weight.double(), mean, rstd, kind == "frozen", scale, True
        return reference.affine_fused(x, b, *one)

    want = of_each(operator, (x, b, mean, rstd), [SCALE], SCALE)
    statistics = [None if s is None else s.to(backend.device) for s in (mean, rstd)]
    rest = [weight, *statistics, kind == "frozen", SCALE, True]
    found = run(backend, "affine_fused", (x, b), rest, SCALE)
    check(found[1:3], want[1:3], dtype)
    assert found[3].isfinite().all(0).tolist() == [n not in BAD for n in range(N)]


@each_dtype
@pytest.mark.parametrize(("parts", "features"), [(1, 1), (1, 300), (9, 33)])
def test_gradients_by_sample_are_added_up(backend, dtype, parts, features):
    operator = {"emulated": backend.operator, "native": lambda name: getattr(OPS, name)}
    if backend.name not in operator or dtype == torch.bfloat16:
        pytest.skip("it has no twin, and its operand is in the dtype of sums")
    each = torch.randn(N, parts, features).to(dtype)
    found = operator[backend.name]("affine_sum")(spoiled(each), SCALE, dtype)
    want = sum(f * g.sum(0) for f, g in zip(SCALE.double(), each.double(), strict=True))
    check([found], [want], dtype)
    plain = operator[backend.name]("affine_sum")(each, None, dtype)
    check([plain], [each.double().sum((0, 1))], dtype)


@pytest.mark.parametrize("name", ["linear_fused", "linear_scaled"])
@pytest.mark.parametrize("t", [1, 4])
def test_nobody_is_left(backend, name, t):
    a, b = (spoiled(torch.randn(N, t, k)) for k in (5, 3))
    zeros = torch.zeros(N, device=backend.device)
    weight, bias = backend.operator(name)(*to(backend, a, b), zeros, True)[:2]
    assert (weight == 0).all()
    assert (bias == 0).all()
