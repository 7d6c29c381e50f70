"""Batches and sequences of several sizes on one probe: what a first one shows is taken for others,
and where N is as large as something else, that alone must not be doubted."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, check, close_named, loop, square
from torch import nn

import torchgradx

CLASSES, WIDTH, T = 6, 8, 4


def mean_of_each(model, x, y):
    return F.cross_entropy(model(x), y)


def mean_of_rows(model, ids, y):
    """Of logits [N*T, V]."""
    rows = F.cross_entropy(model(ids), y.flatten(), reduction="none")
    return rows.view(len(ids), T).mean(1).mean()


def steps(model, loss, batches, options, moves=0.0):
    """Each step's norms are the loop's; its weights move by so much after each."""
    model = model.double()
    with torchgradx.attach(model, **options) as probe:
        for batch in batches:
            model.zero_grad()
            loss(model, *batch).backward()
            close_named(probe.norms(per="parameter"), loop(copy.deepcopy(model), loss, *batch))
            with torch.no_grad():
                for p in model.parameters():
                    p += moves * torch.randn_like(p)


def images(*sizes, memory_format=torch.contiguous_format):
    return [(torch.randn(n, 3, 6, 6).double().contiguous(memory_format=memory_format),
             torch.randint(CLASSES, (n,))) for n in sizes]  # fmt: skip


def network(act, memory_format=torch.contiguous_format):
    body = nn.Sequential(nn.Conv2d(3, WIDTH, 3), act, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(body, nn.Linear(WIDTH, CLASSES)).to(memory_format=memory_format)


class Windows(nn.Module):
    """Nobody follows samples through it, see proof/sample_dims.py."""

    def forward(self, h):
        return h.unfold(2, 2, 2).sum(-1)


ACTIVATIONS = {"hardswish": nn.Hardswish(), "rrelu": nn.RReLU().eval(), "unfold": Windows()}


@a_few_modes
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("first", [CLASSES, 9, 3])
def test_as_many_samples_as_classes_after_another_batch(first, act, options):
    steps(network(ACTIVATIONS[act]), mean_of_each, images(first, CLASSES, CLASSES), options)


@a_few_modes
def test_as_many_samples_as_classes_in_channels_last(options):
    last = torch.channels_last
    batches = images(9, CLASSES, 9, memory_format=last)
    steps(network(nn.ReLU(), last), mean_of_each, batches, options)


class Biased(nn.Module):
    """Attention biased by a table that a network makes of positions, before a norm of zeros."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        nn.init.zeros_(self.norm.weight)
        self.register_buffer("places", torch.randn(1, T, T, 2))

    def forward(self, h):
        q, k, v = self.qkv(h).chunk(3, -1)
        mixed = q @ k.transpose(1, 2) + self.bias(self.places).squeeze(-1)
        return h + self.norm(mixed.softmax(-1) @ v)


@a_few_modes
@pytest.mark.parametrize("n", [2, T, 5])
def test_what_was_behind_zeros_is_proven_in_the_next_step(n, options):
    rows = [nn.Linear(3, WIDTH), Biased(), Biased(), nn.Flatten(), nn.Linear(T * WIDTH, CLASSES)]
    batches = [(torch.randn(n, T, 3).double(), torch.randint(CLASSES, (n,))) for _ in range(3)]
    steps(nn.Sequential(*rows), mean_of_each, batches, options, moves=0.05)


@a_few_modes
@pytest.mark.parametrize("sizes", [(3, WIDTH, 3), (16, WIDTH, 16), (3, 5, 3)])
def test_a_size_that_comes_back_after_one_that_looks_otherwise(sizes, options):
    def forward(m, ids):
        h = torch.tanh(m.mix(m.ids(ids) + m.places(torch.arange(T))))
        return m.out(h).view(-1, CLASSES)

    model = Model(forward, ids=nn.Embedding(CLASSES, WIDTH), places=nn.Embedding(T, WIDTH),
                  mix=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, CLASSES))  # fmt: skip
    batches = [(torch.randint(CLASSES, (n, T)), torch.randint(CLASSES, (n, T))) for n in sizes]
    steps(model, mean_of_rows, batches, options)


