"""What an algorithm takes on a GPU: a device's rates and a problem's integers in, seconds out.

A kernel's time is that of its fullest multiprocessor, tile by tile, or that of its bytes; batched
products are the framework's. Only `gpu_of` asks torch about a device. Rates are datasheets', and
the shares of them measured on an H200 (benchmarks/results); for the order of two algorithms.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch


@dataclass(frozen=True)
class CardRates:
    """FLOP that a multiprocessor starts in a clock; products accumulate in at least float32."""

    half: int  # tensor cores
    tf32: int
    single: int
    double: int
    clock: float  # Hz, and bytes a second: of the usual card, where the driver does not say
    bandwidth: float


# By compute capability, ascending; from NVIDIA's architecture whitepapers.
CARDS: dict[tuple[int, int], CardRates] = {
    (8, 0): CardRates(2048, 1024, 128, 64, 1.41e9, 1.6e12),  # A100
    (8, 6): CardRates(512, 256, 256, 4, 1.7e9, 0.9e12),  # GA10x
    (8, 9): CardRates(512, 256, 256, 4, 2.5e9, 1.0e12),  # Ada
    (9, 0): CardRates(4096, 2048, 256, 128, 1.8e9, 4.3e12),  # H100, H200
    (10, 0): CardRates(8192, 4096, 256, 128, 1.9e9, 7.0e12),  # B200
    (12, 0): CardRates(512, 256, 256, 4, 2.4e9, 1.8e12),  # consumers' Blackwell
}


@dataclass(frozen=True)
class Gpu:
    name: str
    rates: CardRates
    multiprocessors: int
    clock: float  # Hz
    bandwidth: float  # bytes a second
    tf32: bool = False  # float32 products by tensor cores, as torch's flag has it
    sm90: bool = False  # Hopper's own kernel serves halves: csrc/cuda/direct_sm90.cu


class Problem(NamedTuple):
    """One layer's backward as integers.

    For a convolution t is H'W' and i and o are of one group: i = C / groups * kH * kW.
    """

    layer: Literal["linear", "conv2d"]
    n: int
    t: int
    i: int
    o: int
    groups: int = 1
    itemsize: int = 4
    weight_grad: bool = False
    device: Gpu | None = None  # None: a CPU


def _tf32() -> bool:
    """As the kernels read it: allow_tf32 raises once fp32_precision has been set."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# Dynamo cannot trace the getter. What torch.compiler.assume_constant_result does, which would load
# all of Dynamo here.
_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def gpu_of(device: torch.device) -> Gpu | None:
    """None for the CPU."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (index, _tf32())
    if key not in _known:
        properties = torch.cuda.get_device_properties(index)
        _known[key] = from_properties(properties, key[1], compiled_for())
    return _known[key]


_known: dict[tuple[int, bool], Gpu] = {}  # no lru_cache, of which Dynamo warns


def compiled_for() -> str:
    """Return the architectures that the CUDA kernels were compiled for, as "8.0+PTX;9.0a"."""
    try:
        return str(importlib.import_module("torchgradx._cuda").architectures)
    except ImportError:
        return ""


def from_properties(properties: Any, tf32: bool, compiled: str = "") -> Gpu:
    """Clocks in kHz and a bus in bits, where the driver tells them; double data rate.
    A capability that is not listed has the rates of the newest below it.
    """
    capability = (properties.major, properties.minor)
    *_, rates = (CARDS[known] for known in CARDS if known <= max(capability, (8, 0)))
    clock = 1e3 * getattr(properties, "clock_rate", 0)
    memory = 1e3 * getattr(properties, "memory_clock_rate", 0)
    bandwidth = 2 * memory * getattr(properties, "memory_bus_width", 0) / 8
    return Gpu(
        name=properties.name,
        rates=rates,
        multiprocessors=properties.multi_processor_count,
        clock=clock or rates.clock,
        bandwidth=bandwidth or rates.bandwidth,
        tf32=tf32,
        sm90=capability == (9, 0) and "9.0a" in compiled,
    )


# Of the peak, on tensor cores and on others: by our tiles, by the framework
REACHED = {"direct": (0.18, 0.38), "gram": (0.16, 0.37)}
REACHED |= {"linear": (0.65, 0.7), "conv2d": (0.3, 0.7)}
LAUNCH = 4e-6  # a kernel and the gap before the next
# Positions from which gradients are batched products, and those of which Grams are (batched.h)
BATCHED_FROM, GRAMS_FROM, GRAMS_UP_TO = 128, 8, 2048
DEPTH = 32  # of a step along the sum
TILE = {2: (128, 192), 4: (128, 128), 8: (64, 64)}  # of the gradient: outputs, inputs


# Functions rather than methods of Gpu: Dynamo calls none on an object that a traced function made.
def products(gpu: Gpu, itemsize: int) -> float:
    """FLOP a second of one multiprocessor in products of operands of so many bytes"""
    if itemsize == 2:
        return gpu.clock * gpu.rates.half
    if itemsize == 8:
        return gpu.clock * gpu.rates.double
    return gpu.clock * (gpu.rates.tf32 if gpu.tf32 else gpu.rates.single)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _moved(p: Problem, gpu: Gpu) -> float:
    return p.itemsize * p.n * p.t * p.groups * (p.i + p.o) / gpu.bandwidth


def _on_tensor_cores(p: Problem, gpu: Gpu) -> bool:
    return p.itemsize == 2 or (p.itemsize == 4 and gpu.tf32)


def _reached(p: Problem, gpu: Gpu, by: str) -> float:
    """FLOP a second of one multiprocessor"""
    return REACHED[by][not _on_tensor_cores(p, gpu)] * products(gpu, p.itemsize)


def _tiles(p: Problem, gpu: Gpu, by: str, tiles: int, flop: int, ends: int) -> float:
    """`tiles`, each of `flop` in products and `ends` afterwards, shared among multiprocessors"""
    cores = gpu.rates.double if p.itemsize == 8 else gpu.rates.single  # that square and add
    one = flop / _reached(p, gpu, by) + ends / (gpu.clock * cores)
    return max(_up(tiles, gpu.multiprocessors) / gpu.multiprocessors * one, _moved(p, gpu))


def _batched(p: Problem, gpu: Gpu, flop: int, products: int, launches: int) -> float:
    """Return the time of batched products: `products` accumulators, each written and read."""
    moved = 2 * max(p.itemsize, 4) * products / gpu.bandwidth
    return flop / (_reached(p, gpu, "linear") * gpu.multiprocessors) + moved + launches * LAUNCH


def _weight_grad(p: Problem, gpu: Gpu) -> float:
    flop = 2 * p.n * p.t * p.groups * p.i * p.o
    return max(flop / (_reached(p, gpu, p.layer) * gpu.multiprocessors), _moved(p, gpu)) + LAUNCH


def _gram(p: Problem, gpu: Gpu) -> float:
    if p.layer == "linear" and GRAMS_FROM <= p.t <= GRAMS_UP_TO:
        along, features = _up(p.t, 8), p.i + p.o
        padding = 2 * p.itemsize * p.n * p.t * features / gpu.bandwidth if p.t % 8 else 0
        flop = 2 * p.n * along * _up(along, 64) * features
        return _batched(p, gpu, flop, 2 * p.n * along**2, 6) + padding
    span = 64 if p.t <= 64 or p.itemsize == 8 else 128  # positions of a tile
    along = _up(p.t, span) // span
    flop = 2 * span**2 * (_up(p.i, DEPTH) + _up(p.o, DEPTH))
    pairs = p.n * p.groups * along * (along + 1) // 2
    return _tiles(p, gpu, "gram", pairs, flop, 2 * span**2) + 2 * LAUNCH


def _by_planes(p: Problem) -> bool:
    """Return True if a memory-bound kernel serves: many groups of few channels (planes.cu)."""
    return p.layer == "conv2d" and p.groups >= 8 and p.i * p.o <= 16 * 9


def _by_sm90(p: Problem, gpu: Gpu) -> bool:
    """Return True if Hopper's kernel serves: rows of whole 16 bytes, several positions."""
    return gpu.sm90 and p.itemsize == 2 and p.groups == 1 and p.i % 8 == 0 and p.t > 1


