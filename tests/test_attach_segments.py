"""Rows that stand flattened, and are put together by sample: as long as values alone say where each
sample's end, a batch that cuts them otherwise is not held for proven by one before it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or,
    square_second,
)
from flat_rows import of_each, owned
from torch import nn

import torchgradx
from torchgradx import ops


def apart(k):
    """[N, rows, 1]: flags of the rows that are not a sample's."""
    return owned(k)[..., None] == 0


def weighed(m, h, k):
    """By a softmax over each sample's own rows."""
    scores = m.score(h)[:, 0].expand(len(k), -1)
    return scores.masked_fill(apart(k)[..., 0], -math.inf).softmax(-1) @ h


def attended(m, h, k):
    """Each row to the others of its sample, then summed."""
    scores = (h @ h.T).masked_fill(owned(k).T @ owned(k) == 0, -math.inf)
    return owned(k) @ (scores.softmax(-1) @ h)


def pooled(m, h, k):
    """By torch's attention, of one query that a sample has."""
    query = m.score.weight.expand(len(k), -1)
    q, kv = query[None, None], h[None, None]
    return F.scaled_dot_product_attention(q, kv, kv, attn_mask=owned(k)[None, None] > 0)[0, 0]


def chosen(m, h, k):
    """The row of each that scores most."""
    best = m.score(h)[None].masked_fill(apart(k), -math.inf).argmax(1, keepdim=True)
    return h.expand(len(k), -1, -1).gather(1, best.expand(-1, -1, 4))[:, 0]


def beside_rest(m, h, k):
    index = 1 + torch.arange(len(k)).repeat_interleave(k)
    rows = h.new_zeros(1, len(k) + 1, 4)
    return rows.scatter_add(1, index[None, :, None].expand(1, -1, 4), h[None])[0, 1:]


def coalesced(m, h, k):
    index = torch.arange(len(k)).repeat_interleave(k)
    return torch.sparse_coo_tensor(index[None], h, (len(k), 4)).to_dense()


def in_groups(m, h, k):
    """Summed into groups of rows, and these into samples."""
    within = [torch.arange(int(n)) * 2 // int(n) for n in k]
    groups = torch.cat([2 * i + group for i, group in enumerate(within)])
    sums = h.new_zeros(2 * len(k) + 1, 4).index_add(0, groups, h)
    return h.new_zeros(len(k), 4).index_add(0, torch.arange(2 * len(k)) // 2, sums[:-1])


SEGMENTS = {  # of rows [rows, 4] and how many are of each
    "reduced": lambda m, h, k: torch.segment_reduce(h, "sum", lengths=k),
    "reduced by offsets": lambda m, h, k: torch.segment_reduce(
        h, "sum", offsets=F.pad(k.cumsum(0), (1, 0))),
    "bags": lambda m, h, k: F.embedding_bag(torch.arange(len(h)), h, k.cumsum(0) - k, mode="sum"),
    "pieces": lambda m, h, k: torch.stack([rows.sum(0) for rows in h.split(k.tolist())]),
    "product": lambda m, h, k: owned(k) @ h,
    "means": lambda m, h, k: (owned(k) / k[:, None]) @ h,
    "from the right": lambda m, h, k: (h.T @ owned(k).T).T,
    "linear": lambda m, h, k: F.linear(owned(k), h.T),
    "addmm": lambda m, h, k: torch.addmm(h.new_ones(len(k), 4), owned(k), h),
    "baddbmm": lambda m, h, k: torch.baddbmm(h.new_ones(1, 1, 4), owned(k)[None], h[None])[0],
    "einsum": lambda m, h, k: torch.einsum("nr,rd->nd", owned(k), h),
    "sparse": lambda m, h, k: torch.sparse.mm(owned(k).to_sparse(), h),
    "vectors": lambda m, h, k: torch.stack([owned(k).mv(one) for one in h.unbind(1)], 1),
    "with a gradient": lambda m, h, k: (owned(k) * m.score(h)[:, 0].sigmoid()) @ h,
    "factors": lambda m, h, k: (owned(k)[..., None] * h).sum(1),
    "where": lambda m, h, k: torch.where(apart(k), 0.0, h).sum(1),
    "filled": lambda m, h, k: h.expand(len(k), -1, -1).masked_fill(apart(k), 0).sum(-2),
    "largest": lambda m, h, k: h[None].masked_fill(apart(k), -math.inf).amax(1),
    "largest of a sum": lambda m, h, k: (h + -1e9 * apart(k)).max(1).values,
    "logsumexp": lambda m, h, k: h[None].masked_fill(apart(k), -math.inf).logsumexp(1),
    "permuted": lambda m, h, k: (h[..., None].permute(1, 2, 0) * owned(k)).sum(-1).T,
    "transposed": lambda m, h, k: (h.transpose(0, 1)[:, None] * owned(k)).sum(2).T,
    "after a sum": lambda m, h, k: owned(k) @ h.expand(2, -1, -1).sum(0),
    "squeezed": lambda m, h, k: owned(k) @ h[None].squeeze(0),
    "selected": lambda m, h, k: owned(k) @ torch.stack([h, h], -1)[..., 1],
    "attention of queries": pooled,
    "chosen": chosen,
    "topk": lambda m, h, k: h[None].masked_fill(apart(k), -9).topk(1, 1).values[:, 0],
    "sorted": lambda m, h, k: h[None].masked_fill(apart(k), -9).sort(1, True).values[:, 0],
    "scanned": lambda m, h, k: (owned(k)[..., None] * h).cumsum(1)[:, -1],
    "beside a row": lambda m, h, k: F.pad(owned(k), (1, 0)) @ torch.cat([h.new_ones(1, 4), h]),
    "padded": lambda m, h, k: F.pad(owned(k), (0, 1)) @ F.pad(h, (0, 0, 0, 1)),
    "repeated": lambda m, h, k: owned(k).repeat(1, 2) @ h.repeat(2, 1),
    "beside the rest": beside_rest,
    "convolved": lambda m, h, k: F.conv1d(h[None], owned(k)[..., None])[0],
    "averaged": lambda m, h, k: F.avg_pool1d((owned(k)[..., None] * h).mT, len(h))[..., 0] * len(h),
    "sums": lambda m, h, k: torch.stack([(h * o[:, None]).sum() for o in owned(k)])[:, None].expand(
        -1, 4),
    "coalesced": coalesced,
    "in groups": in_groups,
    "weighed": weighed,
    "attended": attended,
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("shape", [(12, 3), (1, 12, 3)])
@pytest.mark.parametrize("way", SEGMENTS)
def test_segments_of_other_lengths_are_looked_at_anew(way, shape, options):
    if shape[0] == 1 and ("backend" in options or not ops.NATIVE):
        pytest.skip("what runs again is given samples first")

    def forward(m, x, k):
        return m.o(SEGMENTS[way](m, torch.tanh(m.l(x)).view(-1, 4), k))

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2), score=nn.Linear(4, 1)).double()
    twin = copy.deepcopy(model)
    given = {"batch_size": lambda args, kwargs: len(args[1]), **options}
    with torchgradx.attach(model, **given) as probe:
        for lengths in ([4, 4, 4], [4, 4, 4], [3, 5, 4]):
            model.zero_grad()
            x, k = torch.randn(shape).double(), torch.tensor(lengths)
            model(x, k).square().sum(1).mean().backward()
            if lengths[0] != 4:
                with pytest.raises(torchgradx.CoverageError, match=r"l\.weight"):
                    probe.norms()
                break
            close_named(probe.norms(per="parameter"), of_each(twin, x, k, -2))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x @ self.first), torch.tanh(x @ self.second)


