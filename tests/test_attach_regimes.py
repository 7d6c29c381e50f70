"""Checkpointed blocks, offloading, other people's hooks, threads, functorch and tensors without
values."""

import copy
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close,
    close_named,
    every_mode,
    exact_or,
    exact_or_refused,
    fallback_mode,
    loop,
    loop_model,
    mlp,
    native_missing,
    need_native,
    same_gradients,
    square,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4
kinds_of_checkpoint = pytest.mark.parametrize("reentrant", [False, True])


def checkpointed(reentrant, middle=None):
    middle = middle or nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    return Model(
        lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.into(x)), use_reentrant=reentrant)),
        into=nn.Linear(3, 4), block=middle, out=nn.Linear(4, 2),
    )  # fmt: skip


@every_mode
@kinds_of_checkpoint
@pytest.mark.parametrize("shape", [(N, 3), (N, 6, 3)], ids=str)
def test_checkpointed_blocks_are_exact(shape, reentrant, options):
    check(checkpointed(reentrant), square, torch.randn(shape), **options)


@fallback_mode
@kinds_of_checkpoint
def test_checkpointed_fallback_layers_are_exact(reentrant, options):
    model = checkpointed(reentrant, nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU(4)))
    check(model, square, torch.randn(N, 3), **options)


@every_mode
@kinds_of_checkpoint
def test_checkpointed_convolutions_are_exact(reentrant, options):
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2))
    model = Model(
        lambda m, x: m.out(checkpoint(m.block, m.into(x), use_reentrant=reentrant).flatten(1)),
        into=nn.Conv2d(2, 4, 3), block=block, out=nn.Linear(16, 2),
    )  # fmt: skip
    check(model, square, torch.randn(N, 2, 6, 6), **options)


@every_mode
@kinds_of_checkpoint
def test_a_layer_shared_over_three_checkpointed_segments_is_exact(reentrant, options):
    def forward(m, x):
        x = m.into(x)
        for _ in range(3):
            x = checkpoint(lambda t: torch.tanh(m.l(t)), x, use_reentrant=reentrant)
        return x

    model = Model(forward, into=nn.Linear(3, 4), l=nn.Linear(4, 4))
    check(model, square, torch.randn(N, 3), **options)
    check(model, square, torch.randn(N, 6, 3), **options)


@kinds_of_checkpoint
def test_attaching_between_forward_and_backward_leaves_the_gradients_right(reentrant):
    model, x = checkpointed(reentrant), torch.randn(N, 3)
    twin = copy.deepcopy(model)
    square(twin, x).backward()
    loss = square(model, x)
    with torchgradx.attach(model) as probe:
        loss.backward()
        same_gradients(model, twin)
        want = loop_model(model, square, x)
        square(model, x).backward()
        assert torch.allclose(probe.norms().double(), want, rtol=1e-5)


@every_mode
@kinds_of_checkpoint
def test_removing_between_forward_and_backward_leaves_the_gradients_right(reentrant, options):
    need_native(options)
    model, x = checkpointed(reentrant), torch.randn(N, 3)
    twin = copy.deepcopy(model)
    square(twin, x).backward()
    probe = torchgradx.attach(model, **options)
    loss = square(model, x)
    probe.remove()
    loss.backward()
    if options.get("weight_grad", True):
        same_gradients(model, twin, 1e-6)


@every_mode
@pytest.mark.parametrize("how", ["save_on_cpu", "copies"])
def test_saved_tensors_may_be_offloaded(how, options):
    def loss(model, x):
        copies = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        with torch.autograd.graph.save_on_cpu() if how == "save_on_cpu" else copies:
            return square(model, x)

    check(mlp(), loss, torch.randn(N, 6, 3), **options)


def overwriting(m, x):
    x = x * 1.0
    y = m.l(x)
    x.add_(5.0)
    return m.o(torch.tanh(y))


@every_mode
def test_an_input_that_is_overwritten_before_backward_is_refused_as_autograd_refuses(options):
    need_native(options)

    model = Model(overwriting, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()

    def step():
        square(model, torch.randn(N, 3).double()).backward()
        probe.norms()

    with torchgradx.attach(model, **options) as probe:  # noqa: SIM117
        with pytest.raises(RuntimeError, match=r"inplace|in-place"):
            step()


@every_mode
def test_an_input_that_nothing_needs_may_be_overwritten(options):
    """A frozen weight: only the bias counts, and the layer's input is nobody's."""
    need_native(options)

    model = Model(overwriting, l=nn.Linear(3, 4), o=nn.Linear(4, 2))
    model.l.weight.requires_grad_(False)
    if options.get("backend") == "vmap" or native_missing():  # it runs the layer again
        exact_or_refused(model, square, torch.randn(N, 3), **options)
    else:
        check(model, square, torch.randn(N, 3), **options)


@every_mode
@pytest.mark.parametrize("first", ["theirs", "ours"])
@pytest.mark.parametrize("kind", ["output", "input", "tensor", "full backward"])
def test_hooks_of_the_users_own_are_honoured_whoever_came_first(kind, first, options):
    need_native(options)
    model, x = mlp().double(), torch.randn(N, 3).double()

    def scale_gradient(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda g: g * 2)

    def register(model):
        layer = model[2]
        if kind == "output":
            return layer.register_forward_hook(lambda m, args, out: out * 2 + 1)
        if kind == "input":
            return layer.register_forward_pre_hook(lambda m, args: (args[0] * 2 + 1,))
        if kind == "tensor":
            return layer.register_forward_hook(scale_gradient)
        return layer.register_full_backward_hook(lambda m, gin, gout: (gin[0] * 2,))

    hooked = copy.deepcopy(model)
    register(hooked)
    want = loop(hooked, square, x)
    if first == "theirs":
        register(model)
    with torchgradx.attach(model, **options) as probe:
        if first == "ours":
            register(model)
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)
    if options.get("weight_grad", True):
        square(hooked, x).backward()
        same_gradients(model, hooked, 1e-12)


