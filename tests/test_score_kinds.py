"""score() by other kinds than the norm: of the forward alone, several at once, over models."""

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attach_models import Model
from attach_oracle import close, loop, per_model
from test_score import C, N, classifier, entropy, pool, score
from test_token_weights import token_mean
from torch import nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset

import torchgradx


def by_definition(model, data):
    """{kind: [N]}, a sample at a time."""
    found = {kind: [] for kind in ("loss", "margin", "entropy", "el2n")}
    with torch.no_grad():
        for x, y in data:
            p = model(x[None]).softmax(1)[0]
            first, second = sorted(p.tolist())[:-3:-1]
            found["loss"].append(-p[y].log().item())
            found["margin"].append(first - second)
            found["entropy"].append(-(p * p.log()).sum().item())
            found["el2n"].append((p - F.one_hot(y, C)).norm().item())
    return {kind: torch.tensor(v, dtype=torch.float64) for kind, v in found.items()}


def backwards_of(model):
    """How many gradients come to the first weight, from now on."""
    seen = []
    next(model.parameters()).register_hook(lambda grad: seen.append(1))
    return seen


@pytest.mark.parametrize("kind", ["loss", "margin", "entropy", "el2n"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_a_kind_of_the_forward_alone_does_no_backward(kind, loss_reduction):
    model, data = classifier(), pool()
    want, calls = by_definition(model, data)[kind], []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    backwards = backwards_of(model)

    def loss(output, y):
        return F.cross_entropy(output, y, reduction=loss_reduction)

    got = score(model, DataLoader(data, 4, shuffle=True), loss if kind == "loss" else None,
                kind=kind, loss_reduction=loss_reduction)  # fmt: skip
    torch.testing.assert_close(torch.tensor(got), want)
    assert calls == [False] * 6
    assert not backwards


def test_several_kinds_are_had_from_one_pass(tmp_path):
    model, data = classifier(), pool()
    want = {**by_definition(model, data), "egl": expected_lengths(model, data)}
    want["norm"] = per_model(loop(model, entropy, *data.tensors))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    backwards = backwards_of(model)
    kinds = ["loss", "norm", "margin", "egl", "entropy", "el2n"]
    got = score(model, DataLoader(data, 4), kind=kinds, out=tmp_path / "x.csv")
    assert list(got) == kinds
    for kind in kinds:
        torch.testing.assert_close(torch.tensor(got[kind]), want[kind])
    # Two samples alone; and again where, without the extension, what watches changes the graph.
    assert len(calls) == 6 + (2 if torchgradx.ops.NATIVE else 4)
    assert len(backwards) == 6 * (1 + C)
    head, *rows = (tmp_path / "x.csv").read_text().splitlines()
    assert head == "index,loss,norm,margin,egl,entropy,el2n"
    assert [float(row.split(",")[2]) for row in rows] == got["norm"].tolist()
    assert list(score(model, DataLoader(data, 4), kind=["loss"])) == ["loss"]
    soft = TensorDataset(data.tensors[0], F.one_hot(data.tensors[1], C).double())
    got = score(model, DataLoader(soft, 4), None, kind="el2n")
    torch.testing.assert_close(torch.tensor(got), want["el2n"])


class Output(dict):
    """Outputs as of transformers' models: with .loss and .logits, from labels among the inputs."""

    __getattr__ = dict.__getitem__


def with_loss(m, x, labels=None):
    logits = m.inner(x)
    loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
    return Output(logits=logits, **loss)


def test_a_models_own_loss_and_logits_do():
    model, data = Model(with_loss, inner=classifier()), pool()
    x, y = data.tensors
    loader = DataLoader(StackDataset(x=x, labels=y), 4)
    want = by_definition(model.inner, data)
    want["norm"] = per_model(loop(model.inner, entropy, x, y))
    got = score(model, loader, None, kind=["norm", "loss", "el2n", "entropy", "margin"])
    for kind, values in got.items():
        torch.testing.assert_close(torch.tensor(values), want[kind])
    close(torch.tensor(score(model, loader, None)), want["norm"])
    alone = Model(lambda m, x, labels: {"loss": with_loss(m, x, labels).loss}, inner=model.inner)
    unlabelled = DataLoader(StackDataset(x=x), 4)
    for kind, of, batches in (("margin", model, unlabelled), ("loss", alone, loader)):
        torch.testing.assert_close(torch.tensor(score(of, batches, None, kind=kind)), want[kind])
    with pytest.raises(TypeError, match="loss_fn=None takes the loss"):
        score(model, unlabelled, None)


@dataclass(frozen=True, slots=True)
class Fields:
    logits: torch.Tensor


CONTAINERS = {
    "a mapping": (lambda t: UserDict(logits=t), lambda c: c["logits"]),
    "a subclass of dict": (lambda t: Output(logits=t), lambda c: c.logits),
    "a dataclass": (Fields, lambda c: c.logits),
    "a distribution": (lambda t: torch.distributions.Normal(t, 1.0), lambda c: c.loc),
}


@pytest.mark.parametrize(("put", "take"), CONTAINERS.values(), ids=CONTAINERS)
def test_samples_are_taken_out_of_what_a_model_is_given_and_returns(put, take):
    inner, (x, _) = classifier(), pool().tensors
    model = Model(lambda m, given: put(m.inner(take(given))), inner=inner)
    loss, y = lambda out, y: F.mse_loss(take(out), y), torch.randn(N, C, dtype=torch.float64)
    split = lambda batch: ((put(batch[0]),), batch[1])  # noqa: E731
    want = loop(model, lambda m, x, y: loss(m(put(x)), y), x, y)
    got = score(model, DataLoader(TensorDataset(x, y), 4), loss, kind=["norm", "loss"], split=split)
    close(torch.tensor(got["norm"]), per_model(want))
    torch.testing.assert_close(torch.tensor(got["loss"]), (inner(x) - y).square().mean(1).detach())
    torchgradx.verify(model, loss, (put(x),), y)


@pytest.mark.parametrize("flat", [True, False], ids=["rows n*T+t", "sequence first, last step"])
def test_samples_are_run_alone_where_outputs_do_not_show_them(flat):
    x, y = torch.randn(N, 3, C), torch.randn(N, 4)  # and N = 4 in most batches
    model = Model(lambda m, x: m.f(x).flatten(0, 1) if flat else m.f(x)[-1], f=nn.Linear(C, 4))
    loss = lambda out, y: F.mse_loss(out, y.repeat_interleave(len(out) // len(y), 0))  # noqa: E731
    split = lambda batch: (batch[0] if flat else batch[0].transpose(0, 1), batch[1])  # noqa: E731
    how = {"kind": "loss", "split": split, "batch_dim": 0 if flat else 1}
    got = score(model, DataLoader(TensorDataset(x, y), 4), loss, **how)
    for one, a, b in zip(got, x, y, strict=True):
        assert one == pytest.approx(loss(model(split((a[None], b))[0]), b[None]).item(), rel=1e-5)


def test_token_means_are_scored_by_the_samples_own():
    model = nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    x, y = torch.randint(0, 7, (N, 6)), torch.randint(0, 7, (N, 6))
    y[torch.arange(6) >= torch.randint(1, 7, (N, 1))] = -100
    seen = []

    def split(batch):
        seen[:] = [batch[1]]
        return batch

    loader = DataLoader(TensorDataset(x, y), 4)
    with pytest.raises(torchgradx.CoverageError, match="token_weights"):
        score(model, loader, token_mean)
    got = score(
        model, loader, token_mean, split=split, loss_reduction="sum",
        loss_scale=lambda: torchgradx.token_weights(seen[0]),
    )  # fmt: skip
    close(torch.tensor(got), per_model(loop(model, lambda m, x, y: token_mean(m(x), y), x, y)))


def expected_lengths(model, data, classes=C, of=per_model):
    """By the definition: every class in turn, a sample at a time."""
    x = data.tensors[0]
    by_class = [of(loop(model, entropy, x, torch.full((N,), c))) for c in range(C)]
    kept, order = model(x).softmax(1).detach().sort(1, descending=True)
    return (kept * torch.stack(by_class, 1).gather(1, order))[:, :classes].sum(1)


@pytest.mark.parametrize("classes", [None, np.int64(2)])
def test_the_expected_gradient_length_needs_no_labels(classes):
    model, data = classifier(), pool()
    unlabelled = DataLoader(TensorDataset(data.tensors[0]), 4, shuffle=True)
    got = score(model, unlabelled, None, kind="egl", top_classes=classes)
    close(torch.tensor(got), expected_lengths(model, data, classes))
    named = score(model, unlabelled, None, kind="egl", top_classes=classes, per="parameter")
    for name in ("0.weight", "3.bias"):
        want = expected_lengths(model, data, classes, lambda norms, k=name: norms[k])
        close(torch.tensor(named[name]), want)


def test_logits_are_found_in_what_a_model_returns():
    inner, data = classifier(), pool()
    model = Model(lambda m, x: {"logits": m.inner(x), "other": x}, inner=inner)
    want = expected_lengths(inner, data)
    loader = DataLoader(TensorDataset(data.tensors[0]), 4)
    close(torch.tensor(score(model, loader, None, kind="egl")), want)
    deep = Model(lambda m, x: (x, m.inner(x)), inner=inner)
    close(torch.tensor(score(deep, loader, None, kind="egl", logits=lambda o: o[1])), want)
    with pytest.raises(TypeError, match="logits="):
        score(deep, loader, None, kind="egl")
    named = DataLoader([(x, {"label": y}) for x, y in data], 4)
    deep.requires_grad_(False)
    got = score(deep, named, lambda out, y: F.cross_entropy(out[1], y["label"]), kind="loss")
    torch.testing.assert_close(torch.tensor(got), by_definition(inner, data)["loss"])
