"""Products of each sample's gradient with directions, as training asks for them."""

import pytest
import torch
from attach_oracle import mlp, square
from clip_oracle import gradients

import torchgradx
from torchgradx import ops

N = 5


def exact(model, x, directions):
    rows = gradients(model, square, x)
    return torch.stack([sum((row[k] * v).sum() for k, v in directions.items()) for row in rows])


def setting():
    model = mlp().double()
    return model, torch.randn(N, 3, dtype=torch.float64), dict(model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"weight_grad": False}, {"backend": "vmap"}], ids=str)
def test_directions_may_change_with_every_pass(options):
    model, x, named = setting()
    with torchgradx.attach(model, **options) as probe:
        for names in (["0.weight"], ["0.bias", "2.weight"], list(named)):
            directions = {k: torch.randn_like(named[k]) for k in names}
            probe.directions = directions
            assert probe.directions == directions
            loss = square(model, x)
            probe.directions = {}  # for the passes to come
            loss.backward()
            probe.directions = directions
            dots = probe.dot()
            assert torch.allclose(dots, exact(model, x, directions), rtol=1e-9)
            assert (dots.dtype, dots.requires_grad) == (torch.float64, False)


def test_scales_and_signs_and_accumulation():
    model, x, named = setting()
    directions = {k: torch.randn_like(p) for k, p in named.items()}
    want = exact(model, x, directions)
    with torchgradx.attach(model, directions=directions, loss_scale=-0.5) as probe:
        for part in (x[:2], x[2:]):
            (square(model, part) * -0.5).backward()
        assert torch.allclose(probe.dot(), want, rtol=1e-9)
        assert (probe.norms() > 0).all()
    with torchgradx.attach(model, directions=directions, loss_reduction="sum") as probe:
        (square(model, x) * N).backward()
        assert torch.allclose(probe.dot(), want, rtol=1e-9)


@pytest.mark.skipif(not ops.NATIVE, reason="its gradients by sample are rounded to bfloat16")
def test_half_precision_is_summed_in_float32():
    model = torch.nn.Linear(512, 64).bfloat16()
    x = torch.randn(N, 20, 512).bfloat16()
    v = torch.randn(64, 512)
    with torchgradx.attach(model, directions={"weight": v}) as probe:
        y = model(x)
        y.backward(torch.ones_like(y) / N)
        dots = probe.dot()
    want = torch.einsum("nti,oi->n", x.double(), v.double())
    terms = x.double().square().sum((1, 2)).sqrt() * v.double().norm() * 20**0.5
    share = (torch.ones(1).bfloat16() / N).double() * N  # of a gradient that bfloat16 rounds
    assert ((dots - want * share).abs() <= 64 * 2**-24 * terms).all()


def test_what_is_not_a_direction_is_named():
    model, x, named = setting()
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        with pytest.raises(RuntimeError, match="directions"):
            probe.dot()
        with pytest.raises(ValueError, match=r"'0\.wieght'"):
            probe.directions = {"0.wieght": named["0.weight"]}
        with pytest.raises(ValueError, match=r"Tensor \[5, 3\]"):
            probe.directions = {"0.weight": named["2.weight"]}
        with pytest.raises(ValueError, match="floating"):
            probe.directions = {"0.bias": torch.ones(5, dtype=torch.long)}
        with pytest.raises(TypeError, match="directions must be"):
            probe.directions = [named["0.weight"]]
        assert probe.directions == {}
        probe.norms()
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    twice = {"0.weight": torch.ones(3, 3), "1.weight": torch.ones(3, 3)}
    with pytest.raises(ValueError, match="given twice"):
        torchgradx.attach(tied, directions=twice)
