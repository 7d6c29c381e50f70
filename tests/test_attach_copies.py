"""Copies of what holds more of an attachment than a model does: handles of hooks, probes."""

import copy
import pickle

import pytest
import torch
from attach_oracle import (
    a_few_modes,
    mlp,
    square,
)
from torch import nn

import torchgradx

N = 4


@a_few_modes
@pytest.mark.parametrize("early", [False, True], ids=["", "before the layer"])
def test_a_deepcopy_with_the_handle_of_a_hook_still_holds_that_hook(early, options):
    """As models do that make the output of their embedding require a gradient."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).double()
    handle = model[0].register_forward_hook(lambda module, args, out: out + 1)
    vars(model)["handle"] = handle
    if early:
        model._modules = vars(model).pop("_modules")
    x = torch.randint(0, 5, (N, 4))
    with torchgradx.attach(model, **options) as probe:
        copied = copy.deepcopy(copy.deepcopy(model))
        assert len(copied[0]._forward_hooks) == 1
        assert torch.equal(copied(x), model(x))
        copied.handle.remove()
        assert not copied[0]._forward_hooks
        square(model, x).backward()
        handle.remove()
        assert torch.equal(copied(x), model(x))
        assert len(probe.norms()) == N


@a_few_modes
def test_what_holds_a_probe_can_be_copied_and_pickled_and_its_probe_is_attached_to_nothing(options):
    model = mlp()
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 3)).backward()
        for copied in [copy.deepcopy([probe]), pickle.loads(pickle.dumps([probe]))]:
            with pytest.raises(torchgradx.CoverageError, match="nothing is recorded"):
                copied[0].norms()
            copied[0].remove()
        assert len(probe.norms()) == N
