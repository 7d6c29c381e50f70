"""Operations in place on what all samples share: on a view, the graph leads through a node that
wraps the operation's own, of which nothing shows."""

import copy

import pytest
import torch
from attach_oracle import (
    ANY,
    VMAP,
    check,
    close,
    close_named,
    exact_or,
    exact_or_refused,
    loop,
    loop_model,
    same_gradients,
    square,
    title,
)
from broadcast_models import D, N, T, constant
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchgradx

MODES = [*ANY, *VMAP, {"clip": True}, {"clip": True, "fused": False}]
modes = pytest.mark.parametrize("options", MODES, ids=title)


def heads(b):
    b = b.unflatten(-1, (2, -1)).transpose(1, 2)
    b /= 3
    return b.transpose(1, 2).flatten(2)


def part(b):
    b[:, :2] *= 2
    b[..., 1:].tanh_()
    return b


CHANGES = {
    "relu": lambda b: torch.relu_(b),
    "twice": lambda b: b.mul_(2).add_(1).sigmoid_(),
    "heads, scaled": heads,
    "parts": part,
}
changes = pytest.mark.parametrize("change", CHANGES)


def model(change, around=lambda use, c: use(c)):
    """Positions [1, T, D] through a Linear, whose output is changed where it stands."""

    def forward(m, x):
        table = around(lambda c: CHANGES[change](m.l(c)), m.c[None, : x.shape[1]])
        return m.o(torch.tanh(m.i(x) * table))

    return constant(forward, (2 * N, D), l=nn.Linear(D, D), i=nn.Linear(D, D))


@modes
@changes
@pytest.mark.parametrize(("n", "t"), [(N, T), (N, N), (D, D), (1, T), (N, 1), (2, T)])
def test_each_is_exact(change, n, t, options):
    check(model(change), square, torch.randn(n, t, D), **options)


@modes
@changes
def test_each_is_exact_in_later_steps_of_other_sizes(change, options):
    net = model(change).double()
    with torchgradx.attach(net, **options) as probe:
        for n, t in [(N, T), (N, T), (N, N), (3, T), (1, T), (N, T)]:
            x = torch.randn(n, t, D, dtype=torch.float64)
            square(net, x).backward()
            close(probe.norms(), loop_model(net, square, x))


@modes
@changes
def test_samples_written_into_it_are_found(change, options):
    def forward(m, x):
        b = m.l(m.c[None]).expand(len(x), -1, -1).clone()
        b[:, 1:] *= m.i(x)[:, 1:]
        return m.o(torch.tanh(CHANGES[change](b)))

    net = constant(forward, (T, D), l=nn.Linear(D, D), i=nn.Linear(D, D))
    check(net, square, torch.randn(N, T, D), **options)


def offloaded(use, c):
    with save_on_cpu():
        return use(c)


@modes
@changes
def test_what_is_offloaded_is_had_as_often_as_it_is_asked(change, options):
    check(model(change, offloaded), square, torch.randn(N, T, D), **options)


def checkpointed(use, c):
    return checkpoint(use, c, use_reentrant=False)


@modes
@changes
def test_in_a_checkpoint_each_is_exact_or_refused(change, options):
    """What an operation in place wraps shows nothing of what it saved: it is not asked there."""
    exact_or_refused(model(change, checkpointed), square, torch.randn(N, T, D), **options)


@modes
@pytest.mark.parametrize("around", [checkpointed, offloaded])
def test_samples_changed_in_place_by_what_they_share(around, options):
    """Exact, or refused in a checkpoint: that gives each saved tensor once."""

    def change(m, x):
        h = m.i(x)
        h[:, 1:] *= m.l(m.c)[1:]
        return m.l(h)

    def forward(m, x):
        return m.o(torch.tanh(around(lambda x: change(m, x), m.f(x))))

    parts = {name: nn.Linear(D, D) for name in ("f", "i", "l")}
    shows = exact_or_refused if around is checkpointed else check
    shows(constant(forward, (T, D), **parts), square, torch.randn(N, T, D), **options)


class Forgetful(saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda t: [t], list.pop)


@modes
@changes
def test_under_hooks_that_give_once_the_engine_alone_asks(change, options):
    net, x = model(change).double(), torch.randn(N, T, D, dtype=torch.float64)
    twin, want = copy.deepcopy(net), loop(net, square, x)
    square(twin, x).backward()
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            net.zero_grad()
            with Forgetful():
                loss = square(net, x)
            loss.backward()
            if options.get("weight_grad") is not False:
                same_gradients(net, twin, 1e-9)
            exact_or(torchgradx.CoverageError, "", probe, want)


@modes
def test_a_table_of_the_roots_own_is_exact(options):
    def forward(m, x):
        b = m.w[None] * 2
        b.view(-1, D)[1:].sigmoid_()
        return m.o(torch.tanh(m.i(x) * b))

    net = constant(forward, w=torch.randn(T, D), i=nn.Linear(D, D)).double()
    x = torch.randn(N, T, D, dtype=torch.float64)
    with torchgradx.attach(net, **options) as probe:
        square(net, x).backward()
        close_named(probe.norms(per="parameter"), loop(net, square, x))
