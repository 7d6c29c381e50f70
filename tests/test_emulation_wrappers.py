"""The PTX wrappers, lane by lane: the emulator against the manual and, where a GPU has been asked,
against its recorded answers."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
from emulation import build
from emulation.emulator import Emulator
from emulation.wrappers import CASES, Case, differences, golden

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not())
each_case = pytest.mark.parametrize("name", CASES)


@cache
def wrappers():
    emulator = Emulator(build.kernels_alone(build.HERE / "wrappers.cu"))
    pointers = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    emulator.c.run_wrapper.argtypes = pointers
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


@each_case
def test_a_wrapper_answers_as_the_manual_says(name):
    case = CASES[name]()
    assert differences(case, answer(case), case.expected) == []


@each_case
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
