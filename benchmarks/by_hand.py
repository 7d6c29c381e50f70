"""The rival that one writes by hand: hooks, and an einsum for each layer's gradients by sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import Workload

Grads = tuple[Tensor, ...]  # by sample, of the layer's parameters in their order


def linear(layer: nn.Linear, x: Tensor, g: Tensor) -> Grads:
    rows, grads = (
        x.flatten(1, -2) if x.dim() > 2 else x[:, None],
        g.reshape(len(g), -1, g.shape[-1]),
    )
    return torch.einsum("nto,nti->noi", grads, rows), grads.sum(1)


def conv2d(layer: nn.Conv2d, x: Tensor, g: Tensor) -> Grads:
    if layer.padding_mode != "zeros":
        raise NotImplementedError(f"padding_mode={layer.padding_mode!r}")
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    patches = patches.unflatten(1, (layer.groups, -1))
    grads = g.flatten(2).unflatten(1, (layer.groups, -1))
    weight = torch.einsum("ngot,ngit->ngoi", grads, patches)
    return (weight, grads.sum(3)) if layer.bias is not None else (weight,)


def embedding(layer: nn.Embedding, ids: Tensor, g: Tensor) -> Grads:
    table = g.new_zeros(len(g), *layer.weight.shape)
    samples = torch.arange(len(g))[:, None].expand_as(ids)
    return (table.index_put_((samples, ids), g, accumulate=True),)


def layer_norm(layer: nn.LayerNorm, x: Tensor, g: Tensor) -> Grads:
    products = F.layer_norm(x, layer.normalized_shape, eps=layer.eps) * g
    return products.sum(1), g.sum(1)


def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> Grads:
    products = F.group_norm(x, layer.num_groups, eps=layer.eps) * g
    return products.flatten(2).sum(2), g.flatten(2).sum(2)


RULES: dict[type[nn.Module], Callable[..., Grads]] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
}


def by_bmm(w: Workload) -> Callable[[], Tensor]:
    model = w.model
    sq_norms: list[Tensor] = []

    def watch(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        (x,) = inputs

        def squared(g: Tensor) -> None:
            for grads in RULES[type(layer)](layer, x.detach(), g):
                sq_norms.append(grads.flatten(1).square().sum(1))

        output.register_hook(squared)

    for layer in model.modules():
        if any(True for _ in layer.parameters(recurse=False)):
            if type(layer) not in RULES:
                raise NotImplementedError(f"no einsum written for {type(layer).__name__}")
            layer.register_forward_hook(watch)

    def step() -> Tensor:
        sq_norms.clear()
        w.step(model)
        return len(w.inputs) * torch.stack(sq_norms).sum(0).sqrt()

    return step
