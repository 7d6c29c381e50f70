"""Experts whose weights are the matrices of one parameter [E, *, *], as transformers has them."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    ANY,
    Model,
    close_named,
    exact_or,
    exact_step,
    loop,
    native_missing,
    refusal,
    square,
)
from attach_oracle import title as of_options
from clip_oracle import check_clip
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

E, K, D, H = 4, 2, 8, 4  # experts, of each token, width, width within
N, T = 4, 5
native = pytest.mark.skipif(native_missing() is not None, reason="the fallback runs them again")


def grouped_mm(x, w, ends):
    if w.dtype != torch.float64:  # which it does not know
        return F.grouped_mm(x.to(w.dtype), w, offs=ends)
    parts = x.tensor_split(ends[:-1].long())
    return torch.cat([part @ matrix for part, matrix in zip(parts, w, strict=True)])


class Experts(nn.Module):
    def __init__(self, way="each", turned=False, of_whom=lambda h: h):
        super().__init__()
        sizes = ((H, D), (D, H)) if turned else ((D, H), (H, D))
        self.up, self.down = (nn.Parameter(torch.randn(E, *size) / 2) for size in sizes)
        self.way, self.turned, self.of_whom = getattr(self, way), turned, of_whom

    def forward(self, h, weights, chosen):  # [R, D], [R, K], [R, K]
        return self.way(self.of_whom(h), weights, chosen)

    def each(self, h, weights, chosen, experts=range(E)):
        out = torch.zeros_like(h)
        for e in experts:
            rows, k = torch.where(chosen == e)
            up, down = (w[e].T if self.turned else w[e] for w in (self.up, self.down))
            y = torch.tanh(h[rows] @ up) @ down
            out = out.index_add(0, rows, (y * weights[rows, k, None]).to(out.dtype))
        return out

    def hit(self, h, weights, chosen):
        return self.each(h, weights, chosen, chosen.unique())

    def grouped(self, h, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=E).cumsum(0).int()
        up, down = (w.mT if self.turned else w for w in (self.up, self.down))
        y = torch.tanh(grouped_mm(h[order // K], up, ends))
        y = grouped_mm(y, down, ends) * weights.flatten()[order, None]
        return y[order.argsort()].view(*chosen.shape, -1).sum(1)


def mixture(experts, first=True):
    def forward(m, x):
        h = (torch.tanh(m.first(x)) if first else x).flatten(0, 1)
        weights, chosen = torch.softmax(m.router(h), -1).topk(K)
        return m.last(torch.tanh(h + m.experts(h, weights, chosen))).view(*x.shape[:2], -1)

    layers = {"first": nn.Linear(D, D)} if first else {}
    layers |= {"router": nn.Linear(D, E), "last": nn.Linear(D, 2)}
    return Model(forward, experts=experts, **layers)


WAYS = {
    "each": lambda: Experts(),
    "each, turned": lambda: Experts(turned=True),
    "each that was hit": lambda: Experts("hit"),
    "grouped": lambda: Experts("grouped"),
    "grouped, turned": lambda: Experts("grouped", turned=True),
}
of_ways = pytest.mark.parametrize("way", WAYS)


def precision(way):
    return (torch.float32, 2e-5) if "grouped" in way else (torch.float64, 1e-9)


@pytest.mark.parametrize("options", ANY, ids=of_options)
@of_ways
def test_norms(way, options):
    dtype, rtol = precision(way)
    model = mixture(WAYS[way]()).to(dtype)
    with torchgradx.attach(model, **options) as probe:
        for n, t in ((N, T), (N, T), (3, 7), (1, T)):
            x = torch.randn(n, t, D, dtype=dtype)
            want = loop(model, square, x, dtype=dtype)
            model.zero_grad()
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want, rtol)


@pytest.mark.parametrize("options", [{}, {"weight_grad": False}], ids=of_options)
@of_ways
def test_clipping_and_directions(way, options):
    x = torch.randn(N, T, D)
    check_clip(mixture(WAYS[way]()), square, x, dtype=precision(way)[0], **options)


@native
@pytest.mark.parametrize("way", [way for way in WAYS if "hit" not in way])
def test_nothing_runs_again_and_one_proof_holds_whatever_a_batch_chooses(way, backwards):
    dtype, _ = precision(way)
    model, calls = mixture(WAYS[way]()).to(dtype), []
    model.experts.register_forward_hook(lambda *_: calls.append(1))
    with torchgradx.attach(model) as probe:
        for step in range(4):
            backwards.clear()
            square(model, torch.randn(N, 16 * T, D, dtype=dtype)).backward()
            probe.norms()
            assert len(calls) == step + 1
            assert bool(backwards) == (step == 0)
        assert "run again" not in str(probe.explain())


@of_ways
def test_rows_of_another_sample_are_refused(way):
    experts = WAYS[way]()
    experts.of_whom = lambda h: h.flip(0)
    model = mixture(experts)
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            square(model, torch.randn(N, T, D)).backward()
            refusal(probe)
            probe.reset()


def test_what_is_routed_may_be_data():
    """Of rows without a gradient the graph does not show whose they are: they run again."""
    model = mixture(Experts(), first=False).double()
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            exact_step(probe, model, torch.randn(N, T, D).double())


@pytest.mark.parametrize("again", [True, False], ids=["reentrant", ""])
def test_in_a_checkpoint(again):
    through = Model(lambda m, *h: checkpoint(m.experts, *h, use_reentrant=again), experts=Experts())
    model = mixture(through).double()
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            x = torch.randn(N, T, D).double()
            want = loop(model, square, x)
            square(model, x).backward()
            exact_or(torchgradx.CoverageError, "reentrant", probe, want) if again else (
                close_named(probe.norms(per="parameter"), want)
            )
            probe.reset()


@of_ways
def test_under_autocast(way):
    model = mixture(WAYS[way]())

    def loss(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return square(m, x).float()

    with torchgradx.attach(model) as probe:
        for _ in range(2):
            x = torch.randn(N, T, D)
            loss(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, loss, x, dtype=None), 0.05)
            probe.reset()


def test_a_parameter_of_two_calls_is_one_sum():
    shared = Experts()
    model = mixture(shared).double()
    once = model.function
    model.function = lambda m, x: once(m, x) + once(m, torch.tanh(x))
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            exact_step(probe, model, torch.randn(N, T, D).double())
