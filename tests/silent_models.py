"""Models that do something to their samples where no gradient shows it, and models that only look
as if they did.

MODELS = {name: (make, verdict under check="graph", verdict under check="samples")}; `make()` gives
(model, loss, batch). Verdicts: EXACT, REFUSED, and SILENT: accepted with norms that are not those
of the samples alone. Every SILENT of the first column is one that docs/limits.md names.
"""

import copy

import torch
import torch.nn.functional as F
from attach_oracle import Model, Same, mlp, square
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

EXACT, REFUSED, SILENT = "exact", "refused", "accepted, and not as alone"
N, T = 6, 4
LENGTHS = torch.tensor([2, 4, 3, 1, 4, 2])
CLASSES = torch.tensor([1, 1, 1, 2, 3, 2])


def by_a_mask(x):
    first = x[:, 0, 0] > x[:, 0, 0].mean()
    return torch.cat([x[first], x[~first]])


def longest_first(x):
    with torch.no_grad():
        return x[(x[..., 0] > 0).sum(1).argsort(descending=True)]


def normalised(x):
    return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()


DATA = {  # of data [N, T, 1], before the first layer
    "summed up": lambda x: x.cumsum(0),
    "a softmax over samples": lambda x: x.softmax(0),
    "batch statistics": normalised,
    "less the mean": lambda x: x - x.mean(0),
    "over the largest": lambda x: x / x.max(),
    "ranks": lambda x: (x > x.quantile(0.5, 0)).to(x),
    "attention over samples": lambda x: F.scaled_dot_product_attention(
        *[x.movedim(0, 1)] * 3).movedim(1, 0),
    "a branch by the mean": lambda x: x if x.mean() > 9 else x / (1 + (x.mean() < 9) * x.max()),
    "in the last sample's units": lambda x: x / (1 + x[-1].abs().sum()),
}  # fmt: skip
ORDERS = {  # of data [N, T, 1], before the first layer: norms would stand in the same order
    "flipped": lambda x: x.flip(0),
    "sorted by length": longest_first,
    "by a mask": by_a_mask,
    "by a matrix": lambda x: (torch.eye(len(x)).to(x).flip(0) @ x.flatten(1)).view_as(x),
    "put together in turn": lambda x: pad_sequence(list(x.unbind()[::-1]), batch_first=True),
}
DATA_APART = {  # of data [N, T, 1]
    "statistics of each": lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True),
    "turned and back": lambda x: x.flip(0).tanh().flip(0),
    "one by one": lambda x: torch.stack([row.cumsum(0) for row in x]),
    "a check of all": lambda x: x if bool((x.abs() < 1e9).all()) else x / 0,
    "looked at": lambda x: x + 0 * float(x.mean()),
}
IDS = {  # of ids [N, T]
    "padded and cut": lambda ids: F.pad(ids, (0, 0, 1, -1)),
    "how many are alike": lambda ids: (ids == ids[:1]).long() + ids % 2,
    "distinct ones": lambda ids: ids.unique(return_inverse=True)[1] % 9,
}
MEETINGS = {  # of activations h [N, 2] with d, of which no gradient is
    "likeness": lambda h, d: torch.cat([h, h @ d.T], 1)[:, :3],
    "contrast": lambda h, d: F.nll_loss(
        (h @ d.T).log_softmax(1), torch.arange(len(h)), reduction="none")[:, None],
    "memory": lambda h, d: (h @ d.T).softmax(1) @ d,
    "less the mean": lambda h, d: h - d.mean(0),
    "summed up": lambda h, d: h + d.cumsum(0),
    "above the mean": lambda h, d: h * (d > d.mean(0)),
}  # fmt: skip
MEETINGS_APART = {
    "a loss": lambda h, d: F.mse_loss(h, d, reduction="none"),
    "gates": lambda h, d: h * d.sigmoid() + d,
    "straight through": lambda h, d: h + (h.round() - h).detach(),
}
COUNTS = {  # of ids [N], a number for each sample
    "over the largest": lambda k: k / k.max(),
    "over the sum": lambda k: k / k.sum(),
    "how many of its class": lambda k: 1 / k.bincount()[k],
    "rank": lambda k: k.argsort().argsort().sqrt(),
}
FLAGS = {  # of ids [N]
    "as long as the longest": lambda k: (k == k.max())[:, None],
    "longer than the least": lambda k: (k - k.min() > 0)[:, None],
}


def largest_of_all(h):
    """The batch's top-k, as sparse autoencoders take it."""
    values, at = h.flatten().topk(len(h))
    return torch.zeros_like(h).flatten().scatter(0, at, values).view_as(h)


def chosen_by_experts(h):
    """Each column takes half of the batch."""
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
    "flipped": (lambda h: h + h.flip(0), REFUSED),
    "batch statistics": (normalised, REFUSED),
    "sent to experts": (sent_to_experts, EXACT),
    "turned and back": (lambda h: h.flip(0).tanh().flip(0), EXACT),
}


def queue(m, x):
    h = torch.tanh(m.r(x))
    m.queue[: len(h)] = h.detach()
    return h @ m.queue.T


def own_rows(m, x):
    h = torch.tanh(m.r(x))
    m.queue[: len(h)] = h.detach()
    return h * m.queue[: len(h)] + h


def with_queue(forward):
    model = Model(forward, r=nn.Linear(3, 2))
    model.register_buffer("queue", torch.randn(9, 2))
    return model


class OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def frozen_batch_norm(norm):
    frozen = nn.Sequential(nn.Conv1d(T, 3, 1), norm).requires_grad_(False)
    return nn.Sequential(frozen, nn.ReLU(), nn.Flatten(), nn.Linear(15, 2))


