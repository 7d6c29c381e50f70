"""Several models and probes in one graph, replicas, steps within backward; other derivatives than
a loss's."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    every_mode,
    exact_or,
    exact_or_refused,
    loop,
    mlp,
    need_native,
    square,
)
from torch import nn

import torchgradx

N = 4


def joined(first, second):
    """The norms of two passes of one record."""
    return {name: torch.cat([first[name], second[name]]) for name in first}


@a_few_modes
def test_two_models_of_an_adversarial_game_are_exact_in_either_ones_step(options):
    maker = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    judge, z, x = mlp().double(), torch.randn(N, 2).double(), torch.randn(N, 3).double()
    through = lambda m, z: square(judge, m(z))  # noqa: E731
    judged = lambda m, z: square(m, maker(z))  # noqa: E731
    made = maker(z).detach()
    real_and_made = joined(loop(judge, square, x), loop(judge, square, made))
    of_maker, of_judge = loop(maker, through, z), loop(judge, judged, z)
    with torchgradx.attach(maker, **options) as p, torchgradx.attach(judge, **options) as q:
        for _ in range(2):
            (square(judge, x) + square(judge, maker(z).detach())).backward()
            close_named(q.norms(per="parameter"), real_and_made)
            through(maker, z).backward()
            close_named(p.norms(per="parameter"), of_maker)
            close_named(q.norms(per="parameter"), of_judge)
            judge.requires_grad_(False)
            through(maker, z).backward()
            close_named(p.norms(per="parameter"), of_maker)
            judge.requires_grad_(True)


@a_few_modes
def test_probes_on_two_parts_of_one_model_are_exact(options):
    model, x = nn.Sequential(mlp(), nn.Tanh(), nn.Linear(2, 2)).double(), torch.randn(N, 3).double()
    want = loop(model, square, x)
    with torchgradx.attach(model[0], **options) as p, torchgradx.attach(model[2], **options) as q:
        square(model, x).backward()
        for probe, prefix in ((p, "0."), (q, "2.")):
            part = {k.removeprefix(prefix): v for k, v in want.items() if k.startswith(prefix)}
            close_named(probe.norms(per="parameter"), part)


def test_two_models_that_share_a_module_cannot_both_be_attached():
    trunk = nn.Linear(3, 3)
    one, other = nn.Sequential(trunk, nn.Linear(3, 1)), nn.Sequential(trunk, nn.Linear(3, 2))
    with torchgradx.attach(one), pytest.raises(RuntimeError, match="'0' is attached already"):
        torchgradx.attach(other)


class Replicated(nn.Module):
    """What nn.DataParallel does, on the CPU: replicas whose weights are copies, in threads."""

    def __init__(self, module, count=2):
        super().__init__()
        self.module, self.count = module, count

    def replica(self):
        modules = list(self.module.modules())
        twins = {m: m._replicate_for_data_parallel() for m in modules}
        for module, twin in twins.items():
            for key, child in module._modules.items():
                setattr(twin, key, twins[child])
            for key, p in module._parameters.items():
                setattr(twin, key, p.clone())
        return twins[self.module]

    def forward(self, x):
        outputs = [None] * self.count
        replicas, chunks = [self.replica() for _ in outputs], x.chunk(self.count)

        def run(k):
            outputs[k] = replicas[k](chunks[k])

        threads = [threading.Thread(target=run, args=(k,)) for k in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)


@a_few_modes
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_replicas_in_threads_are_refused_and_train_as_before(where, options):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    wrapped, x = Replicated(model), torch.randn(2 * N, 3).double()
    square(wrapped, x).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torchgradx.attach(model if where == "inside" else wrapped, **options) as probe:
        square(wrapped, x).backward()
        with pytest.raises(torchgradx.CoverageError) as refusal:
            probe.norms()
    assert len(refusal.value.parameters) == len(want)
    assert where == "outside" or "DistributedDataParallel" in str(refusal.value)
    for p, gradient in zip(model.parameters(), want, strict=True):
        assert torch.allclose(p.grad, gradient, rtol=1e-12)


@a_few_modes
def test_a_proof_hides_nothing_of_other_threads_and_records_nothing_of_its_own(options):
    """While a structure is proven, another thread runs a backward, or a forward with its proof."""
    model = mlp().double()
    batches = [torch.randn(N, *(5,) * dims, 3).double() for dims in range(4)]
    meanwhile, losses = [], []

    def in_backward(_):
        if meanwhile:
            thread = threading.Thread(target=meanwhile.pop())
            thread.start()
            thread.join()

    model[1].register_forward_hook(lambda *call: call[-1].register_hook(in_backward) and None)
    with torchgradx.attach(model, **options) as probe:
        losses.append(square(model, batches[0]))
        meanwhile.append(losses[0].backward)
        losses.append(square(model, batches[1]))
        meanwhile.append(lambda: losses.append(square(model, batches[2])))
        last = square(model, batches[3])
        assert not meanwhile
        for loss in (*losses[1:], last):
            loss.backward()
        begun = [batches[k] for k in (0, 1, 3, 2)]
        want = [loop(model, square, x) for x in begun]
        close_named(
            probe.norms(per="parameter"),
            {name: torch.cat([one[name] for one in want]) for name in want[0]},
        )


def both_outputs(m, x):
    rows, state = m.g(x)
    return m.o(rows + state[0][:, None])


def recurrent(forward):
    return Model(forward, g=nn.GRU(3, 4, batch_first=True), o=nn.Linear(4, 2)).double()


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
def test_weights_may_be_stepped_within_the_backward(options):
    """A layer of several outputs is run again when the backward ends, with the weights it had."""
    model, x = recurrent(both_outputs), torch.randn(N, 5, 3).double()

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            want = loop(model, square, x)
            handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("first", ["hook", "probe"])
def test_hooks_on_a_parameter_under_norms_alone(first, options):
    """One on the gradient sees it; what follows an accumulation follows none, and stays."""
    model, x = mlp().double(), torch.randn(N, 3).double()
    want, weight, seen, stepped = loop(model, square, x), model[0].weight, [], []
    square(model, x).backward()
    gradient, kept = weight.grad.clone(), [p.grad for p in model.parameters()]

    def hook():
        weight.register_hook(lambda g: seen.append(g) or g * 2)
        weight.register_post_accumulate_grad_hook(stepped.append)

    if first == "hook":
        hook()
    with torchgradx.attach(model, weight_grad=False, **options) as probe:
        if first == "probe":
            hook()
        for _ in range(2):
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)
    assert len(seen) == 2
    assert all(torch.allclose(g, gradient, rtol=1e-9) for g in seen)
    assert not stepped
    assert all(p.grad is old for p, old in zip(model.parameters(), kept, strict=True))
    assert torch.equal(weight.grad, gradient)
    square(model, x).backward()
    assert len(stepped) == 1


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


WRAPPED = {
    "a tuple": (lambda y, h: (y, h), lambda out: out[0]),
    "nested": (lambda y, h: {"a": [(y,)], "b": {"h": h}}, lambda out: out["a"][0][0]),
    "a dataclass": (lambda y, h: Output(y, (h,)), lambda out: out.logits),
    "an object of its own": (lambda y, h: type("Own", (), {"y": y})(), lambda out: out.y),
}


@a_few_modes
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
def test_models_may_return_anything(name, flat, options):
    wrap, get = WRAPPED[name]

    def forward(m, *, x):  # by keyword only
        n, t, _ = x.shape
        hidden = torch.tanh(m.i(x.flatten(0, 1)).view(n, t, -1) if flat else m.i(x))
        return wrap(m.o(hidden), hidden)

    def loss(model, x):
        return get(model(x=x)).square().flatten(1).sum(1).mean()

    model, x = Model(forward, i=nn.Linear(3, 4), o=nn.Linear(4, 2)), torch.randn(N, 5, 3)
    if flat and name == "an object of its own":  # rows t*N+n look the same, and nothing is provable
        refusal = exact_or_refused(model, loss, x, **options)
        assert refusal is None or "layout" in str(refusal)
    else:
        check(model, loss, x, **options)


def test_a_backward_that_begins_in_several_places():
    """In the outputs themselves, one of which is reached from the other, and comes twice."""

    def forward(m, x):
        h = m.a(x)
        return m.b(h), h

    def both(model, x):
        y, h = model(x)
        return (y.square().flatten(1).sum(1) + 2 * h.square().flatten(1).sum(1)).mean()

    model = Model(forward, a=nn.Linear(3, 4, bias=False), b=nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    want = loop(model, both, x)
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            y, h = model(x)
            torch.autograd.backward([y, h, h], [2 * t.detach() / 5 for t in (y, h, h)])
            close_named(probe.norms(per="parameter"), want)


SAMPLES, T, C = 3, 5, 4


def first(rnn):
    return Model(lambda m, x: m.r(x)[0], r=rnn)


def looked_up():
    return Model(
        lambda m, x: m.l(x * m.e(torch.arange(T))), e=nn.Embedding(T, C), l=nn.Linear(C, 2)
    )


ROWS, IMAGES = (SAMPLES, T, C), (SAMPLES, C, 6, 6)
MODELS = {
    "linear": (lambda: nn.Linear(C, 6), ROWS),
    "a linear of vectors": (lambda: nn.Linear(C, 6), (SAMPLES, C)),
    "one without bias": (lambda: nn.Linear(C, 6, bias=False), ROWS),
    "conv1d": (lambda: nn.Conv1d(T, 6, 3), ROWS),
    "conv2d": (lambda: nn.Conv2d(C, 6, 3, groups=2), IMAGES),
    "transposed": (lambda: nn.ConvTranspose2d(C, 6, 3), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(C), ROWS),
    "rms norm": (lambda: nn.RMSNorm(C), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, C), IMAGES),
    "instance norm": (lambda: nn.InstanceNorm2d(C, affine=True), IMAGES),
    "batch norm": (lambda: nn.BatchNorm2d(C).eval(), IMAGES),
    "prelu": (lambda: nn.PReLU(C), IMAGES),
    "embedding": (looked_up, ROWS),
    "lstm": (lambda: first(nn.LSTM(C, 6, batch_first=True)), ROWS),
    "gru": (lambda: first(nn.GRU(C, 6, batch_first=True, bidirectional=True)), ROWS),
    "rnn": (lambda: first(nn.RNN(C, 6, batch_first=True)), ROWS),
    "mlp": (lambda: nn.Sequential(nn.Linear(C, 8), nn.Tanh(), nn.Linear(8, 2)), ROWS),
    "encoder": (lambda: nn.TransformerEncoderLayer(C, 2, 8, 0.0, batch_first=True), ROWS),
}
each_model = pytest.mark.parametrize("name", MODELS)
forwards = pytest.mark.parametrize(
    "name", [m for m in MODELS if m != "encoder"]
)  # attention has no tangents


def example(name):
    make, sizes = MODELS[name]
    model = make().double()
    return model, copy.deepcopy(model), torch.randn(sizes, dtype=torch.float64)


def near(got, want):
    """Sums of fewer than a thousand terms each, none much larger than what comes of them."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e3 * torch.finfo(got.dtype).eps * want.abs().max()


