"""Training steps to time on a GPU: a table of models, as each is trained.

A `Case` builds a `Workload`; how a case is timed is in gpu_steps.py. The first models are of
torch's modules alone, so that no other package decides what is measured. Those of transformers and
timm are built from a configuration; all weights are random. `tiny` is the same code at sizes for a
test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import GPT, Block, Workload


class Case(NamedTuple):
    build: Callable[[bool], Workload]  # tiny -> workload; runs under the device's default
    autocast: bool = False  # float32 weights under autocast(bfloat16); else bfloat16 weights
    channels_last: bool = False
    needs: str = ""  # the package of the model

    @property
    def regime(self) -> str:
        return "autocast" if self.autocast else "bfloat16"


# Models of torch's modules


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
    """Vision transformer whose head reads the mean of all positions, not a class token."""

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


# Losses, of a tensor or of what transformers returns


def of_classes(output: Any, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(getattr(output, "logits", output), targets, reduction=reduction)


def of_tokens(output: Any, targets: Tensor, reduction: str = "mean") -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def language(model: nn.Module, n: int, t: int, vocabulary: int) -> Workload:
    ids = torch.randint(vocabulary, (n, t + 1))
    return Workload(model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), of_tokens)


def images(model: nn.Module, n: int, size: int) -> Workload:
    targets = torch.randint(1000, (n,))
    return Workload(model, torch.randn(n, 3, size, size), targets, of_classes)


# Cases


def gpt2(tiny: bool) -> Workload:
    n, t, vocabulary = (2, 8, 50) if tiny else (8, 1024, 50257)
    d, heads, layers = (32, 2, 1) if tiny else (768, 12, 12)
    return language(GPT(vocabulary, t, d, heads, layers), n, t, vocabulary)


def vit(tiny: bool) -> Workload:
    if tiny:
        return images(ViT(32, 16, 32, 2, 1), 2, 32)
    return images(ViT(224, 16, 768, 12, 12), 64, 224)


def resnet50(tiny: bool) -> Workload:
    if tiny:
        return images(resnet((1, 1), 32), 2, 32)
    return images(resnet((3, 4, 6, 3), 64), 64, 224)


def mlp(tiny: bool) -> Workload:
    n, width = (4, 16) if tiny else (4096, 1024)
    layers = [nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Workload(model, torch.randn(n, 784), torch.randint(10, (n,)), of_classes)


def bert(tiny: bool) -> Workload:
    """Without dropout, so that a sample alone has the same gradient."""
    from transformers import BertConfig, BertForSequenceClassification

    n, t, vocabulary = (3, 8, 50) if tiny else (32, 128, 30522)
    small = {"hidden_size": 32, "intermediate_size": 64}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=10,
        **(small if tiny else {}),
    )
    ids, targets = torch.randint(vocabulary, (n, t)), torch.randint(10, (n,))
    return Workload(BertForSequenceClassification(config), ids, targets, of_classes)


def llama(tiny: bool) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    n, t, vocabulary = (2, 8, 50) if tiny else (4, 1024, 32000)
    d, inner, heads, layers = (32, 64, 2, 1) if tiny else (2048, 5504, 16, 8)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=d,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        use_cache=False,
    )
    return language(LlamaForCausalLM(config), n, t, vocabulary)


def huggingface_gpt2(tiny: bool) -> Workload:
    """Its vocabulary is 50257 too; its head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    n, t, vocabulary = (2, 8, 50) if tiny else (8, 1024, 50257)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2} if tiny else {}
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=t,
        embd_pdrop=0,
        resid_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
        **sizes,
    )
    return language(GPT2LMHeadModel(config), n, t, vocabulary)


def convnext(tiny: bool) -> Workload:
    from timm import create_model

    if tiny:
        model = create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16))
        return images(model, 2, 64)
    return images(create_model("convnext_tiny"), 64, 224)


# In the order of what is to be known first: time may run out.
MODELS: dict[str, Case] = {
    "GPT-2 small, N=8, T=1024": Case(gpt2),
    "ResNet-50 with GroupNorm, N=64": Case(resnet50, channels_last=True),
    "ViT-B/16, N=64": Case(vit, channels_last=True),
    "BERT-base, N=32, T=128": Case(bert, autocast=True, needs="transformers"),
    "Llama 8 x 2048, N=4, T=1024": Case(llama, needs="transformers"),
    "ConvNeXt-T, N=64": Case(convnext, autocast=True, needs="timm"),
    "MLP 784-1024-1024-10, N=4096": Case(mlp),
    "GPT-2 of transformers, N=8, T=1024": Case(huggingface_gpt2, needs="transformers"),
}
