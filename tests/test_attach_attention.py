"""nn.MultiheadAttention as the Linears that it is made of, however it is called."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    every_mode,
    fallback_mode,
    need_native,
    square,
    square_second,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, S, E = 4, 5, 3, 6


def attention(**options):
    """Biases of zero, as they are at first, would hide some of what a bias does."""
    made = nn.MultiheadAttention(E, 2, **{"batch_first": True, **options})
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made


def calls(how, **options):
    return lambda: Model(how, a=attention(**options))


def to_itself(**more):
    return lambda m, x, *_: m.a(x, x, x, **more)[0]


def causal(m, x, *_):
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
    return m.a(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def padded(m, x, *_):
    mask = torch.zeros(len(x), T, dtype=torch.bool, device=x.device)
    mask[:, -1] = True
    return m.a(x, x, x, key_padding_mask=mask)[0]


def weights_too(m, x, y, _):
    out, weights = m.a(x, y, y, average_attn_weights=False)
    return torch.cat([out.flatten(1), weights.flatten(1)], 1)


def of_three_and_of_two(m, x, y, z):
    return m.a(m.a(x, y, z)[0], y, y)[0]


to_two = {"kdim": 4, "vdim": 2}
# (a model of x [N, T, E], y [N, S, E] and z [N, S, E])
WAYS = {
    "to itself": calls(to_itself()),
    "to itself, without weights": calls(to_itself(need_weights=False)),
    "causal": calls(causal),
    "padded": calls(padded),
    "without bias": calls(to_itself(), bias=False),
    "of a zero": calls(to_itself(), add_zero_attn=True),
    "across": calls(lambda m, x, y, z: m.a(x, y, y)[0]),
    "across, by keywords": calls(lambda m, x, y, z: m.a(query=x, key=y, value=y)[0]),
    "across, its weights in the loss": calls(weights_too),
    "of three tensors": calls(lambda m, x, y, z: m.a(x, y, z, need_weights=False)[0]),
    "of three sizes": calls(lambda m, x, y, z: m.a(x, y[..., :4], z[..., :2])[0], **to_two),
    "across twice": calls(lambda m, x, y, z: m.a(m.a(x, y, y)[0], y, y)[0]),
    "of three tensors and of two": calls(of_three_and_of_two),
    "query and key, another value": calls(lambda m, x, y, z: m.a(y, y, z)[0]),
}  # fmt: skip
FALLBACK_WAYS = {
    "rows of its own": calls(to_itself(), add_bias_kv=True),
    "rows of its own, across": calls(lambda m, x, y, z: m.a(x, y, y)[0], add_bias_kv=True),
}


def three():
    return torch.randn(N, T, E), torch.randn(N, S, E), torch.randn(N, S, E)


@both_dtypes
@every_mode
@pytest.mark.parametrize("way", WAYS)
def test_attention_has_the_norms_of_the_loop(way, options, dtype):
    for input_grad in (False, True):
        check(WAYS[way](), square, *three(), dtype=dtype, input_grad=input_grad, **options)


@fallback_mode
@pytest.mark.parametrize("way", FALLBACK_WAYS)
def test_attention_with_rows_of_its_own_runs_again(way, options):
    check(FALLBACK_WAYS[way](), square, *three(), **options)


@every_mode
@pytest.mark.parametrize("across", [False, True], ids=["to itself", "across"])
def test_attention_with_the_sequence_first(across, options):
    def how(m, x, y):
        return m.a(x, y, y)[0] if across else m.a(x, x, x)[0]

    model = calls(how, batch_first=False)()
    check(model, square_second, torch.randn(T, N, E), torch.randn(S, N, E), dims=1,
          batch_dim=1, **options)  # fmt: skip


@every_mode
def test_attention_where_there_are_as_many_positions_as_samples(options):
    x = torch.randn(N, N, E)
    check(calls(to_itself())(), square, x, **options)
    check(calls(to_itself(), batch_first=False)(), square_second, x, dims=1, batch_dim=1, **options)


@a_few_modes
@pytest.mark.parametrize("across", [False, True], ids=["to itself", "across"])
def test_attention_over_several_rows_of_each_sample(across, options):
    """As within windows of an image, or within frames: [N * 3, T, E]."""

    def how(m, x, y):
        x, y = x.flatten(0, 1), y.flatten(0, 1)
        out = m.a(x, y, y)[0] if across else m.a(x, x, x)[0]
        return out.unflatten(0, (-1, 3))

    x, y = torch.randn(N, 3, 2 * N, E), torch.randn(N, 3, S, E)
    check(calls(how)(), square, x, y, **options)


@a_few_modes
@pytest.mark.parametrize("live", ["in_proj_weight", "in_proj_bias", "out_proj", "out_proj.bias"])
@pytest.mark.parametrize("way", ["to itself", "across", "of three tensors"])
def test_attention_frozen_but_for_a_part(way, live, options):
    model = WAYS[way]()
    for name, p in model.a.named_parameters():
        p.requires_grad_(name.startswith(live))
    check(model, square, *three(), **options)


LAYERS = {
    "encoder": (lambda m, x, y: m.l(x), nn.TransformerEncoderLayer),
    "decoder": (lambda m, x, y: m.l(x, y), nn.TransformerDecoderLayer),
}


@every_mode
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_transformer(name, training, options):
    how, kind = LAYERS[name]
    model = Model(how, l=kind(E, 2, 8, dropout=0.0, batch_first=True)).train(training)
    check(model, square, *three()[:2], **options)


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpointed", "reentrant"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("way", ["to itself, without weights", "across", "of three sizes"])
def test_attention_in_a_checkpoint(way, training, reentrant, options):
    inner = WAYS[way]()

    def how(m, x, y, z):
        return checkpoint(m.inner, m.i(x), y, z, use_reentrant=reentrant)

    model = Model(how, i=nn.Linear(E, E), inner=inner).train(training)
    check(model, square, *three(), **options)


def test_attention_is_served_by_its_linears():
    need_native({"backend": "native"})
    model = WAYS["across"]()
    with torchgradx.attach(model, backend="native") as probe:
        square(model, *three()).backward()
        probe.norms()
        shown = str(probe.explain())
    assert "vmap" not in shown
    assert "replay" not in shown
    assert shown.count("MultiheadAttention") == 3  # query of two, key and value, output
