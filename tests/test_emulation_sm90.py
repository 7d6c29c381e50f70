"""The emulator's Hopper: what right kernels compute on it, and that each fault is reported.

The kernels are in emulation/unit_sm90.cu. Where bytes lie is written here once more, as on an H200.
"""

import ctypes
from functools import cache

import numpy as np
import pytest
import torch
from backends import needs_emulation
from emulation.emulator import EmulationError, Unit
from test_emulation import in_each_order

pytestmark = needs_emulation


@cache
def unit():
    return Unit("unit_sm90.cu", *[ctypes.c_void_p] * 4)


def launch(name, a, b, numbers, out):
    """`out`, written. a and b: what the kernel reads."""
    host = np.array(numbers, np.int32)
    given = [torch.as_tensor(x).contiguous() for x in (a, b)]
    spans = [(x.data_ptr(), x.numel() * x.element_size(), x is out) for x in (*given, out)]
    unit().launch(name, spans, spans[0][0], spans[1][0], host.ctypes.data, spans[2][0])
    return out


def _integers(*shape):
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(3)).float()


# Products: 60 positions of 64, so that the last boxes reach out of the tensor
POSITIONS = 60


def _product(name, dtype, columns):
    a, b = _integers(POSITIONS, 64), _integers(POSITIONS, columns)
    out = torch.full((64, columns), -1.0)
    return launch(name, a.to(dtype), b.to(dtype), [POSITIONS], out), a.T @ b


@in_each_order
@pytest.mark.parametrize(
    ("dtype", "columns"), [("bfloat16", 128), ("bfloat16", 192), ("float16", 192), ("float16", 256)]
)
def test_a_pipeline_of_copies_and_products_is_right(dtype, columns):
    name = f"product_{dtype}_{columns}"
    out, truth = _product(name, getattr(torch, dtype), columns)
    assert torch.equal(out, truth)
    with unit().unchecked():
        assert torch.equal(_product(name, getattr(torch, dtype), columns)[0], truth)


def swizzled(byte):
    return byte ^ (byte >> 7 & 7) << 4


