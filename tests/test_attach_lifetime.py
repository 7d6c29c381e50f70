"""What an attachment leaves on a model and its parameters, keeps alive, copies and pickles."""

import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import weakref
from functools import partial

import pytest
import torch
from attach_models import Model, mlp, square
from attach_modes import ANY, a_few_modes, every_mode, fallback_mode, native_missing, title
from attach_oracle import close, fingerprint, loop_model, same_gradients
from attach_steps import exact_step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


def net():
    """A layer with each kind of path: convolution, linear, fallback; one used twice."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.ReLU(inplace=True), nn.LayerNorm(4), layer, nn.Tanh(), layer
    )  # fmt: skip


def batch():
    return torch.randn(N, 3, 6)


def only_kernels(options):
    model = net()
    if options.get("backend") == "native":
        model[2] = nn.Identity()
    return model


@every_mode
def test_an_attached_model_has_no_new_attribute_and_is_of_its_own_types(options):
    model = only_kernels(options)
    kinds = [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    of_parameters = [set(vars(p)) for p in model.parameters()]
    state = list(model.state_dict())
    text = repr(model)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            square(model, batch()).backward()
            probe.norms()
        assert all(isinstance(m, kind) for m, kind in zip(model.modules(), kinds, strict=True))
        assert [set(vars(m)) for m in model.modules()] == attributes
        assert [set(vars(p)) for p in model.parameters()] == of_parameters
        assert list(model.state_dict()) == state
        assert repr(model) == text
    assert [type(m) for m in model.modules()] == kinds


@every_mode
@pytest.mark.parametrize("then", ["backward", "forgotten"])
def test_after_removal_with_a_graph_in_flight_nothing_is_left_once_it_dies(then, options):
    model = only_kernels(options)
    before, twin, x = fingerprint(model), copy.deepcopy(model), batch()
    probe = torchgradx.attach(model, **options)
    loss = square(model, x)
    probe.remove()
    if then == "backward":
        loss.backward()
        square(twin, x).backward()
        if options.get("weight_grad", True):
            same_gradients(model, twin, None if options.get("fused") is False else 1e-5)
    del loss
    gc.collect()
    assert fingerprint(model) == before


def pickled(model, dump, load):
    """Without a word of torchgradx, which it does not need."""
    file = io.BytesIO()
    dump(model, file)
    assert b"torchgradx" not in file.getvalue()
    file.seek(0)
    return load(file)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickled(model, pickle.dump, pickle.load),
    "torch.save": lambda m: pickled(m, torch.save, partial(torch.load, weights_only=False)),
}


@a_few_modes
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_attached_model_is_unattached_and_runs_its_own_weights(how, options):
    model, x = net().double(), batch().double()
    plain = fingerprint(model)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        copied = COPIES[how](model)
        assert fingerprint(copied) == plain
        assert torch.equal(copied(x), model(x))
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        assert not copied(x).any(), "the copy runs the original's weights"
        copied.zero_grad()
        square(copied, x[:2]).backward()
        assert all(p.grad is not None for p in copied.parameters())
        close(probe.norms(), want)
    assert fingerprint(copied) == plain
    with torchgradx.attach(copied) as probe:
        exact_step(probe, copied, x[:3])


def activations(model, run):
    """Weak references to every layer's output storage during run(), and what run() returned."""
    references = []

    def note(layer, args, out):
        references.append(StorageWeakRef(out.untyped_storage()))

    handles = [layer.register_forward_hook(note) for layer in model]
    kept = run()
    for handle in handles:
        handle.remove()
    gc.collect()
    return [r for r in references if not r.expired()], kept


@fallback_mode
def test_no_activation_outlives_backward_though_the_loss_does(options):
    model = net()

    def step():
        loss = square(model, batch())
        loss.backward()
        return loss

    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            alive, loss = activations(model, step)
            assert not alive, f"{len(alive)} activations outlive backward"
            assert loss.isfinite()
            assert len(probe.norms()) == N


