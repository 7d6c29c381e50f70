"""Experts whose weights are the matrices of one parameter [E, *, *], as transformers has them."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, square, under_autocast
from attach_modes import ANY, native_missing
from attach_modes import title as of_options
from attach_oracle import close_named, loop
from attach_steps import exact_step, exact_steps, refusal, step_or_refused
from clip_oracle import check_clip
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

E, K, D, H = 4, 2, 8, 16  # experts, of each token, width, width within
N, T = 5, 4
native = pytest.mark.skipif(native_missing() is not None, reason="the fallback runs them again")


def grouped_mm(x, w, ends):
    if w.dtype != torch.float64:  # which it does not know
        return F.grouped_mm(x.to(w.dtype), w, offs=ends)
    parts = x.tensor_split(ends[:-1].long())
    return torch.cat([part @ matrix for part, matrix in zip(parts, w, strict=True)])


class Experts(nn.Module):
    def __init__(self, way="each", turned=False, biased=False, of_whom=lambda h: h):
        super().__init__()
        sizes = ((H, D), (D, H)) if turned else ((D, H), (H, D))
        self.up, self.down = (nn.Parameter(torch.randn(E, *size) / 2) for size in sizes)
        for name, size in (("up_bias", H), ("down_bias", D)):
            setattr(self, name, nn.Parameter(torch.randn(E, size)) if biased else None)
        self.way, self.turned, self.of_whom = getattr(self, way), turned, of_whom

    def forward(self, h, weights, chosen):  # [R, D], [R, K], [R, K]
        return self.way(self.of_whom(h), weights, chosen)

    def through(self, x, product):
        """product: of rows, a parameter and a bias."""
        y = product(x, self.up, self.up_bias)
        if self.up_bias is None:
            return product(torch.tanh(y), self.down, None)
        gate, up = y[:, ::2].clamp(max=1.0), y[:, 1::2].clamp(min=-1.0, max=1.0)
        gated = torch.cat([gate * torch.sigmoid(gate), up + 1], 1)
        return product(gated, self.down, self.down_bias)

    def each(self, h, weights, chosen, experts=range(E)):
        def product(e, x, w, b):
            if self.turned:
                return nn.functional.linear(x, w[e], None if b is None else b[e])
            return x @ w[e] if b is None else x @ w[e] + b[e]

        out = torch.zeros_like(h)
        for e in experts:
            rows, k = torch.where(chosen == e)
            y = self.through(h[rows], partial(product, e)) * weights[rows, k, None]
            out = out.index_add(0, rows, y.to(out.dtype))
        return out

    def hit(self, h, weights, chosen):
        return self.each(h, weights, chosen, chosen.unique())

    def grouped(self, h, weights, chosen):
        ids, order = chosen.flatten().sort(stable=True)
        ends = ids.bincount(minlength=E).cumsum(0).int()

        def product(x, w, b):
            y = grouped_mm(x, w.mT if self.turned else w, ends)
            return y if b is None else y.add_(b[ids])

        y = self.through(h[order // K], product) * weights.flatten()[order, None]
        return y[order.argsort()].view(*chosen.shape, -1).sum(1)

    def batched(self, h, weights, chosen):
        ids = chosen.flatten()

        def product(x, w, b):
            pair = (w[ids], x.unsqueeze(2)) if self.turned else (x.unsqueeze(1), w[ids])
            y = torch.bmm(*pair).flatten(1)
            return y if b is None else y + b[ids]

        y = self.through(h.repeat_interleave(K, dim=0), product) * weights.flatten()[:, None]
        return y.view(*chosen.shape, -1).sum(1)


def mixture(experts, first=True):
    def forward(m, x):
        h = (torch.tanh(m.first(x)) if first else x).flatten(0, 1)
        scores = torch.softmax(m.router(h), -1)
        weights, chosen = scores.topk(K)
        weights = weights * scores.gather(1, chosen)
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
    "batched": lambda: Experts("batched"),
    "batched, turned": lambda: Experts("batched", turned=True),
    "each, turned and biased": lambda: Experts(turned=True, biased=True),
    "grouped, biased": lambda: Experts("grouped", biased=True),
    "batched, turned and biased": lambda: Experts("batched", turned=True, biased=True),
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
        for n, t in ((N, T), (N, T), (4, 7), (1, T)):
            x = torch.randn(n, t, D, dtype=dtype)
            exact_step(probe, model, x, rtol=rtol, want=loop(model, square, x, dtype=dtype))


@pytest.mark.parametrize("options", [{}, {"weight_grad": False}], ids=of_options)
@of_ways
def test_clipping_and_directions(way, options):
    x = torch.randn(N, T, D)
    check_clip(mixture(WAYS[way]()), square, x, dtype=precision(way)[0], **options)


@of_ways
def test_documents_of_packed_rows(way):
    """Sums over documents, whose number divides that of the rows; padding is of none."""
    dtype, rtol = precision(way)
    model, ids = mixture(WAYS[way]()).to(dtype), [[0] * 2 + [1] * 29 + [-1], [2] * 3 + [3] * 29]
    parts, ids = [*model.parameters()], torch.tensor(ids)
    close = partial(torch.testing.assert_close, rtol=10 * rtol, atol=rtol)
    options = {"sample_ids": lambda *_: ids, "loss_reduction": "sum"}
    with torchgradx.attach(model, clip=True, **options) as probe:
        for _ in range(3):
            x = torch.randn(*ids.shape, D, dtype=dtype)
            with probe.paused():
                losses = (square(model, x[ids == k][None]) for k in range(4))
                each = [torch.autograd.grad(one, parts) for one in losses]
            whole = torch.stack([torch.cat([g.flatten() for g in one]) for one in each])
            norms, _ = whole.norm(dim=1), model.zero_grad()
            model(x)[ids >= 0].square().sum().backward()
            close(probe.clip_grad_norm_(norms.median()), norms)
            factors = (norms.median() / norms).clamp(max=1)
            close(torch.cat([p.grad.flatten() for p in parts]), factors @ whole)
        assert "run again" not in str(probe.explain()) or not torchgradx.ops.NATIVE


@native
@of_ways
def test_nothing_runs_again_and_one_proof_holds_whatever_a_batch_chooses(way, backwards):
    """And of whatever size it is. No row hits the first expert."""
    dtype, rtol = precision(way)
    model, calls = mixture(WAYS[way]()).to(dtype), []
    model.router.bias.data[0] = -9
    model.experts.register_forward_hook(lambda *_: calls.append(1))
    with torchgradx.attach(model) as probe:
        sizes = {(N, 16 * T): 0, (N, 9 * T): 1, (7, T): 1, (2, 3): 2, (N, T): 1}
        for size, proofs in [((N, 16 * T), 2), *[((N, 16 * T), 0)] * 3, *sizes.items()]:
            x = torch.randn(*size, D, dtype=dtype)
            want = loop(model, square, x, dtype=dtype)
            calls.clear()
            backwards.clear()
            exact_step(probe, model, x, rtol=rtol, want=want)
            assert len(calls) == 1
            assert len(backwards) <= proofs
        assert "run again" not in str(probe.explain())


@of_ways
def test_steps_leave_nothing_behind(way):
    model, counts = mixture(WAYS[way]()), []
    with torchgradx.attach(model) as probe:
        for k in range(30):
            square(model, torch.randn(N, T, D, requires_grad=True)).backward()
            assert probe.norms().isfinite().all()
            if k in (9, 29):
                gc.collect()
                counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    assert counts[1] - counts[0] < 20, f"tensors after 10 and 30 steps: {counts}"


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


def samples(n=N, t=T):
    return torch.randn(n, t, D).double()


def test_what_is_routed_may_be_data():
    """Rows without a gradient run again: the graph does not show whose they are."""
    exact_steps(mixture(Experts(), first=False).double(), samples(), samples())


@pytest.mark.parametrize("again", [True, False], ids=["reentrant", ""])
@of_ways
def test_in_a_checkpoint(way, again, backwards):
    """Served at their nodes as without it, and proven once, unless it is reentrant."""
    (dtype, rtol), experts = precision(way), WAYS[way]()
    block = Model(lambda m, *h: m.experts(*h), experts=experts)
    through = Model(lambda m, *h: checkpoint(m.block, *h, use_reentrant=again), block=block)
    model = mixture(through).to(dtype)
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            backwards.clear()
            x = torch.randn(N, 16 * T, D, dtype=dtype)  # each expert has rows
            if again:
                step_or_refused(probe, model, x, words="reentrant")
            else:
                exact_step(probe, model, x, rtol=rtol, want=loop(model, square, x, dtype=dtype))
        if not again and torchgradx.ops.NATIVE:
            assert not backwards
            assert "run again" not in str(probe.explain())


@of_ways
def test_under_autocast(way):
    model, loss = mixture(WAYS[way]()), under_autocast()
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            x = torch.randn(N, T, D)
            loss(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, loss, x, dtype=None), 0.05)
            probe.reset()


def test_a_parameter_of_two_calls_is_one_sum():
    model = mixture(Experts()).double()
    once = model.function
    model.function = lambda m, x: once(m, x) + once(m, torch.tanh(x))
    exact_steps(model, samples(), samples())


def own(use):
    up, down = torch.randn(2, E, D, D) / 2
    return Model(use, up=up, down=down, shift=0)


def one(m, rows, k=0):
    return torch.tanh(rows @ m.up[k]) @ m.down[k]


def by_place(m, h):
    """Rows of another sample, once `shift` says so. No vmap takes it."""
    rows = torch.where(h[:, 0] > -2)[0]
    return torch.zeros_like(h).index_add(0, rows, one(m, h[(rows + m.shift * T) % len(h)]))


def samples_in_order(m, h):
    order = h.view(-1, T, D)[:, 0, 0].detach().argsort()
    if not m.shift:
        order = order.sort()[0]
    return one(m, h.view(-1, T, D).transpose(0, 1)[:, order])[:, order.argsort()].transpose(0, 1)


def and_a_penalty(m, h):
    a = m.up[0]
    both = torch.tanh(h @ a) + torch.sin(h.cos() @ a) + torch.tanh(h) @ m.down[0]
    return both + m.shift * m.up.square().mean() * torch.tanh(h.detach()).abs()


def some(m, h):
    rows = (h[:, 0] > 0).nonzero()[:, 0]
    return torch.zeros_like(h).index_add(0, rows, one(m, h)[rows])


SWITCHED = {f.__name__: f for f in (by_place, samples_in_order, and_a_penalty)}
PLAIN = {
    "a product at the end": lambda m, h: one(m, h).view(h.shape),
    "the last matrix": lambda m, h: one(m, h, -1) + h,
    "some rows of a product": some,
}


def stack(use):
    model = Model(lambda m, x: m.last(torch.tanh(m.own(torch.tanh(m.first(x)).flatten(0, 1)))
                                      ).reshape(*x.shape[:2], -1),
                  first=nn.Linear(D, D), own=own(use), last=nn.Linear(D, 2))  # fmt: skip
    return model.double()


@pytest.mark.parametrize("use", SWITCHED)
def test_what_was_proven_does_not_hold_once_rows_go_elsewhere(use):
    model = stack(SWITCHED[use])
    with torchgradx.attach(model) as probe:
        for model.own.shift in (0, 0, 1, 1):
            step_or_refused(probe, model, samples())


@pytest.mark.parametrize("use", PLAIN)
def test_products_as_users_write_them(use):
    exact_steps(stack(PLAIN[use]), *(samples() for _ in range(3)))


def every_row(m, h):
    """All rows [E * R, D] for each expert, one after the other: in no order of samples."""
    return torch.bmm(torch.tanh(torch.bmm(h.view(E, -1, D), m.up)), m.down).view(-1, D)


def weighed(m, x):
    h = torch.tanh(m.first(x)).flatten(0, 1)
    weighted = h.repeat(E, 1) * torch.sigmoid(m.router(h)).T.reshape(-1, 1)
    return (h + (m.experts(weighted) - m.shift * weighted.mean(0)).view(E, -1, D).sum(0)).view_as(x)


@native
def test_every_expert_gets_every_row():
    """Llama 4 has such experts. A mean over samples above them is refused."""
    experts = Model(every_row, up=torch.randn(E, D, H) / 2, down=torch.randn(E, H, D) / 2)
    parts = {"first": nn.Linear(D, D), "router": nn.Linear(D, E), "experts": experts, "shift": 0}
    model = Model(weighed, **parts)
    assert "run again" not in exact_steps(model.double(), samples(), samples(), samples()[:3])
    model.shift = 1
    with torchgradx.attach(model) as probe:
        square(model, samples()).backward()
        refusal(probe, "mix the")
