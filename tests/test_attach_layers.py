"""Norms of every layer, alone and in models, by every path, against a loop over single samples."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    every_mode,
    fallback_mode,
    loop,
    loop_model,
    mlp,
    need_native,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N = 4


def conv(*args, **kwargs):
    return lambda: nn.Conv2d(*args, **kwargs)


def conv3d(*args, **kwargs):
    return lambda: nn.Conv3d(*args, **kwargs)


def linear(*args, **kwargs):
    return lambda: nn.Linear(*args, **kwargs)


# Layers that have kernels: name -> (how to make it, shape of the input)
KERNEL_LAYERS = {
    "linear": (linear(3, 5), (N, 3)),
    "linear without bias": (linear(3, 5, bias=False), (N, 3)),
    "linear 3-D": (linear(3, 5), (N, 7, 3)),
    "linear 4-D": (linear(3, 5), (N, 2, 3, 3)),
    "linear 5-D": (linear(3, 2), (N, 2, 3, 2, 3)),
    "linear one position": (linear(3, 5), (N, 1, 3)),
    "linear one sample": (linear(3, 5), (1, 6, 3)),
    "linear one feature in": (linear(1, 5), (N, 6, 1)),
    "linear one feature out": (linear(5, 1), (N, 6, 5)),
    "linear many positions": (linear(3, 5), (N, 70, 3)),
    "linear off every tile": (linear(37, 33), (3, 41, 37)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (N, 2, 8)),
    "conv1d stride padding dilation": (
        lambda: nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2),
        (N, 2, 9),
    ),
    "conv1d groups": (lambda: nn.Conv1d(4, 6, 3, groups=2, bias=False), (N, 4, 8)),
    "conv1d depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4), (N, 4, 8)),
    "conv1d same": (lambda: nn.Conv1d(2, 3, 3, padding="same", dilation=2), (N, 2, 8)),
    "conv1d valid": (lambda: nn.Conv1d(2, 3, 3, padding="valid"), (N, 2, 8)),
    "conv1d circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (N, 2, 8)),
    "conv1d reflect": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), (N, 2, 8)),
    "conv1d replicate": (
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="replicate", stride=2),
        (N, 2, 8),
    ),
    "conv2d": (conv(2, 3, 3), (N, 2, 6, 7)),
    "conv2d without bias": (conv(2, 3, 3, bias=False), (N, 2, 6, 7)),
    "conv2d 1x1": (conv(3, 4, 1), (N, 3, 5, 4)),
    "conv2d 1x1 strided": (conv(3, 4, 1, stride=2), (N, 3, 5, 4)),
    "conv2d 1x1 padded": (conv(3, 4, 1, padding=1), (N, 3, 5, 4)),
    "conv2d stride": (conv(2, 3, 3, stride=(2, 3)), (N, 2, 7, 9)),
    "conv2d padding": (conv(2, 3, 3, padding=(1, 2)), (N, 2, 5, 4)),
    "conv2d dilation": (conv(2, 3, 3, dilation=(1, 2), padding=2), (N, 2, 6, 7)),
    "conv2d everything": (
        conv(4, 6, (3, 2), stride=2, padding=1, dilation=2, groups=2),
        (N, 4, 8, 7),
    ),
    "conv2d stride beyond kernel": (conv(2, 3, 2, stride=3), (N, 2, 9, 9)),
    "conv2d oblong kernel": (conv(2, 3, (1, 3)), (N, 2, 4, 5)),
    "conv2d kernel of the image's size": (conv(2, 3, 4), (N, 2, 4, 4)),
    "conv2d one sample": (conv(2, 3, 3), (1, 2, 6, 6)),
    "conv2d same": (conv(2, 3, 3, padding="same"), (N, 2, 5, 6)),
    "conv2d same dilated": (conv(2, 3, 3, padding="same", dilation=2), (N, 2, 6, 6)),
    "conv2d same, even kernel": (conv(2, 3, (4, 2), padding="same"), (N, 2, 5, 6)),
    "conv2d valid": (conv(2, 3, 3, padding="valid"), (N, 2, 5, 6)),
    "conv2d groups": (conv(4, 6, 3, groups=2), (N, 4, 5, 5)),
    "conv2d depthwise": (conv(4, 4, 3, groups=4, padding=1), (N, 4, 5, 5)),
    "conv2d depthwise multiplier": (conv(3, 6, 3, groups=3, bias=False), (N, 3, 5, 5)),
    "conv2d circular": (conv(2, 3, 3, padding=1, padding_mode="circular"), (N, 2, 5, 6)),
    "conv2d reflect": (conv(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (N, 2, 5, 6)),
    "conv2d replicate": (conv(2, 3, 3, padding=2, padding_mode="replicate"), (N, 2, 5, 6)),
    "conv2d same reflect": (conv(2, 3, 3, padding="same", padding_mode="reflect"), (N, 2, 5, 6)),
    "conv2d same circular, even kernel": (
        conv(2, 3, 4, padding="same", padding_mode="circular"),
        (N, 2, 6, 6),
    ),
    "conv2d circular groups stride": (
        conv(4, 4, 3, padding=1, padding_mode="circular", groups=4, stride=2),
        (N, 4, 6, 6),
    ),
    "conv3d": (conv3d(2, 3, 2, padding=1), (N, 2, 3, 4, 3)),
    "conv3d without bias": (conv3d(2, 3, 3, bias=False), (N, 2, 4, 3, 5)),
    "conv3d groups": (conv3d(4, 6, 2, groups=2), (N, 4, 3, 4, 3)),
    "conv3d depthwise": (conv3d(4, 4, (2, 3, 1), groups=4, padding=(0, 1, 0)), (N, 4, 3, 4, 3)),
    "conv3d 1x1x1": (conv3d(3, 4, 1, stride=2), (N, 3, 3, 4, 3)),
    "conv3d everything": (
        conv3d(4, 6, (2, 3, 2), stride=(2, 1, 3), padding=(1, 2, 1), dilation=(1, 2, 2), groups=2),
        (N, 4, 5, 6, 7),
    ),
    "conv3d stride beyond kernel": (conv3d(2, 3, 2, stride=3), (N, 2, 6, 8, 9)),
    "conv3d tall kernel": (conv3d(2, 3, (1, 4, 1), stride=(1, 2, 1)), (N, 2, 3, 9, 3)),
    "conv3d one depth": (conv3d(2, 3, (3, 2, 2)), (N, 2, 3, 4, 3)),
    "conv3d kernel of the image's size": (conv3d(2, 3, 3), (N, 2, 3, 3, 3)),
    "conv3d one sample": (conv3d(2, 3, 2), (1, 2, 3, 4, 3)),
    "conv3d same, even kernel": (conv3d(2, 3, (2, 3, 4), padding="same"), (N, 2, 3, 4, 5)),
    "conv3d circular": (conv3d(2, 3, 3, padding=1, padding_mode="circular"), (N, 2, 3, 4, 3)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (N, 2, 2, 3, 2)),
    "transposed conv3d in groups": (
        lambda: nn.ConvTranspose3d(4, 2, 3, groups=2, bias=False),
        (N, 4, 2, 2, 3),
    ),
    "transposed conv3d with everything": (
        lambda: nn.ConvTranspose3d(
            2,
            3,
            (3, 2, 3),
            stride=(3, 2, 2),
            padding=(2, 1, 0),
            output_padding=(2, 1, 1),
            dilation=(2, 1, 2),
        ),
        (N, 2, 3, 4, 2),
    ),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (N, 2, 5)),
    "transposed conv1d of one position": (lambda: nn.ConvTranspose1d(3, 2, 2), (N, 3, 1)),
    "transposed conv2d in groups": (lambda: nn.ConvTranspose2d(2, 4, 3, groups=2), (N, 2, 4, 4)),
    "transposed conv2d with everything": (
        lambda: nn.ConvTranspose2d(
            2, 3, (3, 2), stride=(3, 2), padding=(2, 1), output_padding=(2, 1), dilation=(2, 1)
        ),
        (N, 2, 5, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@both_dtypes
@every_mode
@pytest.mark.parametrize("name", KERNEL_LAYERS)
def test_layers_with_kernels_have_the_norms_of_the_loop(name, options, dtype):
    make, shape = KERNEL_LAYERS[name]
    model = nn.Sequential(make(), nn.Tanh())
    for input_grad in (False, True):
        check(model, square, torch.randn(shape), dtype=dtype, input_grad=input_grad, **options)


def batch_norm(kind):
    layer = kind(3)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return layer.eval()


class Scale(nn.Module):
    """A leaf module that owns bare parameters."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1))

    def forward(self, x):
        return x * self.gain + self.shift


