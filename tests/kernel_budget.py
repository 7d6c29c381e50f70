"""What each CUDA kernel may take and must contain: its machine code is read in test_cuda_static.py.

A multiprocessor has 65536 registers, dealt to warps in steps of 8 a thread: a block of 256 threads
leaves room for another at 128 registers, for two at 80 (85, rounded down), for seven at 32.
Minimum counts are of one instantiation: fewer means that the compiler found another way.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

# Local memory is where spilled registers and arrays that are not in registers go; atomics and
# reductions in memory would make sums depend on who comes first.
FORBIDDEN = ("LDL", "STL", "ATOM", "ATOMG", "ATOMS", "RED", "REDG")


@dataclass(frozen=True)
class Budget:
    kernels: str  # a pattern of names, as cubins.short gives them
    threads: int  # of __launch_bounds__
    registers: int
    needs: dict[str, int] = field(default_factory=dict)  # opcode: at least so many
    architecture: str = ""  # the only one for which the kernel has a body
    allows: tuple[str, ...] = ()  # of FORBIDDEN


HALF = {"HMMA": 48, "LDSM": 14, "LDGSTS": 32}
TF32 = {"HMMA": 32, "LDGSTS": 32}
FLOAT = {"FFMA": 256, "LDGSTS": 32}
DOUBLE = {"DFMA": 64, "LDGSTS": 32}
WGMMA = {"HGMMA": 36, "UTMALDG": 4, "SYNCS": 8}
BUDGETS = [
    # Norms alone: one set of accumulators. One block, and registers to spare for the pipeline.
    Budget("direct_kernel<HalfProduct<*>, *, false>", 256, 168, HALF),
    Budget("direct_kernel<Tf32Product<*>, *, false>", 256, 168, TF32),
    Budget("direct_kernel<SimtProduct<float, *>, *, false>", 256, 168, FLOAT),
    Budget("direct_kernel<SimtProduct<double, *>, *, false>", 256, 128, DOUBLE),
    # Fused: two sets. All the registers a thread can have, and none spilled.
    Budget("direct_kernel<HalfProduct<*>, *, true>", 256, 255, HALF),
    Budget("direct_kernel<Tf32Product<*>, *, true>", 256, 208, TF32),
    Budget("direct_kernel<SimtProduct<float, *>, *, true>", 256, 240, FLOAT),
    Budget("direct_kernel<SimtProduct<double, *>, *, true>", 256, 176, DOUBLE),
    # Gram keeps the products of the activations while it makes the gradients': two sets too.
    # Tiles of 64 are for small T, two blocks a multiprocessor.
    Budget("gram_kernel<HalfProduct<*, 64, 64, *>, *>", 256, 128, {"HMMA": 8, "LDSM": 6}),
    Budget("gram_kernel<Tf32Product<64, 64>, *>", 256, 128, {"HMMA": 8, "LDGSTS": 16}),
    Budget("gram_kernel<SimtProduct<float, 64, 64>, *>", 256, 128, {"FFMA": 64, "LDGSTS": 16}),
    Budget("gram_kernel<SimtProduct<double, *>, *>", 256, 168, DOUBLE),
    Budget("gram_kernel<HalfProduct<*>, *>", 256, 224, HALF | {"HMMA": 32, "LDSM": 12}),
    Budget("gram_kernel<Tf32Product<*>, *>", 256, 224, TF32),
    Budget("gram_kernel<SimtProduct<float, *>, *>", 256, 224, FLOAT),
    Budget("verdict_kernel<*>", 128, 32),
    # wgmma. 168 at the launch, dealt out anew: 224 to those that multiply. The atomic
    # is the grid's barrier, whose order nobody sees.
    Budget("sm90::direct_sm90_kernel<*>", 384, 168, WGMMA, architecture="90a", allows=("ATOM",)),
    # A filter's taps in registers, and for a window the image under two rows of outputs: a row's
    # steps are unrolled until the window is as it was. Tiles leave room for two blocks, of halves
    # for three of 128 threads.
    Budget("planes_kernel<Window<*, 7, 1>*", 256, 128, {"FFMA": 2 * 7 * 49}),
    Budget("planes_kernel<Window<*, 5, *>*", 256, 112, {"FFMA": 2 * 5 * 25}),
    Budget("planes_kernel<Window<*, 3, *>*", 256, 80, {"FFMA": 2 * 3 * 9}),
    Budget("planes_kernel<EachTap<double, 25>*", 256, 168, {"DFMA": 25}),
    Budget("planes_kernel<EachTap<double, 9>*", 256, 128, {"DFMA": 9}),
    Budget("planes_kernel<EachTap<*, 25>*", 256, 128, {"FFMA": 25}),
    Budget("planes_kernel<EachTap<*, 9>*", 256, 96, {"FFMA": 9}),
    # A row's columns in registers, five numbers each, 16 warps a multiprocessor; two rows under
    # way. Sums of columns: three blocks of 256, four positions under way.
    Budget("affine_rows_kernel<*, true>", 512, 128, {"LDG": 4}),
    Budget("affine_rows_kernel<*>", 512, 128, {"LDG": 14}),
    Budget("affine_columns_kernel<*, true, *>", 512, 80, {"LDG": 8}),
    Budget("affine_columns_kernel<*>", 512, 80, {"LDG": 24}),
    Budget("affine_input_kernel<*>", 256, 40, {"LDG": 32}),
    # 16 bytes of columns a thread, four positions under way, three blocks; coefficients of each.
    Budget("affine_sweep_kernel<*, (Kind)2>", 256, 64, {"LDG": 5}),
    Budget("affine_sweep_kernel<*>", 256, 80, {"LDG": 8}),
    Budget("affine_sweep_input_kernel<*>", 256, 80, {"LDG": 4}),
    Budget("affine_join_kernel<*>", 512, 64),
    Budget("moments_join_kernel<*>", 512, 64),
    Budget("turn_kernel<*>", 256, 64, {"LDG": 4, "STG": 4}),  # 128 bytes a thread under way
    Budget("gather_kernel<double>", 512, 64, {"LDG": 24}),  # eight rows under way
    Budget("gather_kernel<*>", 512, 40, {"LDG": 24}),
    Budget("moments_kernel<*>", 256, 40, {"LDG": 8}),  # four elements under way, in two passes
    Budget("gradients_kernel<*>", 256, 64, {"LDG": 16}),  # eight elements of two samples
    Budget("grams_kernel<*>", 256, 64, {"LDG": 16}),  # eight pairs
    Budget("scale_samples_kernel<*>", 256, 32, {"LDG": 2}),  # 16 bytes and a scale
    Budget("rank1_kernel<*>", 256, 32),
    Budget("bias_kernel<*>", 1024, 32),  # two blocks, every warp a processor has
    Budget("sum_rows_kernel<*>", 256, 40),
    Budget("sum_partials_kernel<*>", 256, 32),
]


def budget_of(kernel: str) -> Budget | None:
    return next((b for b in BUDGETS if fnmatchcase(kernel, b.kernels)), None)
