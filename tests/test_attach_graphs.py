"""Several models and probes in one graph, replicas, steps within backward, shapes in and out."""

import threading
from dataclasses import dataclass

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or_refused,
    loop,
    mlp,
    square,
)
from torch import nn

import torchgradx

N = 4


def joined(first, second):
    """The norms of two passes of one record."""
    return {name: torch.cat([first[name], second[name]]) for name in first}


# ---- Several models ------------------------------------------------------------------------------
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


# ---- Replicas and steps --------------------------------------------------------------------------
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


def test_a_backward_is_recorded_while_another_thread_asks_a_node_for_its_products():
    model, x = mlp().double(), torch.randn(N, 3).double()
    with torchgradx.attach(model) as probe:
        loss = square(model, x)
        probe._recorder.asking = True  # as on the way down from a functional use
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        probe._recorder.asking = False
        close_named(probe.norms(per="parameter"), loop(model, square, x))


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


def test_a_recurrent_layer_called_twice_counts_its_cross_terms():
    model = recurrent(lambda m, x: both_outputs(m, x) + both_outputs(m, 2 * x))
    check(model, square, torch.randn(N, 5, 3))


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


# ---- What goes in and comes out ------------------------------------------------------------------
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


@a_few_modes
@pytest.mark.parametrize("windows_first", [False, True])
def test_windows_of_an_image_are_exact_or_refused(windows_first, options):
    """Shifted windows [N * windows, positions, channels], as in a Swin transformer."""

    def forward(m, x):
        n, h, w, c = x.shape
        tiles = torch.roll(x, (1, 1), (1, 2)).view(n, h // 2, 2, w // 2, 2, c)
        order = (1, 3, 0, 2, 4, 5) if windows_first else (0, 1, 3, 2, 4, 5)
        rows = tiles.permute(order).reshape(-1, 4, c)
        query = m.q(rows)
        mixed = m.p(torch.softmax(query @ rows.mT, -1) @ rows)
        lead = (h // 2, w // 2, n) if windows_first else (n, h // 2, w // 2)
        mixed = mixed.view(*lead, 2, 2, -1)
        return mixed.permute(2, 0, 3, 1, 4, 5) if windows_first else mixed.transpose(2, 3)

    model = Model(forward, q=nn.Linear(3, 3), p=nn.Linear(3, 2))
    refusal = exact_or_refused(model, square, torch.randn(N, 4, 4, 3), **options)
    assert (refusal is not None) == windows_first


@a_few_modes
def test_lengths_that_vary_under_a_mask_are_exact(options):
    lengths = torch.tensor([2, 5, 3, 4])
    mask = torch.arange(5) < lengths[:, None]

    def forward(m, x, mask):
        return m.o(m.e(x, src_key_padding_mask=~mask)) * mask[..., None]

    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = Model(forward, e=layer, o=nn.Linear(4, 2))
    check(model, square, torch.randn(N, 5, 4), mask, **options)


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
