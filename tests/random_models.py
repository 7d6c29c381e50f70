"""Models drawn at random. `Shared`: what all samples share, met in several branches and layouts.
`Outputs`: a module with parameters of its own that returns outputs made from one another."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

I, D = 3, 4
LONGEST = 8  # positions

# What all samples share, for the first t positions: [t, D], of a `Shared` and t
SOURCES = {
    "a table, called": lambda m, t: m.table(torch.arange(t)),
    "a parameter": lambda m, t: m.w[:t],
    "a Linear of a table": lambda m, t: torch.tanh(m.linear(m.table(torch.arange(t)))),
    "a norm of a parameter": lambda m, t: m.norm(m.w)[:t],
    "a Linear of a constant": lambda m, t: m.linear(m.constant[:t]) * m.w[:t],
    "a row for all": lambda m, t: m.v * m.constant[:t],
}

# Where samples meet it: of the model, h [N, T, D] and s [T, D]
MEETINGS = {
    "added": lambda m, h, s: h + s,
    "multiplied": lambda m, h, s: h * s * m.v,
    "times a constant": lambda m, h, s: s * m.constant[: len(s)] * h,
    "expanded": lambda m, h, s: torch.tanh(s.expand(h.shape) + h),
    "einsum": lambda m, h, s: torch.einsum("ntd,td->ntd", h, s),
    "scored": lambda m, h, s: torch.softmax(h @ s.t(), -1) @ s,
    "queried": lambda m, h, s: m.attention(s.expand(h.shape), h, h)[0],
    "a block": lambda m, h, s: m.block(h + s),
    "positions first": lambda m, h, s: (h.transpose(0, 1) * s[:, None]).transpose(0, 1),
    "a block, positions first": lambda m, h, s: m.second(h.transpose(0, 1) + s[:, None]
                                                         ).transpose(0, 1),
}  # fmt: skip

ENDS = {
    "one": lambda m, branches: m.head(sum(branches)),
    "two": lambda m, branches: (m.head(branches[0]), sum(branches)),
    "a dict": lambda m, branches: {"logits": m.head(sum(branches)), "branches": branches},
    "the branches": lambda m, branches: tuple(branches),
}


def _block(**options):
    return nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, **options)


class Shared(nn.Module):
    """x [N, T, I] to what `ENDS` says."""

    def __init__(self, rng):
        super().__init__()
        self.embed, self.linear, self.head = nn.Linear(I, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.table, self.norm = nn.Embedding(LONGEST, D), nn.LayerNorm(D)
        self.w, self.v = nn.Parameter(torch.randn(LONGEST, D)), nn.Parameter(torch.randn(D))
        self.block, self.second = _block(batch_first=True), _block()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.register_buffer("constant", torch.randn(LONGEST, D))
        sources = rng.choices(list(SOURCES), k=2)
        meetings = rng.choices(list(MEETINGS), k=rng.randint(1, 4))
        self.branches = [(rng.choice(sources), meeting) for meeting in meetings]
        self.end, self.checkpointed = rng.choice(list(ENDS)), rng.random() < 0.2

    def forward(self, x):
        h, made = self.embed(x), {}
        branches = []
        for source, meeting in self.branches:
            if source not in made:
                made[source] = SOURCES[source](self, x.shape[1])
            branches.append(self._meet(MEETINGS[meeting], h, made[source]))
        return ENDS[self.end](self, branches)

    def _meet(self, meet, h, shared):
        if self.checkpointed:
            return checkpoint(meet, self, h, shared, use_reentrant=False)
        return meet(self, h, shared)


# What an output is made from: of a `_Chain`, a vector of its parameters and two earlier outputs
STEPS = {
    "scaled": lambda m, p, a, b: a * p,
    "shifted": lambda m, p, a, b: torch.tanh(a + p),
    "a Linear": lambda m, p, a, b: m.linear(a),
    "a sum": lambda m, p, a, b: a.sigmoid() + b,
    "a product": lambda m, p, a, b: a * b,
    "a class token": lambda m, p, a, b: torch.cat([p.expand(len(a), 1, D), a], 1).mean(
        1, keepdim=True) + b,
    "cut off": lambda m, p, a, b: a.detach() * p + b,
    "a view": lambda m, p, a, b: a.flip(-1).view_as(a),
    "attention": lambda m, p, a, b: torch.softmax(a @ b.transpose(1, 2), -1) @ (b * p),
    "in place": lambda m, p, a, b: (a.clone().mul_(2) + p).relu_(),
    "a chain's first": lambda m, p, a, b: m.inner(a)[0] if m.inner else a + p.exp(),
}  # fmt: skip

USES = {
    "not": lambda total, output: total,
    "added": lambda total, output: total + output,
    "squared": lambda total, output: total + output.square(),
    "multiplied": lambda total, output: total * output + output.sin(),
}


class _Chain(nn.Module):
    def __init__(self, rng, inner):
        super().__init__()
        for name in "pqr":
            setattr(self, name, nn.Parameter(torch.randn(D)))
        self.linear = nn.Linear(D, D)
        self.inner = _Chain(rng, False) if inner else None
        self.steps = [
            (step, rng.choice("pqr"), rng.randrange(k + 1), rng.randrange(k + 1))
            for k, step in enumerate(rng.choices(list(STEPS), k=rng.randint(2, 7)))
        ]
        self.returned = rng.choices(range(1, len(self.steps) + 1), k=rng.randint(2, 4))

    def forward(self, x):
        made = [x]
        for step, name, first, second in self.steps:
            made.append(STEPS[step](self, getattr(self, name), made[first], made[second]))
        return tuple(made[k] for k in self.returned)


class Outputs(nn.Module):
    """x [N, T, I] to three outputs, the root having a parameter; or to one."""

    def __init__(self, rng):
        super().__init__()
        self.embed, self.head = nn.Linear(I, D), nn.Linear(D, 2)
        self.chain = _Chain(rng, rng.random() < 0.3)
        self.uses = ["added", *rng.choices(list(USES), k=len(self.chain.returned) - 1)]
        self.checkpointed = rng.random() < 0.2
        self.w = nn.Parameter(torch.randn(D)) if rng.random() < 0.4 else None

    def forward(self, x):
        h = self.embed(x)
        if self.checkpointed:
            outputs = checkpoint(self.chain, h, use_reentrant=False)
        else:
            outputs = self.chain(h)
        total = 0
        for use, output in zip(self.uses, outputs, strict=True):
            total = USES[use](total, output)
        if self.w is None:
            return self.head(total)
        return self.head(total * self.w), outputs[0], total
