"""Token means over unequal lengths: weights, where they are said, and the warning without them."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attach_models import Model
from attach_oracle import close, loop_model
from clip_oracle import gradients
from torch import nn

import torchgradx
from torchgradx import token_weights

N, T, V = 4, 5, 7
LENGTHS = (5, 2, 0, 3)


def model():
    return nn.Sequential(nn.Embedding(V, 6), nn.Tanh(), nn.Linear(6, V)).double()


def batch(lengths=LENGTHS, n=N):
    x, y = torch.randint(0, V, (n, T)), torch.randint(0, V, (n, T))
    y[torch.arange(T) >= torch.tensor(lengths)[:, None]] = -100
    return x, y


def token_mean(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def own_mean(net, x, y):
    """A sample's own token mean; 0 where it has no tokens."""
    return F.cross_entropy(net(x).mT, y, reduction="sum") / (y != -100).sum().clamp(min=1)


def test_weights_are_shares_of_the_counted_targets():
    _, y = batch()
    assert token_weights(y).tolist() == pytest.approx([5 / 10, 2 / 10, 0, 3 / 10])
    assert token_weights(torch.tensor([[1, 0], [0, 0]]), ignore_index=0).tolist() == [1.0, 0.0]
    assert token_weights(torch.full((3, 2), -100)).tolist() == [0, 0, 0]
    assert token_weights(torch.tensor([3, -100])).tolist() == [1, 0]
    y = torch.tensor([[1, 2, 3, -100, 1], [1, 1, -100, 2, 2]])  # packed documents
    ids = torch.tensor([[0, 0, 0, 0, 1], [3, 3, 3, 3, -1]])
    assert token_weights(y, sample_ids=ids).tolist() == pytest.approx([3 / 7, 1 / 7, 0, 3 / 7])


def test_arguments_of_weights_are_refused_by_name():
    with pytest.raises(TypeError, match="targets must be"):
        token_weights([1, 2])
    with pytest.raises(ValueError, match="sample_ids must be"):
        token_weights(torch.ones(2, 3), sample_ids=torch.ones(3, dtype=torch.long))


# ---- Where they are said -------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["attach", "read", "set", "callable", "callable of nothing"])
@pytest.mark.parametrize("backend", ["auto", "vmap"])
def test_norms_are_those_of_each_samples_own_token_mean(how, backend):
    net, (x, y) = model(), batch()
    want, w = loop_model(net, own_mean, x, y), token_weights(y)
    given = {
        "attach": {"loss_scale": w},
        "callable": {"loss_scale": lambda args, kwargs: token_weights(y) * len(args[0]) / N},
        "callable of nothing": {"loss_scale": lambda: token_weights(y)},
    }.get(how, {})
    with torchgradx.attach(net, loss_reduction="sum", backend=backend, **given) as probe:
        if how == "set":
            probe.loss_scale = w
            assert torch.equal(probe.loss_scale, w)
        token_mean(net(x), y).backward()
        norms = probe.norms(loss_scale=w if how == "read" else None)
    close(norms, want)
    assert norms[2] == 0
    assert 0 not in norms[[0, 1, 3]]


def test_every_reader_goes_by_it():
    net, (x, y) = model(), batch()
    want, w = loop_model(net, own_mean, x, y), token_weights(y)
    each = gradients(net, own_mean, x, y)
    v = {"2.weight": torch.randn(V, 6, dtype=torch.float64)}
    with torchgradx.attach(net, loss_reduction="sum", clip=True, directions=v) as probe:
        probe.loss_scale = w
        token_mean(net(x), y).backward()
        dots = torch.stack([(g["2.weight"] * v["2.weight"]).sum() for g in each])
        torch.testing.assert_close(probe.dot(), dots)
        close(probe.shares, w)
        noise = torchgradx.NoiseScale(decay=0.0)
        noise.update(probe)
        bound = float(want.median())
        close(probe.clip_grad_norm_(bound), want)
    for name, p in net.named_parameters():
        factors = [min(1, bound / float(norm)) if norm else 0 for norm in want]
        clipped = sum(f * s * g[name] for f, s, g in zip(factors, w, each, strict=True))
        torch.testing.assert_close(p.grad, clipped)
    kept = [n for n in range(N) if LENGTHS[n]]  # a sample without tokens is no sample
    rows = torch.stack([torch.cat([g.flatten() for g in each[n].values()]) for n in kept])
    shares = w[kept]
    whole = (shares @ rows).square().sum()
    mean, squares = rows.square().sum(1).mean(), shares.square().sum()
    assert noise.trace == pytest.approx(((mean - whole) / (1 - squares)).item())


