"""Convolutions, and a Linear, whose weights are bare parameters of the user's, or computed in the
forward: standardised, divided by their norms, by what torch and timm have and by hand."""

import torch
import torch.nn.functional as F
from attach_oracle import Model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

N = 4


class Standardised(nn.Conv2d):
    """As timm's ScaledStdConv2d."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        rows, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.7).view(-1)
        weight = F.batch_norm(rows, None, None, gain, training=True, momentum=0.0, eps=1e-3)
        return self._conv_forward(x, weight.view_as(self.weight), self.bias)


class ByHand(nn.Conv2d):
    def forward(self, x):
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (var + 1e-5).sqrt(), self.bias)


def frozen(module, *names):
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def of_images(m, x):
    """A sample's several, first and last."""
    first = F.conv2d(x.flatten(0, 1), m.w, m.b, padding=1).unflatten(0, x.shape[:2])
    last = F.conv2d(x.transpose(0, 1).flatten(0, 1), m.w, padding=1).unflatten(0, (-1, len(x)))
    return first + last.transpose(0, 1)


def near_its_unit(m, x):
    """Rows of which next to nothing is left beside what lies along the weight."""
    return F.conv2d(1 + 1e-3 * x, torch._weight_norm(1 + 1e-3 * m.v, m.g, 0))


def in_two(m, x):
    weight = torch._weight_norm(m.v, m.g, 0)
    return F.conv2d(torch.tanh(F.conv2d(x, weight, padding=1)), weight, m.b * m.b, dilation=2)


def of_both(m, x):
    weight = F.batch_norm(m.v.view(1, 4, -1), None, None, m.h, training=True)
    return F.conv2d(x, torch._weight_norm(weight.view_as(m.v), m.g, 0))


def transposed(m, x):
    return F.conv_transpose2d(x, m.w, m.b, 2, 1, output_padding=1, groups=2)


def beyond_its_stride(m, x):
    return F.conv_transpose2d(x, m.w, m.b, output_padding=1, dilation=2)


def of_a_sample(*size):
    return lambda n=N: torch.randn(n, *size)


IMAGE, SOUND = of_a_sample(4, 5, 5), of_a_sample(4, 9)
PAIRS = {"w": torch.randn(4, 4, 3, 3), "b": torch.randn(4)}
NORMED = {"v": torch.randn(4, 4, 3, 3), "g": torch.randn(4, 1, 1, 1)}
GROUPED = {"padding": 2, "groups": 2}
DIRECTION = "parametrizations.weight.original1"
COMPUTED = {
    "a bare weight": (
        lambda: Model(lambda m, x: F.conv2d(x, m.w, m.b, 2, 1), **PAIRS), IMAGE),
    "of three dimensions": (
        lambda: Model(lambda m, x: F.conv3d(x, m.w, groups=2), w=torch.randn(4, 2, 2, 2, 2)),
        of_a_sample(4, 3, 3, 3)),
    "transposed": (lambda: Model(transposed, w=torch.randn(4, 2, 3, 3), b=torch.randn(4)), IMAGE),
    "padded beyond its stride": (lambda: Model(beyond_its_stride, **PAIRS), IMAGE),
    "several images": (
        lambda: Model(of_images, w=torch.randn(6, 6, 3, 3), b=torch.randn(6)),
        of_a_sample(3, 6, 5, 5)),
    "standardised": (lambda: Standardised(4, 6, 3, padding="same"), IMAGE),
    "standardised, by channel": (lambda: Standardised(4, 4, 3, 2, groups=4, bias=False), IMAGE),
    "standardised, gain alone": (lambda: frozen(Standardised(4, 4, 3), "weight"), IMAGE),
    "weight_norm": (
        lambda: weight_norm(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), IMAGE),
    "weight_norm, transposed": (
        lambda: weight_norm(nn.ConvTranspose1d(4, 4, 3, 2, groups=2)), SOUND),
    "weight_norm by position": (lambda: weight_norm(nn.Conv1d(4, 4, 4, **GROUPED), dim=2), SOUND),
    "weight_norm, g alone": (lambda: frozen(weight_norm(nn.Conv1d(4, 6, 3)), DIRECTION), SOUND),
    "weight_norm of old": (lambda: nn.utils.weight_norm(nn.Conv1d(4, 4, 4, **GROUPED)), SOUND),
    "weight_norm of a Linear": (lambda: weight_norm(nn.Linear(5, 6)), IMAGE),
    "weight_norm, cancelled": (
        lambda: Model(near_its_unit, v=torch.randn(4, 4, 1, 1), g=NORMED["g"]), IMAGE),
    "in two convolutions": (lambda: Model(in_two, **NORMED, b=torch.randn(4)), IMAGE),
    "both": (lambda: Model(of_both, **NORMED, h=torch.rand(4) + 0.5), IMAGE),
    "by hand": (lambda: ByHand(4, 6, 3), IMAGE),
}  # fmt: skip
FULL = {"by hand", "weight_norm, cancelled"}  # gradients of the weight's size for each sample


def around(name, reentrant=None):
    """(model, input): the convolution is neither its first nor its last layer."""
    make, batch = COMPUTED[name]
    torch.manual_seed(0)
    part, x = make().double(), batch().double()

    def forward(m, x):
        h = m.scale * x
        h = m.part(h) if reentrant is None else checkpoint(m.part, h, use_reentrant=reentrant)
        return m.last(torch.tanh(0.5 * h).flatten(1))

    with torch.no_grad():
        last = nn.Linear(part(x)[0].numel(), 2)
    scale = torch.rand(x.shape[1:]) + 0.5
    return Model(forward, part=part, scale=scale, last=last).double(), x
