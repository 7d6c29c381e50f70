"""Opacus' ghost mode with our samplers: against its own results where those are right, and against
a float64 loop over single samples everywhere."""

import copy

import pytest
import torch
from attach_models import Model
from attach_oracle import close_named, loop
from clip_oracle import gradients, norms_of, weighted
from test_score import entropy
from torch import nn

import torchgradx

pytest.importorskip("opacus", reason='needs `pip install ".[bridges]"`')

from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost

from torchgradx.bridges import opacus as bridge

pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]ecure RNG", "ignore:Full backward hook")
CIRCULAR = {"padding": 1, "padding_mode": "circular"}
REFLECT, REPLICATE = ({"padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate"))
DEEP = {"stride": (1, 2, 2), "dilation": (2, 1, 1), "groups": 2}
# name: (layer, shape of a sample, or the ids' range and shape; whether Opacus itself is right)
LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (5,), True),
    "linear in time": (lambda: nn.Linear(5, 4), (7, 5), True),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (7, 5), True),
    "linear, 4-D": (lambda: nn.Linear(5, 4), (2, 3, 5), False),  # it has no norm
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9), True),
    "conv1d reflect": (lambda: nn.Conv1d(4, 6, 3, **REFLECT), (4, 9), False),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, padding=2), (4, 9, 8), True),
    "conv2d same": (lambda: nn.Conv2d(4, 6, (2, 3), padding="same"), (4, 6, 5), True),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 6, 5), True),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 6, 5), True),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 3, **CIRCULAR), (4, 6, 5), False),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3, stride=2, padding=1), (2, 5, 6, 7), True),
    "conv3d deep": (lambda: nn.Conv3d(2, 4, (2, 3, 1), **DEEP), (2, 5, 7, 4), True),
    "conv3d flat": (lambda: nn.Conv3d(2, 4, (5, 3, 3), padding=(0, 1, 1)), (2, 5, 4, 4), True),
    "conv3d replicate": (lambda: nn.Conv3d(2, 4, 3, **REPLICATE), (2, 4, 4, 4), False),
    "embedding": (lambda: nn.Embedding(6, 5), [6, 7], True),
    "embedding with padding": (lambda: nn.Embedding(6, 5, padding_idx=2), [6, 7], False),
    "layer norm": (lambda: nn.LayerNorm(5), (7, 5), True),
    "layer norm of two": (lambda: nn.LayerNorm((3, 5)), (2, 3, 5), True),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), (7, 5), False),  # it raises
    "rms norm": (lambda: nn.RMSNorm(5), (7, 5), True),
    "rms norm eps": (lambda: nn.RMSNorm(5, eps=0.1), (5,), True),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 4, 3), True),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), (6, 4, 3), True),
}


def square(model, x):
    """Off 1: what padding looks up is zero, and would have no gradient."""
    return (model(x) - 1).square().flatten(1).sum(1).mean()


def batch(shape, n=5):
    if isinstance(shape, list):
        return torch.randint(0, shape[0], (n, *shape[1:]))
    return torch.randn(n, *shape)


def ghost(model, x, loss=square):
    """{parameter: norms [N]}, as Opacus' ghost mode has them after a backward."""
    model = Ghost(copy.deepcopy(model).train(), strict=False)
    loss(model, x).backward()
    return {name: p._norm_sample for name, p in model._module.named_parameters() if p.requires_grad}


@pytest.fixture
def registered():
    with bridge.register():
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_a_layer(name, dtype):
    make, shape, right = LAYERS[name]
    layer, x = make().to(dtype), batch(shape)
    x = x if x.dtype == torch.int64 else x.to(dtype)
    want = loop(layer, square, x)
    with bridge.register():
        got = ghost(layer, x)
    rtol = 256 * torch.finfo(dtype).eps
    close_named(got, want, rtol)
    assert all(norms.dtype == dtype for norms in got.values())
    if right:
        close_named(ghost(layer, x), want, rtol)


def bags(mode, last=False):
    def forward(m, ids):
        return m.bag(ids.flatten(), torch.arange(len(ids) + last) * ids.shape[1])

    return Model(forward, bag=nn.EmbeddingBag(6, 5, mode=mode, include_last_offset=last))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_ids_that_repeat(mode, registered):
    model, ids = bags(mode).double(), torch.tensor([[1, 1, 2], [3, 3, 3], [0, 5, 4], [2, 1, 2]])
    close_named(ghost(model, ids), loop(model, square, ids))


def test_a_batch_that_opacus_miscounts_and_mixed_samples_are_refused(registered):
    with pytest.raises(torchgradx.CoverageError, match="one of 5 samples, and its output has 4"):
        ghost(bags("sum", last=True), torch.randint(0, 6, (4, 3)))
    with pytest.raises(torchgradx.CoverageError, match="scale_grad_by_freq"):
        ghost(nn.Embedding(6, 5, scale_grad_by_freq=True), batch([6, 7]))


def test_frozen_parameters_have_no_norm(registered):
    layer, x = nn.Conv2d(4, 6, 3).double(), torch.randn(5, 4, 7, 7, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    close_named(ghost(layer, x), loop(layer, square, x))


def test_registrations_are_undone_one_by_one_and_after_an_exception():
    table = Ghost.NORM_SAMPLERS
    before = dict(table)
    assert bridge.SAMPLERS.keys() >= before.keys()

    def interrupted():
        with bridge.register():
            inner = bridge.register()
            assert table[nn.Conv2d] is bridge.SAMPLERS[nn.Conv2d]
            for _ in range(2):  # the second time it has nothing to undo
                inner.remove()
                assert table[nn.Conv2d] is bridge.SAMPLERS[nn.Conv2d], "the other's"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert table == before


def test_a_private_step_clips_by_our_norms(registered):
    """make_private from end to end, without noise: the sum of clipped gradients, over the batch."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, **CIRCULAR), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(100, 3),
    ).double()  # fmt: skip
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.randint(0, 3, (6,))
    twin, bound = copy.deepcopy(model), 0.5
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)
    private, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), data_loader=data,
        noise_multiplier=0.0, max_grad_norm=bound, poisson_sampling=False,
        criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost",
    )  # fmt: skip
    criterion(private(x), y).backward()
    optimizer.step()
    rows = gradients(twin, entropy, x, y)
    (norms,) = norms_of(rows, "model").values()
    assert (norms > bound).all()
    want = weighted(rows, {"": bound / (norms + 1e-6) / 6}, "model")  # as Opacus divides
    for p, (name, q) in zip(model.parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(p, q - want[name], rtol=1e-9, atol=1e-9)
