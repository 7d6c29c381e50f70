"""Refusals of models whose samples are independent, mended as kinds."""

import gc

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, check, close_named, loop, square
from torch import nn

import torchgradx


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


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}])
def test_a_linear_on_five_dimensions(options):
    check(nn.Linear(5, 4), square, torch.randn(2, 2, 3, 2, 5), **options)


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