@a_few_modes
@pytest.mark.parametrize("n", [5, CLASSES])
def test_a_loss_alone_of_as_many_samples_as_classes(n, options):
    model = Model(lambda m, x, y: F.cross_entropy(m.b(torch.tanh(m.a(x))), y),
                  a=nn.Linear(4, WIDTH), b=nn.Linear(WIDTH, CLASSES))  # fmt: skip
    batches = [(torch.randn(n, 4).double(), torch.randint(CLASSES, (n,))) for _ in range(2)]
    steps(model, lambda m, *batch: m(*batch), batches, options)


N, WIDTHS, LONGEST = 4, [4, 6], 8


def block(width):
    return nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0)


# Of a model and h [T, N, D]
USES = {
    "scaled": lambda m, h: h * m.scale,
    "rows t*N+n, scaled": lambda m, h: (h.flatten(0, 1) * m.scale).view(h.shape),
    "multiplied": lambda m, h: h @ m.w,
    "adapted": lambda m, h: h + h @ m.w[:, :2] @ m.w[:2],
    "positions, added": lambda m, h: h + m.places[: len(h)],
    "a table's positions, added": lambda m, h: h + m.table(torch.arange(len(h)))[:, None],
    "a gate around a block": lambda m, h: h + m.scale * m.block(h),
    "a block below positions": lambda m, h: m.block(h + m.places[: len(h)]),
}
LENGTHS = {
    "short first": (1, 6, 1, 8),
    "long first": (6, 1, 6, 1),
    "as many as samples between": (8, 1, N, 1, 8),
}
FED = {"positions first": lambda m, x: m.i(x.transpose(0, 1)),
       "samples first": lambda m, x: m.i(x).transpose(0, 1)}  # fmt: skip


def model_of(use, fed, width):
    return Model(
        lambda m, x: m.o(USES[use](m, FED[fed](m, x)).transpose(0, 1)),
        i=nn.Linear(3, width),
        o=nn.Linear(width, 5),
        scale=torch.randn(width),
        w=torch.randn(width, width),
        places=torch.randn(LONGEST, 1, width),
        table=nn.Embedding(LONGEST, width),
        block=block(width),
    ).double()


@a_few_modes
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("use", USES)
def test_each_length_is_exact_whichever_came_before(use, lengths, width, fed, options):
    model = model_of(use, fed, width)
    with torchgradx.attach(model, **options) as probe:
        for length in LENGTHS[lengths]:
            x = torch.randn(N, length, 3, dtype=torch.float64)
            square(model, x).backward()
            want = loop(model, square, x)
            try:
                got = probe.norms(per="parameter")
            except torchgradx.CoverageError:
                assert length == N, f"refused at length {length}"
            else:
                close_named(got, want)


