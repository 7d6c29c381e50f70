"""A step that an exception interrupts leaves nothing behind: the next one is exact."""

import copy
import gc

import pytest
import torch
from attach_oracle import (
    ANY,
    VMAP,
    Model,
    close,
    close_named,
    each_of,
    loop,
    loop_model,
    same_gradients,
    square,
    title,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4
modes = each_of([*ANY, *VMAP, {"clip": True}])


class Trap(torch.autograd.Function):
    """The identity, whose backward raises what it is armed with."""

    armed: type[BaseException] | None = None

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Trap.armed is not None:
            raise Trap.armed("interrupted")
        return grad


class Pair(nn.Module):
    """Two outputs of a module that runs again in backward: it settles at the backward's end."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return x @ self.w, (x * 2) @ self.w


def tied(m, x):
    x = Trap.apply(m.a(x).tanh())
    return m.b(m.a(x)) + m.b(x)


def two_outputs(m, x):
    first, second = m.pair(m.a(x))
    return m.b(Trap.apply(first) + second.tanh())


def reentrant(m, x):
    inside = lambda x: m.b(Trap.apply(m.a(x)).tanh())  # noqa: E731
    return m.c(checkpoint(inside, m.c(x), use_reentrant=True))


def only_inside(m, x):
    """The trap springs in the outer backward, after the inner one has ended."""
    x = Trap.apply(x.detach().requires_grad_())
    return checkpoint(lambda x: m.b(m.a(x)), x, use_reentrant=True)


def linear():
    return nn.Linear(3, 3)


def spring(grad):
    if Trap.armed is not None:
        raise Trap.armed("interrupted")


def shared(m, x):
    x = m.c(x)
    if x.requires_grad:
        x.register_hook(spring)
    return m.b(m.a(x) + m.table(torch.arange(x.shape[1]))[None])


# name -> model, and N samples of it
NETS = {
    "tied": lambda: (Model(tied, a=linear(), b=linear()), torch.randn(N, 3)),
    "two outputs": lambda: (
        Model(two_outputs, a=linear(), pair=Pair(), b=linear()), torch.randn(N, 3)
    ),
    "reentrant": lambda: (Model(reentrant, a=linear(), b=linear(), c=linear()), torch.randn(N, 3)),
    "only inside": lambda: (Model(only_inside, a=linear(), b=linear()), torch.randn(N, 3)),
    "norms and conv": lambda: (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.LayerNorm(4), Model(lambda m, x: Trap.apply(x)),
                      nn.GroupNorm(1, 3), nn.Linear(4, 2)),
        torch.randn(N, 2, 5),
    ),
    "recurrent": lambda: (
        Model(lambda m, x: m.b(Trap.apply(m.a(x)[0])), a=nn.LSTM(3, 3, batch_first=True),
              b=linear()),
        torch.randn(N, 2, 3),
    ),
    "positions": lambda: (
        Model(shared, a=linear(), table=nn.Embedding(2, 3), b=linear(), c=linear()),
        torch.randn(N, 2, 3),
    ),
}  # fmt: skip
nets = pytest.mark.parametrize("net", NETS)


def made(net="tied"):
    model, x = NETS[net]()
    return model.double(), x.double()


def fails(loss, error=KeyError, **options):
    """A backward with an exception in its middle, which is returned."""
    Trap.armed = error
    try:
        with pytest.raises(error) as caught:
            loss.backward(**options)
    finally:
        Trap.armed = None
    return caught


def nothing_recorded(probe):
    with pytest.raises(torchgradx.CoverageError, match="nothing is recorded"):
        probe.norms()


def step_is_exact(probe, model, x, options):
    model.zero_grad()
    twin = copy.deepcopy(model) if options.get("weight_grad", True) else None
    square(model, x).backward()
    close_named(probe.norms(per="parameter"), loop(model, square, x))
    if twin is not None:
        square(twin, x).backward()
        same_gradients(model, twin, None if options.get("fused") is False else 1e-9)


@modes
@nets
def test_a_failed_backward_leaves_nothing(net, options):
    model, x = made(net)
    with torchgradx.attach(model, **options) as probe:
        for error in (KeyError, KeyboardInterrupt):  # the first time at a structure yet unknown
            for _ in range(2):
                fails(square(model, x), error)
                nothing_recorded(probe)
            step_is_exact(probe, model, x, options)
            step_is_exact(probe, model, x, options)


@modes
def test_a_graph_that_failed_may_be_gone_through_once_more(options):
    for net in ("tied", "reentrant", "norms and conv"):
        model, x = made(net)
        with torchgradx.attach(model, **options) as probe:
            loss = square(model, x)
            fails(loss, retain_graph=True)
            loss.backward()
            close(probe.norms(), loop_model(model, square, x))


@modes
def test_what_was_recorded_before_stays(options):
    model, x = made()
    with torchgradx.attach(model, **options) as probe:
        square(model, x[:3]).backward()
        fails(square(model, x))
        close(probe.norms(), loop_model(model, square, x[:3]))
        square(model, x[:2]).backward()
        kept = square(model, x[:1])
        fails(square(model, x))
        kept.backward()
        want = [loop_model(model, square, x[:n]) for n in (2, 1)]
        close(probe.norms(), torch.cat(want))
        if options.get("clip"):
            with pytest.raises(torchgradx.CoverageError, match="failed"):
                probe.clip_grad_norm_(0.1)
        probe.reset()
        step_is_exact(probe, model, x, options)


@modes
@pytest.mark.parametrize("net", ["tied", "reentrant"])
def test_a_second_backward_that_fails_takes_back_what_it_brought_alone(net, options):
    model, x = made(net)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        loss.backward(retain_graph=True)
        fails(2 * loss, retain_graph=True)
        close(probe.norms(), want)
        (2 * loss).backward()
        close(probe.norms(), 3 * want)


@modes
def test_directions_and_the_scale_of_a_scaler_are_those_of_the_step_that_ended(options):
    model, x = made()
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with torchgradx.attach(model, directions=v, loss_scale=scaler, **options) as probe:
        dots = []
        for failing in (False, True):
            if failing:
                fails(scaler.scale(square(model, x)))
                scaler.update(2.0)
            scaler.scale(square(model, x)).backward()
            dots.append(probe.dot())
            close(probe.norms(), loop_model(model, square, x))
        torch.testing.assert_close(*dots)


@pytest.mark.parametrize("options", [ANY[2], VMAP[1]], ids=title)
def test_norms_alone_put_back_what_stood_in_grad_and_the_hooks_that_follow_it(options):
    model, x = made()
    seen = []
    p = model.a.weight
    with torchgradx.attach(model, **options) as probe:
        p.grad = kept = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(seen.append)

        def boom(_):
            raise KeyError

        handle = p.register_hook(boom)
        with pytest.raises(KeyError):
            square(model, x).backward()
        assert p.grad is kept
        assert len(p._post_accumulate_grad_hooks) == 2
        nothing_recorded(probe)
        handle.remove()
        step_is_exact(probe, model, x, options)
        assert not seen  # nothing was accumulated that a hook could follow
        assert len(p._post_accumulate_grad_hooks) == 2
    assert len(p._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("options", [*ANY, VMAP[0], {"clip": True}], ids=title)
def test_a_failed_backward_keeps_no_activation_alive(options):
    model, x = made()
    kept = []

    def see(module, args, out):
        kept.extend(StorageWeakRef(t.untyped_storage()) for t in (*args, out) if t is not x)

    handles = [module.register_forward_hook(see) for module in (model.a, model.b)]
    with torchgradx.attach(model, **options) as probe:
        fails(square(model, x))
        for handle in handles:
            handle.remove()
        gc.collect()
        assert kept
        assert all(memory.expired() for memory in kept)
        nothing_recorded(probe)
        step_is_exact(probe, model, x, options)


@modes
def test_an_exception_at_the_very_end_of_a_backward(options):
    model, x = made("two outputs")

    def boom():
        raise KeyError

    def at_the_end(_):
        torch.autograd.Variable._execution_engine.queue_callback(boom)

    with torchgradx.attach(model, **options) as probe:
        handle = model.a.weight.register_hook(at_the_end)
        with pytest.raises(KeyError):
            square(model, x).backward()
        handle.remove()
        nothing_recorded(probe)
        step_is_exact(probe, model, x, options)


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
        try:
            Trap.armed = KeyError
            out.backward(grad, retain_graph=True)
        except KeyError:
            Trap.armed = None
            x.grad = None
            out.backward(grad)
        return x.grad, None


@modes
def test_a_backward_inside_of_another_that_fails_and_is_tried_again_is_refused(options):
    model, x = made()
    model.function = lambda m, x: m.b(Retried.apply(m.a(x), lambda x: m.b(Trap.apply(m.b(x)))))
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            square(model, x).backward()
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
            probe.reset()


@modes
def test_what_was_refused_in_a_failed_backward_is_not_held_against_the_next(options):
    model, x = made()
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x) + model.a.weight.square().sum()  # no sample's
        fails(loss)
        step_is_exact(probe, model, x, options)
        fails(square(model, x), create_graph=True)
        step_is_exact(probe, model, x, options)


@modes
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("net", ["tied", "reentrant", "positions"])
def test_a_forward_that_fails_leaves_nothing(net, error, options):
    model, x = made(net)
    kept = []

    def boom(*_):
        raise error

    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            handle = model.b.register_forward_hook(boom)
            with pytest.raises(error) as caught:
                model(x)
            kept.append(caught)  # and with it the graph
            handle.remove()
            probe.reset()
            nothing_recorded(probe)
            assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            step_is_exact(probe, model, x, options)
