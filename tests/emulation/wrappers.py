"""What each wrapper of device.cuh is given, and what the PTX manual has it answer.

The layouts are written here once more, from the manual's figures and not from ptx.cpp. `python
tests/emulation/wrappers.py` on a machine with a GPU records what that answers (golden/*.json).
"""

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
LANES = np.arange(32)
GROUP, PAIR = LANES // 4, LANES % 4


@dataclass(frozen=True)
class Case:
    wrapper: str
    given: Words
    expected: Words
    rounding: float = 0.0  # what an answer may be off by, as float32; 0: the same bits


def _words(values: NDArray) -> Words:
    return np.ascontiguousarray(values).view(np.uint32).reshape(-1)


def _random(seed: int) -> np.random.RandomState:
    return np.random.RandomState(seed)  # whose stream no release of numpy changes


# cp.async: bytes past the valid ones are zero
def _cp_async(size: int) -> Case:
    given = _random(size).randint(1, 256, (64, size)).astype(np.uint8)
    valid = np.arange(64)[:, None] % (size + 1)
    expected = np.where(np.arange(size) < valid, given, 0).astype(np.uint8)
    return Case(f"cp_async_{size}", _words(given), _words(expected))


# ldmatrix: "each thread holds a row fragment": thread l, row l / 4, elements 2 (l % 4) and the next
def _ldmatrix(transposed: bool) -> Case:
    rows = np.arange(256, dtype=np.uint16).reshape(32, 8)
    order = _random(1).permutation(32)
    matrices = rows[order].reshape(4, 8, 8)  # lanes 8 m ... 8 m + 7 name the rows of matrix m
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    fragments = matrices.reshape(4, 32, 2).swapaxes(0, 1)  # [lane, matrix, two neighbours]
    name = "ldmatrix_x4_trans" if transposed else "ldmatrix_x4"
    return Case(name, np.concatenate([_words(rows), order.astype(np.uint32)]), _words(fragments))


# mma: figures "m16n8k16 fragment layout for A / B / C" and their m16n8k8 .tf32 counterparts
def _bits_of_half(x: Floats, dtype: str) -> NDArray[np.uint16]:
    """Of values that the half type holds exactly."""
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _pair(x: NDArray[np.uint16], row: NDArray, column: NDArray) -> Words:
    return x[row, column].astype(np.uint32) | x[row, column + 1].astype(np.uint32) << 16


def _mma_given(a: list[Words], b: list[Words], c: Floats) -> Words:
    return np.stack([*a, *b, *(_words(x) for x in _accumulators(c))], 1).reshape(-1)


