"""What only the emulation can ask of the CUDA operators: any order of threads, any number of
multiprocessors, every kernel's launches, every byte of workspace, TF32 to the last bit."""

import re
from pathlib import Path

import pytest
import test_emulated_sm90 as hopper
import torch
from backends import EMULATED, algorithms_of, needs_emulation, same_in_every_order
from emulation.operators import operators
from oracle import DTYPES, Conv2d, Linear, assert_sq_norms, case, truth_of
from processes import python
from test_memory import BOUND, CASES, WIDE

pytestmark = needs_emulation
# Several tiles in each direction and a part of one, samples enough to share out, every kernel.
LINEAR = (
    Linear(3, 37, 200, 135),
    Linear(2, 40, 200, 136),  # whole tiles that are copied by the 16 bytes, and parts
    Linear(2, 136, 72, 40),  # of positions too
    Linear(7, 1, 270, 40),  # rows for several warps
    Linear(2, 140, 9, 11),
)
CONV2D = (
    Conv2d(3, 6, 10, (9, 7), (3, 3), (2, 1), (1, 1), (1, 1), 2),
    Conv2d(3, 8, 8, (13, 14), (3, 3), padding=(1, 1), groups=8),  # planes of several tiles
    Conv2d(2, 8, 16, (8, 7), (5, 5), padding=(2, 2), groups=8),
    Conv2d(2, 23, 9, (6, 6), (3, 3), padding=(1, 1)),
)
each_problem = pytest.mark.parametrize("problem", LINEAR + CONV2D)
ARITHMETIC = [(dtype, False) for dtype in DTYPES] + [(torch.float32, True)]  # with TF32 or not


@pytest.fixture
def allow_tf32():
    """Set torch's flag, whose own attribute cannot be deleted as monkeypatch would; undone."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda allowed: setattr(matmul, "allow_tf32", allowed)
    matmul.allow_tf32 = before


def results(problem, a, b, ways=None):
    scale = torch.arange(problem.n, dtype=torch.float32) - 1
    norms = {way: EMULATED.norms(way, a, b, problem) for way in ways or algorithms_of(problem)}
    fused = EMULATED.fused(a, b, problem, scale)
    return norms | dict(zip(("weight", "bias", "scaled"), fused, strict=True))


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize(("dtype", "tf32"), ARITHMETIC)
@each_problem
def test_the_order_of_threads_does_not_matter(problem, dtype, tf32, allow_tf32):
    allow_tf32(tf32)
    a, b = problem.operands(dtype, "gaussians")
    same_in_every_order(lambda: results(problem, a, b))


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("count", [1, 2, 132])
@each_problem
def test_any_number_of_multiprocessors_is_right(problem, count):
    with operators().multiprocessors(count):
        assert_right(problem, *case(problem, torch.float32, "integers")[:2])


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("kind", ["integers", "gaussians"])
@each_problem
def test_tf32_loses_nothing_of_operands_that_it_can_hold(problem, kind, allow_tf32):
    allow_tf32(True)
    a, b = problem.operands(torch.float32, kind)
    assert_right(problem, _of_tf32(a), _of_tf32(b), kind)


@pytest.mark.parametrize("name", ["cuda.matmul.fp32_precision", "fp32_precision"])
def test_tf32_is_allowed_by_torchs_newer_setting_too(name):
    """After which the older one can no longer be read."""
    done = python("-c", NEWER_SETTING.format(name=name), cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["128.0", "True"]


NEWER_SETTING = """
import torch
from emulation.operators import operator
torch.backends.{name} = "tf32"
a, ones = torch.full((2, 64, 128), 1 + 2.0**-12), torch.ones(2, 64, 128)  # TF32 keeps ten bits
grad = operator("linear_fused")(a, ones, None, False)[0]
from torchgradx.plan import gpu
torch.cuda.get_device_properties = lambda index: None
gpu.from_properties = lambda properties, tf32, compiled: tf32
print(float(grad.unique()), gpu.gpu_of(torch.device("cuda", 0)))
"""


def _of_tf32(x):
    """Cut to 10 bits of mantissa."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def assert_right(problem, a, b, kind="integers", ways=None):
    """Every operator against the oracle, by these algorithms or by all."""
    truth, given = truth_of(a, b, problem), results(problem, a, b, ways)
    for way in ways or algorithms_of(problem):
        assert_sq_norms(given[way], truth, way, a.dtype, kind)
    scale = torch.arange(problem.n, dtype=torch.float64) - 1
    hopper.assert_gradients(problem, given["weight"], given["bias"], truth, scale)


def _turned(x):
    """The same numbers, contiguous along the other dimension, or along none."""
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if x.shape[1] == 1:
        return torch.stack([x, x], -1)[..., 0]
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("name", CASES)
def test_results_and_workspace_are_bounded(name):
    """Of problems whose gradients, T x T or patches would each take more, on an H200."""
    algorithm, problem = CASES[name]
    library = operators()
    with library.dry(), library.multiprocessors(132):
        EMULATED.norms(algorithm, *problem.operands(torch.float32, "integers"), problem)
    assert library.allocated() <= BOUND


def test_allocations_are_counted():
    a, b = WIDE.operands(torch.float32, "integers")
    with operators().dry():
        EMULATED.fused(a, b)
    assert operators().allocated() >= 4 * WIDE.i * WIDE.o


FUZZ = """
import random, sys, warnings
from test_fuzz import raw_call, _written
from torchgradx import ops
from emulation.operators import operator
warnings.simplefilter("ignore")
rng, refused = random.Random(int(sys.argv[1])), 0
for call in range(int(sys.argv[2])):
    name, _, arguments, _ = raw_call(rng)
    print(name, *map(_written, arguments), flush=True)
    try:
        operator(name)(*arguments)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        refused += 1
        assert "EmulationError" not in type(error).__name__, error
print(refused)
"""


def test_malformed_calls_are_refused_before_a_kernel_sees_them(tmp_path):
    calls = 2000
    done = python("-c", FUZZ, 1, calls, cwd=Path(__file__).parent, timeout=300)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, f"{done.returncode} in {last}: {done.stderr}"
    assert re.fullmatch(r"\d+", last)
    assert int(last) > calls // 4
