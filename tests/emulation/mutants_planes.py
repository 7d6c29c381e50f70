"""Bugs to plant in the kernel of depthwise convolutions (csrc/cuda/planes.*)."""

from emulation.mutant import Mutant, file_of

BARRIER = "__syncthreads();\n"
PLANTED = [  # name, text, what takes its place
    ("barrier before the next tile dropped", f"{BARRIER}#pragma unroll 1  // once", "// once"),
    ("barrier after the copies dropped", f"{BARRIER}        // The last", "// The last"),
    ("barrier before the sums are written dropped", f"// Sum over warps\n    {BARRIER}", ""),
    ("no barrier after the sums' writes", f"{BARRIER}    const acc_t factor", "const acc_t factor"),
    ("copies are not waited for", "cp_async_wait<0>", "cp_async_wait<1>"),
    ("groups past the last are read", "inside ? planes : 0", "inside ? warp_threads : 0"),
    ("reads pieces past the last group", "c.groups * bytes_of(c.dtype) % kPieceBytes == 0 &&", ""),
    ("pieces where only the image is aligned", "&& in_pieces(c, c.grad_output)", ""),
    ("no padding to the right", "unsigned(o.H) && unsigned(x0 + x) < unsigned(o.W)",
     "unsigned(o.H) && x0 + x >= 0"),
    ("nothing pads below", "inside && unsigned(y0 + y) < unsigned(o.H))", "inside && y0 + y >= 0)"),
    ("no zeros for pieces", "*reinterpret_cast<uint4*>(to) = uint4{};", ";"),
    ("rows of pixels a row late", "from += o.of.h - o.wide * o.of.w", "from -= o.wide * o.of.w"),
    ("four warps of eight are summed", "w += kFewestWarps", "w += kMostWarps"),
    ("scale forgotten", "before + factor * sum", "before + sum"),
    ("a block's first samples forgotten", "n == begin ? acc_t(0) : of_samples", "acc_t(0)"),
    ("the bias is forgotten", "entry < mine + sums_bias", "entry < mine"),
    ("squares of every unit have the bias's", "if (tap < kTaps) {",
     "square += tap == kTaps;\n      if (tap < kTaps) {"),
    ("a group's biases are one", "group + lane) * p.rows + row]", "group + lane) * p.rows]"),
    ("taps a column off", "* p.dilationW) * kPitch", "* p.dilationW + 1) * kPitch"),
    ("the window turns the wrong way", "(j * kStride + tap", "(j * (kSide - kStride) + tap"),
    ("columns a step late", "kSide + (j - 1) * kStride", "kSide + (j - 2) * kStride"),
    ("rows end with the window's turn", "if (x + j >= wide) break;", ""),
    ("an odd last row is taken for two", "both = y + 1 < high", "both = true"),
    ("the image stays after a turn", ", image_at += kSide * kStride * kPitch<scalar_t>;", ";"),
    ("the second row reads under the first", "window[i * kStride + tap", "window[tap"),
]  # fmt: skip
MUTANTS = [
    Mutant(f"planes: {name}", file_of(old, "planes.cu*"), "planes", "bfloat16", old, new, "planes")
    for name, old, new in PLANTED
]
