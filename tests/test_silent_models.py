"""What each level of check= finds of models that do something to their samples where no gradient
shows it, and of models that only look as if they did.

MODELS = {name: (make, verdict under check="graph")}; `make()` gives (model, loss, batch). SILENT is
accepted with wrong norms: docs/limits.md names each, and check="samples" refuses them.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, identity, mlp, square
from attach_modes import ANY, title
from attach_oracle import close_named, loop
from attach_steps import attempt, refusal
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops

EXACT, REFUSED, SILENT = "exact", "refused", "accepted, and not as alone"
N, T = 6, 4
same = identity(lambda grad: grad)  # nothing sees through it


DATA = {  # of data [N, T, 1], before the first layer
    "summed up": (lambda x: x.cumsum(0), SILENT),
    "less the mean": (lambda x: x - x.mean(0), SILENT),
    "a branch by the mean": (
        lambda x: x if x.mean() > 9 else x / (1 + (x.mean() < 9) * x.max()), SILENT),
    "in the last sample's units": (lambda x: x / (1 + x[-1].abs().sum()), SILENT),
    "flipped": (lambda x: x.flip(0), SILENT),  # norms would stand in the same order
    "statistics of each": (
        lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), EXACT),
    "turned and back": (lambda x: x.flip(0).tanh().flip(0), EXACT),
    "looked at": (lambda x: x + 0 * float(x.mean()), EXACT),
}  # fmt: skip
MEETINGS = {  # of activations h [N, 2] with d, of which no gradient is
    "contrast": (lambda h, d: F.nll_loss(
        (h @ d.T).log_softmax(1), torch.arange(len(h)), reduction="none")[:, None], SILENT),
    "memory": (lambda h, d: (h @ d.T).softmax(1) @ d, SILENT),
    "less the mean": (lambda h, d: h - d.mean(0), SILENT),
    "gates": (lambda h, d: h * d.sigmoid() + d, EXACT),
    "straight through": (lambda h, d: h + (h.round() - h).detach(), EXACT),
}  # fmt: skip


def largest_of_all(h):
    """The batch's top-k, as sparse autoencoders take it."""
    values, at = h.flatten().topk(len(h))
    return torch.zeros_like(h).flatten().scatter(0, at, values).view_as(h)


