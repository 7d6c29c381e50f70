"""What layers give where their input lies otherwise in memory: as they would, number by number."""

import pytest
import torch
from attach_oracle import (
    Model,
    check,
    every_mode,
    need_native,
    square,
)
from torch import nn

import torchgradx

N, C, T = 4, 8, 9
ROWS, IMAGES = torch.randn(N, T, C), torch.randn(N, T, T, C)  # channels last
GIVEN = {
    "conv1d": (lambda: nn.Conv1d(C, 6, 3), lambda: ROWS.transpose(1, 2)),
    "conv1d, one channel": (lambda: nn.Conv1d(1, 6, 3), lambda: ROWS[..., :1].transpose(1, 2)),
    "conv1d by groups": (lambda: nn.Conv1d(C, 8, 3, groups=4), lambda: ROWS.transpose(1, 2)),
    "conv1d padded": (
        lambda: nn.Conv1d(C, 6, 3, padding=1, padding_mode="circular"),
        lambda: ROWS.transpose(1, 2),
    ),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(C, 6, 3), lambda: ROWS.transpose(1, 2)),
    "conv2d": (lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(0, 3, 1, 2)),
    "conv2d, samples second": (lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(1, 3, 0, 2)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(C, 6, 3), lambda: IMAGES.permute(0, 3, 1, 2)),
    "conv3d": (lambda: nn.Conv3d(C, 6, (1, 2, 2)), lambda: IMAGES[:, None].permute(0, 4, 1, 2, 3)),
    "linear": (lambda: nn.Linear(T, 6), lambda: ROWS.transpose(1, 2)),
    "linear, samples second": (lambda: nn.Linear(C, 6), lambda: ROWS.transpose(0, 1)),
    "linear without bias, one sample": (
        lambda: nn.Linear(C, 6, bias=False),
        lambda: ROWS[:, :1].transpose(0, 1),  # contiguous, though its first stride is no product
    ),
    "layer norm": (lambda: nn.LayerNorm(T), lambda: ROWS.transpose(1, 2)),
    "rms norm": (lambda: nn.RMSNorm(C), lambda: ROWS.transpose(0, 1)),
    "group norm": (lambda: nn.GroupNorm(2, C), lambda: IMAGES.permute(0, 3, 1, 2)),
    "batch norm": (lambda: nn.BatchNorm2d(C).eval(), lambda: IMAGES.permute(0, 3, 1, 2)),
    "prelu": (lambda: nn.PReLU(C), lambda: IMAGES.permute(0, 3, 1, 2)),
    "embedding": (lambda: nn.Embedding(9, 6), lambda: torch.randint(9, (T, N)).t()),
    "lstm": (lambda: nn.LSTM(T, 6, batch_first=True), lambda: ROWS.transpose(1, 2)),
}


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GIVEN)
def test_outputs_lie_in_memory_as_they_would(name, dtype, options):
    need_native(options)
    make, given = GIVEN[name]
    model, x = make().to(dtype), given()
    x = x.to(dtype) if x.is_floating_point() else x
    want = model(x)
    with torchgradx.attach(model, **options):
        got = model(x)
    for a, b in zip(*([t] if torch.is_tensor(t) else t[:1] for t in (got, want)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@every_mode
def test_a_text_network_flattens_what_it_convolved(options):
    model = Model(
        lambda m, ids: m.l(torch.relu(m.c(m.e(ids).permute(0, 2, 1))).view(len(ids), -1)),
        e=nn.Embedding(9, C), c=nn.Conv1d(C, 6, 3, padding=1), l=nn.Linear(6 * T, 3),
    )  # fmt: skip
    check(model, square, torch.randint(9, (N, T)), **options)
