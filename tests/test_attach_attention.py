"""Attention, bags, bilinear products, sparse tensors, however they are called."""

import copy
from functools import partial

import pytest
import torch
from attach_models import Model, mlp, square, square_second
from attach_modes import a_few_modes, both_dtypes, every_mode, need_native
from attach_oracle import check, close_named, loop, same_gradients
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
    "of three tensors and of two": calls(lambda m, x, y, z: m.a(m.a(x, y, z)[0], y, y)[0]),
    "over several rows of each": calls(
        lambda m, x, *_: m.a(*[x.repeat_interleave(3, 0)] * 3)[0].unflatten(0, (-1, 3))),
    "query and key, another value": calls(lambda m, x, y, z: m.a(y, y, z)[0]),
    "rows of its own": calls(to_itself(), add_bias_kv=True),
    "rows of its own, across": calls(lambda m, x, y, z: m.a(x, y, y)[0], add_bias_kv=True),
}  # fmt: skip


def three():
    return torch.randn(N, T, E), torch.randn(N, S, E), torch.randn(N, S, E)


@both_dtypes
@every_mode
@pytest.mark.parametrize("way", WAYS)
def test_attention_has_the_norms_of_the_loop(way, options, dtype):
    if way.startswith("rows of its own") and options.get("backend") == "native":
        pytest.skip("these have no kernel")
    for input_grad in (False, True):
        check(WAYS[way](), square, *three(), dtype=dtype, input_grad=input_grad, **options)


@pytest.mark.grid("across", "t")
@every_mode
@pytest.mark.parametrize("t", [T, N])
@pytest.mark.parametrize("across", [False, True], ids=["to itself", "across"])
def test_attention_with_the_sequence_first(across, t, options):
    def how(m, x, y):
        return m.a(x, y, y)[0] if across else m.a(x, x, x)[0]

    model = calls(how, batch_first=False)()
    check(model, square_second, torch.randn(t, N, E), torch.randn(S, N, E), dims=1,
          batch_dim=1, **options)  # fmt: skip
    if t == N and not across:
        check(calls(to_itself())(), square, torch.randn(N, N, E), **options)


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

    check(Model(how, i=nn.Linear(E, E), inner=inner).train(training), square, *three(), **options)


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


# ---- Bags, bilinear products, sparse tensors -----------------------------------------------------
def bag(how=lambda m, ids: m.bag(ids), **options):
    return lambda: Model(how, bag=nn.EmbeddingBag(7, 3, **options))


def by_offsets(m, ids):
    """The same bags, one after another, the first id of each left out."""
    kept = ids[:, 1:]
    offsets = torch.arange(0, kept.numel() + m.bag.include_last_offset, kept.shape[1])
    return m.bag(kept.flatten(), offsets)


def of_other_sizes(m, ids):
    """As many of a sample's ids as its last one says: none, for some."""
    bags = [row[: row[-1] % len(row)] for row in ids]
    return m.bag(torch.cat(bags), offsets=torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1])


def weighted(m, ids):
    return m.bag(ids, per_sample_weights=m.gain(ids).squeeze(-1).to(m.bag.weight.dtype))


def weighted_bag():
    made = bag(weighted, mode="sum", padding_idx=2)()
    made.gain = nn.Embedding(7, 1)
    return made


def tied_to_a_head():
    made = bag(lambda m, ids: m.head(m.bag(ids).tanh()), mode="mean")()
    made.head = nn.Linear(3, 7, bias=False)
    made.head.weight = made.bag.weight
    return made


BAGS = {
    "max": bag(mode="max"), "sum with padding": bag(mode="sum", padding_idx=2),
    "by offsets": bag(by_offsets, mode="mean"), "of other sizes": bag(of_other_sizes, mode="sum"),
    "of other sizes, max": bag(of_other_sizes, mode="max"), "sparse": bag(mode="sum", sparse=True),
    "weighted": weighted_bag,
    "several of a sample": bag(
        lambda m, ids: m.bag(ids.reshape(2 * len(ids), -1)).unflatten(0, (-1, 2)), mode="sum"
    ),
    "twice": bag(lambda m, ids: m.bag(ids[:, :3]) * m.bag(ids), mode="mean"),
    "its table in a head": tied_to_a_head,
}  # fmt: skip


@both_dtypes
@every_mode
@pytest.mark.parametrize("name", BAGS)
def test_bags_have_the_norms_of_the_loop(name, options, dtype):
    model, ids = BAGS[name](), torch.randint(0, 7, (N, 6))
    ids[1] = 2  # nothing but equal ids, or but padding
    check(model, square, ids, dtype=dtype, **options)


def pair(how=lambda m, x, y: torch.tanh(m.pair(x, y)), **options):
    return lambda: Model(how, pair=nn.Bilinear(3, 2, 4, **options))


PAIRS = {
    "rows": (pair(), (N,)),
    "many positions": (pair(), (N, 70)),
    "flattened rows": (
        pair(lambda m, x, y: m.pair(x.flatten(0, 1), y.flatten(0, 1)).view(-1, 3, 4)), (N, 3)),
    "of one tensor": (pair(lambda m, x, y: m.pair(x, x[..., :2]).tanh()), (N, 3)),
    "twice": (pair(lambda m, x, y: m.pair(m.pair(x, y)[..., :3].tanh(), y)), (N, 3)),
    "positions first": (
        pair(lambda m, x, y: m.pair(x.transpose(0, 1), y.transpose(0, 1)).transpose(0, 1)), (N, 5)),
}  # fmt: skip


@both_dtypes
@every_mode
@pytest.mark.parametrize("name", PAIRS)
def test_bilinear_products_have_the_norms_of_the_loop(name, options, dtype):
    make, lead = PAIRS[name]
    x, y = torch.randn(*lead, 3), torch.randn(*lead, 2)
    check(make(), square, x, y, dtype=dtype, input_grad=True, **options)


ROWS = 6
LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}
layouts = pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)


@a_few_modes
@layouts
@pytest.mark.parametrize("way", ["plain", "a checkpoint", "clipped"])
def test_a_linear_layer_is_given_bags_of_words(made, way, options):
    model, x = mlp(5).double(), torch.randn(ROWS, 3).double().relu()
    want = loop(model, square, x)
    twin, sparse = copy.deepcopy(model), made(x)
    clips = way == "clipped" and options.get("weight_grad", True)
    with torchgradx.attach(model, **options, clip=clips) as probe:
        for m in (model, twin):
            inside = partial(checkpoint, m, use_reentrant=False) if way == "a checkpoint" else m
            square(inside, sparse).backward()
        close_named(probe.norms(per="parameter"), want)
        if clips:
            probe.clip_grad_norm_(torch.inf)
    if options.get("weight_grad", True):
        same_gradients(model, twin, rtol=None if options else 1e-12)