def no_proof(function, again):
    """`function` below a reentrant checkpoint or a Function of the user's: nothing is proven."""
    return (lambda x: checkpoint(function, x, use_reentrant=True)) if again else (
        lambda x: Same.apply(function(x)))  # fmt: skip


def loss_alone(mixes):
    def forward(m, x):
        h = torch.tanh(m.r(x))
        h = h - h.mean(0) if mixes else h
        return m.o(h).square().sum(1).mean()

    return Model(forward, r=nn.Linear(3, 2), o=nn.Linear(2, 2))


def as_returned(model, *batch):
    return model(*batch)


def before_a_layer(way):
    return Model(lambda m, x: torch.tanh(m.r(way(x))).flatten(1), r=nn.Linear(1, 2))


def meeting(way, frozen):
    def forward(m, x):
        h = torch.tanh(m.r(x))
        return way(h, m.frozen(x) if frozen else h.detach())

    return Model(forward, r=nn.Linear(3, 2), frozen=nn.Linear(3, 2).requires_grad_(False))


def table_by(way):
    return Model(lambda m, ids: m.l(m.e(way(ids))).flatten(1), e=nn.Embedding(9, 3),
                 l=nn.Linear(3, 2))  # fmt: skip


def scaled_by(way):
    return Model(lambda m, x, k: m.l(x * way(k)[:, None]), l=nn.Linear(3, 2))


def flagged(way, fill):
    def forward(m, x, k):
        h, flags = torch.tanh(m.r(x)), way(k)
        return m.l(h.masked_fill(flags, 0) if fill else h * flags)

    return Model(forward, l=nn.Linear(3, 2), r=nn.Linear(3, 3))


def between(way):
    return Model(lambda m, x: m.b(way(F.softplus(m.a(x)))), a=nn.Linear(4, 3), b=nn.Linear(3, 3))


MODELS = {}


def add(name, make, graph, samples, *batch, loss=square):
    MODELS[name] = (lambda: (make(), loss, batch), graph, samples)


torch.manual_seed(0)
X1, X3, X4 = (torch.randn(size) for size in ((N, T, 1), (N, 3), (N, 4)))
X1[1, :2], X1[3, 1:], X4[0] = -1.0, -1.0, X4[0] / 10
IDS_GIVEN = torch.randint(0, 9, (N, T))
for kind, ways, verdict in (("data", DATA, SILENT), ("an order", ORDERS, SILENT),
                            ("data apart", DATA_APART, EXACT)):  # fmt: skip
    for title, way in ways.items():
        make = lambda way=way: before_a_layer(way)  # noqa: E731
        add(f"{kind}: {title}", make, verdict, REFUSED if verdict == SILENT else EXACT, X1)
for title, way in IDS.items():
    add(f"ids: {title}", lambda way=way: table_by(way), SILENT, REFUSED, IDS_GIVEN)
for title, way in MEETINGS.items():
    for frozen in (False, True):
        make = lambda way=way, frozen=frozen: meeting(way, frozen)  # noqa: E731
        whose = "a frozen part" if frozen else "its detached"
        add(f"meets {whose}: {title}", make, SILENT, REFUSED, X3)
for title, way in MEETINGS_APART.items():
    add(f"meets its own: {title}", lambda way=way: meeting(way, True), EXACT, EXACT, X3)
for title, way in COUNTS.items():
    add(f"a count: {title}", lambda way=way: scaled_by(way), SILENT, REFUSED, X3, CLASSES)
for title, way in FLAGS.items():
    for fill in (False, True):
        make = lambda way=way, fill=fill: flagged(way, fill)  # noqa: E731
        add(f"flags{', filled' * fill}: {title}", make, SILENT, REFUSED, X3, LENGTHS)
for title, (way, verdict) in BETWEEN.items():
    make = lambda way=way: between(way)  # noqa: E731
    add(f"between: {title}", make, verdict, EXACT if verdict == EXACT else REFUSED, X4)
add("a queue that has this batch", lambda: with_queue(queue), SILENT, REFUSED, X3)
add("a buffer of its own rows", lambda: with_queue(own_rows), EXACT, EXACT, X3)
for title, norm in {"": nn.BatchNorm1d(3), " without weights": nn.BatchNorm1d(3, affine=False),
                    " of the user's": OwnBatchNorm(3)}.items():  # fmt: skip
    make = lambda norm=norm: frozen_batch_norm(copy.deepcopy(norm))  # noqa: E731
    add(f"a frozen BatchNorm{title}", make, REFUSED, REFUSED, torch.randn(N, T, 5))
for again in (False, True):
    where = "a reentrant checkpoint" if again else "a Function of the user's"
    make = lambda again=again: Model(  # noqa: E731
        lambda m, x: no_proof(lambda h: m.b(torch.tanh(h.flip(0))), again)(m.i(x)),
        i=nn.Linear(3, 3), b=nn.Linear(3, 2))  # fmt: skip
    add(f"{where}: flipped", make, SILENT, REFUSED, X3)
    make = lambda again=again: Model(  # noqa: E731
        lambda m, x: no_proof(m.b, again)(m.i(x)), i=nn.Linear(3, 3), b=mlp()
    )
    add(f"{where}: apart", make, EXACT, EXACT, X3)
add("a loss alone", lambda: loss_alone(False), EXACT, EXACT, X3, loss=as_returned)
add("a loss alone, mixed", lambda: loss_alone(True), SILENT, REFUSED, X3, loss=as_returned)
