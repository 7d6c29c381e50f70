"""Numbers of positions that a model holds in no buffer, or is given once for all samples."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    exact_or_refused,
    loop,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N, T, D = 4, 5, 3
PLACES = torch.arange(9)

HELD = {
    "an attribute": lambda m, x: m.p(m.places[:T]),
    "of an attribute, once for all": lambda m, x: m.p(m.places[None, :T]),
    "of an attribute, repeated": lambda m, x: m.p(m.places[None, :T]).repeat(len(x), 1, 1),
    "in a dictionary": lambda m, x: m.p(m.kept["places"][:T]),
}


def tanh_sum(m, x, positions):
    return m.o(torch.tanh(m.i(x) + positions))


def layers():
    return {"p": nn.Embedding(9, D), "i": nn.Linear(D, D), "o": nn.Linear(D, 2)}


def held(use):
    model = Model(lambda m, x: tanh_sum(m, x, use(m, x)), **layers())
    vars(model).update(places=PLACES, kept={"places": PLACES})
    return model


@a_few_modes
@pytest.mark.parametrize("name", HELD)
def test_positions_that_the_model_holds_are_exact(name, options):
    model = held(HELD[name])
    assert exact_or_refused(model, square, torch.randn(N, T, D), **options) is None


def given():
    return Model(lambda m, x, places: tanh_sum(m, x, m.p(places)), **layers())


def of_all(places):
    return lambda model, x: square(model, x, places)


@a_few_modes
@pytest.mark.parametrize("name", ["positional", "keyword"])
def test_position_ids_given_once_are_exact(name, options):
    model, places = given().double(), PLACES[None, :T]
    sizes = [N, N, N - 1]
    with torchgradx.attach(model, **options) as probe:
        for n in sizes:
            x = torch.randn(n, T, D).double()
            out = model(x, places=places) if name == "keyword" else model(x, places)
            out.square().flatten(1).sum(1).mean().backward()
            close_named(probe.norms(per="parameter"), loop(model, of_all(places), x))


def test_given_by_sample_later_they_are_exact_too():
    model, x = given().double(), torch.randn(N, T, D).double()
    own = torch.randint(0, 9, (N, T))
    with torchgradx.attach(model) as probe:
        square(model, x, PLACES[None, :T]).backward()
        probe.norms()
        square(model, x, own).backward()
        close_named(probe.norms(per="parameter"), loop(model, square, x, own))


def test_what_samples_made_is_refused_though_it_is_given_once():
    """As the mean of the batch: a sample alone has another."""
    model = Model(lambda m, x, mean: tanh_sum(m, x, m.c(mean)), c=nn.Linear(D, D), **layers())
    x = torch.randn(N, T, D)
    with torchgradx.attach(model) as probe:
        square(model, x, x.mean(0, keepdim=True)).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"c\.weight"):
            probe.norms()


def test_an_argument_in_the_memory_of_the_samples_is_theirs():
    def forward(m, x, first):
        mean = x[0, 0].float().mean(0) + 0 * first.sum()
        return tanh_sum(m, x.float(), m.c(mean.expand(T, D)))

    model = Model(forward, c=nn.Linear(D, D), **layers())
    x = torch.randint(0, 9, (N, T, D))
    with torchgradx.attach(model) as probe:
        square(model, x, x[:1, 1:]).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"c\.weight"):
            probe.norms()


@pytest.mark.parametrize("kept", [torch.randn(N, D), torch.randn(2, N, D)], ids=["N", "2, N"])
def test_an_attribute_that_may_hold_samples_is_refused(kept):
    """Set before each forward, as a condition."""

    def forward(m, x):
        return tanh_sum(m, x, m.c(m.kept[0]).reshape(-1, D).mean(0))

    model = Model(forward, c=nn.Linear(D, D), **layers())
    model.kept = [kept]
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, T, D)).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"c\.weight"):
            probe.norms()
