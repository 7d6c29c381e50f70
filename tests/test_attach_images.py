"""Convolutions over several images of each sample: the words of a text by their letters, [B, K, C,
H, W], augmented views. And three dimensions of one pixel, by each algorithm."""

import copy

import pytest
import torch
from attach_oracle import Model, a_few_modes, check, loop, need_native, square
from torch import nn

import torchgradx

N, K = 4, 3
LAYERS = {
    "conv1d": (lambda: nn.Conv1d(2, 6, 3, padding=1), (2, 8)),
    "conv1d, dilated, stride 2": (lambda: nn.Conv1d(2, 6, 3, stride=2, dilation=2), (2, 11)),
    "conv2d": (lambda: nn.Conv2d(2, 6, 3, padding=1), (2, 6, 5)),
    "conv2d, no padding": (lambda: nn.Conv2d(2, 6, 3), (2, 6, 5)),
    "conv2d, stride 2": (lambda: nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False), (2, 7, 6)),
    "conv2d, tall": (lambda: nn.Conv2d(2, 6, (5, 2), dilation=(2, 1), padding=3), (2, 6, 5)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding=1), (4, 6, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 6, 5)),
    "conv2d, one pixel": (lambda: nn.Conv2d(2, 6, 3, padding=1, stride=3), (2, 3, 3)),
    "conv2d, circular": (lambda: nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular"), (2, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 6, 3, stride=2, output_padding=1), (2, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2, padding=1), (2, 3, 4, 3)),
}  # fmt: skip


def of_images(layer, last=False):
    def forward(m, x):
        h = torch.tanh(m.conv(x.flatten(0, 1) if not last else x.transpose(0, 1).flatten(0, 1)))
        h = h.flatten(2).mean(2)
        h = h.unflatten(0, (-1, K)) if not last else h.unflatten(0, (K, -1)).transpose(0, 1)
        return m.head(h.mean(1))

    return Model(forward, conv=layer, head=nn.Linear(layer.out_channels, 3))


@a_few_modes
@pytest.mark.parametrize("name", LAYERS)
def test_several_images_of_each_sample_are_exact(name, options):
    make, sizes = LAYERS[name]
    check(of_images(make()), square, torch.randn(N, K, *sizes), **options)


@a_few_modes
def test_images_before_samples_are_exact(options):
    make, sizes = LAYERS["conv2d"]
    check(of_images(make(), last=True), square, torch.randn(N, K, *sizes), **options)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "conv3d"])
def test_they_are_served_in_one_piece(name):
    need_native({"backend": "native"})
    make, sizes = LAYERS[name]
    model = of_images(make())
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, K, *sizes)).backward()
        probe.norms()
        assert "several uses" not in str(probe.explain())


@pytest.mark.parametrize("options", [{"clip": True}, {"clip": True, "weight_grad": False}], ids=str)
def test_they_are_clipped(options):
    make, sizes = LAYERS["conv2d, stride 2"]
    model, x = of_images(make()).double(), torch.randn(N, K, *sizes).double()
    norms = sum(v.square() for v in loop(model, square, x).values()).sqrt()
    bound = float(norms.median())
    want = [torch.zeros_like(p) for p in model.parameters()]
    for n in range(N):
        alone = copy.deepcopy(model)
        (square(alone, x[n : n + 1]) / N).backward()
        for sum_, p in zip(want, alone.parameters(), strict=True):
            sum_ += p.grad * min(1.0, bound / float(norms[n]))
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(bound)
    for p, sum_ in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, sum_)


@pytest.mark.parametrize("algorithm", ["rank1", "gram", "direct"])
@pytest.mark.parametrize("kernel", [3, (2, 3, 1)], ids=str)
def test_three_dimensions_of_one_pixel_are_exact_by_each_algorithm(kernel, algorithm):
    conv = nn.Conv3d(2, 4, kernel, padding=1 if kernel == 3 else (1, 1, 0), stride=2)
    options = {"backend": "native", "algorithm": algorithm}
    check(nn.Sequential(conv, nn.Flatten()), square, torch.randn(N, 2, 1, 1, 1), **options)