@a_few_modes
def test_each_plan_is_held_to_its_own_sizes(options):
    """Windows of every fourth position: at 1 the samples come in at the expansion, then later."""

    def forward(m, x):
        windows = m.p(torch.arange(1)).expand(x.shape[1] // 2, 3, len(x), -1)[::4]
        h = m.i(x)[:, : len(windows)].transpose(0, 1)
        return m.o((windows * h[:, None]).sum(1).transpose(0, 1))

    model = Model(forward, p=nn.Embedding(2, 3), i=nn.Linear(3, 3), o=nn.Linear(3, 2)).double()
    with torchgradx.attach(model, **options) as probe:
        for length in (2, 4, 4, 10, 2, 10):
            x = torch.randn(3, length, 3, dtype=torch.float64)
            square(model, x).backward()
            want = loop(model, square, x)
            with contextlib.suppress(torchgradx.CoverageError):
                close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_bias_sum_of_the_frameworks_own_is_not_refused(seed):
    """65,536 terms, which the framework adds up in float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 32, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, y = torch.randn(16, 8, 64, 64), torch.randint(0, 32, (16,))
    with torchgradx.attach(model, fused=False) as probe:
        F.cross_entropy(model(x), y).backward()
        assert len(probe.norms()) == 16


@pytest.mark.parametrize("lengths", [[(8, 8, 8), (8, 5, 6)], [(8, 5, 6), (8, 8, 8)]])
def test_t5_with_and_without_padding(lengths):
    """The mask is dropped when nothing is padded, so that the bias is broadcast otherwise."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                                   vocab_size=61, dropout_rate=0.0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train().double()
    model.config.use_cache = False

    def loss(m, x, mask, d, y):
        out = m(input_ids=x, attention_mask=mask, decoder_input_ids=d).logits
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    with torchgradx.attach(model) as probe:
        for lens in lengths * 2:
            x, d, y = (torch.randint(3, 61, (3, 8)) for _ in range(3))
            mask = (torch.arange(8)[None] < torch.tensor(lens)[:, None]).long()
            want = loop(model, loss, x, mask, d, y)
            model.zero_grad()
            loss(model, x, mask, d, y).backward()
            close_named(probe.norms(per="parameter"), want, 1e-5)  # its norms are float32


@a_few_modes
def test_a_weight_that_is_read_once_a_step_of_a_sequence(options):
    """The number of graph nodes grows with T."""

    def forward(m, x):
        h = m.a(x)
        steps = (F.linear(h[:, k], m.b.weight, m.b.bias) for k in range(x.shape[1]))
        return sum(map(torch.tanh, steps))

    model = Model(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3)).double()
    with torchgradx.attach(model, **options) as probe:
        for t in (6, 5, 5, 6, 7, 7, 8):
            x = torch.randn(4, t, 5).double()
            want = loop(model, square, x)
            model.zero_grad()
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)


@a_few_modes
@pytest.mark.parametrize("lengths", [(6, 4), (6, 5, 4)])
def test_experts_in_one_bare_parameter_with_t_equal_to_n(lengths, options):
    def forward(m, ids):
        h = m.emb(ids)
        f = h.flatten(0, 1)
        i, y = m.r(f).argmax(-1), torch.zeros_like(f)
        for k in range(3):
            rows = (i == k).nonzero()[:, 0]
            y = y.index_add(0, rows, f[rows] @ m.w[k])
        return m.head(h + y.view_as(h))

    model = Model(forward, emb=nn.Embedding(17, 8), r=nn.Linear(8, 3), w=torch.randn(3, 8, 8),
                  head=nn.Linear(8, 17)).double()  # fmt: skip
    model.r.requires_grad_(False)
    with torchgradx.attach(model, **options) as probe:
        for t in lengths:
            ids = torch.randint(0, 17, (4, t))
            want = loop(model, square, ids)
            model.zero_grad()
            square(model, ids).backward()
            close_named(probe.norms(per="parameter"), want)


def test_bloom_with_as_many_samples_as_parts_of_its_qkv():
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=61, hidden_dropout=0.0, use_cache=False
    )
    model = transformers.BloomForCausalLM(config)

    def loss(m, x):
        return F.cross_entropy(m(input_ids=x).logits.flatten(0, 1), x.flatten())

    check(model, loss, torch.randint(0, 61, (3, 8)))


def test_a_lost_probe_lets_go():
    model = nn.Linear(4, 3)

    def train():
        probe = torchgradx.attach(model)
        assert torchgradx.attached(model) is probe
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    gc.collect()
    assert torchgradx.attached(model) is None
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(2, 4)).backward()
        assert len(probe.norms()) == 2
        with pytest.raises(RuntimeError, match="attached"):
            torchgradx.attach(model)
    assert torchgradx.attached(model) is None
    probe = torchgradx.attach(model)
    del probe
    assert type(model) is nn.Linear
