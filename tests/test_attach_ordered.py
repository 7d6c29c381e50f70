"""Samples that a batch puts in an order of its own: outputs stand in it, and norms would."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    UNPROVEN,
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or_refused,
    loop,
    refused,
    seeded,  # noqa: F401
    square,
    unproven,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchgradx

N, T = 4, 6
LENGTHS = torch.tensor([3, 6, 2, 4])


def rows(order, x):
    return order.view(-1, 1, 1).expand(x.shape)


def places(order, x):
    return rows(order, x) * x[0].numel() + torch.arange(x[0].numel()).view(x[0].shape)


def without_grad(x, order):
    with torch.no_grad():
        return x[order]


ORDERS = {
    "without grad": without_grad,
    "by a list": lambda x, order: x[order.tolist()],
    "by an array": lambda x, order: x[order.numpy()],
    "with positions": lambda x, order: x[order[:, None], torch.arange(x.shape[1])],
    "put": lambda x, order: torch.empty_like(x).index_put((order,), x),
    "looked up": lambda x, order: nn.functional.embedding(order, x.flatten(1)).view_as(x),
    "indexed": lambda x, order: x[order],
    "selected": lambda x, order: x.index_select(0, order),
    "gathered": lambda x, order: x.gather(0, rows(order, x)),
    "copied": lambda x, order: torch.empty_like(x).index_copy(0, order, x),
    "added": lambda x, order: torch.zeros_like(x).index_add(0, order, x),
    "reduced": lambda x, order: torch.ones_like(x).index_reduce(0, order, x, "prod"),
    "scattered": lambda x, order: torch.empty_like(x).scatter(0, rows(order, x), x),
    "scattered, added": lambda x, order: torch.zeros_like(x).scatter_add(0, rows(order, x), x),
    "scattered in place": lambda x, order: torch.empty_like(x).scatter_(0, rows(order, x), x),
    "taken": lambda x, order: x.take(places(order, x)),
    "taken along": lambda x, order: x.take_along_dim(rows(order, x), 0),
    "summed by bags": lambda x, order: F.embedding_bag(
        order[:, None], x.flatten(1), mode="sum"
    ).view_as(x),
    "put flat": lambda x, order: torch.empty_like(x).put(places(order, x), x),
    "where a matrix is set": lambda x, order: x[F.one_hot(order).nonzero()[:, 1]],
    "gathered where a matrix is set": lambda x, order: x.gather(
        0, rows(F.one_hot(order).nonzero()[:, 1], x)
    ),
    "a matrix": lambda x, order: (F.one_hot(order).to(x) @ x.flatten(1)).view_as(x),
    "einsum": lambda x, order: torch.einsum("mn,ntd->mtd", F.one_hot(order).to(x), x),
    "linear": lambda x, order: F.linear(x.permute(1, 2, 0), F.one_hot(order).to(x))
    .permute(2, 0, 1),
    "behind what nobody follows": lambda x, order: x.unfold(-1, 1, 1).squeeze(-1)[order],
}  # fmt: skip


def longest_first(m, x, lengths, how):
    order = lengths.argsort(descending=True)
    return m.r(ORDERS[how](x, order)), lengths[order]


@a_few_modes
@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS.sort(descending=True).values])
def test_a_model_that_sorts_its_batch_is_refused(lengths, how, options):
    """Also where the batch was sorted already: another one is not."""

    def forward(m, x, lengths):
        return torch.tanh(longest_first(m, x, lengths, how)[0]).flatten(1)

    model = Model(forward, r=nn.Linear(3, 2))
    x = torch.randn(N, T, 3)
    refused(model, square, x, lengths, names=["r.weight"], match="order", **options)


@a_few_modes
@pytest.mark.parametrize("how", ORDERS)
def test_a_model_that_sorts_to_pack_is_refused(how, options):
    def forward(m, x, lengths):
        rows, lengths = longest_first(m, x, lengths, how)
        return m.g(pack_padded_sequence(torch.tanh(rows), lengths, True))[1][0]

    model = Model(forward, r=nn.Linear(3, 3), g=nn.GRU(3, 2, batch_first=True))
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["r.weight"], match="order",
            **options)  # fmt: skip


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


@unproven
def test_an_order_that_python_made_may_be_another_next_time(where):
    """That of the first batch changes nothing."""

    def forward(m, x):
        order = sorted(range(len(x)), key=m.lengths.__getitem__)
        back = sorted(range(len(x)), key=order.__getitem__)
        return UNPROVEN[where](lambda t: m.b(torch.tanh(t)), m.i(x)[order])[back]

    model = Model(forward, i=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    with torchgradx.attach(model) as probe:
        for model.lengths in ([2, 2, 2, 2], [2, 2, 2, 2], [4, 2, 3, 1]):
            x = torch.randn(N, 3, dtype=torch.float64)
            square(lambda x: model(x), x).backward()
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
            probe.reset()


def as_deberta(logits, labels):
    i = (labels >= 0).nonzero()
    return logits.gather(0, i.expand(len(i), logits.shape[1])), labels.gather(0, i.view(-1))


def labelled(logits, labels):
    i = (labels >= 0).nonzero().view(-1)
    return logits[i], labels.index_select(0, i)


def by_label(logits, labels):
    i = labels.argsort(stable=True)
    return F.log_softmax(logits[i], 1), labels[i].clamp(min=0)


def again(logits, labels):
    return by_label(*by_label(logits, labels))


def labels_alone(logits, labels):
    return logits, labels[labels.argsort()]


def logits_alone(logits, labels):
    return logits[labels.argsort()].detach() + logits, labels[labels.argsort()]


def rolled(logits, labels):
    return logits, labels.roll(1)


def two_orders(logits, labels):
    return logits[labels.argsort()], labels[labels.argsort().clone()]


def written(logits, labels):
    i = labels.argsort()
    labels = labels[i]
    return logits[i.copy_(i.flip(0))], labels


def columns_apart(logits, labels):
    i = torch.stack([labels.argsort(), labels.argsort(descending=True)], 1)
    return logits.gather(0, i), labels.gather(0, i[:, 0])


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
@pytest.mark.parametrize("labels", [ONE, OTHER], ids=["", "in order"])
@pytest.mark.parametrize("put", [again, labels_alone, rolled, logits_alone, two_orders, written,
                                 columns_apart])  # fmt: skip
def test_labels_in_an_order_that_is_not_the_logits_are_refused(put, labels, options):
    """Whatever the order is in this batch."""
    refused(classifier(put), first, torch.randn(N, 3), labels, names=["l.weight", "o.bias"],
            match="order", **options)  # fmt: skip


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
def test_an_order_of_inputs_that_need_gradients_is_refused(options):
    """Their graph shows nothing: no layer is in it."""

    def forward(m, x, lengths):
        return m.r(x.requires_grad_()[lengths.argsort()]).flatten(1)

    model = Model(forward, r=nn.Linear(3, 2))
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["r.weight"], match="order",
            **options)  # fmt: skip


@a_few_modes
def test_an_order_that_is_detached_before_the_next_layer_is_refused(options):
    def forward(m, x, lengths):
        return m.r(m.l(x)[lengths.argsort()].detach()).flatten(1)

    model = Model(forward, l=nn.Linear(3, 3), r=nn.Linear(3, 2))
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["r.weight"], match="order",
            **options)  # fmt: skip


COPIES = {
    "NumPy's": lambda x: torch.from_numpy(x.numpy()),
    "a list": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    "a deep copy": copy.deepcopy,
    "sparse": lambda x: x.to_sparse().to_dense(),
}


@a_few_modes
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_an_order_is_refused_through_copies_that_torch_does_not_see(copied, options):
    model = Model(lambda m, x, lengths: m.r(copied(x[lengths.argsort()])).flatten(1),
                  r=nn.Linear(3, 2))  # fmt: skip
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["r.weight"], match="order",
            **options)  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("detached", [True, False])
def test_an_order_behind_another_models_layers_is_refused(detached, options):
    trunk = nn.Linear(3, 3).double()
    head = Model(lambda m, x, lengths: m.r(x[lengths.argsort()]).flatten(1), r=nn.Linear(3, 2))
    x = trunk(torch.randn(N, T, 3).double())
    with torchgradx.attach(head.double(), **options) as probe:
        square(head, x.detach() if detached else x, LENGTHS).backward()
        with pytest.raises(torchgradx.CoverageError, match="order"):
            probe.norms()


@a_few_modes
def test_weights_that_are_not_in_the_order_of_their_loss_are_refused(options):
    def forward(m, x, y, w):
        i = y.argsort()
        out = m.o(torch.tanh(m.l(x)))
        return (F.cross_entropy(out[i], y[i], reduction="none") * w).mean(), out

    model = Model(forward, l=nn.Linear(3, 5), o=nn.Linear(5, 2))
    refused(model, first, torch.randn(N, 3), ONE, torch.rand(N), names=["l.weight", "o.bias"],
            match="order", **options)  # fmt: skip


@a_few_modes
def test_batches_in_other_orders_are_exact(options):
    model = classifier(by_label).double()
    with torchgradx.attach(model, **options) as probe:
        for labels in (OTHER, ONE, OTHER, 1 - ONE):
            x = torch.randn(N, 3, dtype=torch.float64)
            first(model, x, labels).backward()
            got = probe.norms(per="parameter")
            close_named(got, loop(model, first, x, labels))
