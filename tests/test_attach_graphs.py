"""Several models in one graph, other derivatives, hooks of the user's, threads, fake tensors."""

import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from attach_models import Model, identity, mlp, square
from attach_modes import a_few_modes, every_mode
from attach_oracle import close, close_named, joined, loop, loop_model, same_gradients
from attach_steps import exact_step
from test_attach_checkpoint import checkpointed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgradx

N = 4


@a_few_modes
def test_two_models_of_an_adversarial_game_are_exact_in_either_ones_step(options):
    maker = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    judge, z, x = mlp().double(), torch.randn(N, 2).double(), torch.randn(N, 3).double()
    through = lambda m, z: square(judge, m(z))  # noqa: E731
    judged = lambda m, z: square(m, maker(z))  # noqa: E731
    real_and_made = joined([loop(judge, square, x), loop(judge, square, maker(z).detach())])
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


def test_two_models_that_share_a_module_cannot_both_be_attached():
    trunk = nn.Linear(3, 3)
    one, other = nn.Sequential(trunk, nn.Linear(3, 1)), nn.Sequential(trunk, nn.Linear(3, 2))
    with torchgradx.attach(one), pytest.raises(RuntimeError, match="'0' is attached already"):
        torchgradx.attach(other)
    shared = nn.Tanh()  # without a parameter, as a default argument is
    with torchgradx.attach(nn.Sequential(trunk, shared)):
        torchgradx.attach(nn.Sequential(nn.Linear(3, 2), shared)).remove()


def both_outputs(m, x):
    rows, state = m.g(x)
    return m.o(rows + state[0][:, None])


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
def test_weights_may_be_stepped_within_the_backward(options):
    """A layer of several outputs is run again when the backward ends, with the weights it had."""
    model = Model(both_outputs, g=nn.GRU(3, 4, batch_first=True), o=nn.Linear(4, 2)).double()
    x = torch.randn(N, 5, 3).double()

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            want = loop(model, square, x)
            handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
            exact_step(probe, model, x, want=want)
            for handle in handles:
                handle.remove()


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
ROWS, IMAGES = (SAMPLES, T, C), (SAMPLES, C, 6, 6)
DIFFERENTIATED = {
    "linear": (lambda: nn.Linear(C, 6), ROWS),
    "conv2d": (lambda: nn.Conv2d(C, 6, 3, groups=2), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(C), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, C), IMAGES),
    "embedding": (
        lambda: Model(lambda m, x: m.l(x * m.e(torch.arange(T))), e=nn.Embedding(T, C),
                      l=nn.Linear(C, 2)), ROWS),
    "lstm": (lambda: Model(lambda m, x: m.r(x)[0], r=nn.LSTM(C, 6, batch_first=True)), ROWS),
    "encoder": (lambda: nn.TransformerEncoderLayer(C, 2, 8, 0.0, batch_first=True), ROWS),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", DIFFERENTIATED)


def example(name):
    make, sizes = DIFFERENTIATED[name]
    model = make().double()
    return model, copy.deepcopy(model), torch.randn(sizes, dtype=torch.float64)


