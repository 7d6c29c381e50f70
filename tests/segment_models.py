"""Models whose rows are not one per sample: sets, graphs, packed documents.

A case draws samples of given sizes, calls a model on all of them joined, and on one alone.
"""

from types import MappingProxyType

import torch
from attach_models import Model, rms_norm
from torch import nn
from torch.nn import functional as F

D, CLASSES, WORDS = 6, 3, 23


def spread(sizes):
    """The sample of each row."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long))


def packed_row(lengths, size):
    """Document ids of a row, padded with -1, and the positions in its documents."""
    at = torch.cat([torch.arange(length) for length in [0, *lengths]])
    rest = 0, size - len(at)
    return F.pad(spread(lengths), rest, value=-1), F.pad(at, rest)


def deep_set(pool="index_add"):
    def forward(m, x, ids, n):
        m.unused(x)
        return m.b(pooled(torch.relu(m.n(m.a(x))), ids, n, pool))

    return Model(forward, a=nn.Linear(D, 8), n=nn.LayerNorm(8), b=nn.Linear(8, CLASSES),
                 unused=nn.Linear(D, 2))  # fmt: skip


def pooled(h, rows, n, how):
    zeros = h.new_zeros(n, h.shape[1])
    if how == "index_add":
        return zeros.index_add(0, rows, h)
    wide = rows[:, None].expand_as(h)
    if how == "scatter_add":
        return zeros.scatter_add(0, wide, h)
    if how == "split":
        sizes = torch.bincount(rows, minlength=n).tolist()
        return torch.stack([part.mean(0) for part in h.split(sizes)])
    return zeros.scatter_reduce(0, wide, h, how, include_self=False)


def looking(m, x, ids, n):
    """Layers of images, one of them in two uses: a row is an image."""
    x = x.view(-1, 1, 2, 3)
    h = m.slope(m.norm(m.conv(x) + m.conv(x.flip(-1)) * 2))
    h = torch.cat([m.up(h).mean((2, 3)), m.patch(x[:, :, None]).flatten(1)], 1)
    bags = m.bag((x.flatten(1) > 0).long())
    return m.out(pooled(torch.cat([torch.tanh(h), bags.to(h.dtype)], 1), ids, n, "index_add"))


def placing(m, words, x, ids=None):
    """Rows of an image take the places of the words 0, as in language models that see."""
    h, rows = m.emb(words), m.patch(x.view(-1, 1, 1, 2, 3)).flatten(1)
    at = (words == 0)[..., None].expand_as(h)
    h = h.masked_scatter(at, m.b(torch.tanh(m.a(rows))).to(h))
    return m.out(torch.tanh(h).mean(1))


def patching(m, x):
    rows = m.patch(x.view(-1, 1, 2, 3)).flatten(2).mT
    return torch.cat([m.first.expand(len(x), 1, 8), rows], 1) + m.at(torch.arange(13)[None])


def seeing(m, words, x, ids=None):
    """Any number of images a sample, seen through a tower with positions of its own."""
    h, rows = m.emb(words), m.tower(m.patches(x), None)[:, 1:]
    rows = rows.view(-1, 3, 2, 16).flatten(1, 2)  # as a pixel shuffle does first
    h = h.masked_scatter((words == 0)[..., None].expand_as(h), m.b(rows).to(h))
    return m.out(m.block(h, None)), rows


def attending(m, x, ids, n):
    """Attention pooling of bags: a softmax over the rows of each bag."""
    score = m.s(x).squeeze(-1).exp()
    weight = score / score.new_zeros(n).index_add(0, ids, score)[ids]
    return m.o(pooled(m.v(x) * weight[:, None], ids, n, "index_add"))


def passing(m, x, src, dst, weight):
    """Messages to neighbours, between parameters that no layer has."""
    h = m.lin(x)
    near = torch.zeros_like(h).index_add(0, dst, weight.to(h.dtype) * h[src])
    return ((1 + m.eps) * h + near + m.bias).to(h.dtype)


def convolve(m, x, edges, ids, n):
    src, dst = edges
    ones = x.new_ones(len(x) + len(dst))
    degree = ones[: len(x)].index_add(0, dst, ones[len(x) :])
    norm = (degree[src] * degree[dst]).rsqrt()
    h = torch.relu(m.gcn(x, src, dst, norm[:, None]))
    zeros, wide = torch.zeros_like(h), dst[:, None].expand(-1, 8)
    h = h + zeros.index_add(0, dst, m.first(torch.cat([x[src], x[dst] - x[src]], 1)))
    mean = zeros.scatter_reduce(0, wide, h[src], "mean", include_self=False)
    h = torch.relu(m.root(h) + m.sage(mean))
    h = m.gin(h + zeros.index_add(0, dst, F.embedding(src, h)))
    edge = torch.tanh(m.edge(torch.cat([h[dst], h[src] - h[dst]], 1)))
    h = zeros.scatter_reduce(0, wide, edge, "amax", include_self=False)
    return m.out(pooled(h, ids, n, "mean"))


def convolving():
    """GCN-, SAGE- and GIN-like layers, and one that looks at edges (EdgeConv)."""
    sizes = {"sage": (8, 8), "root": (8, 8), "edge": (16, 8), "first": (2 * D, 8)}
    layers = {name: nn.Linear(*size) for name, size in sizes.items()}
    gin = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    gcn = Model(passing, lin=nn.Linear(D, 8), eps=torch.rand(1), bias=torch.rand(8))
    return Model(convolve, **layers, gcn=gcn, gin=gin, out=nn.Linear(8, CLASSES))


def encoder():
    """A layer of torch's own, whose attention has the sequences first."""

    def forward(m, tokens, positions, ids=None, joins=False):
        mask = None
        if ids is not None and not joins:
            mask = (ids[:, :, None] != ids[:, None, :]).repeat_interleave(2, 0)
        return m.out(m.layer(m.emb(tokens), src_mask=mask))

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Model(forward, emb=nn.Embedding(WORDS, 8), layer=layer, out=nn.Linear(8, WORDS))