class Shifted(nn.Linear):
    """Another forward under a Linear's name."""

    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias) + x[..., :2]


@a_few_modes
def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_its_base(options):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Shifted(3, 2))
    check(model, square, torch.randn(N, 5, 3), **options)


@a_few_modes
def test_an_instance_whose_forward_was_replaced_is_not_taken_for_its_type(options):
    model = mlp()
    layer = model[2]
    model[2].forward = lambda x: F.linear(x, layer.weight * 2, layer.bias)
    x = torch.randn(N, 3)
    # deepcopy keeps such a closure on the original layer: take the oracle from an equal model
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    twin[2].weight.data *= 2
    want = loop(twin.double(), square, x)
    want["2.weight"] = want["2.weight"] * 2
    with torchgradx.attach(model.double(), **options) as probe:
        square(model, x.double()).backward()
        exact_or(torchgradx.CoverageError, "2.weight", probe, want)


@a_few_modes
@pytest.mark.parametrize("kind", ["plain", False, True])
def test_backward_may_run_in_another_thread(kind, options):
    model = (mlp() if kind == "plain" else checkpointed(kind)).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        close_named(probe.norms(per="parameter"), loop(model, square, x))


def test_functorch_transforms_of_an_attached_model_work_and_record_nothing():
    model, x = mlp().double(), torch.randn(N, 3).double()
    want = loop(model, square, x)
    detached = {name: p.detach() for name, p in model.named_parameters()}

    def one(parameters, row):
        out = torch.func.functional_call(model, parameters, (row[None],))
        return out.square().sum()

    with torchgradx.attach(model) as probe:
        grads = torch.func.vmap(torch.func.grad(one), (None, 0))(detached, x)
        close_named({name: g.flatten(1).norm(dim=1) for name, g in grads.items()}, want)
        torch.func.jvp(model, (x,), (x,))
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)


def test_a_functional_call_with_other_parameters_is_theirs_or_refused():
    model, x = mlp().double(), torch.randn(N, 3).double()
    others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    twin = copy.deepcopy(model)
    twin.load_state_dict({name: p.detach() for name, p in others.items()})
    want = loop(twin, square, x)
    with torchgradx.attach(model) as probe:
        square(lambda t: torch.func.functional_call(model, others, (t,)), x).backward()
        square(twin, x).backward()
        for name, p in twin.named_parameters():
            assert torch.allclose(others[name].grad, p.grad, rtol=1e-12)
        try:
            norms = probe.norms(per="parameter")
        except (torchgradx.CoverageError, RuntimeError):
            probe.reset()
        else:
            empty = all(len(v) == 0 or not v.any() for v in norms.values())
            assert empty or close_named(norms, want) is None
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))


THREADS, ROUNDS = 6, 12


@pytest.fixture
def switching():
    """Between threads as often as may be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def own():
    scale = Model(lambda m, x: x * m.scale, scale=torch.rand(5) + 0.5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), scale, nn.Linear(5, 2))


MODELS = {"layers": mlp, "a module with a parameter of its own": own}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "beside"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_in_threads(make, fused, switching):
    """The first rounds prove the structure, all at once."""
    model, x = make().double(), torch.randn(THREADS, 3, 3).double()
    twin = copy.deepcopy(model)
    square_of_all = [square(twin, part) for part in x]
    torch.stack(square_of_all).sum().backward()
    want = loop_model(twin, square, x.flatten(0, 1)).sort()[0]
    with torchgradx.attach(model, fused=fused) as probe:
        for _ in range(ROUNDS):
            model.zero_grad()
            step = lambda part: square(model, part).backward()  # noqa: E731
            threads = [threading.Thread(target=step, args=(part,), daemon=True) for part in x]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            close(probe.norms().sort()[0], want)
            same_gradients(model, twin, 1e-9)


def fake_input(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (4, 2)


def exported(model, x):
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))


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


@a_few_modes
@pytest.mark.parametrize(
    "kind", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"]
)
@pytest.mark.parametrize("make", [mlp, own])
def test_nothing_else(make, kind, options):
    with kind():
        model = make()
        with torchgradx.attach(model, **options) as probe:
            square(model, torch.randn(4, 3)).backward()
            assert all(p.grad.shape == p.shape for p in model.parameters())
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
