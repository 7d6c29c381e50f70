"""Rows that are not one per sample: sample_ids, held against a loop over single samples."""

import pytest
import torch
from attach_models import Model, identity
from attach_modes import a_few_modes
from attach_oracle import close_named
from attach_steps import refusal
from counters import Counter
from segment_models import CASES, Case, D, deep_set, spread
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import torchgradx
from torchgradx import ops

DOUBLE, ids_of = torch.float64, Case.options["sample_ids"]


def grad_of(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


def loop(model, case, losses):
    """{parameter: [N]} float64 gradients' norms, one sample at a time; and their clipped sum."""
    found = {name: [] for name, _ in model.named_parameters()}
    for k in range(case.n):
        model.zero_grad()
        losses(case.alone(model, k), case.y[k]).backward()
        for name, p in model.named_parameters():
            found[name].append(grad_of(p).clone())
    model.zero_grad()
    return {name: torch.stack(g) for name, g in found.items()}


def norms_of(gradients):
    return {name: g.flatten(1).norm(dim=1) for name, g in gradients.items()}


def step(model, case):
    """A training step's backward: the mean over samples of each one's own loss."""
    model.zero_grad()
    case.loss(case.batch(model), case.y).backward()


@a_few_modes
@pytest.mark.parametrize("name", CASES)
def test_norms_are_those_of_single_samples_in_every_step(name, options):
    make, sizes = CASES[name]
    model = make().model().to(DOUBLE)
    with torchgradx.attach(model, **make().options, **options) as probe:
        for k, each in enumerate(sizes):  # others at equal totals, and sizes that never repeat
            case = make().draw(each, torch.Generator().manual_seed(k))
            with probe.paused():
                want = loop(model, case, case.loss_of_one)
            step(model, case)
            norms = probe.norms(per="parameter")
            assert probe.norms().shape == (case.n,)
            close_named(norms, norms_of(want))
            if options.get("weight_grad", True):
                for key, p in model.named_parameters():
                    torch.testing.assert_close(grad_of(p), want[key].mean(0), rtol=1e-9, atol=1e-12)
        assert "run again" not in str(probe.explain()) or "backend" in options or not ops.NATIVE


@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_clipping_and_products_with_directions_are_by_sample(name, deferred, backend):
    make, sizes = CASES[name]
    model = make().model().to(DOUBLE)
    v = {key: torch.randn_like(p) for key, p in model.named_parameters()}
    options = {"clip": True, "weight_grad": not deferred, "backend": backend, "directions": v}
    with torchgradx.attach(model, **make().options, **options) as probe:
        for k, each in enumerate(sizes[:3]):
            case = make().draw(each, torch.Generator().manual_seed(k))
            with probe.paused():
                gradients = loop(model, case, case.loss_of_one)
            whole = torch.cat([g.flatten(1) for g in gradients.values()], 1).norm(dim=1)
            factors = (whole.median() / whole).clamp(max=1)
            step(model, case)
            dots = sum((gradients[key] * v[key]).flatten(1).sum(1) for key in v)
            torch.testing.assert_close(probe.dot(), dots, rtol=1e-9, atol=1e-12)
            norms = probe.clip_grad_norm_(whole.median())
            torch.testing.assert_close(norms, whole, rtol=1e-9, atol=1e-12)
            for key, p in model.named_parameters():
                want = torch.einsum("n...,n->...", gradients[key], factors) / case.n
                torch.testing.assert_close(grad_of(p), want, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_autocast(name):
    make, sizes = CASES[name]
    model = make().model()
    with torchgradx.attach(model, **make().options) as probe:
        for k in range(2):
            case = make().draw(sizes[0], torch.Generator().manual_seed(k), torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                with probe.paused():
                    gradients = loop(model, case, case.loss_of_one)
                step(model, case)
            want = norms_of({name: g.double() for name, g in gradients.items()})
            close_named(probe.norms(per="parameter"), want, 6e-2)


def test_two_passes_and_no_row_of_a_sample():
    model = deep_set().to(DOUBLE)
    with torchgradx.attach(model, sample_ids=ids_of, batch_size=3, loss_reduction="sum") as probe:
        for _ in range(2):
            b = torch.tensor([0, 2, 2, 0, 0])
            model(torch.randn(5, D, dtype=DOUBLE), ids=b, n=3)[b].square().sum().backward()
        norms = probe.norms(per="parameter")["a.weight"]
    assert [bool(norm > 0) for norm in norms] == [True, False, True, True, False, True]


def test_rows_of_very_unequal_samples_are_not_padded():
    def most(func, args):
        return max((t.numel() for t in tree_leaves(args) if torch.is_tensor(t)), default=0)

    model, once = deep_set().to(DOUBLE), deep_set().function
    model.function = lambda m, x, **given: once(m, F.linear(x, m.a.weight[:D]), **given)
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for _ in range(2):
            b, sizes = spread([1] * 30 + [4000]), Counter(most)
            loss = model(torch.randn(len(b), D, dtype=DOUBLE), ids=b, n=31).square().sum(1).mean()
            with sizes:
                loss.backward()
        assert 4000 < max(sizes.counts) <= 2 * len(b) * 8
        assert (probe.norms() > 0).all()


def joined(case):
    """By an edge between two graphs."""
    case.edges = torch.cat([case.edges, torch.tensor([[0], [4]])], 1)


def seen(case):
    case.joins = True


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["graphs", "packed"])
def test_samples_that_meet_are_refused_in_every_step(name, first):
    spoil, sizes = (seen, [[4, 3, 5]]) if name == "packed" else (joined, [4, 3, 5])
    make, _ = CASES[name]
    model = make().model().to(DOUBLE)
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for meet in (first, not first, True, False):
            step_where_samples_may_meet(probe, model, make(), sizes, spoil if meet else None)


def step_where_samples_may_meet(probe, model, case, sizes, spoil):
    case.draw(sizes, torch.Generator().manual_seed(2))
    if spoil:
        spoil(case)
    step(model, case)
    if spoil:
        refusal(probe, "fed by several samples")
    else:
        assert (probe.norms() > 0).all()


def test_rows_of_one_document_each_prove_nothing_of_rows_of_several():
    make, _ = CASES["packed"]
    model = make().model().to(DOUBLE)
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for rows in ([[5], [4]], [[6], [6]], [[2, 3], [4]], [[5], [4]]):
            case = make().draw(rows, torch.Generator().manual_seed(2))
            case.joins = "causal"  # no mask
            with probe.paused():
                want = norms_of(loop(model, case, case.loss_of_one))
            step(model, case)
            if len(rows[0]) > 1:
                refusal(probe, "fed by several samples")
            else:
                close_named(probe.norms(per="parameter"), want)


PACKED, LINES = [[0, 0, 1, 1, 1], [2, 3, 3, 3, 3]], [[1] * 5, [0] * 5, [0] * 5]
ROWS = [0] * 3 + [1] * 4
turn = identity(lambda g: 2 * g)  # a user's Function


def given(m, x):
    """Data times a computed weight: one row, then as many as it has."""
    at = torch.arange(1, 2 if m.step < 2 else 1 + D)
    return x.index_add(0, at, torch.tanh(x[at] @ (m.t.weight * m.t.weight[0])))


def seen_in_part(m, x):
    """Whose rows read a computed vector shows in some steps only."""
    h, v = torch.tanh(m.b(x)), m.t.weight[0] * m.t.weight[1]
    one, other = torch.tensor([0, 1]), torch.tensor([4, 5] if m.step > 1 else [], dtype=torch.long)
    return h.index_add(0, one, h[one] * v).index_add(0, other, h[other] @ torch.diag(v))


@pytest.mark.parametrize(("function", "ids", "own"), [
    (lambda m, x: m.b(m.b(x))[:, :-1].log_softmax(-1)[..., 1], PACKED, lambda ids: ids[:, :-1]),
    (lambda m, x: m.b(m.b(x)[:, 1:].tanh()) + m.b(x).sum() * 0, PACKED, lambda ids: ids[:, 1:]),
    (lambda m, x: ((h := m.b(x)) + x @ x.mT @ h)[range(3), [3] * 3], LINES, lambda ids: ids[:, 0]),
    (lambda m, x: F.linear(m.t((x[..., 0] > 0).long()) + m.b(x), m.t.weight), PACKED, torch.clone),
    (lambda m, x: m.b(x) * (1 + m.b.bias) @ m.b.weight.mT.exp(), PACKED, torch.clone),
    (lambda m, x: m.b(turn(torch.relu(m.b(x)))), PACKED, torch.clone),
    (given, ROWS, torch.clone), (seen_in_part, ROWS, torch.clone),
    (lambda m, x: torch.cat(F.linear(m.b(x), m.b.weight).split([1, 2], 1), 1)
     * (torch.arange(6).view(2, 3, 1) > 0), [[-1, 0, 0], [1, 1, 1]], torch.clone),
    (lambda m, x: m.b(m.b(x))[:, :-1].flip(1), PACKED, "fed by several samples"),
    (lambda m, x: m.b(x[:, 1:]) - m.b(x)[:, :-1], PACKED, "no output of the model has N rows"),
    (lambda m, x: m.b(turn(m.b(x).roll(1, 1))), PACKED, "no weighted backward can run"),
    (lambda m, x: m.b(m.b(x).mean(1)), [[0, 0, 1], [-1, -1, -1]], "fed by several samples"),
    (lambda m, x: m.b(m.c(x.mT).mT), [[0, 0, 1]],
     "Conv1d is not served by rows" if ops.NATIVE else "nothing shows which samples"),
])  # fmt: skip
def test_outputs_and_uses_of_other_rows(function, ids, own):
    layers = {"b": nn.Linear(D, D), "t": nn.Embedding(D, D), "c": nn.Conv1d(D, D, 3, padding=1)}
    model, ids = Model(function, **layers), torch.tensor(ids)
    with torchgradx.attach(model.to(DOUBLE), sample_ids=lambda *_: ids) as probe:
        for model.step in range(3):
            out = model(torch.randn(*ids.shape, D, dtype=DOUBLE))
            out.square().sum().backward(retain_graph=True)
            if isinstance(own, str):
                refusal(probe, own)
                continue
            norms, parts = probe.norms(per="parameter"), dict(model.named_parameters())
            for k in range(1 + int(ids.max())):
                one = out[own(ids) == k].square().sum() * (1 + ids.max())
                g = torch.autograd.grad(one, [*parts.values()], None, True, allow_unused=True)
                want = {key: t.norm() for key, t in zip(parts, g, strict=True) if t is not None}
                close_named({key: t[k] for key, t in norms.items()}, want)


def joined_by(kind, m, x):
    h, last = torch.tanh(m.b(x)), m.step > 1
    if kind == "a matrix of data":
        adjacent = torch.eye(len(x), dtype=DOUBLE)
        adjacent[0, -1] = last
        return m.b(h + adjacent @ h)
    out = h.clone()
    out[1:5][torch.tensor([3, 1, 2, 0] if last else [0, 1, 2, 3])] = h[1:5]
    return m.b(out)


@pytest.mark.parametrize("kind", ["a matrix of data", "indices into a slice"])
def test_rows_that_join_samples_in_a_later_step_alone_are_refused(kind):
    model = Model(lambda m, x: joined_by(kind, m, x), b=nn.Linear(D, D)).to(DOUBLE)
    with torchgradx.attach(model, sample_ids=lambda *_: torch.tensor(ROWS)) as probe:
        for model.step in range(3):
            model(torch.randn(len(ROWS), D, dtype=DOUBLE)).square().sum().backward()
            assert model.step > 1 or (probe.norms() > 0).all()
        refusal(probe, "fed by several samples")


def test_what_sample_ids_returns():
    model, x, b = deep_set(), torch.randn(5, D), torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(TypeError, match="sample_ids must be a callable"):
        torchgradx.attach(model, sample_ids=b)
    with pytest.raises(ValueError, match="sample_ids says where all samples are"):
        torchgradx.attach(model, sample_ids=ids_of, layout={"*": "batch"})
    for wrong, error in (b.float(), TypeError), (b[None, None], ValueError), ([0, 1], TypeError):
        raises = pytest.raises(error, match=r"sample_ids\(args, kwargs\) must return")
        with torchgradx.attach(model, sample_ids=lambda *_, wrong=wrong: wrong), raises:
            model(x, ids=b, n=2)
    raises = pytest.raises(ValueError, match="has the id 1, and batch_size= is 1")
    with torchgradx.attach(model, sample_ids=ids_of, batch_size=1), raises:
        model(x, ids=b, n=2)


def test_grad_norms_and_verify():
    """A mean over all tokens, with token weights."""
    make, _ = CASES["packed"]
    model, case = make().model().to(DOUBLE), make().draw([[3, 4, 2]], torch.Generator())
    weights, y = torchgradx.token_weights(torch.cat(case.y), sample_ids=case.ids.flatten()), case.y
    options = {"loss_reduction": "sum", "loss_scale": lambda *_: weights, "sample_ids": ids_of}
    inputs = {"tokens": case.x, "positions": case.at, "ids": case.ids}
    want = norms_of(loop(model, case, case.loss_of_one))
    given = lambda out, y: F.cross_entropy(out.flatten(0, 1), y), inputs, torch.cat(y)
    got = torchgradx.grad_norms(model, *given, per="parameter", **options)
    report = torchgradx.verify(model, *given, **options)
    assert report.agrees
    for name, norms in want.items():
        for found in (got, report.loop):
            torch.testing.assert_close(found[name].double(), norms, rtol=1e-9, atol=1e-12)
