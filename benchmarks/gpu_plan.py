"""What is measured of layers on a GPU, and the least that it can take: integers, no tensors.

A convolution counts as the Linear of its patches: T output pixels, I of a patch, O channels. Of its
input, though, each pixel that any patch has is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

ITEMSIZE = {"bfloat16": 2, "float32": 4}
GRADIENT = ("fused", "weight gradient")  # ways that write the batch's gradient
GRAM_LIMIT = 8  # times direct's FLOP: beyond, no cost model would choose it


class Conv(NamedTuple):
    channels: int
    size: int  # height and width
    kernel: int
    stride: int = 1

    @property
    def padding(self) -> int:
        return self.kernel // 2


@dataclass(frozen=True)
class Layer:
    name: str
    n: int
    t: int
    i: int
    o: int
    conv: Conv | None = None

    @property
    def numel_read(self) -> int:
        c = self.conv
        if c is None:
            return self.n * self.t * self.i
        side = min(c.size, isqrt(self.t) * c.kernel)  # a stride beyond the kernel leaves some out
        return self.n * c.channels * side**2

    def flop(self, way: str) -> int:
        if way == "rank1":
            return 2 * self.n * (self.i + self.o)
        if way == "gram":  # one triangle
            return self.n * self.t * (self.t + 1) * (self.i + self.o)
        return 2 * self.n * self.t * self.i * self.o

    def bytes(self, way: str, dtype: str) -> int:
        written = self.i * self.o if way in GRADIENT else 0
        return ITEMSIZE[dtype] * (self.numel_read + self.n * self.t * self.o + written)

    def ways(self) -> list[str]:
        """Ours that are worth a measurement."""
        if self.t == 1:
            return ["rank1", "fused"]
        gram = self.flop("gram") <= GRAM_LIMIT * self.flop("direct")
        return [*(["gram"] if gram else []), "direct", "fused"]


class Ceilings(NamedTuple):
    """What the device reaches, measured."""

    bandwidth: float  # bytes a second, read and written
    flop: dict[str, float]  # a second, of a large GEMM, by dtype

    def floor(self, layer: Layer, way: str, dtype: str) -> float:
        """Seconds"""
        return max(layer.flop(way) / self.flop[dtype], layer.bytes(way, dtype) / self.bandwidth)


class Row(NamedTuple):
    layer: Layer
    dtype: str


def linear(name: str, n: int, t: int, i: int, o: int) -> Layer:
    return Layer(f"{name} {i}-{o}, N={n}, T={t}", n, t, i, o)


def conv2d(name: str, n: int, o: int, conv: Conv) -> Layer:
    c, size, kernel, stride = conv
    side = (size + 2 * conv.padding - kernel) // stride + 1
    strided = f" /{stride}" if stride > 1 else ""
    title = f"{name} {c}-{o} {kernel}x{kernel}{strided} on {size}x{size}, N={n}"
    return Layer(title, n, side**2, c * kernel**2, o, conv)


def resnet50(n: int) -> Iterator[Layer]:
    """Its convolutions, each shape once."""
    shapes = {(64, Conv(3, 224, 7, 2)): None}
    c, size = 64, 56
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        shapes[width, Conv(c, size, 1)] = None
        shapes[width, Conv(width, size, 3, stride)] = None
        shapes[4 * width, Conv(c, size, 1, stride)] = None
        c, size = 4 * width, size // stride
        shapes[c, Conv(width, size, 1)] = None
        shapes[width, Conv(c, size, 1)] = None
        shapes[width, Conv(width, size, 3)] = None
    return (conv2d("ResNet-50", n, o, conv) for o, conv in shapes)


TRANSFORMER = ((768, 768), (768, 2304), (768, 3072), (3072, 768))
LINEAR = [
    linear("GPT-2 head", 8, 1024, 768, 50304),
    linear("GPT-2 head", 8, 1024, 768, 50257),  # rows of grad_output are not 16-byte aligned
    *(linear("GPT-2", 8, 1024, i, o) for i, o in TRANSFORMER),
    linear("LLaMA", 8, 1024, 4096, 4096),
    linear("LLaMA", 8, 1024, 4096, 11008),
    *(linear("ViT-B", 64, 197, i, o) for i, o in TRANSFORMER),
    *(linear("BERT", 32, 128, i, o) for i, o in ((768, 768), (768, 3072))),
    linear("MLP", 4096, 1, 1024, 1024),
    # across the crossover of gram and direct, and where fused gives way to both
    *(linear("in T", 64, t, 768, 768) for t in (8, 16, 64, 256)),
]
EXACT = [LINEAR[2], conv2d("ResNet-50", 64, 128, Conv(128, 28, 3))]  # float32 without TF32
ROWS = [
    *(Row(layer, "bfloat16") for layer in (*LINEAR, *resnet50(64))),
    *(Row(layer, "float32") for layer in EXACT),
]
TINY = [
    Row(linear("tiny", 3, 5, 8, 6), "float32"),
    Row(linear("tiny", 3, 5, 8, 6), "bfloat16"),
    Row(linear("tiny", 3, 1, 8, 6), "float32"),
    Row(conv2d("tiny", 2, 4, Conv(3, 6, 3, 2)), "float32"),
    Row(conv2d("tiny", 2, 4, Conv(3, 6, 1)), "float32"),
]