@a_few_modes
def test_a_first_pass_leaves_nothing_to_the_garbage_collector(no_collector, options):
    """Or its graph, and the outputs, would live until the collector runs."""
    model, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(N, 3)
    with torchgradx.attach(model, **options) as probe:
        output = model(x)
        kept = output.grad_fn.metadata["marker"] = nn.Identity()
        left = weakref.ref(kept)
        output.square().sum(1).mean().backward()
        probe.norms()
        del output, kept
        assert left() is None


@pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)
@pytest.mark.parametrize("regime", ["checkpoint", "reentrant", "offloaded", "biases only"])
def test_what_saves_memory_without_a_probe_saves_as_much_with_one(regime, options):
    if native_missing() and regime in ("checkpoint", "offloaded"):
        pytest.skip("without the extension inputs are kept by reference")
    block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Conv1d(6, 6, 3, padding=1))
    if regime == "biases only":
        if options.get("backend") == "vmap" or native_missing():
            pytest.skip("vmap runs the layer again, and keeps its input for that")
        block = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(6, 6, 3, padding=1), nn.Linear(16, 16))
        for layer in block:
            layer.weight.requires_grad_(False)
    x = torch.randn(N, 6, 16, requires_grad=True)

    def forward():
        if regime in ("checkpoint", "reentrant"):
            return checkpoint(block, x, use_reentrant=regime == "reentrant").square().sum()
        if regime == "biases only":
            return block(x).sum()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return block(x).square().sum()

    whole = Model(lambda m: forward(), block=block)

    def alive():
        return len(activations(block, lambda: whole())[0])

    plain = alive()
    with torchgradx.attach(whole, batch_size=N, **options):
        whole().backward()  # the first one is proven, by backwards of its own
        for _ in range(2):
            assert alive() <= plain
            whole().backward()


def resident():
    """Bytes that are held: what the allocator keeps of freed memory is given back first."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.grid(pairs=False)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)
@pytest.mark.parametrize("kind", ["read", "unread", "no backward", "retained"])
def test_a_thousand_steps_hold_memory_flat(kind, options):
    model = Model(lambda m, x: m.head(torch.relu_(m.l(m.l(x))).flatten(1)),
                  l=nn.Linear(16, 16), head=nn.Linear(16 * 64, 2))  # fmt: skip
    x = torch.randn(8, 64, 16)  # 32 KiB; a leaked activation is 32 MiB in a thousand steps
    steps = 200 if options.get("backend") == "vmap" else 1000
    with torchgradx.attach(model, **options) as probe:

        def step():
            if kind == "no backward":
                model(x)
                return
            loss = square(model, x)
            loss.backward(retain_graph=kind == "retained")
            if kind == "retained":
                loss.backward()
            if kind != "unread":
                probe.norms()

        for _ in range(50):
            step()
        gc.collect()
        objects, memory = len(gc.get_objects()), resident()
        for _ in range(steps):
            step()
        gc.collect()
        grown, more = resident() - memory, len(gc.get_objects()) - objects
    # a record that nobody reads holds its norms, and less than half an activation beside
    allowed = 32 * 2**10 * steps / (2 if kind == "unread" else 4)
    assert grown < allowed, f"{grown / 2**20:.1f} MiB more after {steps} steps"
    # an unread record keeps a row of norms a pass, and no more
    allowed = 20 * steps if kind == "unread" else 200
    assert more < allowed, f"{more} objects more after {steps} steps"


def test_a_lost_probe_lets_go():
    model = nn.Linear(4, 3)

    def train():
        probe = torchgradx.attach(model)
        assert torchgradx.attached(model) is probe
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    gc.collect()
    assert torchgradx.attached(model) is None
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(2, 4)).backward()
        assert len(probe.norms()) == 2
        with pytest.raises(RuntimeError, match="is attached already"):
            torchgradx.attach(model)
    assert torchgradx.attached(model) is None
    probe = torchgradx.attach(model)
    del probe
    assert type(model) is nn.Linear


@a_few_modes
def test_what_holds_a_probe_can_be_copied_and_pickled_and_its_probe_is_attached_to_nothing(options):
    model = mlp()
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 3)).backward()
        for copied in [copy.deepcopy([probe]), pickle.loads(pickle.dumps([probe]))]:
            with pytest.raises(torchgradx.CoverageError, match="nothing is recorded"):
                copied[0].norms()
            copied[0].remove()
        assert len(probe.norms()) == N
