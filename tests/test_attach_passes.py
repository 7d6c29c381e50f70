"""What a record holds: passes, accumulation, scales; how it is read; names, arguments, explain."""

import pytest
import torch
from attach_models import Model, mlp, square
from attach_modes import a_few_modes, every_mode, native_missing
from attach_oracle import check, close, close_named, joined, loop, loop_model, per_model, per_module
from attach_steps import exact_step, refusal
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


@pytest.fixture
def model():
    return mlp().double()


def samples(n=N):
    return torch.randn(n, 3, dtype=torch.float64)


@every_mode
@pytest.mark.parametrize("read_each", [True, False])
def test_micro_batches_with_a_leftover_one_give_every_samples_norm(model, read_each, options):
    batches = samples(10).split(4)
    want = [loop_model(model, square, x) for x in batches]
    with torchgradx.attach(model, loss_scale=1 / 3, **options) as probe:
        for _ in range(2):
            for x, norms in zip(batches, want, strict=True):
                (square(model, x) / 3).backward()
                if read_each:
                    close(probe.norms(), norms)
            if not read_each:
                close(probe.norms(loss_scale=2 / 3), torch.cat(want) / 2)  # overrides attach's
                close(probe.norms(), torch.cat(want))


@a_few_modes
def test_the_record_is_in_the_order_of_the_forwards_whatever_that_of_the_backwards(model, options):
    x, z = samples(), samples(6)
    want = joined([loop(model, square, x), loop(model, square, z)])
    with torchgradx.attach(model, **options) as probe:
        first, second = square(model, x), square(model, z)
        second.backward()
        first.backward()
        close_named(probe.norms(per="parameter"), want)
        close_named(probe.norms(per="module"), per_module(want))
        close(probe.norms(), per_model(want))


def test_a_read_takes_what_there_is_and_the_next_backward_begins_a_new_record(model):
    x, z = samples(), samples(6)
    want_x, want_z = loop_model(model, square, x), loop_model(model, square, z)
    with torchgradx.attach(model) as probe:
        first, second = square(model, x), square(model, z)
        first.backward()
        close(probe.norms(), want_x)
        close(probe.norms(), want_x)
        second.backward()  # its forward was before the read; it is not reported yet
        close(probe.norms(), want_z)
        square(model, x)
        close(probe.norms(), want_z)  # a forward alone begins nothing


@every_mode
@pytest.mark.parametrize("shape", [(N, 3), (N, 6, 3)], ids=str)
def test_two_losses_in_two_backwards_give_the_norm_of_the_summed_gradient(shape, options):
    two = Model(lambda m, x: (lambda y: (m.a(y), m.b(y)))(torch.tanh(m.trunk(x))),
                trunk=nn.Linear(3, 5), a=nn.Linear(5, 2), b=nn.Linear(5, 2)).double()  # fmt: skip
    x = torch.randn(shape, dtype=torch.float64)

    def losses(model, x):
        a, b = model(x)
        return a.square().flatten(1).sum(1).mean(), b.pow(3).flatten(1).sum(1).mean()

    want = loop(two, lambda m, x: sum(losses(m, x)), x)
    with torchgradx.attach(two, **options) as probe:
        first, second = losses(two, x)
        first.backward(retain_graph=True)
        second.backward()
        close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("to_none", [True, False])
def test_a_backward_of_the_last_layer_that_was_read_and_zeroed_does_not_count(to_none, options):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = samples()
    want = loop_model(net, square, x)
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            loss = square(net, x)
            loss.backward(inputs=[*net[2].parameters()], retain_graph=True)
            probe.norms()
            net.zero_grad(to_none)
            loss.backward()
            close(probe.norms(), want)
            net.zero_grad(to_none)


