"""The emulator itself: what right kernels compute on it, and that each fault is reported.

The kernels are in emulation/unit.cu. A fault must be found in every thread order.
"""

import ctypes
from functools import cache

import numpy as np
import pytest
import torch
from backends import needs_emulation
from emulation import build
from emulation.emulator import EmulationError, Emulator, Unit
from emulation.mutants import MUTANTS, planted
from emulation.wrappers import CASES, Case, differences, golden

pytestmark = needs_emulation
THREADS = 64
IN = torch.arange(1, 2 * THREADS + 1, dtype=torch.float32)
OUT_BYTES = 4 * 2 * THREADS


@cache
def unit():
    pointer = ctypes.c_void_p
    return Unit("unit.cu", pointer, pointer, ctypes.c_int, ctypes.c_size_t)


def launch(name, threads=THREADS, shared_bytes=4 * THREADS):
    """out [2 * THREADS] of a kernel given IN"""
    out = torch.full((2 * THREADS,), -1.0)
    spans = [(IN.data_ptr(), OUT_BYTES, False), (out.data_ptr(), OUT_BYTES, True)]
    unit().launch(name, spans, *(s[0] for s in spans), threads, shared_bytes)
    return out


in_each_order = pytest.mark.usefixtures("_each_order")
ROW = IN[:THREADS]


def _warp_functions():
    x = ROW.view(-1, 32)
    down = torch.cat([x[:, 4:], x[:, 28:]], 1)  # past the warp's end: one's own
    up = torch.cat([x[:, :1], x[:, :-1]], 1)
    return (down + 1000 * up + 1e6 * x[:, 3:4] + 0.5).flatten()


EXPECTED = {
    "reverse": ROW.flip(0), "rotate_twice": ROW.roll(-66),
    "swap_lanes": ROW.view(-1, 2).flip(1).flatten(),
    **dict.fromkeys(("shared", "global", "index", "copy"), ROW), "vector": IN[: THREADS - 4],
    "shuffle": ROW.view(-1, 2).flip(1).flatten(), "warp_functions": _warp_functions(),
    "sums": 3 * ROW.sum() * torch.tensor([1, 1, 0, 0]),  # the sum is thread 0's alone
    "copy/part": torch.where(torch.arange(THREADS) % 4 < 3, ROW, 0),
    "copy/nothing": torch.zeros(THREADS),
}  # fmt: skip


@in_each_order
@pytest.mark.parametrize("name", EXPECTED)
def test_a_right_kernel_computes_what_cuda_would(name):
    expected = EXPECTED[name]
    assert torch.equal(launch(name)[: len(expected)], expected)
    with unit().unchecked():
        assert torch.equal(launch(name)[: len(expected)], expected)


FAULTS = {
    "reverse/no_barrier": "uninitialised|race: read",
    "reverse/divergent": "uninitialised|race: read",
    "reverse/early_return": "divergence: .*__syncthreads", "rotate_twice/no_barrier": "race: ",
    "swap_lanes/no_barrier": "uninitialised|race: ",
    "swap_lanes/across_warps": "uninitialised|race: ",
    "shared/out_of_bounds": "read of 4 bytes at offset 256 of 256 bytes of dynamic shared memory",
    "shared/uninitialised": "read of dynamic shared memory at offset 20, which is uninitialised",
    "global/out_of_bounds": "at offset 512 of 512 bytes|in no registered buffer",
    "global/between_blocks": "race: write at offset .* by another block",
    "global/write_input": "write at offset .* of an input",
    "global/read_other_block": "race: .* by another block",
    "vector/misaligned": "type_mismatch|misaligned", "index/overflow": "(add|mul)_overflow",
    "shuffle/divergent": "divergence: warp operation",
    "shuffle/partial_mask": "mask 0000ffff leaves out lanes", "copy/no_wait": "still being copied",
    "copy/wait_too_short": "still being copied",
    "copy/no_barrier": "still being copied|uninitialised|race: ",
    "copy/misaligned": "misaligned cp.async of 16 bytes",
    "copy/never_waited": "1 asynchronous copies it never waited for",
}  # fmt: skip