def _accumulators(c: Floats) -> list[Floats]:
    return [c[GROUP + 8 * (i // 2), 2 * PAIR + i % 2] for i in range(4)]


def _mma_half(dtype: str, kind: str) -> Case:
    a, b, c = _operands(16, dtype, kind)
    bits_a, bits_b = _bits_of_half(a, dtype), _bits_of_half(b.T.copy(), dtype)
    k = 2 * PAIR
    of_a = [_pair(bits_a, GROUP + 8 * (i % 2), k + 8 * (i // 2)) for i in range(4)]
    of_b = [_pair(bits_b, GROUP, k + 8 * i) for i in range(2)]
    return _mma_case(f"mma_m16n8k16_{dtype}", of_a, of_b, (a, b, c), kind)


def _mma_tf32(kind: str) -> Case:
    a, b, c = _operands(8, "tf32", kind)
    of_a = [_words(a[GROUP + 8 * (i % 2), PAIR + 4 * (i // 2)]) for i in range(4)]
    of_b = [_words(b[PAIR + 4 * i, GROUP]) for i in range(2)]
    return _mma_case("mma_m16n8k8_tf32", of_a, of_b, (a, b, c), kind)


def _mma_case(
    wrapper: str, a: list[Words], b: list[Words], matrices: tuple[Floats, ...], kind: str
) -> Case:
    x, y, c = (m.astype(np.float64) for m in matrices)
    expected = (c + x @ y).astype(np.float32)
    # Tensor cores align a sum's terms to the largest before they add: each may lose a last bit.
    terms = float((np.abs(x) @ np.abs(y) + np.abs(c)).max())
    rounding = 0.0 if kind == "integers" else (x.shape[1] + 2) * 2.0**-22 * terms
    given = _mma_given(a, b, matrices[2])
    return Case(wrapper, given, _words(np.stack(_accumulators(expected), 1)), rounding)


def _operands(k: int, dtype: str, kind: str) -> tuple[Floats, Floats, Floats]:
    random = _random(k)
    shapes = (16, k), (k, 8), (16, 8)
    if kind == "integers":
        a, b, c = (random.randint(-9, 10, shape).astype(np.float32) for shape in shapes)
        return a, b, c
    a, b, c = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return _rounded(a, dtype), _rounded(b, dtype), c


def _rounded(x: Floats, dtype: str) -> Floats:
    """To nearest; ties to even for the halves, away from zero for tf32."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    dropped = {"bfloat16": 16, "tf32": 13}[dtype]
    half = 1 << (dropped - 1)
    up = half if dtype == "tf32" else half - 1 + (bits >> dropped & 1)
    rounded = ((bits + up) >> dropped << dropped).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


# Conversions: ties, carries into the exponent, the edges of each range, and what is not finite
def _edges() -> Floats:
    mantissas = [0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000]
    mantissas += [0x7FF000, 0x7FFFFF]
    exponents = [0x3F800000, 0xC0000000, 0x47000000, 0x33000000, 0x7F000000]
    bits = [e | m for e in exponents for m in mantissas]
    bits += [0, 0x80000000, 0x7F800000, 0xFF800000]
    return np.array(bits, np.uint32).view(np.float32)


def _conversion(wrapper: str, dtype: str) -> Case:
    given = _edges()
    with np.errstate(over="ignore"):
        return Case(wrapper, _words(given), _words(_rounded(given, dtype)))


# Sums: the butterfly's own order, lane by lane
def _butterfly(x: Floats) -> Floats:
    for distance in (16, 8, 4, 2, 1):
        x = (x + x[:, LANES ^ distance]).astype(np.float32)
    return x


def _warp_sum() -> Case:
    given = _random(3).standard_normal((2, 32)).astype(np.float32)
    return Case("warp_sum", _words(given), _words(_butterfly(given)))


def _block_sum() -> Case:
    given = _random(4).standard_normal((2, 32)).astype(np.float32)
    partial = np.zeros((1, 32), np.float32)
    partial[0, :2] = _butterfly(given)[:, 0]
    expected = np.zeros(64, np.float32)
    expected[0] = _butterfly(partial)[0, 0]
    return Case("block_sum", _words(given), _words(expected))


CASES: dict[str, Callable[[], Case]] = {
    **{f"cp_async_{size}": lambda size=size: _cp_async(size) for size in (16, 8, 4)},
    "ldmatrix_x4": lambda: _ldmatrix(False),
    "ldmatrix_x4_trans": lambda: _ldmatrix(True),
    **{
        f"mma_m16n8k16_{dtype}-{kind}": lambda dtype=dtype, kind=kind: _mma_half(dtype, kind)
        for dtype in ("bfloat16", "float16")
        for kind in ("integers", "gaussians")
    },
    "mma_m16n8k8_tf32-integers": lambda: _mma_tf32("integers"),
    "mma_m16n8k8_tf32-gaussians": lambda: _mma_tf32("gaussians"),
    "to_tf32": lambda: _conversion("to_tf32", "tf32"),
    **{f"narrow_{t}": lambda t=t: _conversion(f"narrow_{t}", t) for t in ("bfloat16", "float16")},
    "warp_sum": _warp_sum,
    "block_sum": _block_sum,
}


def differences(case: Case, answer: Words, wanted: Words) -> list[str]:
    """The words in which an answer is not what is wanted, as text; empty if none."""
    x, y = answer.view(np.float32), wanted.view(np.float32)
    with np.errstate(invalid="ignore"):
        fine = answer == wanted if not case.rounding else np.abs(x - y) <= case.rounding
    return [f"word {i}: {answer[i]:08x}, wanted {wanted[i]:08x}" for i in np.flatnonzero(~fine)]


def golden(name: str) -> Words | None:
    """What a GPU answered, if one has been asked."""
    path = GOLDEN / f"{name}.json"
    return np.array(json.loads(path.read_text())["answer"], np.uint32) if path.exists() else None


def record() -> int:
    """Ask the GPU at hand; how many of its answers are not the manual's."""
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/wrappers.so"
        capability = "".join(map(str, torch.cuda.get_device_capability()))
        device_header = HERE.parents[1] / "csrc/cuda"
        options = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{capability}"]
        source = str(HERE / "wrappers.cu")
        subprocess.run(["nvcc", *options, f"-I{device_header}", source, "-o", path], check=True)
        run = ctypes.CDLL(path).run_wrapper
    run.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    GOLDEN.mkdir(exist_ok=True)
    wrong = 0
    for name, make in CASES.items():
        case = make()
        given = torch.from_numpy(case.given.view(np.int32)).cuda()
        out = torch.zeros(len(case.expected), dtype=torch.int32, device="cuda")
        error = run(case.wrapper.encode(), given.data_ptr(), out.data_ptr())
        torch.cuda.synchronize()
        answer = out.cpu().numpy().view(np.uint32)
        off = differences(case, answer, case.expected)
        wrong += bool(error or off)
        print(f"{name:32} {f'error {error}' if error else 'differs: ' + off[0] if off else 'ok'}")
        facts = {"device": torch.cuda.get_device_name(), "answer": answer.tolist()}
        (GOLDEN / f"{name}.json").write_text(json.dumps(facts) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(record())
