"""Data given as rows alone (`batch_size=`): what is made of all rows is of other samples too."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
)
from flat_rows import of_each, owned
from torch import nn

import torchgradx


def near(k):
    """[rows, rows]: each row to the earlier ones of its sample."""
    return (owned(k).T @ owned(k)).tril(-1)


def summed_by_edge(m, x, k):
    to, of = near(k).nonzero().T
    return x + torch.zeros_like(x).index_add(0, to, x[of])


def of_its_own_written(m, x, k):
    y = torch.zeros_like(x)
    for rows in torch.arange(len(x)).split(k.tolist()):
        y[rows] = x[rows] - x[rows].amax(0)
    return y.mul_(2)


def nearest(m, x, k):
    distances = torch.cdist(x, x).masked_fill(owned(k).T @ owned(k) == 0, math.inf)
    return x[distances.topk(2, largest=False).indices].sum(1)


OF_ITS_OWN = {
    "neighbours": summed_by_edge,
    "a matrix": lambda m, x, k: near(k) @ x,
    "a sparse matrix": lambda m, x, k: x + torch.sparse.mm(near(k).to_sparse(), x),
    "a softmax of a matrix": lambda m, x, k: (
        (x @ x.T).masked_fill(owned(k).T @ owned(k) == 0, -math.inf).softmax(1) @ x),
    "the mean": lambda m, x, k: x - ((owned(k) @ x) / k[:, None])[owned(k).argmax(0)],
    "a weighed mean": lambda m, x, k: (
        x - (owned(k).T * x.exp()[:, :1]) @ ((owned(k) * x.exp()[:, 0]) @ x)),
    "a view's mean": lambda m, x, k: (
        x.view(len(k), -1, 3) - x.view(len(k), -1, 3).mean(1, keepdim=True)).flatten(0, 1),
    "the mean of a piece": lambda m, x, k: torch.cat([r - r.mean(0) for r in x.split(k.tolist())]),
    "a row": lambda m, x, k: x.log_softmax(1) - x.mean(1, keepdim=True),
    "its mean with a gradient": lambda m, x, k: m.into(x) - (near(k) @ m.into(x)).relu(),
    "written": of_its_own_written,
    "the nearest": nearest,
    "noise": lambda m, x, k: x + 0 * torch.randn_like(x),
    "a sum that is kept": lambda m, x, k: setattr(m, "kept", x.sum(0) / len(x)) or x,
}  # fmt: skip


def of_rows(made):
    return Model(
        lambda m, x, k: m.o(owned(k) @ torch.tanh(m.l(made(m, x, k)))),
        l=nn.Linear(3, 4),
        o=nn.Linear(4, 2),
        into=nn.Linear(3, 3),
    ).double()


def step(model, x, lengths):
    model(x, torch.tensor(lengths)).square().sum(1).mean().backward()


EVEN = [4, 4, 4]


@a_few_modes
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_what_rows_of_one_sample_make_is_its_own(name, options):
    model = of_rows(OF_ITS_OWN[name])
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        for _ in range(2):
            x = torch.randn(12, 3).double()
            step(model, x, EVEN)
            close_named(probe.norms(per="parameter"), of_each(twin, x, torch.tensor(EVEN)))
            model.zero_grad()


@a_few_modes
def test_numbers_of_segments_stay_what_they_are(options):
    def forward(m, x, segment):
        segment = segment if len(segment) == len(x) else torch.zeros(len(x), dtype=torch.long)
        sums = x.new_zeros(1 + int(segment.max()), 4)
        return m.o(sums.index_add(0, segment, torch.tanh(m.l(x))))

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    twin, x, even = copy.deepcopy(model), torch.randn(12, 3).double(), torch.tensor(EVEN)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        step(model, x, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
        close_named(probe.norms(per="parameter"), of_each(twin, x, even))


@a_few_modes
def test_rows_that_were_padded_before_the_layers_may_be_of_any_lengths(options):
    """As many in all as would be three for each, and they are not."""

    def forward(m, x, k):
        padded = nn.utils.rnn.pad_sequence(x.split(k.tolist()), batch_first=True)
        there = torch.arange(padded.shape[1])[None] < k[:, None]
        return m.o(
            (torch.tanh(m.l(padded - padded.sum(1, keepdim=True))) * there[..., None]).sum(1)
        )

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        for lengths in ([1, 5, 3], [2, 5, 2]):
            x = torch.randn(9, 3).double()
            step(model, x, lengths)
            close_named(probe.norms(per="parameter"), of_each(twin, x, torch.tensor(lengths)))
            model.zero_grad()


@a_few_modes
def test_neither_the_model_nor_its_random_numbers_are_touched(options):
    def forward(m, x, k):
        m.seen.add_(x.sum(0))
        noise = torch.rand(1).to(x) + torch.bernoulli(x.sigmoid(), generator=m.draws)
        F.batch_norm(m.l(x).detach(), m.means, m.means + 1, training=True)
        return m.o(owned(k) @ torch.tanh(m.l(F.dropout(x, 0.5) + noise)))

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    model.register_buffer("seen", torch.zeros(3).double())
    model.register_buffer("means", torch.zeros(4).double())
    twin, x = copy.deepcopy(model), torch.randn(12, 3).double()
    model.draws, twin.draws = (torch.Generator().manual_seed(5) for _ in range(2))
    torch.manual_seed(3)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        step(model, x, EVEN)
        assert len(probe.norms()) == 3
    state = torch.get_rng_state()
    torch.manual_seed(3)
    step(twin, x, EVEN)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(model.draws.get_state(), twin.draws.get_state())
    assert torch.equal(model.seen, twin.seen)
    assert torch.equal(model.means, twin.means)
    if "weight_grad" not in options:
        assert torch.allclose(model.l.weight.grad, twin.l.weight.grad, rtol=1e-12, atol=0)


LAID_OUT = {
    "sparse": (lambda x: x.to_sparse(), lambda x: x.to_dense()),
    "compressed": (lambda x: x.to_sparse_csr(), lambda x: x.to_dense()),
    "of one row": (lambda x: x[:1].expand(12, 3), lambda x: x),
    "nested": (
        lambda x: torch.nested.nested_tensor(list(x.split(4))),
        lambda x: torch.cat(x.unbind()),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@a_few_modes
@pytest.mark.parametrize("name", LAID_OUT)
def test_rows_in_other_layouts_are_left_alone(name, options):
    lay, strided = LAID_OUT[name]

    def forward(m, x, k):
        x = x if x.layout is torch.strided and not x.is_nested else strided(x)
        return m.o(owned(k) @ torch.tanh(m.l(x)))

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    twin, x = copy.deepcopy(model), torch.randn(12, 3).double()
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        x = x if name != "of one row" else lay(x)
        step(model, lay(x), EVEN)
        close_named(probe.norms(per="parameter"), of_each(twin, x, torch.tensor(EVEN)))