def of_operand(mn, k, start, between, group):
    """Canonical layout of an operand along m or n: ((8, 8, m), (8, k)) elements, swizzled."""
    inner = 2 * (mn % 8 + 8 * (mn // 8 % 8) + 64 * (k % 8))
    return swizzled(start + inner + between * (mn // 64) + group * (k // 8))


# sizes, strides in bytes, box, steps, coordinates: inside, at every border, every other element
BOXES = {
    "inside": ((64, 9, 5, 2), (128, 1152, 5760), (64, 4, 3, 1), (1, 1, 1, 1), (0, 2, 1, 1)),
    "before": ((64, 9, 5, 2), (128, 1152, 5760), (64, 4, 3, 1), (1, 1, 1, 1), (0, -1, -2, 0)),
    "behind": ((72, 9, 5, 2), (144, 1296, 6480), (64, 4, 3, 2), (1, 1, 1, 1), (64, 7, 4, 1)),
    "far": ((64, 9, 5, 2), (128, 1152, 5760), (64, 4, 3, 1), (1, 1, 1, 1), (64, 20, 0, 0)),
    "left": ((64, 9, 5, 2), (128, 1152, 5760), (64, 8, 1, 1), (1, 1, 1, 1), (-24, 0, 0, 0)),
    "other": ((64, 9, 8, 2), (128, 1152, 9216), (64, 8, 6, 1), (1, 2, 2, 1), (0, -1, 1, 1)),
    "narrow": ((16, 9, 5, 2), (32, 288, 1440), (16, 8, 4, 1), (1, 1, 1, 1), (0, 0, 0, 0)),
}


def _box(which, fault="none"):
    sizes, strides, box, steps, at = BOXES[which]
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    memory = np.arange(1, strides[2] // 2 * sizes[3] + 1, dtype=np.uint16)
    expected = np.zeros(int(np.prod(counts)), np.uint16)
    for row, where in enumerate(np.ndindex(counts[3], counts[2], counts[1])):
        x = [at[d] + steps[d] * where[3 - d] for d in (1, 2, 3)]
        if all(0 <= x[d - 1] < sizes[d] for d in (1, 2, 3)):
            base = sum(x[d] * strides[d] for d in range(3)) // 2
            for column in range(counts[0]):
                if 0 <= at[0] + column < sizes[0]:
                    byte = 2 * (row * counts[0] + column)
                    expected[swizzled(byte) // 2] = memory[base + at[0] + column]
    numbers = [2 * expected.size, *at]
    out = torch.zeros(expected.size // 2, dtype=torch.int32)
    geometry = [*sizes, *strides, *box, *steps]
    a, b = torch.from_numpy(memory.view(np.int16)), torch.tensor(numbers, dtype=torch.int32)
    got = launch(f"box/{fault}", a, b, [*numbers, *geometry], out)
    return got.numpy().view(np.uint16), expected


@in_each_order
@pytest.mark.parametrize("which", BOXES)
def test_a_box_lands_as_the_manual_has_it(which):
    got, expected = _box(which)
    assert np.array_equal(got, expected)


# between and group of B: boxes of their own; three taps of rows of 10 and 18 pixels (8 and 16 wide)
LAYOUTS = {"boxes": (2048, 1024), "taps of 8": (128, 1280), "taps of 16": (128, 1024)}


def _image(layout, fault="none"):
    between, group = LAYOUTS[layout]
    shared, start = _integers(40, 64), 2048  # positions of 64 channels, behind A's box
    a = _integers(16, 64)
    image = np.zeros(start + 3 * 2048, np.uint8).view(np.float16)
    for k in range(16):
        for m in range(64):
            image[of_operand(m, k, 0, 2048, 1024) // 2] = a[k, m]
    b = torch.zeros(16, 192)
    for row in range(40 if between == 128 else 0):
        for channel in range(64):
            image[swizzled(start + 128 * row + 2 * channel) // 2] = shared[row, channel]
    for k in range(16):
        for n in range(192):
            if between == 128:  # a pixel is one row on, a line of the image a group
                row = group // 128 * (k // 8) + k % 8 + n // 64
                b[k, n] = shared[row, n % 64]
            else:
                b[k, n] = shared[k + n // 64 * 8, n % 64]
                image[of_operand(n, k, start, between, group) // 2] = b[k, n]
    numbers = [2 * image.size, 0, 2048, 1024, start, between, group]
    out = torch.full((64, 192), -1.0)
    given = torch.from_numpy(image.view(np.int32)), torch.tensor(numbers, dtype=torch.int32)
    return launch(f"image/{fault}", *given, numbers, out), a.T @ b


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_descriptor_finds_its_operand(layout):
    out, truth = _image(layout)
    assert torch.equal(out, truth)


# Blocks together, registers
def _grid(fault="none", blocks=5):
    given = torch.arange(1.0, blocks + 1)
    return launch(f"grid/{fault}", given, given, [blocks], torch.full((2 * blocks,), -1.0))


def _cluster(fault="none", blocks=4):
    rows = torch.randint(-(2**31), 2**31, (4 * 2 * 16, 32), dtype=torch.int32)
    out = torch.zeros(blocks, 64, dtype=torch.int32)
    launch(f"cluster/{fault}", rows, rows, [blocks], out)
    return out.long().sum(1) % 2**32, rows.long().sum() % 2**32


def _registers(fault="none"):
    given = torch.arange(384.0)
    return launch(f"registers/{fault}", given, given, [], torch.full((384,), -1.0))


@in_each_order
def test_blocks_wait_for_each_other():
    assert _grid().tolist() == [1, 2, 3, 4, 5] + [15] * 5


def test_blocks_that_cannot_all_run_are_refused():
    with pytest.raises(EmulationError, match="200 blocks cannot all run at once"):
        _grid(blocks=200)


@in_each_order
def test_blocks_of_a_cluster_copy_for_each_other():
    sums, truth = _cluster()
    assert sums.tolist() == [truth] * 4


def test_blocks_that_are_no_whole_clusters_are_refused():
    with pytest.raises(EmulationError, match="3 blocks are no whole clusters"):
        _cluster(blocks=3)


@in_each_order
def test_registers_change_hands():
    assert torch.equal(_registers(), torch.arange(384.0))


FAULTS = {
    "product/no_wait": "wgmma reads offset .* still being copied",
    "product/one_waits": "race: wgmma reads offset .* some of its threads' last barrier_wait|still",
    "product/waits_elsewhere": "race: wgmma reads offset .* some of its threads' last|still being",
    "product/wrong_parity": "wgmma reads offset .* still being copied",
    "product/expects_less": "fewer bytes were expected than copied|still being copied",
    "product/expects_more": r"deadlock: .*parity 0 .*0 arrivals and 16 bytes to come",
    "product/releases_early": "race: copy to offset .* a wgmma of warpgroup 1 may still read",
    "product/no_empty": "race: copy to offset .*while another copy|more than the 1 arrivals",
    "product/uninitialised": "barrier_wait: nobody has initialised the barrier",
    "product/no_init_fence": "no barrier_init_fence since",
    "product/no_barrier": "no __syncthreads since|nobody has initialised",
    "product/initialised_twice": "barrier_init: the barrier at .* is in use",
    "product/arrives_twice": "more than the 1 arrivals|lands after its phase|more bytes come",
    "product/touches_barrier": "write at offset .* which is a barrier",
    "product/misaligned": "copy_box: the destination .* not aligned to 1024 bytes",
    "product/reads_registers": "read of a register of wgmma before its wgmma_wait",
    "product/writes_registers": "write of a register of wgmma before its wgmma_wait",
    "product/no_fence": "no wgmma_fence since its registers were last touched",
    "product/never_waited": "ends before a wgmma_wait|deadlock",
    "product/divergent": "divergence: wgmma_commit .* while thread .* at wgmma |divergence: wgmma ",
    "product/disagrees": "do not agree on descriptors",
    "product/leaves_memory": "wgmma: (a descriptor leaves shared memory|read of 16 bytes)",
    "product/leaves_variable": "wgmma: read of 16 bytes at offset .* of static shared memory",
    "product/no_swizzle": "only the 128-byte swizzle",
    "product/reserved": "reserved bits in descriptor",
    "product/misaligned_descriptor": "not aligned to the swizzle's rows",
    "product/not_whole": "in no whole warpgroup",
    "image/no_shared_fence": "wgmma reads offset .* without fence_async_shared",
    "image/late_fence": "wgmma reads offset .* without fence_async_shared",
    "image/overwrites": "race: write at offset .* a wgmma may still read",
    "image/no_barrier": "wgmma reads offset|uninitialised|without fence",
    "box/no_shared_fence": "copy to offset .* without fence_async_shared",
    "box/no_empty": "race: copy to offset .* a thread may still read|still being copied",
    "box/one_waits": "race: .* a copy has written; no barrier_wait|still being|uninit",
    "box/no_barrier": "race: copy to offset .* a thread may still read",
    "box/expects_less": "more bytes come to the barrier at .* by 16",
    "grid/misses": r"deadlock: threads of block \(0, 0, 0\) wait at: grid_barrier at .*\d",
    "grid/no_barrier": "race: ",
    "grid/constant": "__ldg at offset .* of what this launch has written",
    "cluster/no_cluster_barrier": "no cluster_barrier since|nobody has initialised",
    "cluster/own_readers": "race: copy to offset",
    "cluster/one_releases": "deadlock: .*4 arrivals and 0 bytes to come",
    "cluster/one_copies": "deadlock: .*0 arrivals and 2048 bytes to come",
    "cluster/ends_early": "deadlock|block . of the cluster has ended",
    "cluster/no_such_block": "no block 2 in a cluster of 2",
    "registers/too_greedy": r"deadlock: .*take_registers \(\d+ of 65536 would be taken\)",
    "registers/not_less": "give_registers: 240, where the warpgroup has 168",
    "registers/divergent": "divergence: give_registers at",
}


def _with(name):
    kernel, fault = name.split("/")
    if kernel == "product":
        return _product(name, torch.bfloat16, 192)
    if kernel == "image":
        return _image("boxes", fault)
    if kernel == "box":
        return _box("inside", fault)
    return {"grid": _grid, "cluster": _cluster, "registers": _registers}[kernel](fault)


def test_every_kernel_of_the_table_is_tested():
    right = {name for name in unit().cases if "/" not in name or name.endswith("/none")}
    assert right | set(FAULTS) == set(unit().cases)


@in_each_order
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(name):
    with pytest.raises(EmulationError, match=FAULTS[name]):
        _with(name)