class Mixing(nn.Module):
    """A leaf module with a matrix of its own, used as an operator and through F.linear."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return F.linear(torch.tanh(x @ self.matrix), self.matrix)


class Doubled(nn.Linear):
    """A subclass with a forward of its own is not a Linear."""

    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias) + x[..., :1]


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class First(nn.Module):
    """The output of a recurrent layer without its state; batch_first or not."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if self.layer.batch_first:
            return self.layer(x)[0]
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


def recurrent(kind, **options):
    return lambda: First(kind(3, 4, **options))


IDS = (N, 5)  # token ids of 7
ELEMENTWISE_LAYERS = {
    "layer norm": (lambda: nn.LayerNorm(3), (N, 5, 3)),
    "layer norm without bias": (lambda: nn.LayerNorm(3, bias=False), (N, 5, 3)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((5, 3)), (N, 2, 5, 3)),
    "layer norm of rows": (lambda: nn.LayerNorm(3, eps=0.1), (N, 3)),
    "rms norm": (lambda: nn.RMSNorm(3), (N, 5, 3)),
    "rms norm of two dimensions": (lambda: nn.RMSNorm((5, 3), eps=0.1), (N, 2, 5, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (N, 4, 3, 3)),
    "group norm of rows": (lambda: nn.GroupNorm(3, 6, eps=0.1), (N, 6)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(3, affine=True), (N, 3, 4)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (N, 3, 4, 4)),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(3, affine=True), (N, 3, 2, 3, 2)),
    "batch norm 1d in eval": (lambda: batch_norm(nn.BatchNorm1d), (N, 3)),
    "batch norm 2d in eval": (lambda: batch_norm(nn.BatchNorm2d), (N, 3, 4, 4)),
    "batch norm 3d in eval": (lambda: batch_norm(nn.BatchNorm3d), (N, 3, 2, 3, 2)),
    "embedding": (lambda: nn.Embedding(7, 3), IDS),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=2), IDS),
    "embedding of one id": (lambda: nn.Embedding(7, 3), (N,)),
    "prelu": (lambda: nn.PReLU(), (N, 3)),
    "prelu per channel": (lambda: nn.PReLU(3), (N, 3, 4)),
}


