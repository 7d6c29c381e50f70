"""Costs of steps: backwards in a first pass, whatever the number of layers and outputs; and waits
in a steady step. On a CPU the operations are counted that would wait on a GPU; there torch raises.
"""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from attach_models import DEVICE as NAME
from attach_models import Model, rms_norm, square
from attach_oracle import loop
from attach_steps import exact_step, refusal
from counters import Counter
from test_experts import WAYS as WAYS_OF_EXPERTS
from test_experts import mixture
from torch import nn

import torchgradx
from torchgradx import ops
from torchgradx.graph import modes


def bound(n):
    return 2 + math.ceil(math.log(n, 16))


def deep():
    """300 layers: LayerNorm and Linear in turn."""

    def forward(m, x):
        for norm, layer in zip(m.layers[::2], m.layers[1::2], strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return x

    parts = (part for _ in range(150) for part in (nn.LayerNorm(8), nn.Linear(8, 8)))
    return Model(forward, layers=nn.ModuleList(parts))


@pytest.mark.parametrize("n", [4, 17])
def test_a_net_of_300_layers(n, backwards):
    model, x = deep(), torch.randn(n, 3, 8)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        probe.norms()
    assert 0 < len(backwards) <= bound(n)


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=61, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return transformers.BertForMaskedLM(config), lambda ids: {"input_ids": ids}


def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=61, dropout_rate=0.0,
        use_cache=False)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, lambda ids: {"input_ids": ids, "decoder_input_ids": ids}


def token_loss(model, keywords, ids):
    return F.cross_entropy(model(**keywords(ids)).logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("make", [bert, t5])
def test_language_models(make, backwards):
    """A first pass, others of new sizes, of which one has T = N, and a change of mode."""
    model, keywords = make()
    model.train()
    with torchgradx.attach(model) as probe:
        for n, t, most in [(5, 8, bound(5)), (5, 6, 1), (3, 7, 1), (4, 4, 1)]:
            backwards.clear()
            loss = token_loss(model, keywords, torch.randint(3, 61, (n, t)))
            assert len(backwards) <= most, (n, t)
            loss.backward()
            assert len(probe.norms()) == n


def words(m, ids):
    """As transformers' models: a warning of padding without a mask, and positions."""
    assert (ids[:, [-1, 0]] != 0).all()
    h = m.words(ids)
    h = h + m.places(torch.arange(ids.shape[1])[None]).expand_as(h)
    h = m.inner(h.flatten(0, 1)).relu().view(h.shape)
    return m.head(h)


def padded(m, ids):
    """As experts of transformers: a mask is looked up by ranges, and rows are flat after it."""
    mask = (ids > 9)[torch.arange(len(ids))[:, None], torch.arange(ids.shape[1])]
    h = m.words(ids) * mask[..., None]
    return m.head(m.inner(h.flatten(0, 1)).relu().view(h.shape))


def pictured(m, ids):
    """As Qwen's: patches of pictures are flat rows, and places of words come of rows of ids."""
    patches = m.inner((ids[:, :4, None] / m.places.weight[0].exp()).flatten(0, 1)).tanh()
    places = torch.stack([row[row > 0] for row in ids]).cumsum(1)[..., None]
    return m.head(m.words(ids) * places.cos() + patches.view(-1, 4, 8).sum(1, keepdim=True))


def recurrent(m, ids):
    """As RWKV's: a decay that its first step multiplies by a state of zeros."""
    h, state = m.words(ids), torch.zeros(len(ids), 8, device=ids.device)
    for k in range(3):
        state = torch.maximum(m.decay.sigmoid() * state, m.inner(h[:, k]))
    return m.head(h + state[:, None] + m.places(ids % 16))


@pytest.mark.parametrize("forward", [words, padded, pictured, recurrent])
def test_other_batches_of_the_same_sizes_are_not_proven_anew(forward, backwards):
    parts = {"words": nn.Embedding(61, 8), "places": nn.Embedding(16, 8), "inner": nn.Linear(8, 8)}
    model = Model(forward, **parts, head=nn.Linear(8, 61), decay=torch.rand(8))
    with torchgradx.attach(model) as probe:
        for t, most in [(8, 5), (8, 0), (8, 0), (10, 1), (6, 1), (7, 1), (10, 0), (6, 0)]:
            backwards.clear()
            exact_step(probe, model, torch.randint(3, 61, (5, t)), rtol=1e-4)
            assert len(backwards) <= most


def test_no_kernel_reads_beyond_a_weight():
    model = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64)).eval()
    short = Counter(lambda f, args: "norm_backward" in str(f) and not args[2].is_contiguous())
    with torchgradx.attach(model), short:
        square(model, torch.randn(5, 3)).backward()
    assert not short.counts


def test_sizes_that_leave_no_doubt_cost_nothing(backwards):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torchgradx.attach(model) as probe:
        for n, t in [(4, 6), (4, 7), (5, 6), (3, 8)]:
            backwards.clear()
            exact_step(probe, model, torch.randn(n, t, 3).double())
            assert bool(backwards) == ((n, t) == (4, 6))