def near(got, want):
    """Sums of fewer than a thousand terms each, none much larger than what comes of them."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e3 * torch.finfo(got.dtype).eps * want.abs().max()


@every_mode
@pytest.mark.parametrize("name", sorted(DIFFERENTIATED.keys() - {"encoder"}))  # has no tangents
def test_tangents_go_through(name, options):
    model, twin, x = example(name)
    v = torch.randn_like(x)

    def tangent(m):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent

    want = tangent(twin)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            near(tangent(model), want)
            exact_step(probe, model, x)


@every_mode
@each_model
def test_several_gradients_at_once_come_back(name, options):
    """is_grads_batched or vmap, as of a Jacobian: by the input, and by parameters."""
    model, twin, x = example(name)
    x.requires_grad_()

    def several(m):
        out = m(x)
        given = torch.stack([torch.ones_like(out), out.detach()])
        sources = [x, *m.parameters()]
        kept = lambda g, **o: torch.autograd.grad(out, x, g, retain_graph=True, **o)  # noqa: E731
        by_input = kept(given, is_grads_batched=True) + torch.func.vmap(kept)(given)
        return by_input + torch.autograd.grad(out, sources, given, is_grads_batched=True)

    want = several(twin)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            for a, b in zip(several(model), want, strict=True):
                near(a, b)
            exact_step(probe, model, x.detach())


def overwriting(m, x):
    """Its input before backward."""
    x = x * 1.0
    y = m.a(x)
    x.add_(5.0)
    return m.b(torch.tanh(y))


@every_mode
def test_an_input_that_is_overwritten_before_backward_is_refused_as_autograd_refuses(options):
    model = Model(overwriting, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()

    def step():
        square(model, torch.randn(N, 3).double()).backward()
        probe.norms()

    with torchgradx.attach(model, **options) as probe:  # noqa: SIM117
        with pytest.raises(RuntimeError, match=r"inplace|in-place"):
            step()


def scale_gradient(module, args, out):
    if out.requires_grad:
        out.register_hook(lambda g: g * 2)


HOOKS = {
    "output": lambda l: l.register_forward_hook(lambda m, args, out: out * 2 + 1),
    "input": lambda l: l.register_forward_pre_hook(lambda m, args: (args[0] * 2 + 1,)),
    "tensor": lambda l: l.register_forward_hook(scale_gradient),
    "full backward": lambda l: l.register_full_backward_hook(lambda m, gin, gout: (gin[0] * 2,)),
}


@every_mode
@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_users_own_are_honoured_whoever_came_first(kind, first, options):
    model, x = mlp().double(), torch.randn(N, 3).double()
    hooked, register = copy.deepcopy(model), HOOKS[kind]
    register(hooked[2])
    want = loop(hooked, square, x)
    if first == "theirs":
        register(model[2])
    with torchgradx.attach(model, **options) as probe:
        if first == "ours":
            register(model[2])
        exact_step(probe, model, x, want=want)
    if options.get("weight_grad", True):
        square(hooked, x).backward()
        same_gradients(model, hooked, 1e-12)


@a_few_modes
@pytest.mark.parametrize("kind", ["plain", False, True])
def test_backward_may_run_in_another_thread(kind, options):
    model = (mlp() if kind == "plain" else checkpointed(kind)).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        ThreadPoolExecutor(1).submit(square(model, x).backward).result()
        close_named(probe.norms(per="parameter"), loop(model, square, x))


THREADS, ATTACHED, ROUNDS = 6, 40, 3


@pytest.fixture
def switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def own(read=lambda w: w):
    scale = Model(lambda m, x: x * read(m.scale), scale=torch.rand(5) + 0.5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), scale, nn.Linear(5, 2))


MODELS = {"layers": mlp, "a module with a parameter of its own": own}
if torchgradx.ops.NATIVE:  # else torch may lock up: docs/limits.md
    MODELS["a Function of one"] = lambda: own(identity(lambda g: g))  # Python is asked for its name


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "beside"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_in_threads(make, fused, switching):
    """The first rounds prove the structure, all at once."""
    twin, x = make().double(), torch.randn(THREADS, 3, 3).double()
    want = loop_model(twin, square, x.flatten(0, 1)).sort()[0]
    torch.stack([square(twin, part) for part in x]).sum().backward()
    for _ in range(ATTACHED):
        model = copy.deepcopy(twin)
        with torchgradx.attach(model, fused=fused) as probe:
            for _ in range(ROUNDS):
                model.zero_grad()
                with ThreadPoolExecutor(THREADS) as pool:
                    list(pool.map(lambda part, model=model: square(model, part).backward(), x))
                close(probe.norms().sort()[0], want)
                same_gradients(model, twin, 1e-9)


@pytest.mark.parametrize("make", [nn.Linear, nn.LSTM])
def test_other_threads_run_during_a_forward(make, switching):
    model, x, times = make(512, 512), torch.randn(64, 128, 512), []
    with torchgradx.attach(model, check="off"), ThreadPoolExecutor(1) as pool:
        done = pool.submit(model, x)
        while not done.done():
            times.append(time.monotonic())
    waits = [after - before for before, after in pairwise(times)]
    assert max(waits) < sum(waits) / 2


def fake_input(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (4, 2)


def exported(model, x):
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


@a_few_modes
@pytest.mark.parametrize("use", [fake_input, exported])
@pytest.mark.parametrize("make", [mlp, own])
def test_beside_steps(make, use, options):
    model, x = make(), torch.randn(4, 3)
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            use(model, x)
            square(model, x).backward()
            use(model, x)
            close_named(probe.norms(per="parameter"), loop(twin, square, x), 1e-4)