FALLBACK_LAYERS = {
    "rms norm of one's own": (RootMeanSquare, (N, 5, 3)),
    "transposed conv2d with much output padding": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, dilation=3, output_padding=2),
        (N, 2, 4, 3),
    ),
    "leaf with bare parameters": (Scale, (N, 5, 3)),
    "leaf with a matrix": (Mixing, (N, 5, 3)),
    "leaf subclass of linear": (lambda: Doubled(3, 3), (N, 3)),
    "lstm batch first": (recurrent(nn.LSTM, batch_first=True), (N, 5, 3)),
    "lstm": (recurrent(nn.LSTM), (N, 5, 3)),
    "lstm both ways, two layers": (
        recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        (N, 5, 3),
    ),
    "gru": (recurrent(nn.GRU, batch_first=True), (N, 5, 3)),
    "gru without biases": (recurrent(nn.GRU, batch_first=True, bias=False), (N, 5, 3)),
    "rnn": (recurrent(nn.RNN, batch_first=True), (N, 5, 3)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (N, 3)),
}


@both_dtypes
@every_mode
@pytest.mark.parametrize("name", ELEMENTWISE_LAYERS)
def test_tables_and_normalisations_have_the_norms_of_the_loop(name, options, dtype):
    check_leaf(name, *ELEMENTWISE_LAYERS[name], options, dtype)


@both_dtypes
@fallback_mode
@pytest.mark.parametrize("name", FALLBACK_LAYERS)
def test_every_other_leaf_layer_has_the_norms_of_the_loop(name, options, dtype):
    check_leaf(name, *FALLBACK_LAYERS[name], options, dtype)


def check_leaf(name, make, shape, options, dtype):
    layer, ids = make(), "embedding" in name
    for p in layer.parameters():
        nn.init.normal_(p)
    model = nn.Sequential(layer, nn.Tanh()).train(layer.training)
    x = torch.randint(0, 7, shape) if ids else torch.randn(shape)
    check(model, square, x, dtype=dtype, input_grad=not ids, **options)


@every_mode
def test_the_model_of_the_forum_question(options):
    model = Model(
        lambda m, x: m.fc(torch.relu(m.conv2(torch.relu(m.conv1(x)))).flatten(1)),
        conv1=nn.Conv2d(3, 10, 3, padding=1, bias=False),
        conv2=nn.Conv2d(10, 20, 3, padding=1, stride=2, bias=False),
        fc=nn.Linear(500, 10, bias=False),
    )
    x, y = torch.randn(50, 3, 10, 10), torch.randint(0, 10, (50,))
    check(model, cross_entropy, x, y, dtype=torch.float32, **options)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