def exact_afterwards(probe, model, x):
    want = loop(model, square, x)
    for _ in range(2):
        model.zero_grad()
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)


@every_mode
@forwards
def test_tangents_go_through(name, options):
    """Forward-mode differentiation."""
    need_native(options)
    model, twin, x = example(name)
    v = torch.randn_like(x)

    def tangent(m):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent

    want = tangent(twin)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            near(tangent(model), want)
            exact_afterwards(probe, model, x)


@every_mode
@forwards
def test_a_backward_beside_tangents_is_exact_or_refused(name, options):
    need_native(options)
    model, _, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with forward_ad.dual_level():
                y = model(forward_ad.make_dual(x, torch.randn_like(x)))
                loss = forward_ad.unpack_dual(y).primal.square().flatten(1).sum(1).mean()
            loss.backward()
            exact_or(torchgradx.CoverageError, "tangents", probe, want)
            exact_afterwards(probe, model, x)


@every_mode
@each_model
def test_several_gradients_at_once_come_back(name, options):
    """is_grads_batched, as of a Jacobian: by the input, and by parameters."""
    need_native(options)
    model, twin, x = example(name)
    x.requires_grad_()

    def several(m):
        out = m(x)
        given = torch.stack([torch.ones_like(out), out.detach()])
        sources = [x, *m.parameters()]
        by_input = torch.autograd.grad(out, x, given, retain_graph=True, is_grads_batched=True)
        return by_input + torch.autograd.grad(out, sources, given, is_grads_batched=True)

    want = several(twin)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            for a, b in zip(several(model), want, strict=True):
                near(a, b)
            exact_afterwards(probe, model, x.detach())