@pytest.mark.parametrize("scale", [0.0, float("nan"), "word", np.ones(3), torch.ones(2, 2)])
def test_a_scale_that_is_none_is_refused(scale):
    with torchgradx.attach(nn.Linear(2, 2)) as probe:
        with pytest.raises((TypeError, ValueError), match="loss_scale must be"):
            probe.loss_scale = scale
        probe.loss_scale = lambda: scale
        with pytest.raises((TypeError, ValueError), match="loss_scale must be"):
            probe._model()(torch.ones(3, 2))


def warned(net, steps, loss, read=lambda probe: probe.norms(), **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torchgradx.attach(net, **options) as probe:
            for x, y in steps:
                loss(net(x), y).backward()
                read(probe)
    return [w for w in seen if "token_weights" in str(w.message)]


def test_the_call_that_reads_warns_once():
    net = model()
    full = batch((5, 5, 5, 5))
    assert warned(net, [full] * 3, token_mean) == []
    found = warned(net, [full, batch(), batch(), full], token_mean)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert 'loss_reduction="sum"' in str(found[0].message)
    assert len(warned(net, [batch()] * 2, token_mean, lambda p: p.shares)) == 1


@pytest.mark.parametrize(
    "options", [{"loss_reduction": "mean"}, {"loss_reduction": "sum"}, {"loss_scale": 1.0}], ids=str
)
def test_whoever_says_how_the_loss_is_made_is_not_warned(options):
    assert warned(model(), [batch()], token_mean, **options) == []


def test_other_zeros_are_no_cause_to_warn():
    equal_lengths = lambda o, y: token_mean(o[:, :-1], y[:, :-1].clamp_min(0))  # noqa: E731
    assert warned(model(), [batch()], equal_lengths) == []
    classes = nn.Linear(3, 4).double()
    hinge = [(torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 4, (6,)))]
    assert warned(classes, hinge, lambda o, y: F.multi_margin_loss(o * 100, y)) == []
    rectified = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU())
    assert warned(rectified, [(torch.randn(3, 1, 6, 6), None)], lambda o, _: o.sum()) == []
    confirmed = [(torch.randn(n, 4, 6), None) for n in (8, 4)]  # by one more backward, at T = N
    two = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    assert warned(two, confirmed, lambda o, _: o.square().mean()) == []


@pytest.mark.parametrize("shape", ["flattened", "sequence first", "image", "beside a loss"])
def test_unequal_lengths_are_seen_wherever_tokens_are(shape):
    x, y = batch()
    net, loss, options = model(), token_mean, {}
    if shape == "flattened":
        net = Model(lambda m, x: m.inner(x).flatten(0, 1), inner=net)
        loss = lambda logits, y: F.cross_entropy(logits, y.flatten())  # noqa: E731
    elif shape == "sequence first":
        net = Model(lambda m, x: m.inner(x), inner=net)
        x, y, options = x.mT.contiguous(), y.mT.contiguous(), {"batch_dim": 1}
    elif shape == "image":
        net = nn.Conv2d(2, V, 1).double()
        x, y = torch.randn(N, 2, 1, T, dtype=torch.float64), y[:, None]
        loss = F.cross_entropy
    else:

        def forward(m, pair):
            logits = m.inner(pair[0])
            return token_mean(logits, pair[1]), logits

        net = Model(forward, inner=net)
        x, loss = (x, y), lambda out, _: out[0]
    assert len(warned(net, [(x, y)], loss, **options)) == 1
