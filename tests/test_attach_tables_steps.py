"""What all samples share, under every kind of training step, and each way in which samples meet
it."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    close_named,
    exact_or_refused,
    loop,
    refused,
    square,
)
from broadcast_models import (
    WAYS,
    D,
    N,
    Patches,
    T,
    against_all,
    constant,
    positional,
    relative,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

MODELS = {
    "positions": (positional, tokens),
    "relative": (lambda: relative(True), lambda: torch.randn(N, T, D)),
    "queries": (lambda: constant(against_all, l=nn.Linear(D, D)), lambda: torch.randn(N, T, D)),
    "patches": (Patches, lambda: torch.randn(N, T, 3)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def example(name, dtype=torch.float64):
    make, data = MODELS[name]
    model, x = make(), data()
    if hasattr(model, "r"):
        del model.r
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


@each_model
@both_dtypes
@a_few_modes
def test_in_either_precision(name, dtype, options):
    check(*(lambda model, x: (model, square, x))(*example(name)), dtype=dtype, **options)


@each_model
@a_few_modes
def test_under_autocast(name, options):
    """Norms are those of what the backward computed in bfloat16: near the exact ones."""
    model, x = example(name, torch.float32)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = square(model, x)
            out.backward()
            norms = probe.norms(per="parameter")
    largest = max(float(v.max()) for v in want.values())
    for key, value in want.items():
        assert (norms[key].double() - value).abs().max() < 0.05 * largest, key


@each_model
@a_few_modes
def test_micro_batches_are_one_record(name, options):
    model, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for part in (x[:2], x[2:]):
            square(model, part).backward()
        close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_several_backwards_through_one_graph_add_up(name, options):
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, x[:1], x[:1]):
            want = loop(model, lambda *batch: 3 * square(*batch), batch)
            model.zero_grad()
            loss = square(model, batch)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_forwards_of_the_same_samples_add_up(name, options):
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch, at_once in ((x, True), (x, False), (x[:1], False), (x[:1], True)):
            want = loop(model, lambda m, b: square(m, b) + square(m, b.flip(1)), batch)
            model.zero_grad()
            with probe.same_samples():
                losses = square(model, batch), square(model, batch.flip(1))
            for loss in [sum(losses)] if at_once else losses:
                loss.backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_batches_of_other_sizes_follow(name, options):
    """Where a sample's value goes is seen once; where the samples stand is proven for each size."""
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, torch.cat([x, x])[:7], x[:1], x[:, :3], torch.cat([x, x])[:T], x[:3], x):
            want = loop(model, square, batch)
            square(model, batch).backward()
            close_named(probe.norms(per="parameter"), want)
        model.eval()
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, square, x))


@each_model
@a_few_modes
def test_frozen_parts_count_nothing(name, options):
    for place in range(len(list(example(name)[0].parameters()))):
        model, x = example(name)
        list(model.parameters())[place].requires_grad_(False)
        check(model, square, x, **options)


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
