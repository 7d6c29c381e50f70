"""Modules of users' own, served at the graph's nodes or run again; weights that a hook makes."""

import copy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, rms_norm, square
from attach_modes import a_few_modes, native_missing, title
from attach_oracle import check, close, close_named, loop_model, loop_within
from attach_steps import exact_or_refused, exact_step, exact_steps, refusal, refused
from clip_oracle import check_clip
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import torchgradx

N = 4


def of_three_layers(kind, **options):
    rnn = kind(3, 4, num_layers=3, dropout=0.5, batch_first=True, **options)
    return Model(lambda m, x: m.r(x)[0], r=rnn)


DROPPING = {
    "linears": lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
    "an LSTM": lambda: of_three_layers(nn.LSTM),
    "a GRU both ways": lambda: of_three_layers(nn.GRU, bidirectional=True),
    "attention": lambda: Model(
        lambda m, x: m.a(*[m.i(x)] * 3)[0], i=nn.Linear(3, 4),
        a=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)),
}  # fmt: skip


def squares(model, x):
    return model(x).square().flatten(1).sum(1)


@a_few_modes
@pytest.mark.parametrize("block", DROPPING)
def test_active_dropout_gives_the_gradient_under_the_masks_of_that_forward(block, options):
    model, x = DROPPING[block]().double(), torch.randn(N, 5, 3).double()
    torch.manual_seed(7)
    want = loop_within(model, squares, x)
    torch.manual_seed(7)
    plain = square(model, x)
    with torchgradx.attach(model, **options) as probe:
        torch.manual_seed(7)
        value = square(model, x)
        value.backward()
        after = torch.rand(3)
        assert torch.equal(value, plain)
        close_named(probe.norms(per="parameter"), want)
    torch.manual_seed(7)
    model(x)
    assert torch.equal(torch.rand(3), after), "the probe moved the random state"


@a_few_modes
@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag, nn.Embedding])
def test_what_frequencies_of_the_batch_divide_is_refused_where_it_is_replayed(function, options):
    """A replay of the batch gives parts of its gradient, which add up: only the loop differs."""

    def forward(m, x):
        return function(x + 0 * int(x.sum()), m.weight, scale_grad_by_freq=True)

    model, ids = Model(forward, weight=torch.randn(7, 3)), torch.randint(0, 7, (N, 5))
    match = "how often an id"
    if function is nn.Embedding:
        model, match = nn.Embedding(7, 3, scale_grad_by_freq=True), "is not the sum"
    refused(model, square, ids, names={"weight"}, match=match, **options)


UNSEEN = {  # what a forward gives, and its logits
    "an object": (lambda logits: SimpleNamespace(logits=logits), lambda m, out: out.logits),
    "nothing": (lambda logits: None, lambda m, out: m.logits),
    "a nested tensor": (lambda logits: torch.nested.as_nested_tensor([*logits[..., None]]),
                        lambda m, out: out.to_padded_tensor(0.0)[..., 0]),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("own", [False, True], ids=["", "parameters of its own"])
@pytest.mark.parametrize("turned", [False, True], ids=["", "sequence first"])
@pytest.mark.parametrize("name", UNSEEN)
def test_outputs_that_are_not_seen_are_exact_or_refused(name, turned, own, options):
    give, take = UNSEEN[name]

    def forward(m, x):
        h = torch.tanh(m.l(x.transpose(0, 1) if turned else x))
        h = m.o(h * m.scale if own else h)
        m.logits = h.mean(0) if turned else h
        return give(m.logits)

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2), scale=torch.randn(4))
    loss = lambda m, x: take(m, m(x)).square().sum(1).mean()  # noqa: E731
    x = torch.randn(*[N] * (1 + turned), 3)
    if own:
        refused(model, loss, x, names=["scale"], **options)
    else:
        model.logits = None
        exact_or_refused(model, loss, x, **options)


