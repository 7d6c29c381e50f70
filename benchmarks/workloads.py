"""What is timed: WORKLOADS, and OURS, our ways to get each sample's gradient norm out of one
(rivals.py has other people's).

Losses are means, over the samples and within each. `check` holds a way against the oracle: float64,
one sample at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RTOL = 1e-6  # of most samples: ten float32 epsilons
WORST = 2e-3  # of any: a ReLU at 0 within rounding is on in one precision and off in the other


class Workload(NamedTuple):
    model: nn.Module
    inputs: Tensor  # [N, ...]; requires a gradient where the layer would stand inside a model
    targets: Tensor  # [N, ...]
    loss: Callable[..., Tensor]  # (outputs, targets, reduction="mean"), as in torch.nn.functional

    def step(self, model: nn.Module) -> None:
        """Forward and backward, as in training."""
        model.zero_grad()
        self.inputs.grad = None
        self.loss(model(self.inputs), self.targets).backward()

    def copied(self) -> Workload:
        """With a model of its own, to hook as one likes."""
        return self._replace(model=copy.deepcopy(self.model))

    def double(self) -> Workload:
        def wide(t: Tensor) -> Tensor:
            return t.detach().double() if t.is_floating_point() else t

        inputs = wide(self.inputs).requires_grad_(self.inputs.requires_grad)
        return Workload(copy.deepcopy(self.model).double(), inputs, wide(self.targets), self.loss)


# Workloads


class Block(nn.Module):
    def __init__(self, d: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:  # [N, T, d]
        by_head = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = by_head.unbind(2)  # [N, heads, T, d / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, t: int, d: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(t, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:  # [N, T] -> [N, T, vocabulary]
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        x = self.tokens(ids) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


class Residual(nn.Module):
    """Two convolutions of ResNet-18, with GroupNorm: BatchNorm would mix the samples."""

    def __init__(self, c: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*normed(c, o, 3, stride), nn.ReLU(), *normed(o, o, 3))
        self.shortcut = nn.Sequential(*(normed(c, o, 1, stride) if stride > 1 or c != o else []))

    def forward(self, x: Tensor) -> Tensor:  # [N, C, H, W]
        return F.relu(self.body(x) + self.shortcut(x))


def normed(c: int, o: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(c, o, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(32, o)]


def resnet18() -> Workload:
    """As for CIFAR: a 3x3 stem, no pooling after it."""
    layers: list[nn.Module] = [*normed(3, 64, 3), nn.ReLU()]
    for c, o, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Residual(c, o, stride), Residual(o, o, 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return classifier(nn.Sequential(*layers), torch.randn(32, 3, 32, 32))


def mlp() -> Workload:
    wide = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return classifier(nn.Sequential(*wide, nn.Linear(1024, 10)), torch.randn(256, 784))


def cnn() -> Workload:
    """Two max-pools, 32x32 to 8x8, and the mean over the pixels before the last layer."""
    layers: list[nn.Module] = []
    for c, o in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(c, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return classifier(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10)), torch.randn(64, 3, 32, 32)
    )


def many_small_layers() -> Workload:
    return regression(nn.Sequential(*(nn.Linear(16, 16) for _ in range(64))), torch.randn(8, 16))


def gpt() -> Workload:
    ids = torch.randint(256, (16, 129))
    model = GPT(vocabulary=256, t=128, d=256, heads=4, layers=4)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return Workload(model, inputs, targets, tokens_cross_entropy)


def tokens_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction=reduction)


def classifier(model: nn.Module, inputs: Tensor) -> Workload:
    return Workload(model, inputs, torch.randint(10, (len(inputs),)), F.cross_entropy)


def regression(model: nn.Module, inputs: Tensor) -> Workload:
    with torch.no_grad():
        targets = torch.randn_like(model(inputs))
    return Workload(model, inputs, targets, F.mse_loss)


def inner(layer: nn.Module, *size: int) -> Workload:
    """One layer as inside a model, where the gradient of its input is computed too."""
    return regression(layer, torch.randn(size).requires_grad_())


class Recurrent(nn.Module):
    """The states at all steps, alone."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x)[0]
        return states


def lstm() -> Workload:
    return inner(Recurrent(nn.LSTM(64, 128, batch_first=True)), 32, 32, 64)


def conv(c: int, o: int, side: int, groups: int = 1) -> Workload:
    return inner(nn.Conv2d(c, o, 3, padding=1, groups=groups), 16, c, side, side)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "MLP 784-1024-1024-10, N=256": mlp,
    "CNN 3-32-64-128 on 32x32, N=64": cnn,
    "ResNet-18 with GroupNorm on 32x32, N=32": resnet18,
    "GPT 4 layers d=256, T=128, N=16": gpt,
    "LSTM 64-128, T=32, N=32": lstm,
    "Linear 512-512, T=1024, N=8": lambda: inner(nn.Linear(512, 512), 8, 1024, 512),
    "Conv 32-32 on 64x64, N=16": lambda: conv(32, 32, 64),
    "Conv 512-512 on 8x8, N=16": lambda: conv(512, 512, 8),
    "Depthwise conv 256 on 14x14, N=16": lambda: conv(256, 256, 14, groups=256),
    "64 Linear 16-16, N=8": many_small_layers,
}
MAX_NORM = 1.0
QUICK = list(WORKLOADS)[-2:]  # for a try: those that take milliseconds


# Ways: workload -> a step that gives norms [N]. They may hook its model.

Way = Callable[[Workload], Callable[[], Tensor]]


def attached(read: Callable[[Any], Tensor] = lambda probe: probe.norms(), **options: bool) -> Way:
    """Attached once, as in a training run."""

    def way(w: Workload) -> Callable[[], Tensor]:
        import torchgradx  # here: a process that measures the plain step's memory has not loaded it

        probe = torchgradx.attach(w.model, **options)

        def step() -> Tensor:
            w.step(w.model)
            return read(probe)

        return step

    return way


def by_loop(w: Workload) -> Callable[[], Tensor]:
    parameters = list(w.model.parameters())

    def norm_of_one(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(w.inputs.requires_grad)
        sources = [*parameters, x] if x.requires_grad else parameters
        gradients = torch.autograd.grad(w.loss(w.model(x), y), sources)
        return norm(gradients[: len(parameters)])

    samples = list(zip(w.inputs.split(1), w.targets.split(1), strict=True))
    return lambda: torch.stack([norm_of_one(x, y) for x, y in samples])


def norm(gradients: Iterable[Tensor]) -> Tensor:
    return sum(g.square().sum() for g in gradients).sqrt()


OURS: dict[str, Way] = {
    "fused": attached(fused=True),
    "clip": attached(lambda probe: probe.clip_grad_norm_(MAX_NORM), clip=True),
    "deferred": attached(
        lambda probe: probe.clip_grad_norm_(MAX_NORM), clip=True, weight_grad=False
    ),
    "fused=False": attached(fused=False),
    "scoring": attached(weight_grad=False),
}


def check(name: str, norms: Tensor, oracle: Tensor) -> None:
    """Raise unless the norms are the oracle's."""
    off = ((norms.double() - oracle) / oracle).abs()
    median, worst = off.median().item(), off.max().item()
    if not (median < RTOL and worst < WORST):  # NaN included
        raise AssertionError(
            f"{name}: off the float64 loop's norms by {median:.1g} (median), {worst:.1g} (largest)"
        )