def chosen_by_experts(h):
    columns = []
    for column in h.unbind(1):
        values, at = column.topk(max(1, len(h) // 2))
        columns.append(torch.zeros_like(column).scatter(0, at, values))
    return torch.stack(columns, 1)


def sent_to_experts(h):
    out, to = torch.zeros_like(h), h.argmax(1)
    for expert in range(h.shape[1]):
        rows = (to == expert).nonzero().flatten()
        out = out.index_add(0, rows, h[rows] * (expert + 1.0))
    return out


BETWEEN = {  # of activations [N, 3] between two layers, with their gradient
    "largest of all": (largest_of_all, SILENT),
    "chosen by experts": (chosen_by_experts, SILENT),
    "less the mean": (lambda h: h - h.mean(0), REFUSED),
    "sent to experts": (sent_to_experts, EXACT),
    "turned and back": (lambda h: h.flip(0).tanh().flip(0), EXACT),
}


def with_queue(own_rows):
    def forward(m, x):
        h = torch.tanh(m.r(x))
        m.queue[: len(h)] = h.detach()
        return h * m.queue[: len(h)] + h if own_rows else h @ m.queue.T

    model = Model(forward, r=nn.Linear(3, 2))
    model.register_buffer("queue", torch.randn(9, 2))
    return model


class OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def frozen_batch_norm(norm):
    frozen = nn.Sequential(nn.Conv1d(T, 3, 1), copy.deepcopy(norm)).requires_grad_(False)
    return nn.Sequential(frozen, nn.ReLU(), nn.Flatten(), nn.Linear(15, 2))


def no_proof(function, again):
    """`function` below a reentrant checkpoint or a Function of the user's: nothing is proven."""
    return (lambda x: checkpoint(function, x, use_reentrant=True)) if again else (
        lambda x: same(function(x)))  # fmt: skip


def loss_alone(way):
    def forward(m, x):
        h = torch.tanh(m.r(x))
        if way == "pairs":
            return F.cross_entropy(h @ m.o(h).T, torch.arange(len(h)))
        return m.o(h - h.mean(0) if way == "mixed" else h).square().flatten(1).sum(1).mean()

    return Model(forward, r=nn.Linear(3, 2), o=nn.Linear(2, 2))


def before_a_layer(way):
    return Model(lambda m, x: torch.tanh(m.r(way(x))).flatten(1), r=nn.Linear(1, 2))


def meeting(way, frozen):
    def forward(m, x):
        h = torch.tanh(m.r(x))
        return way(h, m.frozen(x) if frozen else h.detach())

    return Model(forward, r=nn.Linear(3, 2), frozen=nn.Linear(3, 2).requires_grad_(False))


def between(way, hooked):
    model = Model(lambda m, x: m.b(way(F.softplus(m.a(x)))), a=nn.Linear(4, 3), b=nn.Linear(3, 3))
    if hooked:
        model.b.register_full_backward_hook(lambda *_: None)
    return model


MODELS = {}


def add(name, verdict, make, *batch, loss=square):
    MODELS[name] = (lambda: (make(), loss, batch), verdict)


torch.manual_seed(0)
X1, X3, X4 = (torch.randn(size) for size in ((N, T, 1), (N, 3), (N, 4)))
X4[0] /= 10
for name, (way, verdict) in DATA.items():
    add(f"data: {name}", verdict, partial(before_a_layer, way), X1)
for name, (way, verdict) in MEETINGS.items():
    for frozen in (False, True):
        whose = "a frozen part" if frozen else "its detached"
        add(f"meets {whose}: {name}", verdict, partial(meeting, way, frozen), X3)
for name, (way, verdict) in BETWEEN.items():
    for hooked in (False, True):
        where = "below a hook" if hooked else "between"
        add(f"{where}: {name}", verdict, partial(between, way, hooked), X4)
add("ids: padded and cut", SILENT, lambda: Model(
    lambda m, ids: m.l(m.e(F.pad(ids, (0, 0, 1, -1)))).flatten(1), e=nn.Embedding(9, 3),
    l=nn.Linear(3, 2)), torch.randint(0, 9, (N, T)))  # fmt: skip
add("a count over the largest", SILENT, lambda: Model(
    lambda m, x, k: m.l(x * (k / k.max())[:, None]), l=nn.Linear(3, 2)),
    X3, torch.arange(1, N + 1))  # fmt: skip
XT, EACH, FOR_ALL = torch.randn(T, T, 3), torch.rand(T, T), torch.rand(T, T)
add("T = N: sorted, beside a number of each", SILENT, lambda: Model(
    lambda m, x, k: m.l(x.sort(0).values * k[:, None, None]).flatten(1), l=nn.Linear(3, 2)),
    XT, EACH[0])  # fmt: skip
add("T = N: a mask for all, beside one of each", EXACT, lambda: Model(
    lambda m, x, k, mask: m.l(mask.to(x) @ (x * k[..., None])).flatten(1), l=nn.Linear(3, 2)),
    XT, EACH, loss=lambda m, *batch: square(m, *batch, FOR_ALL))  # fmt: skip
add("a queue that has this batch", SILENT, partial(with_queue, False), X3)
add("a buffer of its own rows", EXACT, partial(with_queue, True), X3)
for name, norm in {"": nn.BatchNorm1d(3), " without weights": nn.BatchNorm1d(3, affine=False),
                    " of the user's": OwnBatchNorm(3)}.items():  # fmt: skip
    add(f"a frozen BatchNorm{name}", REFUSED, partial(frozen_batch_norm, norm),
        torch.randn(N, T, 5))  # fmt: skip
for again in (False, True):
    where = "a reentrant checkpoint" if again else "a Function of the user's"
    add(f"{where}: flipped", SILENT, lambda again=again: Model(
        lambda m, x: no_proof(lambda h: m.b(torch.tanh(h.flip(0))), again)(m.i(x)),
        i=nn.Linear(3, 3), b=nn.Linear(3, 2)), X3)  # fmt: skip
    add(f"{where}: apart", EXACT, lambda again=again: Model(
        lambda m, x: no_proof(m.b, again)(m.i(x)), i=nn.Linear(3, 3), b=mlp()), X3)  # fmt: skip
for beside in ("", " beside an actor"):  # which says nothing of the critics' order
    add(f"as many critics as samples{beside}", EXACT, lambda beside=beside: Model(
        lambda m, x: (m.critics @ x.T, m.actor(x) if beside else x), critics=torch.rand(N, 3),
        actor=nn.Linear(3, 2)), X3, loss=lambda m, x: sum(
            out.square().sum(d) for d, out in enumerate(m(x))).mean())  # fmt: skip
LOSS_ALONE = {  # verdicts with the extension, and without
    "": (X3, EXACT, EXACT),
    "T = N": (torch.randn(N, N, 3), REFUSED, REFUSED),
    "mixed": (X3, REFUSED, SILENT),
    "pairs": (X3, SILENT, SILENT),
}
for way, (x, *verdicts) in LOSS_ALONE.items():
    add(f"a loss alone {way}", verdicts[not ops.NATIVE], partial(loss_alone, way), x,
        loss=nn.Module.__call__)  # fmt: skip


def outcome(make, check, **options):
    model, loss, batch = make()
    model, batch = model.double(), [t.double() if t.is_floating_point() else t for t in batch]
    want = loop(copy.deepcopy(model), loss, *batch)
    got, refusal, _ = attempt(model, loss, *batch, check=check, **options)
    if refusal is not None:
        return REFUSED
    try:
        close_named(got, want)
    except AssertionError:
        return SILENT
    return EXACT


@pytest.mark.parametrize("name", MODELS)
def test_check_graph(name):
    make, verdict = MODELS[name]
    assert outcome(make, "graph") == verdict


@pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)
@pytest.mark.parametrize("name", MODELS)
def test_check_samples(name, options):
    make, verdict = MODELS[name]
    assert outcome(make, "samples", **options) == (EXACT if verdict == EXACT else REFUSED)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_pass_of_a_structure_is_as_the_first(name):
    """What is refused is refused again; what was checked is not checked twice."""
    make, verdict = MODELS[name]
    model, loss, batch = make()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with torchgradx.attach(model, check="samples") as probe:
        for _ in range(2):
            before = len(calls)
            loss(model, *batch).backward()
            probe.norms() if verdict == EXACT else refusal(probe)
    assert verdict != EXACT or len(calls) - before == 1


@pytest.mark.parametrize("way", [lambda x: x / x.std(0), lambda x: x - x.mean(0)])
def test_what_is_not_finite_proves_nothing(way):
    """A mismatch, if a sample is so alone only; else the next pass is checked."""
    model = before_a_layer(way)
    with torchgradx.attach(model, check="samples") as probe:
        square(model, X1.index_fill(0, torch.tensor(0), torch.nan)).backward()
        probe.reset()
        square(model, X1).backward()
        refusal(probe, "sample 0 alone")
