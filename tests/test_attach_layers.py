"""Norms of every layer, alone and used twice, by every path, against a loop over single samples."""

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, rms_norm, square
from attach_modes import a_few_modes, both_dtypes, every_mode, fallback_mode, native_missing
from attach_oracle import check
from attach_steps import exact_steps
from recurrent_models import made, net
from torch import nn

import torchgradx

N = 4


def late(kind):
    return lambda *args, **kwargs: lambda: kind(*args, **kwargs)


linear, conv, conv3d = map(late, (nn.Linear, nn.Conv2d, nn.Conv3d))
# Layers that have kernels: name -> (how to make it, shape of the input)
KERNEL_LAYERS = {
    "linear": (linear(3, 5), (N, 3)),
    "linear without bias": (linear(3, 5, bias=False), (N, 3)),
    "linear 3-D": (linear(3, 5), (N, 7, 3)),
    "linear 4-D": (linear(3, 5), (N, 2, 3, 3)),
    "linear one position": (linear(3, 5), (N, 1, 3)),
    "linear one sample": (linear(3, 5), (1, 6, 3)),
    "linear one feature in": (linear(1, 5), (N, 6, 1)),
    "linear one feature out": (linear(5, 1), (N, 6, 5)),
    "linear many positions": (linear(3, 5), (N, 70, 3)),
    "linear off every tile": (linear(37, 33), (3, 41, 37)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (N, 2, 8)),
    "conv1d stride padding dilation": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2),
        (N, 2, 9)),
    "conv1d depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4), (N, 4, 8)),
    "conv1d same": (lambda: nn.Conv1d(2, 3, 3, padding="same", dilation=2), (N, 2, 8)),
    "conv1d same, long": (lambda: nn.Conv1d(9, 64, 64, padding="same"), (N, 9, 32)),
    "conv2d": (conv(2, 3, 3), (N, 2, 6, 7)),
    "conv2d without bias": (conv(2, 3, 3, bias=False), (N, 2, 6, 7)),
    "conv2d 1x1": (conv(3, 4, 1), (N, 3, 5, 4)),
    "conv2d 1x1 strided": (conv(3, 4, 1, stride=2), (N, 3, 5, 4)),
    "conv2d 1x1 padded": (conv(3, 4, 1, padding=1), (N, 3, 5, 4)),
    "conv2d stride": (conv(2, 3, 3, stride=(2, 3)), (N, 2, 7, 9)),
    "conv2d padding": (conv(2, 3, 3, padding=(1, 2)), (N, 2, 5, 4)),
    "conv2d everything": (conv(4, 6, (3, 2), stride=2, padding=1, dilation=2, groups=2),
        (N, 4, 8, 7)),
    "conv2d kernel of the image's size": (conv(2, 3, 4), (N, 2, 4, 4)),
    "conv2d one sample": (conv(2, 3, 3), (1, 2, 6, 6)),
    "conv2d same": (conv(2, 3, 3, padding="same"), (N, 2, 5, 6)),
    "conv2d same, even kernel": (conv(2, 3, (4, 2), padding="same"), (N, 2, 5, 6)),
    "conv2d valid": (conv(2, 3, 3, padding="valid"), (N, 2, 5, 6)),
    "conv2d groups": (conv(4, 6, 3, groups=2), (N, 4, 5, 5)),
    "conv2d depthwise": (conv(4, 4, 3, groups=4, padding=1), (N, 4, 5, 5)),
    "conv2d depthwise multiplier": (conv(3, 6, 3, groups=3, bias=False), (N, 3, 5, 5)),
    "conv2d circular": (conv(2, 3, 3, padding=1, padding_mode="circular"), (N, 2, 5, 6)),
    "conv2d reflect": (conv(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (N, 2, 5, 6)),
    "conv2d replicate": (conv(2, 3, 3, padding=2, padding_mode="replicate"), (N, 2, 5, 6)),
    "conv2d same circular, even kernel": (conv(2, 3, 4, padding="same", padding_mode="circular"),
        (N, 2, 6, 6)),
    "conv3d": (conv3d(2, 3, 2, padding=1), (N, 2, 3, 4, 3)),
    "conv3d depthwise": (conv3d(4, 4, (2, 3, 1), groups=4, padding=(0, 1, 0)), (N, 4, 3, 4, 3)),
    "conv3d 1x1x1": (conv3d(3, 4, 1, stride=2), (N, 3, 3, 4, 3)),
    "conv3d everything": (conv3d(4, 6, (2, 3, 2), stride=(2, 1, 3), padding=(1, 2, 1),
        dilation=(1, 2, 2), groups=2), (N, 4, 5, 6, 7)),
    "conv3d stride beyond kernel": (conv3d(2, 3, 2, stride=3), (N, 2, 6, 8, 9)),
    "conv3d same, even kernel": (conv3d(2, 3, (2, 3, 4), padding="same"), (N, 2, 3, 4, 5)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (N, 2, 2, 3, 2)),
    "transposed conv3d in groups": (lambda: nn.ConvTranspose3d(4, 2, 3, groups=2, bias=False),
        (N, 4, 2, 2, 3)),
    "transposed conv3d with everything": (lambda: nn.ConvTranspose3d(2, 3, (3, 2, 3),
        stride=(3, 2, 2), padding=(2, 1, 0), output_padding=(2, 1, 1), dilation=(2, 1, 2)),
        (N, 2, 3, 4, 2)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (N, 2, 5)),
    "transposed conv1d of one position": (lambda: nn.ConvTranspose1d(3, 2, 2), (N, 3, 1)),
    "transposed conv2d in groups": (lambda: nn.ConvTranspose2d(2, 4, 3, groups=2), (N, 2, 4, 4)),
    "transposed conv2d with everything": (lambda: nn.ConvTranspose2d(2, 3, (3, 2), stride=(3, 2),
        padding=(2, 1), output_padding=(2, 1), dilation=(2, 1)), (N, 2, 5, 4)),
}  # fmt: skip


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


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias) + x[..., :1]