def _sm90(p: Problem, gpu: Gpu, with_gradient: bool) -> float:
    """Return the time of csrc/cuda/direct_sm90.cu, fitted to 28 layers on an H200.

    A tile of one sample takes clocks for every 16 positions and some for its end; the sums of
    tiles that multiprocessors share take a fixed time.
    """
    wide, end, fixed = (192, 960, 17e-6) if with_gradient else (256, 680, 8e-6)
    tall = (_up(p.o, 128) // 128) * (_up(p.i, wide) // wide)
    flat = (_up(p.o, 64) // 64) * (_up(p.i, 384) // 384)
    items = _up(p.n * min(tall, flat), gpu.multiprocessors) // gpu.multiprocessors
    return items * (_up(p.t, 16) // 16 * wide * 1.45 + end) / gpu.clock + fixed


def _gradient(p: Problem, gpu: Gpu, ends: int = 2) -> float:
    """Tiles of every sample's gradient, and `ends` FLOP for each element"""
    if _by_planes(p):
        return _moved(p, gpu) + 2 * LAUNCH
    if _by_sm90(p, gpu):
        return max(_sm90(p, gpu, ends > 2), _moved(p, gpu))
    if p.layer == "linear" and p.t >= BATCHED_FROM:
        return _batched(p, gpu, 2 * p.n * p.t * p.i * p.o, p.n * p.i * p.o, 3)
    high, wide = TILE[p.itemsize]
    tiles = p.n * p.groups * (_up(p.o, high) // high) * (_up(p.i, wide) // wide)
    flop = 2 * high * wide * _up(p.t, DEPTH)
    return _tiles(p, gpu, "direct", tiles, flop, ends * high * wide) + 2 * LAUNCH


def _fused(p: Problem, gpu: Gpu) -> float:
    """Return the cost of one sum over all samples, with norms beside it for few positions."""
    if p.layer == "linear" and p.t <= 1:
        return _weight_grad(p, gpu) + _moved(p, gpu) + LAUNCH
    if p.layer == "linear" and p.t <= 16 and _on_tensor_cores(p, gpu):
        return min(_gradient(p, gpu, 4), _weight_grad(p, gpu) + _gram(p, gpu))
    return _gradient(p, gpu, 4)


def seconds_on_gpu(p: Problem, algorithm: str) -> float:
    """Return the time of all that a problem with a device asks for."""
    gpu = p.device
    assert gpu is not None
    if algorithm == "fused":
        return _fused(p, gpu)
    by = {"gram": _gram, "direct": _gradient}.get(algorithm)
    norms = by(p, gpu) if by else _moved(p, gpu) + LAUNCH
    return norms + (_weight_grad(p, gpu) + LAUNCH if p.weight_grad else 0)  # a kernel for the bias
