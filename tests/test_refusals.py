"""Each refusal is written once, is found by its first words, and is reported once."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, identity, square
from attach_steps import refusal
from test_attach_graphs import overwriting
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence

import torchgradx
from torchgradx.refusals import REFUSALS, sentence

ROOT = Path(__file__).parent.parent / "torchgradx"
SOURCES = [p for p in ROOT.rglob("*.py") if p.name != "refusals.py"]
SOURCES += list((ROOT.parent / "csrc").rglob("*.cpp"))
TEXT = "\n".join(path.read_text() for path in SOURCES)
CALLS = r"refuse\([^\"()]*|cause\(|refused_all\(|RefusedError\(|emplace_back\([^\"()]*|note\("
CALL = rf'(?:{CALLS})"(\w+)"'
N = 6


def test_every_key_is_used_and_every_key_that_is_used_is_there():
    assert not [key for key in REFUSALS if f'"{key}"' not in TEXT]
    used = set(re.findall(CALL, TEXT))
    assert len(used) > 30
    assert used <= set(REFUSALS), used - set(REFUSALS)


def first_words(key: str) -> str:
    """Return what a text begins with, by which the documentation lists it."""
    return re.split(r"[:,;]| \(", re.sub(r"\{\w+\}", "...", REFUSALS[key].text))[0].strip()


def test_the_first_words_are_of_one_refusal():
    words = [first_words(key) for key in REFUSALS]
    assert len(set(words)) == len(words)
    for one in words:
        assert len(one.split()) >= 3, one
        assert not [other for other in words if other != one and other.startswith(one)], one


def test_a_sentence_ends_with_what_to_do():
    for text, remedy in REFUSALS.values():
        assert text[-1] not in ".:;,", text
        assert remedy[0].isupper(), text
        assert remedy[-1] not in ".:;,", text


def pause(model, x, probe):
    with probe.paused():
        square(model, x)


CAUSES = {
    "not_called": lambda *_: None,
    "no_grad": lambda model, x, _: torch.no_grad()(model)(x),
    "paused": pause,
    "called_directly": lambda model, x, _: model.forward(x),
    "no_backward": lambda model, x, _: torch.autograd.grad(square(model, x), model[0].weight),
    "removed": lambda model, x, probe: (square(model, x), probe.remove()),
    "reset": lambda model, x, probe: (square(model, x).backward(), probe.reset()),
    "frozen": lambda model, x, _: model.requires_grad_(False)(x),
}


@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("what", CAUSES)
def test_where_nothing_is_recorded_it_says_why(what, backend):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torchgradx.attach(model, backend=backend) as probe:
        CAUSES[what](model, torch.randn(N, 3), probe)
        error = refusal(probe, "nothing is recorded")
    assert str(error).startswith(sentence(what))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(error.parameters) == names


def test_one_cause_that_covers_many_parameters_is_reported_once():
    """At the module that is the closest to it."""
    layers = {f"l{k}": nn.Linear(3, 3) for k in range(10)}

    def forward(m, x):
        for k in range(9):
            x = torch.tanh(m.get_submodule(f"l{k}")(x))
        return m.l9(x - x.mean(0))

    model = Model(forward, **layers)
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, 3)).backward()
        error = refusal(probe)
    text = str(error)
    below = {f"l{k}.{name}" for k in range(9) for name in ("weight", "bias")}
    assert below <= set(error.parameters)
    assert "l8.weight and 17 parameters below it: its rows mix the 6 samples" in text
    assert text.count("mix") == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_what_mixes_below_batch_statistics_has_one_cause_with_its_module(frozen):
    norm = nn.BatchNorm1d(4).requires_grad_(not frozen)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), norm, nn.Linear(4, 2))
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, 3)).backward()
        error = refusal(probe)
    assert {"0.weight", "1.weight"} <= set(error.parameters)
    assert str(error).count("\n") == 1
    assert "module '2': it normalises by the batch's statistics" in str(error)


# ---- Causes that few models give -----------------------------------------------------------------
def replicas(model, probe):
    """As nn.DataParallel runs them, on the CPU."""

    def run(rows):
        twin = model._replicate_for_data_parallel()
        for name, p in model._parameters.items():
            setattr(twin, name, p.clone())
        return twin(rows)

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(run, torch.randn(2, N, 3)))
    torch.cat(outputs).square().sum().backward()


class Retried(torch.autograd.Function):
    """A checkpoint of one's own, whose backward tries twice."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.inside = inside
        ctx.save_for_backward(x)
        return inside(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.inside(x)
        with pytest.raises(ZeroDivisionError):
            out.backward(grad, retain_graph=True)
        x.grad = None
        out.backward(grad)
        return x.grad, None


def retries(m, x):
    fails = [True]

    def inside(x):
        h = m.b(x)
        if h.requires_grad:
            h.register_hook(lambda g: 1 / 0 if fails and fails.pop() else g)
        return m.b(h)

    return m.b(Retried.apply(m.a(x), inside))


def with_tangents(model, probe):
    x = torch.randn(N, 4, 3)
    with forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, torch.randn_like(x)))
        loss = forward_ad.unpack_dual(y).primal.square().flatten(1).sum(1).mean()
    loss.backward()


