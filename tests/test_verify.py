"""grad_norms and verify: one call, nothing left behind; and verify finds what attach cannot."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model
from attach_oracle import close, close_named, fingerprint, loop, per_model, per_module
from test_score import Counting, entropy
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import torchgradx

N = 6


def classifier():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(16),
                         nn.Linear(16, 5))  # fmt: skip


def samples():
    return torch.randn(N, 3, 6), torch.randint(0, 5, (N,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_grad_norms_gives_every_samples_norm_and_the_parts_of_it(dtype):
    model, (x, y) = classifier().to(dtype), samples()
    x, rtol = x.to(dtype), 1e-9 if dtype == torch.float64 else 1e-4
    want = loop(model, entropy, x, y)
    close(torchgradx.grad_norms(model, F.cross_entropy, x, y), per_model(want), rtol)
    named = torchgradx.grad_norms(model, F.cross_entropy, x, y, per="parameter")
    close_named(named, want, rtol)
    modules = torchgradx.grad_norms(model, F.cross_entropy, x, y, per="module")
    close_named(modules, per_module(want), rtol)
    for norms in named.values():
        assert (norms.dtype, norms.shape, norms.requires_grad) == (dtype, (N,), False)


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_inputs_may_be_a_tuple_or_a_dictionary(kind):
    model = Model(lambda m, left, right: m.head(torch.tanh(m.a(left) * m.b(right))),
                  a=nn.Linear(3, 4), b=nn.Linear(2, 4), head=nn.Linear(4, 5)).double()  # fmt: skip
    y = torch.randint(0, 5, (N,))
    left, right = torch.randn(N, 3).double(), torch.randn(N, 2).double()
    want = per_model(loop(model, entropy, left, right, y))
    inputs = (left, right) if kind == "tuple" else {"right": right, "left": left}
    close(torchgradx.grad_norms(model, F.cross_entropy, inputs, y), want)
    assert str(torchgradx.verify(model, F.cross_entropy, inputs, y))


def test_inputs_may_be_a_packed_sequence():
    model = Model(lambda m, x: m.o(m.r(x)[1][0]), r=nn.GRU(3, 4), o=nn.Linear(4, 5)).double()
    rows, y = [torch.randn(k, 3).double() for k in (2, 1, 3, 2, 1, 3)], torch.randint(0, 5, (N,))
    packed = pack_sequence(rows, enforce_sorted=False)
    one = lambda m, k: entropy(m, pack_sequence([rows[k]]), y[k])  # noqa: E731
    got = torchgradx.grad_norms(model, F.cross_entropy, packed, y, batch_size=N)
    close(got, per_model(loop(model, one, torch.arange(N))))
    assert torchgradx.verify(model, F.cross_entropy, packed, y, batch_size=N).agrees


@pytest.mark.parametrize("kind", ["padded tokens", "class weights", "smoothed", "a part of it"])
def test_a_mean_over_what_counts_is_refused_where_samples_count_differently(kind):
    x, y = torch.randn(N, 7, 3), torch.randint(0, 4, (N, 7))
    model = nn.Linear(3, 5).double()
    weight = torch.tensor([1.0, 2, 3, 1, 1]).double()
    options = {"weight": weight} if kind == "class weights" else {}
    options["ignore_index"] = ignored = 255 if options else 4
    options |= {"label_smoothing": 0.1} if kind == "smoothed" else {}
    factor, more = (2.0, 1.0) if kind == "a part of it" else (1.0, 0.0)

    def loss_fn(out, y, **how):
        how = options | how
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten(), **how)
        return factor * loss + more * out.square().mean()

    x = x.double()
    if kind != "class weights":
        for counted in (7, 5):
            y[:, counted:] = 4  # of all samples alike
            even = loop(model, lambda m, x, y: loss_fn(m(x), y), x, y)
            close_named(torchgradx.grad_norms(model, loss_fn, x, y, per="parameter"), even)
    y[1, 3:] = ignored
    with pytest.raises(torchgradx.CoverageError, match="the targets that count") as caught:
        torchgradx.grad_norms(model, loss_fn, x, y)
    assert caught.value.parameters == ("weight", "bias")
    with pytest.raises(torchgradx.VerificationError, match="differs"):
        torchgradx.verify(model, loss_fn, x, y)


def test_means_by_sample_are_not_refused():
    x, y = torch.randn(N, 7, 3).double(), torch.randint(0, 4, (N, 7))
    y[1, 3:], y[4, 5:] = 4, 4
    model = nn.Linear(3, 5).double()

    def each(out, y):
        rows = zip(out, y, strict=True)
        return sum(F.cross_entropy(o, t, ignore_index=4) for o, t in rows) / len(y)

    want = loop(model, lambda m, x, y: each(m(x), y), x, y)
    close_named(torchgradx.grad_norms(model, each, x, y, per="parameter"), want)


def test_a_reduction_that_is_not_the_one_said_is_refused():
    model, (x, y) = classifier(), samples()
    for said, got in (("mean", "sum"), ("sum", "mean")):
        loss_fn = nn.CrossEntropyLoss(reduction=got)
        with pytest.raises(torchgradx.CoverageError, match=f'say loss_reduction="{got}"'):
            torchgradx.grad_norms(model, loss_fn, x, y, loss_reduction=said)
        torchgradx.grad_norms(model, loss_fn, x[:1], y[:1], loss_reduction=said)
    close(
        torchgradx.grad_norms(model, F.cross_entropy, x, y, loss_reduction="sum", loss_scale=1 / N),
        torchgradx.grad_norms(model, F.cross_entropy, x, y),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    for half in (0.5, torch.tensor(0.5), lambda: 0.5, lambda args, kwargs: 0.5, scaler):
        torchgradx.verify(model, lambda out, y: F.cross_entropy(out, y) / 2, x, y, loss_scale=half)


@pytest.mark.parametrize("call", ["grad_norms", "verify"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_left_behind(call, training, fails):
    model, (x, y) = nn.Sequential(*classifier(), Counting()).train(training), samples()
    before = fingerprint(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.grad = kept = torch.ones(4, 3, 3)
    weight = torch.ones(4, 3, 3, requires_grad=True)  # of the loss alone
    weight.grad = kept

    def loss(out, y):
        return F.cross_entropy(out * weight.mean(), y) if not fails else {}["boom"]

    with pytest.raises(KeyError, match="boom") if fails else contextlib.nullcontext():
        getattr(torchgradx, call)(model, loss, x.requires_grad_(), y)
    grads = [p.grad for p in (*model.parameters(), x)]
    assert grads[0] is weight.grad is kept
    assert bool((kept == 1).all())
    assert grads[1:] == [None] * (len(grads) - 1)
    assert fingerprint(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    torchgradx.attach(model).remove()  # nothing holds it


LOSSES = {
    "in-batch negatives": lambda out, _: F.cross_entropy(out @ out.T, torch.arange(len(out))),
    "a ranking": lambda out, _: F.softplus(3 * (out[:, None, 0] - out[None, :, 1])).mean(),
    "centred": lambda out, y: F.cross_entropy(out - out.mean(0), y),
    "forgot the mean": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "nan of a batch": lambda out, y: F.cross_entropy(out, y) * (torch.nan if len(out) > 1 else 1),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_verify_finds_a_loss_that_mixes_samples_or_is_not_reduced_as_said(loss):
    model, (x, y) = classifier(), samples()
    before = fingerprint(model)
    with pytest.raises(torchgradx.VerificationError) as caught:
        torchgradx.verify(model, loss, x, y)
    text = str(caught.value)
    assert any(name in text for name, _ in model.named_parameters()), text
    assert len(text.splitlines()) > 2, f"no table: {text}"
    assert fingerprint(model) == before
    assert all(p.grad is None for p in model.parameters())


def test_verify_holds_norms_to_the_tolerance_it_is_given():
    model, (x, y) = classifier(), samples()

    def nudged(out, y):  # the loop over single samples meets a loss 1% off the batch's
        return F.cross_entropy(out, y) * (1.01 if len(out) == 1 else 1.0)

    assert torchgradx.verify(model, nudged, x, y, rtol=0.05) is not None
    with pytest.raises(torchgradx.VerificationError):
        torchgradx.verify(model, nudged, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        torchgradx.verify(model, F.cross_entropy, x, y)


@pytest.mark.parametrize("rtol", [-1, float("nan"), "1", torch.ones(2)])
def test_arguments_that_mean_nothing_are_refused_by_name(rtol):
    with pytest.raises((TypeError, ValueError), match="rtol"):
        torchgradx.verify(classifier(), F.cross_entropy, *samples(), rtol=rtol)
    for call in (torchgradx.grad_norms, torchgradx.verify):
        with pytest.raises(TypeError, match="loss_fn"):
            call(classifier(), None, *samples())
        with pytest.raises(TypeError, match=r"inputs must be .*; got 3\.0"):
            call(classifier(), F.cross_entropy, 3.0, samples()[1])


def test_dropout_that_is_on_is_named():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2), nn.Dropout(0.0))
    model.append(nn.Sequential(nn.Dropout(0.1)))
    with pytest.raises(torchgradx.VerificationError, match=r"Dropout is on in 1, 4\.0: say model"):
        torchgradx.verify(model, F.mse_loss, torch.randn(4, 3), torch.randn(4, 2))


def test_verify_reports_a_refusal_as_its_own_error():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    x, y = torch.randn(N, 3), torch.randint(0, 5, (N,))
    with pytest.raises(torchgradx.VerificationError, match=r"1\.weight"):
        torchgradx.verify(model, F.cross_entropy, x, y)
    x[2] = float("nan")  # so are both of its norms
    assert torchgradx.verify(model.eval(), F.cross_entropy, x, y).agrees


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_wrong_gradient_of_torchs_own_is_mended_in_the_loop(dtype, mixes):
    """BatchNorm in eval mode, of a batch of one, whose gradient does not lie as its input does."""
    rows = Model(lambda m, x: m.norm(x).flatten(2).transpose(1, 2), norm=nn.BatchNorm2d(8))
    rows, x = rows.to(dtype).eval(), torch.randn(N, 8, 4, 4, dtype=dtype)
    target = torch.randn(N, 16, 8, dtype=dtype)

    def loss(out, y):
        out = out - out.mean(0) if mixes and len(out) > 1 else out
        return (out * y).cos().mean()

    if mixes:
        with pytest.raises(torchgradx.VerificationError, match="norms differ"):
            torchgradx.verify(rows, loss, x, target)
        return
    state = torch.get_rng_state()
    report = torchgradx.verify(rows, loss, x, target)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.agrees
    one = x[:1].double().requires_grad_()  # once it holds, _mend may go
    assert not torch.autograd.gradcheck(rows.double(), one, raise_exception=False)