@pytest.mark.parametrize("before", [None, 3.0])
def test_a_grad_scaler_is_undone_at_its_value_in_that_pass_even_after_update(before, monkeypatch):
    model, x, z = mlp(), torch.randn(N, 3), torch.randn(N, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    want = torch.cat([loop_model(model, square, batch) for batch in (x, z, x)])
    monkeypatch.setattr(scaler, "get_scale", lambda: pytest.fail("this waits for a GPU"))
    with torchgradx.attach(model, loss_scale=before or scaler) as probe:
        probe.loss_scale = scaler if before else 1.0
        for batch, own, then in ((x, 1, 2.0), (z, 2, torch.full((N,), 3.0)), (x, 3, 1.0)):
            (scaler.scale(square(model, batch)) * own).backward()
            scaler.step(optimizer)
            scaler.update()
            probe.loss_scale = then
        assert torch.allclose(probe.norms().double(), want, rtol=1e-5)
        with pytest.raises(TypeError, match="a GradScaler goes to attach"):
            probe.norms(loss_scale=scaler)


@a_few_modes
@pytest.mark.parametrize("check", ["graph", "samples"])
def test_the_gradient_of_the_input_taken_first_does_not_add_to_the_norms(model, check, options):
    x = samples().requires_grad_()
    with torchgradx.attach(model, check=check, **options) as probe:
        loss = square(model, x)
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        close(probe.norms(), loop_model(model, square, x))


def test_the_probe_works_while_parameters_train_and_gradients_are_changed_before_reading(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchgradx.attach(model) as probe:
        for p in model.parameters():
            p.grad = torch.full_like(p, 7.0)  # stale, and accumulated into
        for _ in range(3):
            x = samples()
            want = loop_model(model, square, x)
            square(model, x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            close(probe.norms(), want)


@pytest.mark.parametrize("how", ["one forward each", "one backward each"])
@pytest.mark.parametrize("check", ["graph", "samples"])
@every_mode
def test_forwards_of_the_same_samples_add_their_gradients(model, how, check, options):
    x, z = samples(), samples()

    def siamese(model, x, z):
        return (model(x) * model(z)).square().sum(1).mean()

    def apart(model, x, z):
        return square(model, x) + square(model, z)

    loss = siamese if how == "one forward each" else apart
    with torchgradx.attach(model, check=check, **options) as probe:
        exact_step(probe, model, x)
        with probe.same_samples():
            if loss is siamese:
                siamese(model, x, z).backward()
            else:
                square(model, x).backward()
                square(model, z).backward()
        close_named(probe.norms(per="parameter"), loop(model, loss, x, z))
        exact_step(probe, model, z)


@a_few_modes
def test_forwards_of_the_same_samples_may_be_served_otherwise(options):
    """The first runs again; the second is served at the graph's nodes."""
    model = Model(lambda m, x, k: m.l(x) * m.w[k], l=nn.Linear(3, 3), w=torch.randn(3, 3)).double()
    both = lambda m, x: sum(square(lambda x, k=k: m(x, k), x) for k in (x.argmax(1), 0))  # noqa: E731
    with torchgradx.attach(model, **options) as probe, probe.same_samples():
        exact_step(probe, model, samples(), loss=both)


MEAN_NOTHING = {
    "batch_size": [0, 2.0],
    "layout": ["batch", {"": "samples"}, {1: "batch"}, {"no_module": "batch"}, {"a.*": "batch"}],
    "directions": [torch.ones(2)],
    "loss_scale": [0.0, float("nan"), float("inf"), torch.ones(2, 2), "1"],
    **{name: ["surely not"] for name in ("loss_reduction", "backend", "algorithm", "clip")},
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in MEAN_NOTHING.items() for v in vs])
def test_a_value_that_means_nothing_is_refused_and_the_model_left_alone(model, name, value):
    with pytest.raises((ValueError, TypeError), match=name) as error:
        torchgradx.attach(model, **{name: value})
    assert "got" in str(error.value) or "it has" in str(error.value)
    torchgradx.attach(model).remove()


@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_samples_that_are_not_found_are_said_to_be_so_and_what_to_do(model, reentrant, backend):
    outer = Model(lambda m, x: checkpoint(m.b, x, use_reentrant=reentrant), b=model)
    with torchgradx.attach(outer, batch_size=3, backend=backend) as probe:
        outer(samples().requires_grad_()).square().sum().backward()
        error = refusal(probe)
    found = "the 3 samples of the pass cannot be found in its output of shape [4, 5]"
    for word in (found, "batch_size=", "batch_dim=", "layout="):
        assert word in str(error)
    assert ("use_reentrant=False" in str(error)) == reentrant


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}, {"clip": True}], ids=str)
def test_complex_parameters_are_refused_and_real_ones_in_their_place_are_exact(options):
    def forward(m, x):
        return (x * torch.view_as_complex(m.w)).abs()

    model = Model(forward, w=torch.randn(3, 2))
    check(model, square, torch.randn(N, 3), **options)
    w = torch.randn(3, 3, dtype=torch.complex64)
    use, parts = (lambda m, x, w: m.l(x) + (x.to(w.dtype) @ w).real), {"l": nn.Linear(3, 3)}
    own, of_child = Model(lambda m, x: use(m, x, m.w), w=w, **parts), Model(None, w=w)
    for model in (own, Model(lambda m, x: use(m, x, m.child.w), child=of_child, **parts)):
        with torchgradx.attach(model, **options) as probe:
            square(model, torch.randn(N, 3)).backward()
            refusal(probe, "view_as_complex")


@pytest.mark.parametrize("algorithm", ["gram", "direct"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_forced_algorithm_is_used_and_gives_the_same_norms(algorithm, fused):
    net, x = mlp().double(), torch.randn(N, 6, 3, dtype=torch.float64)
    with torchgradx.attach(net, algorithm=algorithm, fused=fused) as probe:
        exact_step(probe, net, x)
        if not native_missing():  # vmap has no algorithms to choose from
            chosen = "fused" if fused and algorithm == "direct" else algorithm  # both at once
            assert f": {chosen}, " in probe.explain()
            for shown in (probe.explain(), probe.explain(verbose=True)):
                assert "refused: rank1 needs T = 1: a sum over T = 6 positions is not" in shown


def test_explain_begins_with_a_summary_and_has_a_line_for_each_layer():
    far = Model(lambda m, x: torch.cdist(x, m.centres), centres=torch.rand(5, 5))
    net = nn.Sequential(nn.Linear(3, 5), far, nn.LayerNorm(5), nn.Linear(5, 2))
    net[0].requires_grad_(False)
    with torchgradx.attach(net) as probe:
        square(net, torch.randn(N, 6, 3)).backward()
        summary, *lines = probe.explain().splitlines()
        verbose = probe.explain(verbose=True).splitlines()
    assert all(words in summary for words in ("4 layers: ", "1 frozen", "1 Model"))
    assert len(lines) == 4
    assert verbose[0] == summary
    assert len(verbose) > 5


def test_names_follow_the_model_through_nested_modules_and_the_root():
    inner = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    parts = nn.ModuleDict({"body": inner, "head": nn.Linear(3, 2)})
    model = Model(lambda m, x: m.parts["head"](m.parts["body"](x)), parts=parts).double()
    with torchgradx.attach(model) as probe:
        square(model, samples()).backward()
        assert list(probe.norms(per="parameter")) == [n for n, _ in model.named_parameters()]
        assert list(probe.norms(per="module")) == ["parts.body.0", "parts.body.1", "parts.head"]
