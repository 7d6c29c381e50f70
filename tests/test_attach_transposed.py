"""Convolutions used twice, and the Linear of GPT-2, whose weight is the other way round."""

import pytest
import torch
from attach_oracle import (
    Model,
    both_dtypes,
    check,
    every_mode,
    square,
)
from test_attach_layers import conv, conv3d
from torch import nn

N = 4

TWICE = {
    "conv2d": (conv(3, 3, 3, padding=1), (N, 3, 4, 5)),
    "conv3d": (conv3d(3, 3, 3, padding=1, groups=3), (N, 3, 2, 3, 4)),
    "conv3d strided": (conv3d(3, 3, (2, 1, 3), stride=(1, 2, 1), padding=1), (N, 3, 2, 5, 4)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(3, 3, 2, stride=2), (N, 3, 4)),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(3, 3, (2, 3), stride=2, padding=1),
        (N, 3, 4, 5),
    ),
    "transposed conv2d in groups": (
        lambda: nn.ConvTranspose2d(6, 6, 2, stride=2, groups=3),
        (N, 6, 3, 2),
    ),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(3, 3, (2, 1, 3), stride=2), (N, 3, 2, 3, 2)),
}


@every_mode
@pytest.mark.parametrize("images", [1, 2], ids=["one image", "two images"])
@pytest.mark.parametrize("name", TWICE)
def test_convolutions_used_twice_count_their_cross_terms(name, images, options):
    make, shape = TWICE[name]

    def of_images(m, x):
        x = x.flatten(0, 1)
        return m.conv(m.conv(x).tanh()).unflatten(0, (-1, images))

    x = torch.randn(shape[0], images, *shape[1:])
    check(Model(of_images, conv=make()), square, x, **options)


@both_dtypes
@every_mode
def test_a_linear_of_gpt2_has_the_norms_of_the_loop(options, dtype):
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    for shape in ((N, 3), (N, 7, 3), (N, 70, 3), (1, 6, 3)):
        model = nn.Sequential(kind(5, 3), nn.Tanh())
        check(model, square, torch.randn(shape), dtype=dtype, input_grad=True, **options)
    named = Model(lambda m, x: m.c(x=x), c=kind(5, 3))
    check(named, square, torch.randn(N, 7, 3), dtype=dtype, **options)


@every_mode
def test_a_linear_of_gpt2_used_twice_and_tied_to_a_table(options):
    kind = pytest.importorskip("transformers.pytorch_utils").Conv1D
    twice = Model(lambda m, x: m.c(torch.tanh(m.c(x))), c=kind(3, 3))
    check(twice, square, torch.randn(N, 5, 3), **options)
    tied = Model(lambda m, ids, x: m.c(x).tanh() + m.table(ids), c=kind(3, 7),
                 table=nn.Embedding(7, 3))  # fmt: skip
    tied.table.weight = tied.c.weight
    check(tied, square, torch.randint(0, 7, (N, 5)), torch.randn(N, 5, 7), **options)
