"""Models with parts that all samples share, and the ways in which samples come in there."""

import torch
import torch.nn.functional as F
from attach_models import Model
from torch import nn

N, T, D = 4, 5, 6
TOKENS = 7


def tokens(n=N, t=T):
    return torch.randint(0, TOKENS, (n, t))


def placed(places, table=None):
    """Tokens' rows, and what `places` of (model, ids, ...) reads of another table."""
    return Model(lambda m, i, *more: m.o(torch.tanh(m.t(i) + places(m, i, *more))),
                 t=nn.Embedding(TOKENS, D), p=table or nn.Embedding(2 * N, D),
                 o=nn.Linear(D, 2))  # fmt: skip


def positional(ids=lambda t: torch.arange(t)[None]):
    """A GPT's first layers."""
    return placed(lambda m, i: m.p(ids(i.shape[1])))


def constant(use, shape=(T, D), **parts):
    """A model that holds a constant; `use` of (model, x)."""
    model = Model(use, **{"o": nn.Linear(D, 2), **parts})
    model.register_buffer("c", torch.randn(shape))
    return model


def against_all(m, x):
    return m.o(torch.softmax(x @ m.l(m.c).T, -1) @ m.c)


def patches(m, x):
    h = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], 1)
    h = h + m.positions[:, : h.shape[1]]
    h = h + m.scale * torch.tanh(m.block(h))
    return m.head(h[:, 0])


def vision_transformer():
    """Its parameters beside its modules: class token, positions, layer scale."""
    return Model(patches, token=torch.randn(1, 1, D), positions=torch.randn(1, T + 1, D),
                 scale=torch.randn(D), embed=nn.Linear(3, D), block=nn.Linear(D, D),
                 head=nn.Linear(D, 2))  # fmt: skip


def in_place(y, change):
    change(y)
    return y


# Where samples come in: of x [N, T, D] and s [T, D]
WAYS = {
    "added": lambda x, s: x + s, "added, scaled": lambda x, s: torch.add(x, s, alpha=3),
    "subtracted": lambda x, s: torch.sub(x, s, alpha=3), "multiplied": lambda x, s: x * s,
    "divided by": lambda x, s: x / (s.square() + 1), "in place": lambda x, s: (x * 2).add_(s),
    "into a part": lambda x, s: in_place(x * 2, lambda y: y[:, 1:].add_(s[1:])),
    "expanded": lambda x, s: x * s.expand(x.shape),
    "one row": lambda x, s: x + s[:1].expand(x.shape), "one number": lambda x, s: x * s.sum(),
    "one column": lambda x, s: x * s[:, :1],
    "repeated": lambda x, s: torch.cat([x, s.repeat(len(x), 1, 1)], 1),
    "rows repeated": lambda x, s: x.flatten(0, 1).mul(s.repeat(len(x), 1)).view(x.shape),
    "stacked": lambda x, s: torch.stack([s + x[k] for k in range(len(x))]),
    "matmul": lambda x, s: x @ s.T @ s,
    "addmm": lambda x, s: torch.addmm(s[0], x.flatten(0, 1), s.T @ s, beta=2, alpha=3).view_as(x),
    "einsum": lambda x, s: torch.einsum("ntd,sd->nts", x, s) @ s,
    "einsum, by heads": lambda x, s: torch.einsum("lhd,nthd->nhlt", s.unflatten(-1, (2, -1)),
                                                  x.unflatten(-1, (2, -1))).sum(1) @ x,
    "heads apart": lambda x, s: torch.einsum("nthd,lhd->ntlh", x.unflatten(-1, (2, -1)),
                                             s.unflatten(-1, (2, -1))).sum(-1) @ s,
    "heads apart, samples second": lambda x, s: torch.einsum(
        "tnhd,lhd->tlnh", x.transpose(0, 1).unflatten(-1, (2, -1)),
        s.unflatten(-1, (2, -1))).sum(-1).permute(2, 0, 1) @ s,
    "relative positions": lambda x, s: torch.einsum(
        "nhtd,tld->nhtl", x.unflatten(-1, (2, -1)).transpose(1, 2),
        (s[:, None] - s).unflatten(-1, (2, -1))[:, :, 0]).softmax(-1).sum(1) @ x,
    "columns": lambda x, s: (s @ x.flatten(0, 1).T).T.reshape(len(x), -1, len(s)) @ s,
    "from the left": lambda x, s: torch.softmax(s @ s.T, -1) @ x,
    "bmm": lambda x, s: torch.bmm(x, s.T.expand(len(x), -1, -1)) @ s,
    "attention": lambda x, s: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None],
                                                             attn_mask=s @ s.T)[:, 0],
    "between": lambda x, s: torch.lerp(x, s, 0.3) + torch.clamp(x, -s.exp(), s.exp()),
    "powers": lambda x, s: x.exp() ** s + s.exp() ** x + F.prelu(x.mT, s.mean(0)).mT,
    "maximum": lambda x, s: torch.maximum(x, s), "where": lambda x, s: torch.where(x > 0, x, s),
    "norm": lambda x, s: F.layer_norm(x, (D,), s[0], s[1]),
    "transposed": lambda x, s: (x.transpose(0, 1) + s[:, None]).transpose(0, 1),
    "rows t*N+n": lambda x, s: (x.transpose(0, 1).flatten(0, 1) * s.repeat_interleave(len(x), 0)
                                ).unflatten(0, (-1, len(x))).transpose(0, 1),
    "indexed": lambda x, s: x + s[(x[..., 0] > 0).long()],
}  # fmt: skip
