"""Bugs to plant in Hopper's kernel (csrc/cuda/*sm90*)."""

from __future__ import annotations

from emulation import build
from emulation.mutant import Mutant

PLANTED = [  # name, text, what takes its place
    # Barriers and phases
    ("products do not wait for copies",
     "        barrier_wait(barriers.full + ring.stage, ring.parity);\n        const int steps",
     "        const int steps"),
    ("the bias does not wait for copies",
     "        barrier_wait(barriers.full + ring.stage, ring.parity);\n        const unsigned char",
     "        const unsigned char"),
    ("copies do not wait for readers",
     "barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);", ";"),
    ("copies wait for the wrong phase",
     "barriers.empty + ring.stage, ring.parity ^ 1", "barriers.empty + ring.stage, ring.parity"),
    ("the parity never turns", "stage = 0, parity ^= 1", "stage = 0"),
    ("a stage is released before its products are over",
     "wgmma_wait<1>();\n          release(before);",
     "release(before);\n          wgmma_wait<1>();"),
    ("the stage at hand is released",
     "release(before);\n        }", "release(ring.stage);\n        }"),
    ("the last stage of a sample is not released",
     "release(before);\n      float sums", "float sums"),
    ("one group of products is not waited for", "wgmma_wait<0>", "wgmma_wait<1>"),
    ("two groups of products may be under way", "wgmma_wait<1>", "wgmma_wait<2>"),
    ("the bias is not waited for", "kWarps + (p.bias ? kBiasWarps : 0)", "kWarps"),
    ("the second group waits for too many",
     "barriers.first + i, kWarps / 2", "barriers.first + i, kWarps"),
    ("lanes of the bias read on while one releases",
     "__syncwarp();\n        if (lane == 0) barrier_arrive(barriers.empty",
     "if (lane == 0) barrier_arrive(barriers.empty"),
    ("barriers used without __syncthreads",
     "barrier_init_fence();\n  }\n  __syncthreads();", "barrier_init_fence();\n  }"),
    ("blocks do not wait for each other",
     "    grid_barrier();\n    finish", "    finish"),
    # Fences, registers
    ("barriers initialised without a fence", "    barrier_init_fence();\n", ""),
    ("zeros written without a fence", "    fence_async_shared();\n", ""),
    ("wgmma without its fence", "          wgmma_fence();\n", ""),
    ("more registers than there are", "take_registers<224>", "take_registers<240>"),
    # Boxes
    ("fewer bytes expected than copied",
     "full, boxes.copied_bytes", "full, boxes.copied_bytes - 128"),
    ("bytes of an unclipped box", "input_boxes * rows)", "input_boxes * width * height)"),
    ("a stage of no multiple of 1024 bytes",
     "row_bytes, 1024)) * 1024;", "row_bytes, 128)) * 128;"),
    ("stages aligned to 128 bytes", "(address + 1023) & ~1023u", "(address + 127) & ~127u"),
    ("no room for the alignment", "plan.boxes.stage_bytes + 1024", "plan.boxes.stage_bytes"),
    ("second box of grad_output over the first",
     "copy_box(stage + j * boxes.grad_bytes", "copy_box(stage"),
    ("second box of grad_output of the first's features", "row + j * kBox, x", "row, x"),
    ("padding to the wrong side", "* boxes.dilation_y - boxes.pad_y",
     "* boxes.dilation_y + boxes.pad_y"),
    ("dilation forgotten", ") * boxes.dilation_x -", ") -"),
    ("stride forgotten", "x * boxes.stride_x +", "x +"),
    ("stride forgotten along the height", "y * boxes.stride_y +", "y +"),
    ("stride forgotten within a box",
     "cuuint32_t(stride_x), cuuint32_t(stride_y), 1}", "1, cuuint32_t(stride_y), 1}"),
    ("the halo is a column short", "(b.halo ? 2 : 0), b.height", "(b.halo ? 1 : 0), b.height"),
    ("taps beyond the last are the first",
     "column.tap < 0 ? boxes.channel_blocks * kBox : column.channel", "column.channel"),
    # Descriptors
    ("strides of the input's descriptor exchanged",
     "boxes.between, boxes.group)", "boxes.group, boxes.between)"),
    ("groups of grad_output too far apart", "boxes.grad_bytes, 1024)", "boxes.grad_bytes, 2048)"),
    ("half a step of grad_output", "stage + step * kDepth * 2 * kBox",
     "stage + step * kDepth * kBox"),
    ("the halo's groups as whole boxes'",
     "b.group = width == 8 ? pitch * row_bytes : 1024;", "b.group = 1024;"),
    ("the halo's steps as whole boxes'", "b.input_step = step_rows * pitch * row_bytes, ", ""),
    ("both groups multiply the first's columns",
     "(kTall ? 0 : group * (boxes.halo", "(kTall ? 0 : 0 * (boxes.halo"),
    ("both groups multiply the first's rows", "(kTall ? group * boxes.grad_bytes : 0)", "0"),
    ("the swizzle is forgotten by the bias", "(j % 2 ? odd : even)", "even"),
    # Steps and tails
    ("a sample begins on the sums of the one before", "step > 0 || rectangle > 0", "true"),
    ("every rectangle begins anew", "step > 0 || rectangle > 0", "step > 0"),
    ("all rectangles have the last one's steps",
     "rectangle < boxes.shorter ? boxes.steps : boxes.last_steps", "boxes.last_steps"),
    ("one rectangle too few is long", "b.across * b.down - 1 : b", "b.across * b.down - 2 : b"),
    ("steps are rounded down", "return int(ceil_div<int64_t>(positions, kDepth));",
     "return int(std::max<int64_t>(1, positions / kDepth));"),
    ("shared memory behind a box is not cleared",
     "b.clears = width * height % kDepth != 0;", "b.clears = false;"),
    ("the bias leaves out a step", "takes && step < boxes.steps",
     "takes && step < boxes.steps - 1"),
    # Sums
    ("a sample of factor 0 is multiplied", "if (scale != 0) {", "{"),
    ("a sample of factor 0 counts in the bias",
     "if (scale == 0 || lane >= kBox / kPiece) continue;", "if (lane >= kBox / kPiece) continue;"),
    ("the sum of one tile goes on in the next",
     "for (int i = 0; i < Shape::kRegisters; ++i) total[i] = 0;", ""),
    ("squares of the sample before are lost", "if (n > at.first) keep_square(n - 1);", ";"),
    ("squares of a block's earlier tiles are lost",
     "p.schedule.whole && number > 0 ? *out + square : square", "square"),
    ("every tile adds up the bias", "n % p.schedule.tiles_across == at.across", "true"),
    ("lanes of the bias are not all added up",
     "        sum[i] += __shfl_xor_sync(full_warp, sum[i], 16);\n", ""),
    # Tiles shared by blocks
    ("the first sharer's slot is always its first",
     "2 * block + (from >= begin ? 0 : 1)", "2 * block"),
    ("the last sharer is left out", "count = 1; block + count < s.blocks &&",
     "count = 1; block + count + 1 < s.blocks &&"),
    ("sharers beyond the last are added", "if (i + j < count) {", "{"),
    ("slots of two shares are one", "2 * block + which;", "2 * block;"),
    ("a share ends before the next begins", "s.first_item(block + 1), next_tile",
     "s.first_item(block + 1) - (block == 0), next_tile"),
    # What is written
    ("channels beyond the last are written", "column.tap >= 0 && channel < p.channels",
     "column.tap >= 0"),
    ("rows beyond the last are written", "r < p.O && column.tap", "column.tap"),
    ("lanes of a quad exchanged", "odd ? w[0] : w[1], 1)", "odd ? w[1] : w[0], 1)"),
    ("the second group's rows are the first's", "down * 2 * kRows + warp * 16",
     "down * 2 * kRows + warp % 4 * 16"),
]  # fmt: skip


def _file_of(text: str) -> str:
    """Whichever of the kernel's files has it: its parts move between them."""
    files = sorted(build.KERNELS.glob("*sm90*"))
    return next((file.name for file in files if text in file.read_text()), files[0].name)


MUTANTS = [
    Mutant(f"hopper: {name}", _file_of(old), "direct_sm90", "bfloat16", old, new, "hopper")
    for name, old, new in PLANTED
]