def trembling(mixed=0.0):
    """Backwards differ by 2 % from one to the next, as those of attention do on a GPU. `mixed`
    of the next sample comes into each."""

    def forward(m, x):  # [N, T, 6]
        h = m.first(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * (1 + 0.02 * torch.randn_like(g)))
        return m.second(h + mixed * h.roll(1, 0) if mixed else h)

    return Model(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 6))


@pytest.mark.parametrize("n", [4, 17, 64])
def test_sums_in_another_order_each_time_are_no_mixing(n, backwards):
    model, x = trembling(), torch.randn(n, n, 6)  # T = N: sizes alone leave a doubt
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        norms = probe.norms(per="parameter")
    silenced = {4: 4, 17: 7, 64: 8}[n]  # log2 N and a little: zeros among the seeds
    assert len(backwards) <= bound(n) + silenced
    for name, expected in loop(model, square, x).items():
        assert torch.allclose(norms[name].double(), expected.double(), rtol=0.2), name


@pytest.mark.parametrize("mixed", [1e-6, 1e-2, 1.0])
def test_samples_that_mix_where_sums_tremble_are_refused(mixed):
    model = trembling(mixed)
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(6, 6, 6)).backward()
        refusal(probe, "mix")


# ---- A steady step -------------------------------------------------------------------------------
DEVICE = torch.device(NAME)
# Operators that read a number of a tensor, or make a result whose size depends on one.
READ = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique2"}
N, T, D, V = 4, 6, 8, 11


def waits(func, args):
    name = func.name().partition("::")[2].partition(".")[0]
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    masks = any(i is not None and i.dtype == torch.bool for i in indices)
    return name if name in READ or masks else None


@contextlib.contextmanager
def counted(allowed=0):
    """On a GPU the first wait raises."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with Counter(waits) as counter:
            yield
        assert counter.counts.total() <= allowed, counter.counts


def block(m, ids):
    x = m.table(ids) + m.positions
    x = x + m.gamma * m.down(torch.tanh(m.up(m.norm(x))))
    return m.head(m.own(x))


def transformer():
    """Every way that parameters are served, in one model."""
    return Model(block, table=nn.Embedding(V, D), positions=torch.randn(T, D),
                 norm=nn.LayerNorm(D), own=rms_norm(D), up=nn.Linear(D, 2 * D),
                 down=nn.Linear(2 * D, D), gamma=torch.rand(D),
                 head=nn.Linear(D, V, bias=False))  # fmt: skip


def loss_of(model, ids):
    return model(ids).logsumexp(-1).mean()


def read(probe):
    probe.norms()


def clip(probe, **options):
    probe.clip_grad_norm_(0.01, **options)


DEFERRED = {"clip": True, "weight_grad": False}
SCALE = torch.rand(N, dtype=torch.float64, device=DEVICE) + 0.5
WAYS = {  # options of attach, what reads, reads of the CPU's own memory that decide what is done
    "norms": ({}, read, 0),
    "norms alone": ({"weight_grad": False}, read, 0),
    "clip": ({"clip": True}, clip, 4),
    "deferred clip": (DEFERRED, clip, 0),
    "dropping": (DEFERRED, lambda probe: clip(probe, nonfinite="drop"), 0),
    "by parameter": (DEFERRED, lambda probe: clip(probe, per="parameter"), 0),
    "a tensor for the loss": ({"loss_scale": SCALE}, read, 0),
}


@pytest.mark.skipif(not ops.NATIVE, reason="is of the kernels")
@pytest.mark.parametrize("way", WAYS)
def test_a_steady_step_waits_for_nothing(way, monkeypatch):
    monkeypatch.setattr(modes, "_disabled", contextlib.nullcontext)  # the counter hears ours too
    options, reads, allowed = WAYS[way]
    torch.manual_seed(0)
    model = transformer().to(DEVICE)
    ids = torch.randint(0, V, (N, T), device=DEVICE)
    with torchgradx.attach(model, **{"loss_reduction": "mean", **options}) as probe:
        for _ in range(3):  # the first prove where the samples are
            loss_of(model, ids).backward()
            reads(probe)
            model.zero_grad()
        loss = loss_of(model, ids)
        with counted(allowed):
            loss.backward()
            reads(probe)


@pytest.mark.skipif(not ops.NATIVE, reason="the fallback runs them again")
@pytest.mark.parametrize("way", ["grouped", "grouped, biased", "batched, turned"])
def test_experts_are_waited_for_once_a_call(way, monkeypatch):
    """In the forward, for whose rows they have, and how many. No sample is in E columns."""
    monkeypatch.setattr(modes, "_disabled", contextlib.nullcontext)
    model, copied, cpu = mixture(WAYS_OF_EXPERTS[way]()).to(DEVICE), [], torch.Tensor.cpu
    with torchgradx.attach(model, loss_reduction="sum") as probe:
        for _ in range(3):
            loss = model(torch.randn(5, T, D, device=DEVICE)).square().sum()
            loss.backward()
            probe.norms()
        monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copied.append(t) or cpu(t))
        # on a CPU, random states are compared beside it
        with counted(1) if DEVICE.type == "cpu" else contextlib.nullcontext():
            loss = model(torch.randn(5, T, D, device=DEVICE)).square().sum()
        assert len(copied) == 1
        with counted():
            loss.backward()
            probe.norms()
        assert len(copied) == 1
