"""Whole training steps to time on a GPU: GPT-2 small, ViT-B/16 and ResNet-50, of torch's modules.

Built here, so that no other package or file of weights decides what is measured; the weights are
random. `tiny` is the same code at sizes for a test.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import GPT, Block, Workload, classifier


class Bottleneck(nn.Module):
    def __init__(self, c: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *convolved(c, width, 1), nn.ReLU(),
            *convolved(width, width, 3, stride), nn.ReLU(),
            *convolved(width, out, 1),
        )  # fmt: skip
        shortcut = stride > 1 or c != out
        self.shortcut = nn.Sequential(*(convolved(c, out, 1, stride) if shortcut else []))

    def forward(self, x: Tensor) -> Tensor:  # [N, C, H, W]
        return F.relu(self.body(x) + self.shortcut(x))


def convolved(c: int, o: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(c, o, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.GroupNorm(32, o)]  # BatchNorm would mix the samples


def resnet(depths: tuple[int, ...], width: int) -> nn.Module:
    layers = [*convolved(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    c = width
    for stage, depth in enumerate(depths):
        for k in range(depth):
            stride = 2 if stage and not k else 1
            layers.append(Bottleneck(c, width << stage, stride))
            c = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1000))


class ViT(nn.Module):
    """The mean of all positions in place of a class token."""

    def __init__(self, image: int, patch: int, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, patch)
        self.positions = nn.Embedding((image // patch) ** 2, d)
        self.blocks = nn.Sequential(*(Block(d, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 1000)

    def forward(self, images: Tensor) -> Tensor:  # [N, 3, H, W] -> [N, 1000]
        x = self.patches(images).flatten(2).mT
        x = x + self.positions(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]))
        return self.head(self.norm(self.blocks(x)).mean(1))


def gpt2(tiny: bool) -> Workload:
    n, t, vocabulary = (2, 8, 50) if tiny else (8, 1024, 50257)
    d, heads, layers = (32, 2, 1) if tiny else (768, 12, 12)
    ids = torch.randint(vocabulary, (n, t + 1))
    model = GPT(vocabulary, t, d, heads, layers)
    return Workload(model, ids[:, :-1], ids[:, 1:], of_tokens)


def of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def vit(tiny: bool) -> Workload:
    n, image = (2, 32) if tiny else (64, 224)
    model = ViT(image, 16, 32, 2, 1) if tiny else ViT(image, 16, 768, 12, 12)
    return classifier(model, torch.randn(n, 3, image, image))


def resnet50(tiny: bool) -> Workload:
    n, image = (2, 32) if tiny else (64, 224)
    model = resnet((1, 1), 32) if tiny else resnet((3, 4, 6, 3), 64)
    return classifier(model, torch.randn(n, 3, image, image))


MODELS: dict[str, Callable[[bool], Workload]] = {
    "GPT-2 small, T=1024, N=8": gpt2,
    "ViT-B/16, N=64": vit,
    "ResNet-50 with GroupNorm, N=64": resnet50,
}
