"""An option of a module that is set to another value while it is attached: the model computes with
it at once, and its norms are exact or refused by name."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    every_mode,
    exact_or,
    loop,
    need_native,
    same_gradients,
    square,
)
from torch import nn

import torchgradx

N = 4
IMAGES, ROWS, IDS = torch.randn(N, 4, 6, 6), torch.randn(N, 3, 4), torch.randint(5, (N, 3))
ALTERED = {
    "LayerNorm.eps": (lambda: nn.LayerNorm(4), ROWS, ("eps", 0.5)),
    "RMSNorm.eps": (lambda: nn.RMSNorm(4), ROWS, ("eps", 0.5)),
    "GroupNorm.num_groups": (lambda: nn.GroupNorm(2, 4), IMAGES, ("num_groups", 4)),
    "InstanceNorm.eps": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES, ("eps", 0.5)),
    "BatchNorm.eps": (lambda: nn.BatchNorm2d(4).eval(), IMAGES, ("eps", 0.5)),
    "Conv2d.stride": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("stride", (2, 2))),
    "Conv2d.padding": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", (1, 1))),
    "Conv2d.padding as a number": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", 1)),
    "Conv2d.padding as a word": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", "same")),
    "Conv2d.dilation": (lambda: nn.Conv2d(4, 2, 3, padding=2), IMAGES, ("dilation", 2)),
    "Conv1d.stride": (lambda: nn.Conv1d(4, 2, 3), IMAGES.flatten(2), ("stride", 2)),
    "ConvTranspose2d.stride": (lambda: nn.ConvTranspose2d(4, 2, 3), IMAGES, ("stride", 2)),
    "Embedding.padding_idx": (lambda: nn.Embedding(5, 3), IDS, ("padding_idx", 1)),
}


@every_mode
@pytest.mark.parametrize("name", ALTERED)
def test_the_model_computes_with_it_and_norms_are_exact_or_refused(name, options):
    need_native(options)
    make, x, (option, value) = ALTERED[name]
    model = nn.Sequential(make(), nn.Tanh()).double()
    x = x.double() if x.is_floating_point() else x
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x))
        model.zero_grad()
        setattr(model[0], option, value)
        twin = copy.deepcopy(model)
        assert getattr(twin[0], option) == value
        losses = square(model, x), square(twin, x)
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        if options.get("weight_grad", True):
            same_gradients(model, twin, 1e-12)
        exact_or(torchgradx.CoverageError, "", probe, loop(twin, square, x))
    assert torch.equal(square(model, x), losses[1])
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x))


def test_it_is_named_and_the_same_value_changes_nothing():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).double()
    with torchgradx.attach(model) as probe:
        model[0].eps = model[0].eps
        square(model, ROWS.double()).backward()
        probe.norms()
        model[0].eps = 0.5
        square(model, ROWS.double()).backward()
        if torchgradx.ops.NATIVE:
            with pytest.raises(torchgradx.CoverageError, match="ties or options changed"):
                probe.norms()


@pytest.mark.parametrize("into", [nn.Sequential, lambda: nn.ModuleList([nn.Tanh()]), nn.ModuleDict])
@every_mode
def test_a_module_that_comes_later_is_refused(into, options):
    """Adapters are added to empty containers, and to layers that had no modules inside."""
    need_native(options)

    def forward(model, x):
        later = model.later.values() if isinstance(model.later, nn.ModuleDict) else model.later
        for layer in later:
            x = layer(x)
        return model.head(x)

    model = Model(forward, later=into(), head=nn.Linear(4, 2)).double()
    x = torch.randn(N, 4).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        layer = nn.Linear(4, 4).double()
        holder = model.later[0] if len(model.later) else model.later
        holder.add_module("0", layer)
        if holder is not model.later:
            holder.register_forward_hook(lambda module, args, out: layer(out))
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match="attach again"):
            probe.norms()


def test_dropout_of_a_recurrent_module_may_change():
    model = nn.LSTM(4, 3, num_layers=2, batch_first=True, dropout=0.5).double()

    def loss(m, x):
        return m(x)[0].flatten(1).square().sum(1).mean()

    with torchgradx.attach(model) as probe:
        loss(model, ROWS.double()).backward()
        probe.norms()
        model.dropout = 0.0
        loss(model, ROWS.double()).backward()
        exact_or(AssertionError, "", probe, loop(model, loss, ROWS.double()))


CHANGES = {
    "a module in its place": lambda m: setattr(m, "soft", nn.Softmax(0)),
    "an option of a module": lambda m: setattr(m.soft, "dim", 0),
    "a function": lambda m: setattr(m, "soft", lambda h: torch.softmax(h, 0)),
    "a forward of its own": lambda m: setattr(m.soft, "forward", lambda h: torch.softmax(h, 0)),
}


@a_few_modes
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_proven_before_a_change_is_not_believed_after_attaching_again(name, options):
    model = Model(lambda m, x: m.out(m.soft(m.l(x))), l=nn.Linear(3, 3), soft=nn.Softmax(1),
                  out=nn.Linear(3, 2))  # fmt: skip
    if name == "a function":
        del model.soft
        model.soft = lambda h: torch.softmax(h, 1)
    x = torch.randn(N, 3)
    for change, wrong in ((None, False), (CHANGES[name], True)):
        if change:
            change(model)
        with torchgradx.attach(model, **options) as probe:
            for _ in range(2):
                square(model, x).backward()
                if wrong:
                    with pytest.raises(torchgradx.CoverageError, match=r"l\.weight"):
                        probe.norms()
                    probe.reset()
                else:
                    assert probe.norms().shape == (N,)