@both_dtypes
@a_few_modes
def test_a_cnn_with_group_norm_and_in_place_activations(options, dtype):
    x, y = torch.randn(N, 2, 6, 6), torch.randint(0, 5, (N,))
    check(small_cnn(), cross_entropy, x, y, dtype=dtype, **options)


@every_mode
@pytest.mark.parametrize("threads", [2, 3])
def test_norms_do_not_depend_on_the_number_of_threads(threads, options):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    x, y = torch.randn(33, 3, 8, 8), torch.randint(0, 5, (33,))
    want = loop(model, cross_entropy, x, y)
    torch.set_num_threads(threads)
    check(model, cross_entropy, x, y, dtype=torch.float32, want=want, **options)


@every_mode
@pytest.mark.parametrize("what", ["input", "model", "both"])
def test_channels_last_changes_nothing(what, options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, stride=2))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    if what != "input":
        model = model.to(memory_format=torch.channels_last)
    if what != "model":
        x = x.to(memory_format=torch.channels_last)
    check(model, square, x, want=want, **options)


@every_mode
def test_channels_last_changes_nothing_to_normalisations(options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.PReLU(4))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    last = torch.channels_last
    check(model.to(memory_format=last), square, x.to(memory_format=last), want=want, **options)


@every_mode
def test_strided_and_expanded_inputs_are_as_good_as_contiguous_ones(options):
    images = torch.randn(N, 8, 2, 9).permute(0, 2, 1, 3)[..., ::2]
    check(nn.Conv2d(2, 3, 3), square, images, **options)
    check(nn.Linear(3, 4), square, torch.randn(3, N, 5).permute(1, 2, 0), **options)
    check(nn.Linear(3, 4), square, torch.randn(N, 1, 3).expand(N, 5, 3), **options)


@every_mode
def test_an_expanded_output_gradient_is_as_good_as_a_dense_one(options):
    def total(model, x):
        return model(x).flatten(1).sum(1).mean()

    check(nn.Linear(3, 4), total, torch.randn(N, 5, 3), **options)
    check(nn.Conv2d(2, 3, 3, padding=1), total, torch.randn(N, 2, 5, 5), **options)


def test_norms_of_a_bfloat16_model_are_float32():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).bfloat16()
    x = torch.randn(N, 9, 16).bfloat16()
    want = loop_model(model, square, x)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        norms = probe.norms()
    assert norms.dtype == torch.float32
    # 8 roundings to bfloat16 on a sample's way, each of 2^-9
    assert torch.allclose(norms.double(), want, rtol=8 * 2**-9)


@fallback_mode
def test_permuting_samples_permutes_norms(options):
    model, order = small_cnn().double(), torch.tensor([2, 0, 3, 1])
    x, y = torch.randn(N, 2, 6, 6).double(), torch.randint(0, 5, (N,))
    with torchgradx.attach(model, **options) as probe:
        cross_entropy(model, x, y).backward()
        norms = probe.norms()
        cross_entropy(model, x[order], y[order]).backward()
        assert torch.allclose(probe.norms(), norms[order], rtol=1e-9)


@a_few_modes
def test_the_same_bits_come_out_twice(options):
    model, x, y = small_cnn(), torch.randn(32, 2, 6, 6), torch.randint(0, 5, (32,))
    with torchgradx.attach(model, **options) as probe:
        runs = []
        for _ in range(2):
            model.zero_grad()
            cross_entropy(model, x, y).backward()
            runs.append([probe.norms(), *probe.norms(per="parameter").values()])
            runs[-1] += [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@every_mode
def test_a_sample_without_a_gradient_has_exactly_zero(options):
    need_native(options)
    model, x = mlp(), torch.randn(N, 6, 3)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0])
    with torchgradx.attach(model, **options) as probe:
        (model(x).square().flatten(1).sum(1) * weights).mean().backward()
        norms = probe.norms()
    assert (norms > 0).tolist() == [True, False, True, False]


@a_few_modes
@pytest.mark.parametrize("factor", [1e-18, 1e15])
def test_very_small_and_very_large_gradients_survive_float32(factor, options):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    x = torch.rand(N, 2, 6, 6)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        (square(model, x) * factor).backward()
        norms = probe.norms().double() / factor
    assert torch.allclose(norms, want, rtol=1e-4), f"{norms.tolist()} and not {want.tolist()}"