def with_a_frozen_weight():
    model = Model(overwriting, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model.a.weight.requires_grad_(False)
    return model


def several_packed_sequences(m, x):
    lengths = torch.ones(len(x) // 2, dtype=torch.long).repeat_interleave(2)
    rows = x.unflatten(1, (1, 3))
    return m.r(pack_padded_sequence(rows, lengths, True, False))[1][0].view(N // 2, -1)


hidden = identity(lambda grad: grad)  # a Function, through which no backward proves


def its_loss(m, x):
    x = hidden(x * m.idle) if m.uses else x
    return F.cross_entropy(m.b(torch.tanh(m.a(x))), torch.zeros(len(x), dtype=torch.long))


def used_later(model, probe):
    for model.uses in (False, True, True):
        model(torch.randn(N, 3)).backward()
        probe.norms()


def neighbours(m, x):
    return m.a(torch.zeros_like(x).index_add(0, torch.arange(1, N), x[:-1])[: len(x)])


def doubled(m, x):
    s = m.a(torch.ones(1, 3))
    s.register_hook(lambda g: 2 * g)
    return m.b(torch.tanh(x + s))


def in_sequence(m, x):  # [N, 3, 5, 4], as [5, 3 N, 4]
    rows = x.transpose(0, 1).flatten(0, 1).transpose(0, 1)
    return m.a(rows, rows, rows)[0].transpose(0, 1).unflatten(0, (3, -1)).transpose(0, 1)


def step(*sizes):
    return lambda model, probe: square(model, *([torch.randn(sizes)] if sizes else [])).backward()


def linears(forward, **more):
    return lambda: Model(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3), **more)


# key -> (model, what is done with it, options of attach)
PROVOKED = {
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 2))), step(N, 3), {}),
    "data_parallel": (lambda: nn.Linear(3, 2), replicas, {}),
    "inner_failed": (linears(retries), step(N, 3), {}),
    "tangents": (lambda: Model(lambda m, x: m.r(x)[0], r=nn.RNN(3, 4, batch_first=True)),
                 with_tangents, {}),
    "failed": (with_a_frozen_weight, step(N, 3), {"backend": "vmap"}),
    "packed": (lambda: Model(several_packed_sequences, r=nn.GRU(3, 4, batch_first=True)),
               step(N, 3), {"fused": False, "batch_size": N // 2}),
    "one_number": (linears(its_loss, idle=torch.randn(3)), used_later, {}),
    "algorithm": (lambda: nn.Linear(3, 2), step(N, 4, 3), {"algorithm": "rank1"}),
    "no_batch_size": (linears(lambda m: m.a(torch.ones(N, 3))), step(), {}),
    "no_kernel": (linears(lambda m, x: m.a(x) * m.w, w=torch.randn(3)), step(N, 3),
                  {"backend": "native"}),
    "not_its_sum": (linears(doubled), step(N, 3), {}),
    "failed_alone": (linears(neighbours), step(N, 3), {"check": "samples"}),
    "attention_rows": (lambda: Model(in_sequence, a=nn.MultiheadAttention(4, 2)),
                       step(N, 3, 5, 4), {"layout": {"a": "sequence"}}),
}  # fmt: skip
OF_KERNELS = {"data_parallel", "tangents", "algorithm", "attention_rows", "no_kernel", "failed"}


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("key", PROVOKED)
def test_a_cause_is_found_and_named(key):
    make, use, options = PROVOKED[key]
    if key in OF_KERNELS and not torchgradx.ops.NATIVE:
        pytest.skip("of the extension's layers")

    def attached_and_read():
        model = make()
        with torchgradx.attach(model, **options) as probe:
            use(model, probe)
            probe.norms()

    with pytest.raises(torchgradx.CoverageError) as error:
        attached_and_read()
    assert max(re.split(r"{\w+}", REFUSALS[key][0]), key=len).strip() in str(error.value)
