"""What a record holds: passes, accumulation, scales, several backwards, and how it is read."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    close,
    close_named,
    every_mode,
    loop,
    loop_model,
    mlp,
    need_native,
    per_model,
    per_module,
    square,
    square_sum,
)
from torch import nn

import torchgradx

N = 4


@pytest.fixture
def model():
    return mlp().double()


def samples(n=N):
    return torch.randn(n, 3, dtype=torch.float64)


class Slope(nn.Module):
    """y = w x with w = 1, of the worked example of gradient accumulation."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * x


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}, {"weight_grad": False}], ids=str)
def test_the_worked_example_of_gradient_accumulation(options):
    x, expected = torch.tensor([4.0, 2.0]), torch.tensor([32.0, 8.0])
    slope = Slope()
    with torchgradx.attach(slope, **options) as probe:
        F.mse_loss(slope(x), 2 * x).backward()
        assert torch.equal(probe.norms(), expected)
        assert torch.equal(probe.norms(per="module")[""], expected)
        if not options:
            assert slope.w.grad == -20
    with torchgradx.attach(slope, loss_scale=0.5, **options) as probe:
        for one in x:
            (F.mse_loss(slope(one[None]), 2 * one[None]) * 0.5).backward()
        assert torch.equal(probe.norms(), expected)
    with torchgradx.attach(slope, loss_reduction="sum", **options) as probe:
        F.mse_loss(slope(x), 2 * x, reduction="sum").backward()
        assert torch.equal(probe.norms(), expected)


@every_mode
def test_a_sum_loss_has_the_norms_of_a_mean_loss(model, options):
    need_native(options)
    x = samples()
    with torchgradx.attach(model, loss_reduction="sum", **options) as probe:
        square_sum(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, square_sum, x))


@every_mode
@pytest.mark.parametrize("read_each", [True, False])
def test_micro_batches_with_a_leftover_one_give_every_samples_norm(model, read_each, options):
    need_native(options)
    batches = samples(10).split(4)
    want = [loop_model(model, square, x) for x in batches]
    with torchgradx.attach(model, loss_scale=1 / 3, **options) as probe:
        for _ in range(2):
            for x, norms in zip(batches, want, strict=True):
                (square(model, x) / 3).backward()
                if read_each:
                    close(probe.norms(), norms)
            if not read_each:
                close(probe.norms(), torch.cat(want))


@a_few_modes
def test_the_record_is_in_the_order_of_the_forwards_whatever_that_of_the_backwards(model, options):
    x, z = samples(), samples(6)
    want = {k: torch.cat([a, b]) for (k, a), b in zip(
        loop(model, square, x).items(), loop(model, square, z).values(), strict=True)}  # fmt: skip
    with torchgradx.attach(model, **options) as probe:
        first, second = square(model, x), square(model, z)
        second.backward()
        first.backward()
        close_named(probe.norms(per="parameter"), want)
        close_named(probe.norms(per="module"), per_module(want))
        close(probe.norms(), per_model(want))
        first, second = square(model, x), square(model, z)
        (first + second).backward()
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


def test_reset_begins_a_new_record_at_once(model):
    x, z = samples(), samples(6)
    with torchgradx.attach(model) as probe:
        square(model, z).backward()
        probe.reset()
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))


@every_mode
@pytest.mark.parametrize("shape", [(N, 3), (N, 6, 3)], ids=str)
def test_two_losses_in_two_backwards_give_the_norm_of_the_summed_gradient(shape, options):
    need_native(options)
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


@every_mode
def test_a_second_backward_adds_to_the_norms_as_it_does_to_the_gradient(options):
    need_native(options)
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    if options.get("backend") == "native":
        net = nn.Sequential(net[0], net[1], net[3])
    x = torch.randn(N, 3, 6, dtype=torch.float64)
    want = loop_model(net, square, x)
    with torchgradx.attach(net, **options) as probe:
        loss = square(net, x)
        loss.backward(retain_graph=True)
        close(probe.norms(), want)
        loss.backward(retain_graph=True)
        close(probe.norms(), 2 * want)
        (3 * loss).backward()
        close(probe.norms(), 5 * want)
        square(net, x).backward()
        close(probe.norms(), want)