PARTS = {  # what makes the rows
    "the second output of a module": (lambda m, x: m.two(x)[1], {"two": Two()}),
    "a parameter of the root": (lambda m, x: torch.tanh(x @ m.w), {"w": torch.randn(3, 4)}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_so_are_those_of(name, fused):
    rows, parts = PARTS[name]
    model = Model(lambda m, x, k: m.o(owned(k) @ rows(m, x)), o=nn.Linear(4, 2), **parts).double()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, fused=fused, batch_size=3) as probe:
        for lengths in ([4, 4, 4], [4, 4, 4], [3, 5, 4]):
            x, k = torch.randn(12, 3).double(), torch.tensor(lengths)
            model(x, k).square().sum(1).mean().backward()
            exact_or(torchgradx.CoverageError, "", probe, of_each(twin, x, k))


N, T = 3, 6


def sample_major(m, x):
    """From [T, N, 3]: every layer is given rows that stand one sample after the other."""
    h = m.l(x.transpose(0, 1).reshape(-1, 3))
    return m.o(torch.tanh(h)).view(x.shape[1], -1, 2).transpose(0, 1)


@a_few_modes
def test_no_layer_has_the_samples_where_the_model_says(options):
    model = Model(sample_major, l=nn.Linear(3, 4), o=nn.Linear(4, 2))
    check(model, square_second, torch.randn(T, N, 3), dims=1, batch_dim=1, **options)


@a_few_modes
@pytest.mark.parametrize("shape", [(12, 4), (12, 1, 4)])
def test_attention_over_packed_rows_has_samples_where_positions_are_presumed(shape, options):
    def forward(m, x, k):
        apart = owned(k).T @ owned(k) == 0
        return m.att(x, x, x, attn_mask=apart, need_weights=False)[0].view(len(k), -1, 4).mean(1)

    model, k = Model(forward, att=nn.MultiheadAttention(4, 2)).double(), torch.tensor([4, 4, 4])
    twin, x = copy.deepcopy(model), torch.randn(shape).double()
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        model(x, k).square().sum(1).mean().backward()
        want = of_each(twin, x, k)
        exact_or(torchgradx.CoverageError, "att", probe, want)