class Standardised(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(1, keepdim=True), bias)


def of_another(table):
    """As tied tables of different lengths: its num_embeddings stay."""
    table.weight = nn.Parameter(torch.randn(7, 3))
    return table


IDS = (N, 5)  # token ids of 7
ELEMENTWISE_LAYERS = {
    "layer norm": (lambda: nn.LayerNorm(3), (N, 5, 3)),
    "layer norm without bias": (lambda: nn.LayerNorm(3, bias=False), (N, 5, 3)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((5, 3)), (N, 2, 5, 3)),
    "layer norm of rows": (lambda: nn.LayerNorm(3, eps=0.1), (N, 3)),
    "rms norm": (lambda: nn.RMSNorm(3), (N, 5, 3)),
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
    "embedding of bounded rows": (lambda: nn.Embedding(7, 3, max_norm=1.0), IDS),
    "embedding of one id": (lambda: nn.Embedding(7, 3), (N,)),
    "embedding with sparse gradients": (lambda: nn.Embedding(7, 3, sparse=True), IDS),
    "embedding of another's table": (lambda: of_another(nn.Embedding(9, 3)), IDS),
    "prelu": (lambda: nn.PReLU(), (N, 3)),
    "prelu per channel": (lambda: nn.PReLU(3), (N, 3, 4)),
}
FALLBACK_LAYERS = {
    "rms norm of one's own": (lambda: rms_norm(3), (N, 5, 3)),
    "transposed conv2d with much output padding": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2,
        dilation=3, output_padding=2), (N, 2, 4, 3)),
    "leaf with bare parameters": (lambda: Model(lambda m, x: x * m.gain + m.shift,
        gain=torch.randn(3), shift=torch.randn(1)), (N, 5, 3)),
    "leaf subclass of linear": (lambda: Doubled(3, 3), (N, 3)),
    "leaf subclass of conv2d": (lambda: Standardised(2, 3, 3), (N, 2, 5, 6)),
    "gru cell": (lambda: nn.GRUCell(3, 4), (N, 3)),
}  # fmt: skip
FALLBACK_LAYERS |= {
    f"{kind}, {option}": (lambda kind=kind, option=option: net(made(kind, option)), (N, 5, 3))
    for kind in ("lstm", "gru", "rnn")
    for option in ("plain", "batch first", "no biases", "both ways, three layers")
}


@both_dtypes
@every_mode
@pytest.mark.parametrize("name", ELEMENTWISE_LAYERS)
def test_tables_and_normalisations_have_the_norms_of_the_loop(name, options, dtype):
    check_leaf(name, *ELEMENTWISE_LAYERS[name], options, dtype)


@pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="the gradients are the framework's own")
def test_sums_of_many_alike_keep_their_digits():
    rows = torch.full((1 << 16, 8), -1.0)
    inputs = rows, rows, rows[None], rows[None, :, None].movedim(3, 1)  # the last: channels_last
    layers = nn.LayerNorm(8), nn.PReLU(8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
    for layer, x in zip(layers, inputs, strict=True):
        with torchgradx.attach(layer, loss_reduction="sum", check="off"):
            (layer(x) * 0.3).sum().backward()
        *_, p = layer.parameters()
        assert p.grad.abs().tolist() == pytest.approx([0.3 * len(rows)] * 8, rel=1e-5), layer


@every_mode
def test_a_group_norm_of_single_values_raises_as_it_does_alone(options):
    model, x = nn.Sequential(nn.GroupNorm(4, 4)), torch.randn(1, 4, 1)
    with torchgradx.attach(model, **options), pytest.raises(ValueError, match="more than 1 value"):
        model(x)


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


TWICE = {
    "conv2d": (conv(3, 3, 3, padding=1), (N, 3, 4, 5)),
    "conv3d": (conv3d(3, 3, 3, padding=1, groups=3), (N, 3, 2, 3, 4)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(3, 3, (2, 3), stride=2, padding=1),
        (N, 3, 4, 5)),
    "transposed conv2d in groups": (lambda: nn.ConvTranspose2d(6, 6, 2, stride=2, groups=3),
        (N, 6, 3, 2)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(3, 3, (2, 1, 3), stride=2), (N, 3, 2, 3, 2)),
}  # fmt: skip


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


SEVERAL = 3
OF_IMAGES = (
    *("conv1d", "conv1d stride padding dilation", "conv2d", "conv2d padding", "conv2d stride"),
    *("conv2d without bias", "conv2d everything", "conv2d groups", "conv2d depthwise"),
    *("conv2d circular", "conv2d kernel of the image's size", "transposed conv1d"),
    "transposed conv2d with everything",
    *(name for name in KERNEL_LAYERS if "conv3d" in name),
)


def of_images(layer, last=False):
    """[N, SEVERAL, C, ...] -> [N, O]: the words of a text by their letters, or augmented views."""

    def forward(m, x):
        h = m.conv(x.transpose(0, 1).flatten(0, 1) if last else x.flatten(0, 1))
        h = torch.tanh(h).flatten(2).mean(2)
        h = h.unflatten(0, (SEVERAL, -1)).transpose(0, 1) if last else h.unflatten(0, (-1, SEVERAL))
        return m.head(h.mean(1))

    return Model(forward, conv=layer, head=nn.Linear(layer.out_channels, 3))


@a_few_modes
@pytest.mark.parametrize(
    ("name", "last"), [*((name, False) for name in OF_IMAGES), ("conv2d padding", True)]
)
def test_several_images_of_each_sample_are_exact_and_served_in_one_piece(name, last, options):
    make, (n, *sizes) = KERNEL_LAYERS[name]
    model, x = of_images(make(), last), torch.randn(n, SEVERAL, *sizes)
    check(model, square, x, **options)
    if not (last or options or native_missing()):
        assert "several uses" not in exact_steps(model.double(), x.double())


@pytest.mark.parametrize("algorithm", ["rank1", "gram", "direct"])
@pytest.mark.parametrize("kernel", [3, (2, 3, 1)], ids=str)
def test_three_dimensions_of_one_pixel_are_exact_by_each_algorithm(kernel, algorithm):
    layer = nn.Conv3d(2, 4, kernel, padding=1 if kernel == 3 else (1, 1, 0), stride=2)
    options = {"backend": "native", "algorithm": algorithm}
    check(nn.Sequential(layer, nn.Flatten()), square, torch.randn(N, 2, 1, 1, 1), **options)


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
    tied = Model(lambda m, i, x: m.c(x).tanh() + m.table(i), c=kind(3, 7), table=nn.Embedding(7, 3))
    tied.table.weight = tied.c.weight
    check(tied, square, torch.randint(0, 7, (N, 5)), torch.randn(N, 5, 7), **options)