D = 4
EMPTY = {
    "attention": lambda: Model(lambda m, x: m.a(x, x, x)[0],
                               a=nn.MultiheadAttention(D, 2, batch_first=True)),
    "parameters of the root": lambda: Model(
        lambda m, x: m.o(x + m.p.tanh() * m.gain), o=nn.Linear(D, 2), p=torch.randn(5, D),
        gain=torch.randn(D)),
    "a recurrent layer": lambda: Model(lambda m, x: m.r(x)[0], r=nn.GRU(D, 3, batch_first=True)),
    "a replay": lambda: Model(lambda m, x: m.l(x), l=nn.utils.parametrizations.weight_norm(
        nn.Linear(D, 3))),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_no_samples_among_others(name, sizes, options):
    model = EMPTY[name]().double()
    batches = [torch.randn(n, 5, D).double() for n in sizes]
    with torchgradx.attach(model, loss_reduction="sum", **options) as probe:
        for x in batches:
            model(x).square().sum().backward()
            norms = probe.norms()
            assert norms.shape == x.shape[:1]
            if len(x):
                close(norms, loop_model(model, square, x))
        for x in batches:
            model(x).square().sum().backward()
        assert len(probe.norms()) == sum(sizes), "accumulated"


T, C = 2 * N, 6


def layer_scale(*shape):
    return Model(lambda m, x: x * m.gamma, gamma=torch.randn(shape))


def response_norm(m, x):
    """ConvNeXt V2's."""
    size = x.norm(dim=(2, 3), keepdim=True)
    weight, bias = (p.view(1, -1, 1, 1) for p in (m.weight, m.bias))
    return x + torch.addcmul(bias, weight, x * size / (size.mean(1, keepdim=True) + 1e-6))


def around(middle, layer):
    return Model(lambda m, x: m.o(torch.tanh(m.s(m.i(x)))), i=layer(3, C), s=middle, o=layer(C, 2))


def of_rows(middle):
    return around(middle, nn.Linear), torch.randn(N, T, 3)


def grn():
    """A dimension of the input is as long as the channels."""
    middle = Model(response_norm, weight=torch.randn(C), bias=torch.randn(C))
    return around(middle, partial(nn.Conv2d, kernel_size=1)), torch.randn(N, 3, 5, C)


MODELS = {
    "RMSNorm": lambda: of_rows(rms_norm(C)),
    "1 + w": lambda: of_rows(rms_norm(C, lambda weight: weight + 1)),
    "LayerScale": lambda: of_rows(layer_scale(C)),
    "one number": lambda: of_rows(layer_scale()),
    "GRN": grn,
    "LayerNorm": lambda: of_rows(Model(lambda m, x: m.w * (x - x.mean(-1, True)) / 2 + m.b,
                                       w=torch.randn(C), b=torch.randn(C))),
    "positions": lambda: of_rows(Model(lambda m, x: m.b + x, b=torch.randn(1, T, C))),
    "time first": lambda: of_rows(Model(
        lambda m, x: (x.movedim(1, 0)[None] * m.w + m.b)[0].movedim(0, 1),
        w=torch.randn(C), b=torch.randn(T, 1, C))),
    "thrice": lambda: of_rows(Model(lambda m, x: torch.add(x, m.b, alpha=3), b=torch.randn(C))),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", MODELS)


def example(name):
    model, x = MODELS[name]()
    for key, p in model.s.named_parameters():
        nn.init.normal_(p, 1.0 if key == "weight" else 0.0)
    return model.double(), x.double()


@each_model
@a_few_modes
def test_norms_are_exact_in_first_and_later_steps_and_no_module_runs_again(name, options):
    """Of a known structure kernels take the norms at the nodes."""
    model, first = example(name)
    check(model, square, first, input_grad=True, **options)
    calls, sizes, kind = [], (N, N, N + 1, N + 1), type(model.s)
    counted = {"forward": lambda s, x: calls.append(x) or kind.forward(s, x)}
    model.s.__class__ = type("Counted", (kind,), counted)
    batches = [torch.randn(n, *first.shape[1:]).double() for n in sizes]
    shown = exact_steps(model, *batches, **options)
    if options.get("fused", True) and "backend" not in options:
        (line,) = [line for line in shown.splitlines() if line.startswith("s: ")]
        assert "lifted" in line
        assert len(calls) == len(sizes) + sum(sizes)  # those of the loop too


@each_model
@pytest.mark.parametrize("options", [{}, {"weight_grad": False}], ids=title)
def test_clipping_without_directions(name, options):
    model, x = example(name)
    check_clip(model, square, x, dots=False, **options)


@pytest.mark.skipif(native_missing() is not None, reason="the fallback is in Python")
@pytest.mark.parametrize("name", sorted({*MODELS} - {"GRN", "thrice"}))
def test_a_steady_backward_asks_nothing_of_python(name):
    def calls(depth):
        (model, x), found = example(name), []
        model.s = nn.Sequential(*(copy.deepcopy(model.s) for _ in range(depth)))
        with torchgradx.attach(model) as probe:
            for loss in (square(model, x) for _ in range(4)):
                found.clear()
                sys.setprofile(lambda frame, event, _: found.append(event == "call"))
                loss.backward()
                sys.setprofile(None)
                probe.norms()
        return sum(found)

    assert calls(1) == calls(3)


@each_model
def test_a_penalty_that_comes_later_is_refused(name):
    model, x = example(name)
    with torchgradx.attach(model) as probe:
        for _ in range(3):
            square(model, x).backward()
            probe.norms()
        (square(model, x) + sum(p.square().sum() for p in model.s.parameters())).backward()
        error = refusal(probe)
    assert set(error.parameters) == {f"s.{key}" for key, _ in model.s.named_parameters()}


pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def copyable(module):
    """Its weight as a forward without gradients leaves it: else deepcopy refuses it."""
    with torch.no_grad():
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
    return module


MADE = {
    "lstm": (lambda: Model(lambda m, x: m.r(x)[0], r=copyable(
        weight_norm(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0"))), (N, 5, 3)),
    "spectral": (lambda: nn.Sequential(copyable(spectral_norm(nn.Linear(3, 4))), nn.Tanh()).eval(),
                 (N, 3)),
    "pruned": (lambda: nn.Sequential(copyable(
        prune.random_unstructured(nn.Linear(3, 4), "weight", amount=5)), nn.Tanh()), (N, 3)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", MADE)
def test_the_tensors_that_a_weight_is_made_of_have_the_norms_of_the_loop(name, options):
    make, shape = MADE[name]
    check(make(), square, torch.randn(shape), **options)


@a_few_modes
@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_a_power_iteration_takes_no_step_more_in_backward(norm, options):
    """In training each forward takes one; of a pass, the vectors are the same for all samples."""
    model = nn.Sequential(copyable(norm(nn.Linear(3, 4))), nn.Tanh(), nn.Linear(4, 2)).double()
    for _ in range(2):
        x, twin = torch.randn(N, 3, dtype=torch.float64), copy.deepcopy(model)
        want = loop_within(twin, squares, x)
        with torchgradx.attach(model, **options) as probe:
            exact_step(probe, model, x, want=want)
        model(x)
        twin(x)
        for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(b, c), name
        copyable(model[0])