def test_every_kernel_of_the_table_is_tested():
    assert set(EXPECTED) | set(FAULTS) == set(unit().cases)


@in_each_order
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name):
    with pytest.raises(EmulationError, match=FAULTS[name]):
        launch(name)


def test_a_report_says_which_thread_and_which_line():
    with pytest.raises(EmulationError) as report:
        launch("shared/uninitialised")
    assert "[block (0, 0, 0), thread (5, 0, 0)]" in str(report.value)
    assert "shared_kernel" in str(report.value)
    assert "unit.cu:" in str(report.value)


def test_a_failed_launch_leaves_nothing_behind():
    for fault in ("copy/never_waited", "reverse/divergent", "shared/out_of_bounds"):
        with pytest.raises(EmulationError):
            launch(fault)
        assert torch.equal(launch("copy")[:THREADS], ROW)


@pytest.mark.parametrize(
    ("threads", "shared_bytes"), [(33, 256), (0, 0), (2048, 0), (64, 1 << 18), (64, 0)]
)
def test_a_launch_no_gpu_would_take_is_refused(threads, shared_bytes):
    match = "no dynamic shared memory" if (threads, shared_bytes) == (64, 0) else "invalid launch"
    with pytest.raises(EmulationError, match=match):
        launch("shared", threads, shared_bytes)


@in_each_order
@pytest.mark.parametrize("name", ["reverse/divergent", "reverse/early_return"])
def test_divergence_names_both_places(name):
    """Also without the checks of memory, which may see its consequence first."""
    both = r"divergence: .*__syncthreads at .*unit.cu:\d+; the end of the kernel"
    with unit().unchecked(), pytest.raises(EmulationError, match=both):
        launch(name)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_still_be_planted(mutant, tmp_path):
    """`make mutants` then sees to it that it is caught."""
    assert planted(mutant, tmp_path).exists()


def test_what_is_unchecked_is_not_reported():
    """Else the plain flavour would cost what the checked one does."""
    with unit().unchecked():
        launch("global/between_blocks")


# The PTX wrappers, lane by lane, against the manual and a GPU's recorded answers
@cache
def wrappers():
    emulator = Emulator(build.kernels_alone(build.HERE / "wrappers.cu"))
    emulator.c.run_wrapper.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    return emulator


def answer(case):
    emulator, out = wrappers(), np.zeros(len(case.expected), np.uint32)
    given = case.given.copy()
    spans = ((given.ctypes.data, given.nbytes, False), (out.ctypes.data, out.nbytes, True))
    emulator.c.cuda_emulation_clear()
    with emulator.buffers(*spans):
        error = emulator.c.run_wrapper(case.wrapper.encode(), *(s[0] for s in spans))
    emulator.expect_silence()
    assert error == 0
    return out


@pytest.mark.parametrize("name", CASES)
def test_a_wrapper_answers_as_the_manual_says(name):
    case = CASES[name]()
    assert differences(case, answer(case), case.expected) == []


@pytest.mark.parametrize("name", CASES)
def test_a_wrapper_answers_as_a_gpu_did(name):
    recorded = golden(name)
    if recorded is None:
        pytest.skip("no GPU has been asked: python tests/emulation/wrappers.py records its answer")
    case = CASES[name]()
    assert differences(case, answer(case), recorded) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_comparison_sees_one_swapped_register(dtype):
    case = CASES[f"mma_m16n8k16_{dtype}-gaussians"]()
    swapped = case.given.reshape(32, 10).copy()
    swapped[:, [1, 2]] = swapped[:, [2, 1]]
    other = Case(case.wrapper, swapped.reshape(-1), case.expected, case.rounding)
    assert differences(other, answer(other), case.expected)
