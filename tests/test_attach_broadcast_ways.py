"""Each way in which samples come in at something that they share."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or,
    exact_or_refused,
    loop,
    refused,
    seeded,  # noqa: F401
    square,
)
from broadcast_models import WAYS, D, N, T, constant
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

MAY_REFUSE = {"stacked"}  # each sample alone: its nodes hold no row for the others


@a_few_modes
@pytest.mark.parametrize("positions", [T, N])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_for_samples_to_come_in_is_exact(way, positions, options):
    def forward(m, x):
        return m.o(torch.tanh(WAYS[way](x, m.l(m.c))))

    model = constant(forward, (positions, D), l=nn.Linear(D, D))
    x = torch.randn(N, positions, D)
    if way in MAY_REFUSE or positions == N:  # outputs [N, N, ...] may have the samples in either
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


COLUMNS = [
    "einsum, from the left",
    "einsum, by heads",
    "columns",
    "heads apart",
    "heads apart, samples second",
]


@a_few_modes
@pytest.mark.parametrize("way", COLUMNS)
def test_columns_are_of_samples_in_later_steps_of_other_sizes(way, options):
    """Among them as many samples as positions, rows or features, and columns as both together."""
    model = constant(lambda m, x: m.o(torch.tanh(WAYS[way](x, m.l(m.c)))), (T, D),
                     l=nn.Linear(D, D)).double()  # fmt: skip
    with torchgradx.attach(model, **options) as probe:
        for n, t in [(N, 7), (N, 7), (T, 7), (3, N), (N, N), (D, D), (2, 4), (1, 7), (N, 7)]:
            x = torch.randn(n, t, D, dtype=torch.float64)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, square, x))


@a_few_modes
def test_columns_that_stand_otherwise_are_refused(options):
    """Rows t*N+n of x, which are columns here; and a softmax along them, which mixes samples."""

    def turned(m, x):
        return (m.l(m.c) @ x.transpose(0, 1).flatten(0, 1).T).unflatten(1, (-1, len(x)))[:, 0].T

    def mixing(m, x):
        return torch.einsum("ld,ntd->lnt", m.l(m.c), x).softmax(1).transpose(0, 1)

    for forward in (turned, mixing):
        for n, t in [(N, 7), (T, 7), (N, N), (T, T), (D, D)]:
            model = constant(forward, (T, D), l=nn.Linear(D, D), o=nn.Linear(D, D))
            x = torch.randn(n, t, D)
            refused(model, square, x, names=["l.weight", "l.bias"], **options)


@a_few_modes
def test_samples_that_come_in_in_two_layouts_are_told_apart_in_every_pass(options):
    """By nodes of one kind, of equal sizes, below two outputs; every graph is somewhere else."""

    def forward(m, x):
        h = m.i(x)
        return h * m.w, (h.transpose(0, 1) * m.w[:, None]).transpose(0, 1)

    def loss(model, x):
        first, second = model(x)
        graphs.append(first)
        return first.square().mean() + second.exp().mean()

    graphs = []
    model = Model(forward, w=torch.randn(N, D), i=nn.Linear(D, D)).double()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(16):
            x = torch.randn(N, N, D, dtype=torch.float64)
            loss(model, x).backward()
            norms = probe.norms(per="parameter")["w"]
            torch.testing.assert_close(norms, loop(model, loss, x)["w"], rtol=1e-9, atol=0)


@a_few_modes
def test_samples_that_come_in_in_another_order_of_operations(options):
    """Below as many nodes of the same kinds, joined in another way: rows stand elsewhere."""

    def forward(m, x):
        h, table = m.i(x), m.l(m.c)
        ways = [lambda: h * table * m.g(x), lambda: table * m.s * h]
        first, second = (way() for way in (ways[::-1] if m.turned else ways))
        return first + second

    model = constant(forward, (T, D), l=nn.Linear(D, D), i=nn.Linear(D, D), g=nn.Linear(D, D))
    model.register_buffer("s", torch.randn(T, D))
    model.double()
    with torchgradx.attach(model, **options) as probe:
        for model.turned in (False, True, False):
            x = torch.randn(N, T, D, dtype=torch.float64)
            square(model, x).backward()
            exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x))


MAY_RUN_AGAIN = {"divided by", "into a part", "stacked", "attention", "maximum", "where", "norm",
                 "indexed"}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("way", WAYS)
def test_a_bare_parameter_is_exact_without_running_its_owner_again(way, options):
    model = Model(lambda m, x: m.o(torch.tanh(WAYS[way](m.i(x), m.w))), w=torch.randn(T, D),
                  i=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    x = torch.randn(N, T, D)
    if way in MAY_RUN_AGAIN:
        exact_or_refused(model, square, x, **options)
        return
    check(model, square, x, **options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        assert "(root): Model  [w]: lifted" in probe.explain()


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_where_samples_come_in_inside_a_checkpoint(way, reentrant, options):
    def forward(m, x):
        inside = lambda x, s: torch.tanh(WAYS[way](x, s))  # noqa: E731
        return m.o(checkpoint(inside, m.i(x), m.l(m.c), use_reentrant=reentrant))

    model = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D))
    x = torch.randn(N, T, D)
    if reentrant or way in {*MAY_REFUSE, "into a part"}:  # what CopySlices saved shows to nobody
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


@a_few_modes
@pytest.mark.parametrize("before", [nn.LayerNorm(D), nn.Identity()], ids=["normed", "plain"])
def test_a_module_without_samples_inside_a_checkpoint(before, options):
    def forward(m, x):
        inside = lambda x: torch.tanh(x + m.l(m.n(m.c)))  # noqa: E731
        return m.o(checkpoint(inside, m.i(x), use_reentrant=False))

    model = constant(forward, l=nn.Linear(D, D), n=copy.deepcopy(before), i=nn.Linear(D, D))
    check(model, square, torch.randn(N, T, D), **options)


class Number(nn.Module):
    """Of a submodule that is given no sample, as a temperature."""

    def __init__(self, numbers):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers))

    def forward(self):
        return self.weight.exp().sum()


ONE = {
    "a factor": lambda m, x: m.l(x) * m.t(),
    "a temperature": lambda m, x: (m.l(x) / m.t()).softmax(-1),
    "twice": lambda m, x: torch.tanh(m.l(x * m.t())) * m.t(),
    "in a checkpoint": lambda m, x: checkpoint(
        lambda x: torch.tanh(m.l(x)) * m.t(), x, use_reentrant=False),
    "detached": lambda m, x: m.l(x) * m.t().detach(),
    "idle": lambda m, x: (m.t(), m.l(x))[1],
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("numbers", [(), (3,)], ids=str)
@pytest.mark.parametrize("way", ONE)
def test_a_module_may_give_one_number(way, numbers, n, options):
    model = Model(ONE[way], l=nn.Linear(D, D), t=Number(numbers))
    check(model, square, torch.randn(n, T, D), **options)
