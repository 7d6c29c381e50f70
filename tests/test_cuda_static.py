"""The CUDA kernels without a GPU: compiled for each architecture, warnings and spills as errors,
and their machine code held to a budget (kernel_budget.py)."""

import cubins
import pytest
import test_emulated as emulated
import test_emulated_elementwise as elementwise
import test_emulated_planes as planes
import test_emulated_sm90 as hopper
import torch
from backends import needs_emulation
from cubins import ARCHITECTURES, SOURCES
from emulation.operators import operator, operators
from kernel_budget import BUDGETS, FORBIDDEN, Budget, budget_of
from oracle import Linear
from oracle_gather import Gather

needs_nvcc = pytest.mark.skipif(bool(cubins.why_not()), reason=cubins.why_not())
needs_disassembler = pytest.mark.skipif(
    not cubins.cuobjdump(),
    reason="the kernels' budgets are NOT checked: no cuobjdump (pip install '.[test]')",
)
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_file_compiles_without_warnings_and_spills(source):
    assert cubins.compiled(source, *ARCHITECTURES).exists()


@needs_nvcc
def test_hoppers_kernel_compiles_where_its_instructions_are_not():
    (source,) = (path for path in SOURCES if path.stem == "direct_sm90")
    assert cubins.compiled(source, "90").exists()


# As files of kernels are, but for one fault. A loop over a local array of 512 floats, all of them
# alive at once, cannot stay in 255 registers.
FAULTS = {
    "warning": ("__global__ void f(float* x) { int never_used = 3; x[0] = 1; }", "never_used"),
    "stack": (
        """__global__ void f(const float* x, float* y, int n) {
             float kept[512];
             for (int i = 0; i < 512; ++i) kept[i] = x[i * n];
             for (int i = 0; i < n; ++i) y[i] = kept[i * n % 512];
           }""",
        "local memory|stack|lmem",
    ),
    "spill": (
        """__global__ void __launch_bounds__(1024, 2) f(const float* x, float* y) {
             float kept[64];
             #pragma unroll
             for (int i = 0; i < 64; ++i) kept[i] = x[i * 1024 + threadIdx.x];
             __syncthreads();
             #pragma unroll
             for (int i = 0; i < 64; ++i) y[(63 - i) * 1024 + threadIdx.x] = kept[i] * kept[i ^ 21];
           }""",
        "[Ss]pill",
    ),
}


@needs_nvcc
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_doubtful_is_an_error(fault, tmp_path):
    code, message = FAULTS[fault]
    source = tmp_path / f"{fault}.cu"
    source.write_text(code)
    with pytest.raises(RuntimeError, match=message):
        cubins.compiled(source, "80")


def faults(kernel, budget, architecture):
    """How a kernel breaks its budget, as text."""
    if budget is None:
        return [f"{kernel.name} has no budget: give it a row in kernel_budget.py"]
    if budget.architecture not in ("", architecture):
        return []
    forbidden = [op for op in FORBIDDEN if op not in budget.allows]
    broken = [f"has {kernel.opcodes[op]} {op}" for op in forbidden if kernel.opcodes[op]]
    broken += [
        f"has {kernel.opcodes[op]} {op}, needs {least}"
        for op, least in budget.needs.items()
        if kernel.opcodes[op] < least
    ]
    if kernel.registers > budget.registers:
        broken.append(f"takes {kernel.registers} registers, of {budget.registers}")
    if kernel.stack:
        broken.append(f"takes {kernel.stack} bytes of stack")
    if kernel.max_threads != budget.threads:
        broken.append(f"is bounded to {kernel.max_threads} threads, not {budget.threads}")
    return [f"{kernel.name} {what}" for what in broken]


@needs_nvcc
@needs_disassembler
@each_architecture
def test_every_kernel_keeps_its_budget(architecture):
    found = cubins.kernels(architecture).values()
    assert len(found) >= len(BUDGETS)
    assert [text for k in found for text in faults(k, budget_of(k.name), architecture)] == []


@needs_nvcc
@needs_disassembler
def test_every_budget_is_some_kernels():
    found = cubins.kernels(ARCHITECTURES[0]).values()
    spent = {b.kernels for k in found if (b := budget_of(k.name))}
    assert {b.kernels for b in BUDGETS} - spent == set()


@needs_nvcc
@needs_disassembler
def test_a_broken_budget_is_seen(tmp_path, monkeypatch):
    """One kernel that breaks every rule, through the same disassembler."""
    source = tmp_path / "broken.cu"
    source.write_text(
        "__global__ void __launch_bounds__(64) f(float* x) { atomicAdd(x + threadIdx.x, x[64]); }"
    )
    monkeypatch.setattr(cubins, "SOURCES", [source])
    (kernel,) = cubins.kernels.__wrapped__("80").values()
    broken = "\n".join(faults(kernel, Budget("f", 32, 2, {"HMMA": 1}), "80"))
    assert "registers, of 2" in broken
    assert "has 0 HMMA, needs 1" in broken
    assert "is bounded to 64 threads, not 32" in broken
    assert "has 1 RED" in broken
    assert faults(kernel, None, "80") == ["f has no budget: give it a row in kernel_budget.py"]


allow_tf32 = emulated.allow_tf32  # a fixture


@needs_nvcc
@needs_disassembler
@needs_emulation
def test_every_kernel_is_launched_within_its_bounds(allow_tf32):
    """On a GPU a block larger than its kernel's bounds is a launch that fails."""
    for dtype, tf32 in emulated.ARITHMETIC:
        allow_tf32(tf32)
        for problem in (*emulated.LINEAR, *emulated.CONV2D, *planes.PROBLEMS):
            operands = problem.operands(dtype, "integers")
            with operators().dry():
                emulated.results(problem, *operands)
                emulated.results(problem, *map(emulated._turned, operands))
                with operators().batched():
                    emulated.results(problem, *operands)
                    if isinstance(problem, Linear):
                        operator("linear_scaled")(*operands, torch.ones(problem.n), True)
    with operators().hopper(), operators().dry():
        for problem in hopper.LINEAR + hopper.CONV2D:
            for dtype in hopper.HALVES:
                hopper.results(problem, *hopper.operands(problem, dtype, "integers"))
        for problem, count in hopper.CLUSTERS:
            with operators().multiprocessors(count):
                for dtype in hopper.HALVES:
                    hopper.results(problem, *hopper.operands(problem, dtype, "integers"))
    for dtype in emulated.DTYPES:
        for affine in elementwise.PROBLEMS:
            case = elementwise.case(affine, dtype, "integers")[0]
            for given in (case, elementwise.in_planes(case), elementwise.in_longer_rows(case)):
                with operators().dry():
                    elementwise.results(affine, given)
                    for over_positions in (False, True):
                        operator("moments")(given.x, 1e-5, True, over_positions)
        with operators().dry():
            for side in (33, 64):  # elements, and pieces of several
                operator("turned")(torch.zeros(2, side, side, dtype=dtype).mT)
            operator("gather_sq_norms")(*Gather(2, 9, 3, 40).operands(dtype, "integers"), None)
    bounds = {k.name: k.max_threads for k in cubins.kernels("80").values()}
    launched = _launched(operators())
    assert {name: threads for name, threads in launched.items() if threads > bounds[name]} == {}
    assert sorted(set(bounds) - set(launched)) == [], "no test reaches these kernels"


def _launched(library):
    symbols, launched = library.symbols(), library.launched()
    names = cubins.demangled([symbols[offset] for offset in launched])
    return {
        cubins.short(name): threads
        for name, (threads, _) in zip(names, launched.values(), strict=True)
    }