def ring(size, more, generator):
    src = torch.arange(size)
    edges = torch.stack([src, (src + 1) % size])
    extra = torch.randint(0, size, (2, more), generator=generator)
    return torch.cat([edges, extra], 1)


def attend(m, x, mask, heads=2):
    b, t, c = x.shape
    parts = m.qkv(m.ln1(x)).split(c, 2)
    q, k, v = (part.view(b, t, heads, c // heads).transpose(1, 2) for part in parts)
    q, k = m.qn(q), m.kn(k)  # heads before positions
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    x = x + m.proj(y.transpose(1, 2).reshape(b, t, c))
    return x + m.down(F.gelu(m.up(m.ln2(x))))


def block(width):
    return Model(attend, ln1=nn.LayerNorm(width), ln2=nn.LayerNorm(width),
                 qn=rms_norm(width // 2), kn=nn.LayerNorm(width // 2),
                 qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width),
                 up=nn.Linear(width, 2 * width), down=nn.Linear(2 * width, width))  # fmt: skip


def routed(m, x):
    """Each row chooses a matrix of one parameter by another parameter; the first one twice."""
    f = x.flatten(0, 1)
    weight, top = F.linear(f, m.by).softmax(-1).max(-1)
    for k in (0, 1, 2, 0):
        rows = (top == k).nonzero()[:, 0]
        f = f.index_add(0, rows, (f[rows] @ m.of[k]).to(f.dtype) * weight[rows, None].to(f.dtype))
    return f.view(x.shape)


def gpt(tied=True, layers=2, width=12):
    def forward(m, tokens, positions, ids=None, joins=False):
        mask = torch.ones(*tokens.shape[1:] * 2, dtype=torch.bool).tril()[None]
        if ids is not None and not joins:
            mask = mask & (ids[:, :, None] == ids[:, None, :])
        h = m.wte(tokens) + m.wpe(positions)
        for block in m.blocks:
            h = block(h, None if joins == "causal" else mask[:, None])
        h, w = m.ln(m.routed(m.rolled(h))), m.head.weight
        return F.linear(h, w, w.sum(1)) if tied == "by function" else m.head(h)

    rolled = Model(lambda m, x: x + (m.weight * x.roll(1, 1)).roll(-1, 1), weight=torch.ones(width))
    scaled = Model(lambda m, ids: F.embedding(ids, m.weight, 1) * 2, weight=torch.randn(32, width))
    model = Model(forward, wte=nn.Embedding(WORDS, width), wpe=scaled,
                  blocks=nn.ModuleList(block(width) for _ in range(layers)),
                  routed=Model(routed, by=torch.randn(3, width), of=torch.randn(3, width, width)),
                  rolled=rolled, ln=rms_norm(width),
                  head=nn.Linear(width, WORDS, bias=False))  # fmt: skip
    if tied is True:
        model.head.weight = model.wte.weight
    return model


class Case:
    """Samples of a model: `batch` calls it on all of them, `alone` on one."""

    options = MappingProxyType({"sample_ids": lambda args, kwargs: kwargs["ids"]})

    def draw(self, sizes, generator, dtype=torch.float64):
        self.sizes, self.n = sizes, len(sizes)
        self.x = torch.randn(sum(sizes), D, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, CLASSES, (self.n,), generator=generator)
        self.ids = spread(sizes)
        return self

    def loss(self, out, y):
        return F.cross_entropy(out, y)

    def loss_of_one(self, out, y):
        return F.cross_entropy(out, y[None])


class Sets(Case):
    def __init__(self, pool, shuffled=True):
        self.pool, self.shuffled = pool, shuffled

    def model(self):
        if self.pool == "images":
            return Model(looking, conv=nn.Conv2d(1, 4, 2, padding=1), norm=nn.GroupNorm(2, 4),
                         slope=nn.PReLU(4), up=nn.ConvTranspose2d(4, 3, 2, 2),
                         bag=nn.EmbeddingBag(2, 2), patch=nn.Conv3d(1, 4, (1, 2, 3)),
                         out=nn.Linear(9, CLASSES))  # fmt: skip
        if self.pool == "twice":
            return Model(lambda m, x, ids, n: m.b(pooled(m.a(m.a(x).tanh()), ids, n, "index_add")),
                         a=nn.Linear(D, D), b=nn.Linear(D, CLASSES))  # fmt: skip
        if self.pool != "softmax":
            return deep_set(self.pool)
        return Model(attending, v=nn.Linear(D, 8), s=nn.Linear(D, 1), o=nn.Linear(8, CLASSES))

    def draw(self, sizes, generator, dtype=torch.float64):
        super().draw(sizes, generator, dtype)
        if self.shuffled:
            self.ids = self.ids[torch.randperm(len(self.ids), generator=generator)]
        return self

    def batch(self, model):
        return model(self.x, ids=self.ids, n=self.n)

    def alone(self, model, k):
        x = self.x[self.ids == k]
        return model(x, ids=torch.zeros(len(x), dtype=torch.long), n=1)


class Placed(Case):
    def __init__(self, **options):
        self.options = options

    def model(self):
        return Model(placing, emb=nn.Embedding(WORDS, 8), patch=nn.Conv3d(1, 5, (1, 2, 3)),
                     a=nn.Linear(5, 5), b=nn.Linear(5, 8), out=nn.Linear(8, CLASSES))  # fmt: skip

    def words(self):
        at = torch.arange(max(self.sizes) + 4)
        return torch.where((at > 0) & (at <= torch.tensor(self.sizes)[:, None]), 0, at % 20 + 1)

    def batch(self, model):
        words = self.words()
        return model(words, self.x, ids=torch.arange(self.n)[:, None].expand_as(words))

    def alone(self, model, k):
        return model(self.words()[k : k + 1], self.x[self.ids == k])


class Seen(Case):
    def model(self):
        patches = Model(patching, patch=nn.Conv2d(1, 8, 2, padding=1), at=nn.Embedding(13, 8),
                        first=torch.randn(8))  # fmt: skip
        return Model(seeing, emb=nn.Embedding(WORDS, 8), patches=patches, tower=block(8),
                     b=nn.Linear(16, 8), block=block(8), out=nn.Linear(8, CLASSES))  # fmt: skip

    def see(self, model, sizes, x):
        at = torch.arange(6 * max(self.sizes) + 2)
        words = torch.where(at < 6 * torch.tensor(sizes)[:, None], 0, at % 20 + 1)
        out, _ = model(words, x, ids=torch.arange(len(sizes))[:, None].expand_as(words))
        return out.mean(1)

    def batch(self, model):
        return self.see(model, self.sizes, self.x)

    def alone(self, model, k):
        return self.see(model, [self.sizes[k]], self.x[self.ids == k])


class Graphs(Case):
    model = staticmethod(convolving)

    def __init__(self, more=2):
        self.more = more

    def draw(self, sizes, generator, dtype=torch.float64):
        super().draw(sizes, generator, dtype)
        self.own = [ring(size, self.more, generator) for size in sizes]
        starts = [sum(sizes[:k]) for k in range(self.n)]
        self.edges = torch.cat([e + start for e, start in zip(self.own, starts, strict=True)], 1)
        return self

    def batch(self, model):
        return model(self.x, self.edges, ids=self.ids, n=self.n)

    def alone(self, model, k):
        x = self.x[self.ids == k]
        return model(x, self.own[k], ids=torch.zeros(len(x), dtype=torch.long), n=1)


class Packed(Case):
    """Documents in rows of one length: sizes by row. Padding is what is left of a row."""

    joins = False  # documents of a row see each other

    def __init__(self, tied=True, make=None):
        self.model = make or (lambda: gpt(tied))

    def draw(self, sizes, generator, dtype=torch.float64):
        rows = [packed_row(lengths, max(map(sum, sizes))) for lengths in sizes]
        ids, self.at = map(torch.stack, zip(*rows, strict=True))
        counts = torch.tensor([*map(len, sizes)])
        first, self.n = (counts.cumsum(0) - counts)[:, None], int(counts.sum())
        self.ids = torch.where(ids < 0, ids, ids + first)
        self.x = torch.randint(0, WORDS, self.ids.shape, generator=generator)
        words = torch.randint(0, WORDS, self.ids.shape, generator=generator)
        self.y = [words[self.ids == k] for k in range(self.n)]
        return self

    def batch(self, model):
        return model(self.x, self.at, ids=self.ids, joins=self.joins)

    def alone(self, model, k):
        one = self.ids == k
        return model(self.x[one][None], self.at[one][None])[0]

    def loss(self, out, y):
        each = [F.cross_entropy(out[self.ids == k], y[k]) for k in range(self.n)]
        return torch.stack(each).mean()

    def loss_of_one(self, out, y):
        return F.cross_entropy(out, y)


SIZES = [[3, 4, 2], [2, 3, 4], [1, 40], [2, 5, 7, 1], [4], [1, 1, 1, 1], [3, 3, 3]]
ROWS = [
    [[3, 4, 2]], [[5, 3, 1]], [[3, 4, 2], [1, 6, 2]], [[2, 7], [6]], [[9], [8]], [[3, 4], [5, 4]],
    [[7]],
]  # fmt: skip
CASES = {
    "index_add": (lambda: Sets("index_add"), SIZES), "images": (lambda: Sets("images"), SIZES),
    "scatter_add": (lambda: Sets("scatter_add"), SIZES), "mean": (lambda: Sets("mean"), SIZES),
    "amax": (lambda: Sets("amax"), SIZES), "split": (lambda: Sets("split", shuffled=False), SIZES),
    "softmax": (lambda: Sets("softmax"), SIZES), "graphs": (Graphs, SIZES[:5] + SIZES[6:]),
    "rings": (lambda: Graphs(0), [[3, 4, 2], [5, 4], [2, 5, 2], [9]]), "placed": (Placed, SIZES),
    "seen": (Seen, [[2, 1, 0, 1], [1, 0, 2], [3], [1, 1, 1, 1], [0, 2, 1], [2, 2]]),
    "placed, ids": (lambda: Placed(**Case.options), SIZES), "packed, tied": (Packed, ROWS),
    "packed": (lambda: Packed(tied=False), ROWS), "encoder": (lambda: Packed(make=encoder), ROWS),
    "packed, by function": (lambda: Packed("by function"), ROWS),
    "twice": (lambda: Sets("twice"), [[*range(1, 19)], [3, 4, 2], [*range(20, 0, -1)]]),
}  # fmt: skip


class Experts(nn.Module):
    """A mixture of experts that are given the rows of their tokens."""

    def __init__(self, way="index_add", experts=4):
        super().__init__()
        self.at = nn.Embedding(16, 8) if way == "positions" else None
        self.emb, self.ln = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.router, self.head = nn.Linear(8, experts), nn.Linear(8, WORDS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(experts)
        )
        self.way = way

    def forward(self, tokens):
        h = self.emb(tokens)
        if self.at is not None:  # a table that all samples share
            h = h + self.at(torch.arange(tokens.shape[1])[None])
        h = self.ln(h)
        f = h.flatten(0, 1)
        weight, top = self.router(f).softmax(-1).topk(2, -1)
        y, q = torch.zeros_like(f), f.new_zeros(2 * len(f), 8)
        more = [self.experts[0]] * (self.way == "by choice")  # with no rows
        for k, expert in enumerate([*self.experts, *more]):
            rows, slot = (top == k).nonzero(as_tuple=True)
            if self.way == "heads" and len(rows):
                q = q.index_add(0, 2 * rows + slot, expert(f[rows]))
            if self.way in ("index_add", "positions", "tied") and len(rows):
                y = y.index_add(0, rows, expert(f[rows]) * weight[rows, slot, None])
            elif self.way == "by choice":
                slot, rows = (top == k).T.nonzero(as_tuple=True)  # first choices first
                part = expert(f[None, rows].flatten(0, 1))
                y = y.index_add(0, rows, part * weight[rows, slot, None])
            elif self.way == "put" and len(rows):
                y[rows] = y[rows] + expert(f[rows]) * weight[rows, slot, None]
            elif self.way == "mask":
                mask = (top == k).any(-1)
                out = torch.zeros_like(f)
                out[mask] = expert(f[mask])
                y = y + out * torch.where(top == k, weight, 0).sum(-1, keepdim=True)
        if self.way == "heads":  # as JetMoE's: each choice makes two heads
            q = q.view(*h.shape[:2], 4, 4).transpose(1, 2)
            y = (q @ q.mT).softmax(-1).matmul(q).transpose(1, 2).unflatten(2, (2, 2)).sum(2)
        h = h + y.reshape(h.shape)
        return F.linear(h, self.emb.weight) if self.way == "tied" else self.head(h)
