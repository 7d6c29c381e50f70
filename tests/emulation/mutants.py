"""`make mutants`: plants bugs in the CUDA kernels one at a time; the tests must catch every one.
PART=3/8 takes every eighth bug from the fourth on, and PART=ring those with "ring" in their names.

A bug is a substitution whose text must be found exactly once. Of its file, only what its own kind
of problem instantiates is compiled, linked with the other kernels as they are, and run against the
oracle and under the emulator's checks (`battery`) until something objects. Two run at a time.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from emulation import build, mutants_planes, mutants_sm90, mutants_sweep  # noqa: E402
from emulation.mutant import Mutant, planted_in  # noqa: E402

BARRIER, DROPPED = "__syncthreads();", ";"
MUTANTS = [
    # The pipeline
    *planted_in("pipeline.cuh", "direct", "bfloat16", [
        ("ring: barrier dropped", "__syncthreads();  // this slot", ";  // this slot"),
        ("ring: the tail's empty groups are not committed",
         "kStages - 1), work.next(ahead);\n    cp_async_commit();",
         "kStages - 1), work.next(ahead), cp_async_commit();")]),
    *planted_in("pipeline.cuh", "gram", "float32", [
        ("ring: barrier dropped, float32", "__syncthreads();  // this slot", ";  // this slot")]),
    *planted_in("pipeline.cuh", "direct", "float32", [
        ("ring: waits a group early", "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>")]),
    *planted_in("pipeline.cuh", "direct", "float64", [
        ("ring: fills the slot in use", "slot ? slot - 1 : kStages - 1", "slot")]),
    # Staging
    *planted_in("tile.cuh", "direct", "bfloat16", [
        ("staging: rows past the end are not zero", "outer_left > 0 && from ?", "from ?"),
        ("staging: the tail of a sample is taken for whole", "k_extent - k0 >= kK && mn_left(0)",
         "mn_left(0)")]),
    *planted_in("tile.cuh", "direct", "float32", [
        ("staging: reads past the end", "k_valid && mn_left(mn) > 0 && from", "k_valid && from")]),
    *planted_in("tile.cuh", "gram", "bfloat16", [
        ("staging: tail of a chunk is not masked", "min(max(inner_left, 0), kVector)", "kVector"),
        ("staging: the last tile is taken for whole", "&& mn_left(0) >= kMn && kHas", "&& kHas"),
        ("staging: whole tiles copied from one row", "from + i * step", "from")]),
    *planted_in("direct.cuh", "direct", "float32", [
        ("staging: table of places read without a barrier", "__syncthreads();  // the tables",
         ";  // the tables")]),
    *planted_in("operand.cuh", "direct", "float32", "conv2d", [
        ("im2col: no padding above", "unsigned(p.y + f.y) < unsigned(H)", "p.y + f.y < H"),
        ("im2col: division rounds down once too often", "+ uint64_t(d) - 1) / uint64_t(d)",
         ") / uint64_t(d)")]),
    *planted_in("operand.cuh", "gram", "float32", "conv2d", [
        ("im2col: padding to the wrong side", "* strideW - padW", "* strideW + padW")]),
    *planted_in("operand.cuh", "direct", "float64", "conv2d", [
        ("im2col: weight written in the image's order",
         "int64_t(a) * digits[0].weight + b * digits[1].weight + c * digits[2].weight", "index")]),
    # Fragments
    *planted_in("product.cuh", "direct", "bfloat16", [
        ("mma: fragments of B swapped", "b[j][1] = two[1], b[j + 1][0] = two[2]",
         "b[j][1] = two[2], b[j + 1][0] = two[1]"),
        ("mma: rows of D mixed up", "r / 2 * 8 + lane() / 4", "r % 2 * 8 + lane() / 4"),
        ("mma: columns of D mixed up", "lane() % 4 * 2 + r % 2", "lane() % 4 * 2 + r / 2")]),
    *planted_in("product.cuh", "direct", "tf32", [
        ("tf32: second half of k two rows off", "n[LayoutN::offset(k + half * 4",
         "n[LayoutN::offset(k + half * 2")]),
    *planted_in("product.cuh", "gram", "tf32", [
        ("tf32: operand not rounded", "b[j][half] = to_tf32(", "b[j][half] = __float_as_uint(")]),
    *planted_in("product.cuh", "direct", "float32", [
        ("simt: depth off 1", "for (int k = 0; k < kK; ++k)", "for (int k = 0; k < kK - 1; ++k)")]),
    # Direct and fused
    *planted_in("direct.cuh", "direct", "float32", [
        ("fused: no scale", "+= scale * product_.acc[group][r]", "+= product_.acc[group][r]"),
        ("fused: scale of the first sample for all", "a_.scale[n]", "a_.scale[0]"),
        ("direct: one row too many is written", "row >= rows_left()", "row > rows_left()"),
        ("direct: the mask is read the wrong way round", "!a_.mask[n]", "a_.mask[n]")]),
    *planted_in("direct.cuh", "direct", "bfloat16", [
        ("fused: scale forgotten in the bias", "? scale * row_sum :", "? row_sum :")]),
    *planted_in("direct.cuh", "direct", "float64", [
        ("direct: a sample runs into the next", "    product_.clear();\n  }\n", "  }\n")]),
    *planted_in("direct.cuh", "direct", "float32", "conv2d", [
        ("direct: groups overlap", "int64_t(group_) * a_.grads.features + tile_o_", "tile_o_")]),
    *planted_in("direct.cu", "direct", "float32", [
        ("direct: shared memory too small", "DirectBlock<Product, Loader, true>::kSharedBytes",
         "DirectBlock<Product, Loader, true>::kSharedBytes - 512")]),
    # Gram
    *planted_in("gram.cuh", "gram", "float32", [
        ("gram: the diagonal counts twice", "on_diagonal() ? 1 : 2", "2"),
        ("gram: one side of a pair for both", "(side ? tiles_.t : tiles_.s)", "tiles_.s"),
        ("gram: barrier before the squares dropped", f"{BARRIER}\n    const bool mine",
         f"{DROPPED}\n    const bool mine"),
        ("gram: magnitude with a sign", "magnitude[r] += fabs(term)", "magnitude[r] += term")]),
    *planted_in("gram.cu", "gram", "float32", [
        ("gram: cancellation not noticed", "kCancelled = 1e-4", "kCancelled = 1e-12")]),
    # Row sums
    *planted_in("rowwise.cu", "rowwise", "float32", [
        ("bias: barrier dropped", f"{BARRIER}\n  const int64_t part",
         f"{DROPPED}\n  const int64_t part"),
        ("rank1: strides ignored", "row[k * stride]", "row[k]"),
        ("row sums: off the last column", "if (warp % sharing > 0 || k >= K) return;",
         "if (warp % sharing > 0) return;")]),
    *planted_in("rowwise.cu", "rowwise", "bfloat16", [
        ("bias: of four neighbours the first", "widen(read.at[j])", "widen(read.at[0])")]),
    *planted_in("rowwise.cu", "rowwise", "float32", "affine", [
        ("row sums: the first row's weight", "weights[each.divide(int(r))] :", "weights[0] :")]),
    *planted_in("device.cuh", "rowwise", "float32", [
        ("block_sum: second call overtakes the first", f"value = warp_sum(value);\n  {BARRIER}",
         "value = warp_sum(value);")]),
    *planted_in("device.cuh", "direct", "bfloat16", [
        ("narrow: rounds towards zero", "__float2bfloat16_rn", "__float2bfloat16_rz")]),
    # Element by element
    *planted_in("affine.cu", "affine", "float32", "affine", [
        ("columns: barrier dropped", f"{BARRIER}\n  const bool mine",
         f"{DROPPED}\n  const bool mine"),
        ("columns: the tail past the last column is read", "    if (first + j < p.C)\n", ""),
        ("columns: sharers take the same positions", "lane : member;", "lane : 0;"),
        ("columns: statistics of the first position for all", "!kNegative && moving", "false"),
        ("columns: lane 0 alone is not enough", "!cut.along_positions || lane == 0", "true"),
        ("columns: a sharer is left out", "int other = 0; other < sharing",
         "int other = 1; other < sharing"),
        ("columns: sums of the first sample for all", "(kind * p.N + n) * p.C", "kind * p.N * p.C"),
        ("groups: means read without a barrier", f"{BARRIER}\n  shift = means[0]",
         f"{DROPPED}\n  shift = means[0]"),
        ("groups: shift where nothing is subtracted", "p.mean.data ? shift / count : acc_t(0)",
         "shift / count"),
        ("groups: the mean over features alone", "acc_t(kByRow ? 1 : p.T)", "acc_t(1)"),
        ("groups: sums of the first group for all", "+ n * p.C + int64_t(g) * K,", "+ n * p.C,"),
        ("groups: positions past the last", "if (t < p.T) {", "{")]),
    *planted_in("affine.cu", "affine", "bfloat16", "affine", [
        ("prelu: the gradient is cut to zero above it", "kNegative && positive ? grad",
         "kNegative && positive ? acc_t(0)")]),
    # What batched products come to, and moments
    *planted_in("products.cu", "products", "float32", "batched", [
        ("gradients: barrier dropped", f"{BARRIER}\n    if (run.squares",
         f"{DROPPED}\n    if (run.squares"),
        ("gradients: scale of a run's first sample for all", "scale[n0 + sample]", "scale[n0]"),
        ("gradients: earlier runs are forgotten", "run.before && at", "false && at"),
        ("gradients: past the last", "at < run.size ? from[at] : acc_t(0)", "from[at]"),
        ("grams: magnitude forgets the sign", "fabs(term)", "term"),
        ("grams: blocks overlap", "(block * kEach + j) * kBlock", "(block + j) * kBlock")]),
    *planted_in("moments.cu", "moments", "float32", "affine", [
        ("moments: about nothing", "input.k]) - of", "input.k])"),
        ("moments: of the first position", "set, t0, g, 0", "set, 0, g, 0")]),
    # Tables
    *planted_in("gather.cu", "gather", "float32", "gather", [
        ("gather: barrier dropped", BARRIER, DROPPED),
        ("gather: padding counts", " && ids[k + i] != p.padding", ""),
        ("gather: columns past the last are read", "column < p.D && ", ""),
        ("gather: entries past the warp's are read", "const bool counts = k + i < end &&",
         "const bool counts = k + i < p.T &&"),
        ("gather: a run begins with every warp", "begin > 0 ? ids[begin - 1] : -1", "-1"),
        ("gather: what a warp finds begun is lost", "open += heads[other][lane];", ";"),
        ("gather: the last run is not squared", "    square += squared(open);\n  }\n", "  }\n"),
        ("gather: a run is carried into the next", "begun = true, sum = 0;", "begun = true;")]),
    *planted_in("gather.cu", "gather", "bfloat16", "gather", [
        ("gather: positions of the sorted for the rows'", "rows[positions[k + i] * p.rows.t]",
         "rows[(k + i) * p.rows.t]")]),
    *planted_in("gather.cu", "gather", "float64", "gather", [
        ("gather: a warp within one run forgets it",
         "  if (!begun) heads[warp][lane] = sum;\n  tails", "  heads[warp][lane] = 0;\n  tails")]),
]  # fmt: skip
MUTANTS += mutants_planes.MUTANTS + mutants_sm90.MUTANTS + mutants_sweep.MUTANTS
ZEROS = {"bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double", "tf32": "float"}


def planted(mutant: Mutant, folder: Path) -> Path:
    """A copy of csrc with the bug in it; its .cu."""
    csrc = folder / "csrc"
    shutil.copytree(build.ROOT / "csrc", csrc)
    kernels = csrc / "cuda"
    file = kernels / mutant.file
    text = file.read_text()
    if (count := text.count(mutant.old)) != 1:
        sys.exit(f"{mutant.name}: its text is found {count} times in {mutant.file}:\n{mutant.old}")
    file.write_text(text.replace(mutant.old, mutant.new))
    # What is instantiated for others would be nine tenths of the compilation.
    refused, zero = "return cudaErrorInvalidValue;", re.escape(ZEROS[mutant.arithmetic])
    _rewrite(kernels / "dispatch.cuh", rf"return f\((?!{zero}\{{)\w+\{{\}}\);", refused, 3)
    product = r"\1" if mutant.arithmetic == "tf32" else r"\2"
    which = r"\bdevice\.tf32 \? (f\(.*\)) : (f\(.*\));"
    _rewrite(kernels / "product.cuh", which, rf"{product};", 1)
    if mutant.layer in ("hopper", "segments"):
        _rewrite(kernels / "direct_sm90.cu", "start<__half>", "start<__nv_bfloat16>", 1)
    linear, patches = r"return f\(make_layer<.*?;", r"return is_pointwise.*: (f\(.*;)"
    if mutant.layer == "linear":
        _rewrite(kernels / "layer.cuh", patches, refused, 1)
    elif mutant.layer == "conv2d":
        _rewrite(kernels / "layer.cuh", linear, refused, 1)
        _rewrite(kernels / "layer.cuh", patches, r"return \1", 1)
    return kernels / f"{mutant.via}.cu"


def _rewrite(file: Path, pattern: str, to: str, times: int) -> None:
    text, count = re.subn(pattern, to, file.read_text())
    if count != times:
        sys.exit(f"expected {pattern} {times} times in {file.name}; found it {count} times")
    file.write_text(text)


def verdict(library: Path, arithmetic: str, layer: str) -> str:
    """What the battery objects to, in one line; empty if nothing. In a process of its own, since
    a planted bug may well crash it."""
    fork = get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_examine, args=(theirs, library, arithmetic, layer))
    child.start()
    theirs.close()
    try:
        said: str = ours.recv() if ours.poll(300) else "does not end"
    except EOFError:
        child.join()
        return f"crashes, exit status {child.exitcode}"
    child.kill()
    child.join()
    return said


def _examine(to: Connection, library: Path, arithmetic: str, layer: str) -> None:
    os.environ["TORCHGRADX_EMULATED"] = str(library)
    try:
        battery(arithmetic, layer)
    except Exception as error:
        to.send(f"{type(error).__name__}: {error}".splitlines()[0])
    else:
        to.send("")


def battery(arithmetic: str, layer: str) -> None:
    """Raises what the tests would, of the operators in TORCHGRADX_EMULATED."""
    import test_affine as moments
    import test_dropped_samples as dropped
    import test_emulated as tests
    import test_emulated_elementwise as elementwise
    import test_emulated_planes as planes
    import test_emulated_segments as segments
    import test_emulated_sm90 as hopper
    import test_properties as properties
    import test_turned as turned
    import torch
    from backends import BACKENDS

    torch.set_num_threads(1)
    emulated = BACKENDS["emulated"]
    tf32 = arithmetic == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    dtype = torch.float32 if tf32 else getattr(torch, arithmetic)
    if layer in ("linear", "conv2d"):
        for rows in ("activations", "grad_output") if layer == "linear" and not tf32 else ():
            properties.test_a_gram_that_cancels_is_noticed(emulated, rows, dtype)
        problems = tests.LINEAR if layer == "linear" else tests.CONV2D
        for problem, kind in product(problems, ("integers", "gaussians")):
            a, b = problem.operands(dtype, kind)
            if tf32:
                tests.results(problem, a, b)  # not rounded yet: the kernel's to do
                a, b = tests._of_tf32(a), tests._of_tf32(b)
            tests.assert_right(problem, a, b, kind)
            tests.assert_right(problem, tests._turned(a), tests._turned(b), kind)
    elif layer == "clusters":
        hopper.clusters()
    elif layer in ("hopper", "segments"):
        (hopper if layer == "hopper" else segments).battery()
    elif layer == "affine":
        for affine in elementwise.PROBLEMS:
            elementwise.assert_right(affine, dtype, "gaussians")
            moments.test_moments_are_those_of_the_layers(emulated, affine, True, dtype)
        moments.test_moments_of_a_small_variance_about_a_large_mean(emulated)
    elif layer == "turned":
        for size, layout in product(turned.SIZES, turned.LAYOUTS):
            turned.test_a_turned_copy_is_contiguous_and_the_same(emulated, size, layout, dtype)
    elif layer == "batched":
        with tests.operators().batched():
            properties.test_a_gram_that_cancels_is_noticed(emulated, "activations", dtype)
            for problem in (tests.Linear(9, 136, 17, 23), tests.Linear(3, 130, 17, 133)):
                tests.assert_right(problem, *problem.operands(dtype, "gaussians"), "gaussians")
            dropped.test_linear(emulated, dtype, "linear_scaled", 20, 33, 9)
    elif layer == "planes":
        for problem, (image, gradient) in product(planes.PROBLEMS, planes.PAIRS):
            planes.assert_right(problem, dtype, image, gradient)
        planes.test_pixels_beyond_the_last_outputs_reach_may_be_infinite(3, "channels_last")
        planes.test_blocks_of_several_samples_are_right()
    else:
        assert layer == "gather"
        for table in elementwise.TABLES:
            elementwise.assert_table_right(table, dtype)


def objection_to_none(kind: tuple[str, str]) -> str:
    return verdict(build.operators(), *kind)


def objection(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        compiled = build.kernel(planted(mutant, Path(scratch)), "-O1")
    library = build.operators({mutant.via: compiled})
    said = verdict(library, mutant.arithmetic, mutant.layer)
    library.unlink()
    return said


def main() -> int:
    if build.why_not():
        print(build.why_not())
        return 0
    import test_emulated  # noqa: F401  # torch too: once, for all that is forked from here

    only = sys.argv[1] if len(sys.argv) > 1 else ""
    share = re.fullmatch(r"(\d+)/(\d+)", only)  # 3/8: the bugs 3, 11, 19, ...
    if share:
        wanted = MUTANTS[int(share[1]) % int(share[2]) :: int(share[2])]
    else:
        wanted = [m for m in MUTANTS if only in m.name]
    # Of a share (in CI) the suite asks the kernels as they are.
    kinds = [] if share else sorted({(m.arithmetic, m.layer) for m in wanted})
    start, survivors = time.monotonic(), 0
    build.operators()
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("fork")) as pool:
        for kind, said in zip(kinds, pool.map(objection_to_none, kinds), strict=True):
            if said:
                sys.exit(f"the kernels as they are fail, {' '.join(kind)}: {said}")
        for mutant, said in zip(wanted, pool.map(objection, wanted), strict=True):
            survivors += not said
            print(f"{mutant.name:52} {mutant.arithmetic:9} {said[:110] or 'SURVIVES'}", flush=True)
    caught, minutes = len(wanted) - survivors, (time.monotonic() - start) / 60
    print(f"{caught} of {len(wanted)} planted bugs caught, in {minutes:.1f} minutes")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
