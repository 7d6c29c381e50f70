"""What only the emulation can ask of the kernels of element-wise parameters and of tables: any
order of threads, every way of cutting a problem, and the bytes of workspaces."""

from math import ceil

import oracle_gather
import pytest
import test_affine
import torch
import torch.nn.functional as F
from backends import EMULATED, each_dtype, needs_emulation, same_in_every_order
from emulation.operators import operator
from oracle_affine import FROZEN, Affine, assert_sq_norms, case
from oracle_gather import Gather
from test_affine import fused, norms
from test_emulated_launchers import _taken, _wide

pytestmark = needs_emulation
# One warp, several, and all of a block to a row or a column; samples of several parts; samples that
# are rows; rows too long for one sweep; groups of several blocks; planes and rows.
PROBLEMS = (
    Affine("layer_norm", 2, 37, 1, 71), Affine("layer_norm", 3, 20, 1, 300),
    Affine("layer_norm", 2, 19, 1, 336), Affine("rms_norm", 2, 17, 1, 1100),  # whole pieces
    Affine("rms_norm", 5, 3, 1, 33), Affine("layer_norm", 11, 1, 1, 304),
    Affine("rms_norm", 9, 1, 1, 33), Affine("layer_norm", 1, 2, 1, 4100),
    Affine("rms_norm", 2, 2, 1, 4100), Affine("group_norm", 3, 50, 2, 35),
    Affine("group_norm", 2, 300, 2, 40), Affine("group_norm", 2, 2100, 3, 1),
    Affine("group_norm", 2, 70, 32, 2),  # several positions a warp, several groups a piece
    Affine("batch_norm", 3, 6, 40, 1), Affine("batch_norm", 3, 20, 24, 1),
    Affine("group_norm", 2, 24, 4, 136),  # several blocks side by side
    Affine("scale", 2, 2100, 1, 1),  # one column of several parts
    Affine("scale", 5, 1, 300, 1), Affine("prelu", 2, 1100, 3, 1), Affine("prelu", 3, 9, 1, 1),
)  # fmt: skip
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "-".join(map(str, p)))


def in_planes(o):
    """The same numbers, positions side by side."""
    planes = test_affine.LAYOUTS["planes"]
    return o._replace(x=planes(o.x), g=planes(o.g))


def in_longer_rows(o):
    """The same numbers, each position's followed by four others, which no 16 bytes divide."""
    return o._replace(x=F.pad(o.x, (0, 4))[..., :-4], g=F.pad(o.g, (0, 4))[..., :-4])


def results(problem, o):
    scale = torch.arange(problem.n, dtype=torch.float32) - 1
    found = [norms(EMULATED, problem.layer, o)]
    if problem.layer != "prelu":
        arguments = o.x, o.g, o.weight, o.mean, o.rstd, problem.layer in FROZEN, True
        found += EMULATED.operator("affine_by_sample")(*arguments)
    return [*found, *fused(EMULATED, problem.layer, o, scale)]


def assert_right(problem, dtype, kind):
    o, expected = case(problem, dtype, kind)
    for operands in (o, in_planes(o), in_longer_rows(o)):
        sq_norms, *_, also = results(problem, operands)
        assert_sq_norms(sq_norms, expected, dtype, kind)
        assert_sq_norms(also, expected, dtype, kind)
        scale = torch.linspace(-2.0, 3.0, problem.n)
        test_affine.assert_fused_right(EMULATED, problem, operands, expected, scale, kind)
    for makes_input in (True, False) if problem.layer != "prelu" else ():
        test_affine.test_each_samples_gradients_are_given(EMULATED, problem, makes_input, dtype)


@pytest.mark.grid(pairs=False)
@each_dtype
@each_problem
def test_the_order_of_threads_does_not_matter(problem, dtype):
    o = case(problem, dtype, "gaussians")[0]
    same_in_every_order(lambda: results(problem, o))


@each_problem
def test_every_way_of_cutting_is_right(problem):
    assert_right(problem, torch.float32, "gaussians")


TABLES = (
    Gather(2, 300, 2, 40),  # a run over many warps
    Gather(2, 600, 9, 33),
    Gather(3, 70, 1000, 64),
    Gather(2, 5, 2, 5),  # warps without entries
)
each_table = pytest.mark.parametrize("problem", TABLES, ids=lambda p: "-".join(map(str, p)))


def assert_table_right(problem, dtype):
    indices, grads = problem.operands(dtype, "integers")
    for padding in (None, 1):
        sq_norms = operator("gather_sq_norms")(indices, grads, padding)
        oracle_gather.assert_sq_norms(sq_norms, indices, grads, problem.v, padding, "integers")


@each_dtype
@each_table
def test_runs_of_ids_are_joined_in_any_order_of_threads(problem, dtype):
    assert_table_right(problem, dtype)
    operands = problem.operands(dtype, "gaussians")
    same_in_every_order(lambda: operator("gather_sq_norms")(*operands, None))


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_a_table_takes_its_sorted_ids_and_no_more(ids):
    n, t, d = 16, 2048, 768
    indices, grads = torch.zeros(n, t, dtype=ids), _wide(n, t, d, dtype=torch.bfloat16)
    taken = _taken("gather_sq_norms", indices, grads, None)
    assert taken <= 8 * n * d // 32 + 4 * n + 3 * 16 * n * t


LARGE = {  # N, T, G, K
    "long": (8, 1024, 1, 768), "samples": (4096, 16, 1, 1024), "rows": (4096, 1, 1, 1024),
    "too wide": (16, 512, 1, 16384), "groups": (64, 784, 32, 16),
    "one chunk of rows side by side": (16, 196, 32, 8), "few positions a block": (8, 49, 2, 1024),
    "many samples": (520, 40, 1, 16),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_workspaces_are_no_copies_of_activations(name, dtype):
    n, t, g, k = LARGE[name]
    x, weight = _wide(n, t, g, k, dtype=dtype), torch.ones(g, k)
    stat = torch.ones((n, t, 1) if g == 1 else (n, 1, g))
    activations, norms = n * t * g * k * dtype.itemsize, 8 * n
    assert _taken("affine_sq_norms", x, x, stat, stat, True) <= norms + activations // 2
    results = activations + 8 * g * k + norms
    taken = _taken("affine_fused", x, x, weight, stat, stat, False, None, True)
    assert taken <= results + activations // 2
    # Layers without statistics of their own take a sample's column sums.
    taken = _taken("affine_fused", x, x, weight, None, None, True, None, True)
    assert taken <= results + 16 * n * ceil(g * k / 32) + 512 + 8 * n * g * k
    if g > 1:
        taken = _taken("moments", x, 1e-5, True, True)
        assert taken <= 2 * stat.nbytes + activations // 2