def test_a_loss_scale_given_at_reading_overrides_the_one_attached(model):
    x = samples()
    want = loop_model(model, square, x)
    with torchgradx.attach(model, loss_scale=8.0) as probe:
        (square(model, x) * 0.25).backward()
        close(probe.norms(loss_scale=0.25), want)
        close(probe.norms(), want / 32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("when", ["attached", "read"])
def test_a_token_mean_over_unequal_lengths_is_undone_by_a_scale_per_sample(reduction, when):
    lengths, tokens = torch.tensor([2, 6, 3, 5]), torch.randint(0, 7, (N, 6))
    targets = tokens.roll(1, 1).masked_fill(torch.arange(6) >= lengths[:, None], -100)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7)).double()
    x = torch.randn(N, 6, 3, dtype=torch.float64)

    def token_mean(model, x, y):  # of one sample: the mean over its own tokens
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    scale = lengths / lengths.sum() * (N if reduction == "mean" else 1)
    attached = {"loss_scale": scale} if when == "attached" else {}
    with torchgradx.attach(model, loss_reduction=reduction, **attached) as probe:
        token_mean(model, x, targets).backward()
        norms = probe.norms() if attached else probe.norms(loss_scale=scale)
    close(norms, loop_model(model, token_mean, x, targets), 1e-6)  # scale is float32


def test_a_grad_scaler_is_undone_at_its_value_in_that_pass_even_after_update():
    model, x, z = mlp(), torch.randn(N, 3), torch.randn(N, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torchgradx.attach(model, loss_scale=scaler) as probe:
        for batch, scale in ((x, 1024.0), (z, 2048.0)):
            assert scaler.get_scale() == scale
            scaler.scale(square(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        norms = probe.norms().double()
    want = torch.cat([loop_model(model, square, batch) for batch in (x, z)])
    assert torch.allclose(norms, want, rtol=1e-5)


def test_forwards_that_meet_no_backward_leave_nothing_behind(model):
    x = samples()
    want = loop_model(model, square, x)
    with torchgradx.attach(model) as probe:
        model(samples(6))
        loss = square(model, x)
        with torch.no_grad():
            model(samples(9))
        with torch.inference_mode():
            model(samples(7))
        model(samples(5))
        loss.backward()
        close(probe.norms(), want)


def test_eval_mode_with_gradients_is_a_pass_like_any_other(model):
    x = samples()
    model.eval()
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))


def test_nothing_is_recorded_while_paused(model):
    x, z = samples(), samples(6)
    with torchgradx.attach(model) as probe:
        with probe.paused():
            square(model, z).backward()
        assert all(p.grad is not None for p in model.parameters())
        square(model, x).backward()
        with probe.paused():
            square(model, z).backward()
        close(probe.norms(), loop_model(model, square, x))


@a_few_modes
def test_the_gradient_of_the_input_alone_records_nothing(model, options):
    x = samples().requires_grad_()
    with torchgradx.attach(model, **options) as probe:
        (gradient,) = torch.autograd.grad(square(model, x), x)
        attacked = (x + 0.1 * gradient.sign()).detach()
        square(model, attacked).backward()
        close(probe.norms(), loop_model(model, square, attacked))


@a_few_modes
def test_the_gradient_of_the_input_taken_first_does_not_add_to_the_norms(model, options):
    x = samples().requires_grad_()
    with torchgradx.attach(model, **options) as probe:
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
@every_mode
def test_forwards_of_the_same_samples_add_their_gradients(model, how, options):
    need_native(options)
    x, z = samples(), samples()

    def siamese(model, x, z):
        return (model(x) * model(z)).square().sum(1).mean()

    def apart(model, x, z):
        return square(model, x) + square(model, z)

    loss = siamese if how == "one forward each" else apart
    with torchgradx.attach(model, **options) as probe:
        with probe.same_samples():
            if loss is siamese:
                siamese(model, x, z).backward()
            else:
                square(model, x).backward()
                square(model, z).backward()
        close_named(probe.norms(per="parameter"), loop(model, loss, x, z))
        square(model, z).backward()
        close(probe.norms(), loop_model(model, square, z))


def test_a_backward_after_the_block_of_same_samples_still_counts_as_one(model):
    x, z = samples(), samples()
    with torchgradx.attach(model) as probe:
        with probe.same_samples():
            a, b = model(x), model(z)
        (a * b).square().sum(1).mean().backward()
        want = loop_model(model, lambda m, x, z: (m(x) * m(z)).square().sum(1).mean(), x, z)
        close(probe.norms(), want)
