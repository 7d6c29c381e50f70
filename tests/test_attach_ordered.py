"""Samples that a batch puts in an order of its own: outputs stand in it, and norms would."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or_refused,
    loop,
    square,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchgradx

N, T = 4, 6
LENGTHS = torch.tensor([3, 6, 2, 4])


def shuffled_keys(m, x, lengths):
    """As momentum encoders have them."""
    with torch.no_grad():
        order = torch.randperm(len(x))
        keys = m.k(x[order])[order.argsort()]
    return m.l(x) * keys


UNMOVED = {
    "keys that are shuffled and put back": shuffled_keys,
    "packing sorts them, and puts them back": lambda m, x, lengths: m.g(
        pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    )[1][0],
    "a position of each": lambda m, x, lengths: m.l(x[torch.arange(len(x)), lengths - 1]),
    "positions in an order of their own": lambda m, x, lengths: m.l(
        x.gather(1, x.argsort(1))
    ).flatten(1),
    "rows of a table": lambda m, x, lengths: m.l(torch.eye(7, 3, dtype=x.dtype)[lengths]),
}


@a_few_modes
@pytest.mark.parametrize("steps", [N, T])
@pytest.mark.parametrize("name", UNMOVED)
def test_what_leaves_the_samples_where_they_are_is_exact(name, steps, options):
    model = Model(UNMOVED[name], l=nn.Linear(3, 2), k=nn.Linear(3, 2).requires_grad_(False),
                  g=nn.GRU(3, 2, batch_first=True))  # fmt: skip
    x, lengths = torch.randn(N, steps, 3), LENGTHS.clamp(max=steps)
    check(model, square, x, lengths, **options)


def as_deberta(logits, labels):
    i = (labels >= 0).nonzero()
    return logits.gather(0, i.expand(len(i), logits.shape[1])), labels.gather(0, i.view(-1))


def labelled(logits, labels):
    i = (labels >= 0).nonzero().view(-1)
    return logits[i], labels.index_select(0, i)


def by_label(logits, labels):
    i = labels.argsort(stable=True)
    return F.log_softmax(logits[i], 1), labels[i].clamp(min=0)


def classified(m, x, labels):
    logits = m.o(torch.tanh(m.l(x)))
    return F.cross_entropy(*m.put(logits, labels)), logits


def first(model, *batch):
    return model(*batch)[0]


def classifier(put):
    model = Model(classified, l=nn.Linear(3, 5), o=nn.Linear(5, 2))
    model.put = put
    return model


ONE, OTHER = torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1])


@a_few_modes
@pytest.mark.parametrize("labels", [ONE, OTHER], ids=["", "in order"])
@pytest.mark.parametrize("put", [as_deberta, labelled, by_label])
def test_a_loss_of_logits_and_labels_in_one_order_is_exact(put, labels, options):
    """No layer is given them, and the loss has no rows."""
    check(classifier(put), first, torch.randn(N, 3), labels, **options)


@a_few_modes
@pytest.mark.parametrize("put", [as_deberta, labelled])
def test_a_loss_of_those_that_have_a_label_is_never_wrong(put, options):
    """Norms are as the loss has them: a mean over two of four samples, where it is accepted."""
    x, labels = torch.randn(N, 3), torch.tensor([1, -100, 0, -100])
    model = classifier(put).double()
    twin = classifier(labelled).double()
    twin.load_state_dict(model.state_dict())
    with torchgradx.attach(model, **options) as probe:
        first(model, x.double(), labels).backward()
        try:
            got = probe.norms()
        except torchgradx.CoverageError:
            return
    for k in range(N):
        twin.zero_grad()
        if labels[k] >= 0:
            (first(twin, x[k : k + 1].double(), labels[k : k + 1]) * N / 2).backward()
        grads = [p.grad.flatten() for p in twin.parameters() if p.grad is not None]
        assert torch.isclose(got[k], torch.cat([*grads, x.new_zeros(1).double()]).norm())


@a_few_modes
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS.sort(descending=True).values])
def test_an_order_after_the_layers_shows_in_the_outputs(lengths, options):
    model = Model(lambda m, x, lengths: m.l(x)[lengths.argsort()].flatten(1), l=nn.Linear(3, 2))
    exact_or_refused(model, square, torch.randn(N, T, 3), lengths, **options)
    put = Model(
        lambda m, x, lengths: (i := lengths.argsort(), m.l(x[i])[i.argsort()].flatten(1))[1],
        l=nn.Linear(3, 2),
    )
    exact_or_refused(put, square, torch.randn(N, T, 3), lengths, **options)


@a_few_modes
def test_batches_in_other_orders_are_exact(options):
    model = classifier(by_label).double()
    with torchgradx.attach(model, **options) as probe:
        for labels in (OTHER, ONE, OTHER, 1 - ONE):
            x = torch.randn(N, 3, dtype=torch.float64)
            first(model, x, labels).backward()
            got = probe.norms(per="parameter")
            close_named(got, loop(model, first, x, labels))
