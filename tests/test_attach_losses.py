"""Models that return their loss alone, of samples that may be put in another order."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, check, close_named, exact_or_refused, loop, square
from torch import nn

import torchgradx

N, T, CLASSES = 5, 7, 3


def each(logits, labels, **options):
    return F.cross_entropy(logits, labels, reduction="none", **options)


def focal(logits, labels):
    rows = each(logits, labels)
    return ((1 - torch.exp(-rows)).square() * rows).mean()


def binary(logits, labels, **options):
    positive = (labels > 0).to(logits)
    return F.binary_cross_entropy_with_logits(logits[:, 0], positive, reduction="none", **options)


def probability(logits, labels):
    positive = (labels > 0).to(logits)
    return F.binary_cross_entropy(logits[:, 0].sigmoid(), positive, reduction="none")


def distances(a, b):
    return torch.cdist(a[:, None], b[:, None]).mean()


def logged(logits, labels):
    """What is made of it for a log changes nothing."""
    loss = each(logits, labels).mean()
    with torch.no_grad():
        loss.exp().sqrt()
    loss.detach().exp().item()
    return loss


def in_turn(logits, labels):
    loss = logits.new_zeros(())
    for column in logits.unbind(1):
        loss += 0.5 * column.square().mean() / logits.new_tensor(2.0)
    return torch.stack([loss, each(logits, labels).mean()]) @ logits.new_tensor([1.0, 2.0])


LOSSES = {
    "a mean of each": lambda o, y: each(o, y).mean(),
    "a sum of each": lambda o, y: each(o, y).sum() / len(y),
    "a smoothed one": lambda o, y: each(o, y, label_smoothing=0.1).mean(),
    "weighted classes": lambda o, y: each(o, y, weight=torch.arange(1.0, 4).to(o)).mean(),
    "nll": lambda o, y: F.nll_loss(o.log_softmax(1), y, reduction="none").mean(),
    "focal": focal,
    "binary": lambda o, y: binary(o, y).mean(),
    "binary, weighted": lambda o, y: binary(o, y, pos_weight=o.new_tensor(3.0)).mean(),
    "a probability": lambda o, y: probability(o, y).mean(),
    "hinge": lambda o, y: F.multi_margin_loss(o, y),
    "weighted classes, over N": lambda o, y: (
        F.cross_entropy(o, y, weight=torch.arange(1.0, 4).to(o), reduction="sum") / len(y)
    ),
    "over a count": lambda o, y: each(o, y).sum() / (y >= 0).sum().clamp(min=1),
    "a mean that names them": lambda o, y: each(o, y).mean(0),
    "a mean of all dimensions": lambda o, y: o.square().mean((0, 1)),
    "a mean of means": lambda o, y: o.square().mean(dim=0, keepdim=True).mean(),
    "a sum that names them": lambda o, y: o.square().sum(0).sum() / len(y),
    "log sigmoid": lambda o, y: -F.logsigmoid(o[:, 0]).mean(),
    "labels each by itself": lambda o, y: F.multilabel_soft_margin_loss(
        o, F.one_hot(y, CLASSES).to(o)
    ),
    "distances": lambda o, y: distances(o, o.square() + 1),
    "distances from a table": lambda o, y: torch.cdist(o, torch.eye(CLASSES).to(o)).mean(),
    "two, the second by a weight": lambda o, y: each(o, y).mean() + 0.1 * o.square().mean(),
    "several in turn": in_turn,
    "logged": logged,
    "without nan": lambda o, y: each(o, y).mean().nan_to_num(),
    "two of them, less nan": lambda o, y: torch.stack([each(o, y).mean(), o.mean()]).nansum(),
}


def of_its_loss(loss, *batch):
    return Model(lambda m, x, y: loss(m.b(torch.tanh(m.a(x))), y),
                 a=nn.Linear(4, 7), b=nn.Linear(7, CLASSES))  # fmt: skip


def whole(model, *batch):
    return model(*batch)


def labels(*sizes):
    return torch.randint(0, CLASSES, (N, *sizes))


@a_few_modes
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_keeps_the_samples_until_their_mean_is_exact(name, options):
    check(of_its_loss(LOSSES[name]), whole, torch.randn(N, 4), labels(), **options)


@a_few_modes
def test_a_loss_that_is_scaled_by_a_number_the_model_is_given_is_exact(options):
    """As by one that grows in the course of training."""

    def loss(m, x, y, scale):
        o = m.b(torch.tanh(m.a(x)))
        return each(o, y).mean() + scale.clamp(max=1.0) * o.square().mean()

    model = Model(loss, a=nn.Linear(4, 7), b=nn.Linear(7, CLASSES))
    scaled = lambda model, x, y: model(x, y, x.new_tensor(0.3))  # noqa: E731
    check(model, scaled, torch.randn(N, 4), labels(), **options)


def masked(o, y):
    rows = each(o.mT, y) * (y != 0)
    return (rows.sum(1) / (y != 0).sum(1)).mean()


TOKENS = {
    "tokens": lambda o, y: each(o.mT, y).mean(1).mean(),
    "rows": lambda o, y: each(o.flatten(0, 1), y.flatten()).view(y.shape).mean(1).mean(),
    "by sample, masked": masked,
    "maps": lambda o, y: each(o.mT.unflatten(2, (1, -1)), y[:, None]).mean((1, 2)).mean(),
}


@a_few_modes
@pytest.mark.parametrize("name", TOKENS)
def test_a_loss_of_tokens_is_exact(name, options):
    y = labels(T).index_fill(1, torch.tensor([0]), 1)
    check(of_its_loss(TOKENS[name]), whole, torch.randn(N, T, 4), y, **options)


@a_few_modes
@pytest.mark.parametrize("name", TOKENS)
def test_of_as_many_tokens_as_samples_nothing_is_guessed(name, options):
    y = labels(N).index_fill(1, torch.tensor([0]), 1)
    exact_or_refused(of_its_loss(TOKENS[name]), whole, torch.randn(N, N, 4), y, **options)


SAMPLES, STEPS = 4, 6
LENGTHS = torch.tensor([3, 6, 2, 4])


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
    check(classifier(put), first, torch.randn(SAMPLES, 3), labels, **options)


@a_few_modes
@pytest.mark.parametrize("put", [as_deberta, labelled])
def test_a_loss_of_those_that_have_a_label_is_never_wrong(put, options):
    """Norms are as the loss has them: a mean over two of four samples, where it is accepted."""
    x, labels = torch.randn(SAMPLES, 3), torch.tensor([1, -100, 0, -100])
    model = classifier(put).double()
    twin = classifier(labelled).double()
    twin.load_state_dict(model.state_dict())
    with torchgradx.attach(model, **options) as probe:
        first(model, x.double(), labels).backward()
        try:
            got = probe.norms()
        except torchgradx.CoverageError:
            return
    for k in range(SAMPLES):
        twin.zero_grad()
        if labels[k] >= 0:
            (first(twin, x[k : k + 1].double(), labels[k : k + 1]) * SAMPLES / 2).backward()
        grads = [p.grad.flatten() for p in twin.parameters() if p.grad is not None]
        assert torch.isclose(got[k], torch.cat([*grads, x.new_zeros(1).double()]).norm())


@a_few_modes
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS.sort(descending=True).values])
def test_an_order_after_the_layers_shows_in_the_outputs(lengths, options):
    model = Model(lambda m, x, lengths: m.l(x)[lengths.argsort()].flatten(1), l=nn.Linear(3, 2))
    exact_or_refused(model, square, torch.randn(SAMPLES, STEPS, 3), lengths, **options)
    put = Model(
        lambda m, x, lengths: (i := lengths.argsort(), m.l(x[i])[i.argsort()].flatten(1))[1],
        l=nn.Linear(3, 2),
    )
    exact_or_refused(put, square, torch.randn(SAMPLES, STEPS, 3), lengths, **options)


@a_few_modes
def test_batches_in_other_orders_are_exact(options):
    model = classifier(by_label).double()
    with torchgradx.attach(model, **options) as probe:
        for labels in (OTHER, ONE, OTHER, 1 - ONE):
            x = torch.randn(SAMPLES, 3, dtype=torch.float64)
            first(model, x, labels).backward()
            got = probe.norms(per="parameter")
            close_named(got, loop(model, first, x, labels))
