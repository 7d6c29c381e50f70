"""Parameters used several times, tied, frozen, unused; layers called in every way."""

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
    fallback_mode,
    loop,
    loop_model,
    mlp,
    need_native,
    square,
)
from torch import nn

import torchgradx

N = 4


@every_mode
@pytest.mark.parametrize("shape", [(N, 3), (N, 6, 3)], ids=str)
def test_a_linear_used_three_times_counts_its_cross_terms(shape, options):
    def forward(m, x):
        for _ in range(3):
            x = torch.tanh(m.layer(x))
        return m.head(x)

    model = Model(forward, layer=nn.Linear(3, 3), head=nn.Linear(3, 1))
    check(model, square, torch.randn(shape), **options)


@every_mode
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_used_on_two_resolutions_counts_its_cross_terms(groups, options):
    def forward(m, x):
        y = m.conv(x)
        small = m.conv(F.avg_pool2d(torch.tanh(y), 2))
        return torch.cat([y.flatten(1), small.flatten(1)], 1)

    model = Model(forward, conv=nn.Conv2d(2, 2, 3, padding=1, groups=groups))
    check(model, square, torch.randn(N, 2, 6, 6), **options)


@every_mode
def test_a_layer_used_with_different_numbers_of_positions(options):
    model = Model(
        lambda m, x: torch.cat([m.l(x).flatten(1), m.l(x[:, :2]).flatten(1), m.l(x[:, 0])], 1),
        l=nn.Linear(3, 2),
    )
    check(model, square, torch.randn(N, 5, 3), **options)


@every_mode
def test_weights_tied_between_linears_count_their_cross_terms(options):
    model = Model(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model.b.weight = model.a.weight
    check(model, square, torch.randn(N, 6, 3), **options)
    check(model, square, torch.randn(N, 3), **options)


@fallback_mode
def test_a_fallback_module_used_twice_counts_its_cross_terms(options):
    model = Model(
        lambda m, x: m.head(m.norm(torch.tanh(m.norm(x)))),
        norm=nn.LayerNorm(3), head=nn.Linear(3, 2),
    )  # fmt: skip
    check(model, square, torch.randn(N, 6, 3), **options)


@fallback_mode
def test_weights_tied_between_fallback_modules_count_their_cross_terms(options):
    model = Model(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.LayerNorm(3), b=nn.LayerNorm(3))
    model.b.weight = model.a.weight
    check(model, square, torch.randn(N, 6, 3), **options)


@fallback_mode
def test_tied_embedding_and_head_are_exact(options):
    model = Model(
        lambda m, ids: m.head(torch.tanh(m.mid(m.table(ids)))),
        table=nn.Embedding(7, 4), mid=nn.Linear(4, 4), head=nn.Linear(4, 7, bias=False),
    )  # fmt: skip
    model.head.weight = model.table.weight
    check(model, square, torch.randint(0, 7, (N, 5)), **options)


@every_mode
def test_one_module_under_two_names_keeps_the_first(options):
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    check(model, square, torch.randn(N, 3), **options)
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, 3)).backward()
        assert set(probe.norms(per="module")) == {"0"}


@every_mode
def test_a_second_output_that_is_not_used_counts_nothing(options):
    model = Model(lambda m, x: (m.l(x), m.l(2 * x + 1))[0], l=nn.Linear(3, 3))
    check(model, square, torch.randn(N, 3), **options)


@every_mode
def test_an_output_used_twice_and_detached(options):
    def forward(m, x):
        y = m.l(x)
        return y + m.o(y) + y.detach() * m.l(x).sigmoid()

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 4))
    check(model, square, torch.randn(N, 3), **options)


@every_mode
@pytest.mark.parametrize("frozen", ["weights", "biases", "first layer", "last layer"])
def test_frozen_parameters_do_not_count(frozen, options):
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    for name, p in model.named_parameters():
        kinds = {"weights": "weight", "biases": "bias", "first layer": "0.", "last layer": "3."}
        p.requires_grad_(kinds[frozen] not in name)
    check(model, square, torch.randn(N, 3, 6), **options)


@fallback_mode
def test_frozen_parameters_of_fallback_layers_do_not_count(options):
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.LayerNorm(4))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    check(model, square, torch.randn(N, 6, 3), **options)


@a_few_modes
def test_a_parameter_frozen_after_attach_no_longer_counts(options):
    model, x = mlp().double(), torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))
        model[0].requires_grad_(False)
        want = loop(model, square, x)
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)


def test_a_parameter_thawed_after_attach_is_counted_or_refused():
    model, x = mlp().double(), torch.randn(N, 3).double()
    model[0].requires_grad_(False)
    with torchgradx.attach(model) as probe:
        model[0].requires_grad_(True)
        want = loop(model, square, x)
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "0.weight", probe, want)


@every_mode
def test_a_parameter_that_is_not_used_has_norm_zero(options):
    model = Model(lambda m, x: m.used(x), used=nn.Linear(3, 2), spare=nn.Linear(2, 2))
    check(model, square, torch.randn(N, 3), **options)
    model = Model(lambda m, x: (m.spare(x), m.used(x))[1], used=nn.Linear(3, 2),
                  spare=nn.Linear(3, 2))  # fmt: skip
    check(model, square, torch.randn(N, 3), **options)


@every_mode
def test_in_place_operations_on_a_layers_output(options):
    def forward(m, x):
        y = F.relu_(m.l(x))
        y = m.c(y[:, None])
        y[:, 0] *= 2
        y.add_(1)
        return m.o(y.flatten(1))

    model = Model(forward, l=nn.Linear(3, 4), c=nn.Conv1d(1, 2, 3), o=nn.Linear(4, 2))
    check(model, square, torch.randn(N, 3), **options)


@every_mode
def test_a_parameter_frozen_after_its_backward_still_counts(options):
    need_native(options)
    model, x = mlp().double(), torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        want = loop_model(model, square, x)
        model[0].weight.requires_grad_(False)
        close(probe.norms(), want)
        assert "0.weight" in probe.norms(per="parameter")


@every_mode
def test_parameters_exchanged_between_passes_count_as_what_they_are(options):
    """As loaders and wrappers do: another tensor in the same place, then the first one again."""
    need_native(options)
    model, x = mlp().double(), torch.randn(N, 3).double()
    first = model[0].weight
    with torchgradx.attach(model, **options) as probe:
        for weight in (first, nn.Parameter(first.detach() * 2), first):
            model[0].weight = weight
            square(model, x).backward()
            close(probe.norms(), loop_model(model, square, x))


@every_mode
def test_a_bias_that_is_taken_away_counts_nothing(options):
    need_native(options)
    model, x = mlp().double(), torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.reset()
        model[0].bias = None
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))


def test_a_replica_of_a_layer_records_as_the_layer_does():
    """What DataParallel makes: another object, with the weights of its device."""
    layer, x = nn.Linear(3, 2).double(), torch.randn(N, 3).double()

    def forward(m, x):
        replica = m.layer._replicate_for_data_parallel()
        replica.weight, replica.bias = m.layer.weight, m.layer.bias
        return replica(x)

    model = Model(forward, layer=layer)
    want = loop_model(nn.Sequential(layer), square, x)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms(), want)


@fallback_mode
def test_a_replica_with_parameters_of_its_own_counts_nothing(options):
    layer, head = Model(lambda m, x: x * m.scale, scale=torch.ones(3)), nn.Linear(3, 2)

    def forward(m, x):
        replica = m.layer._replicate_for_data_parallel()
        replica._parameters = {"scale": m.layer.scale.detach().clone().requires_grad_()}
        return m.head(x) + replica(x).sum(1, keepdim=True)

    model, x = Model(forward, layer=layer, head=head).double(), torch.randn(N, 3).double()
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)


@every_mode
def test_low_rank_adapters_on_a_frozen_layer(options):
    model = Model(lambda m, x: m.base(x) + m.up(m.down(x)), base=nn.Linear(4, 4),
                  down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 4, bias=False))  # fmt: skip
    model.base.requires_grad_(False)
    check(nn.Sequential(model, nn.Tanh(), nn.Linear(4, 2)), square, torch.randn(N, 5, 4), **options)


@every_mode
def test_conditional_paths_change_the_structure_from_step_to_step(options):
    need_native(options)
    model = Model(lambda m, x: m.head(torch.tanh(m.a(x) if m.first else m.b(m.b(x)))),
                  a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 2)).double()  # fmt: skip
    with torchgradx.attach(model, **options) as probe:
        for first in (True, False, True, False):
            model.first, x = first, torch.randn(N, 3).double()
            want = loop(model, square, x)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("t", [50, 1000])
@fallback_mode
def test_the_gradient_of_a_bias_alone_may_cancel(t, options):
    """An instance norm whose weight is frozen: what its bias receives is rounding of the terms."""
    for running in (False, True):
        layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=running).double()
        layer.weight.requires_grad_(False)
        with torchgradx.attach(layer, **options) as probe:
            square(layer, torch.randn(N, 3, t, dtype=torch.float64)).backward()
            assert bool((probe.norms() < 1e-10).all())


class Hadamard(torch.autograd.Function):
    """(a @ b) * scale, with a context, as adapters have it: vmap has no rule for it."""

    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b, scale)
        return a @ b * scale

    @staticmethod
    def backward(ctx, grad):
        a, b, scale = ctx.saved_tensors
        return grad * scale @ b.T, a.T @ (grad * scale), None


def adapted(m, x):
    return m.base(x) + F.linear(x, Hadamard.apply(m.a, m.b, torch.tensor(0.5, dtype=x.dtype)))


@every_mode
@pytest.mark.parametrize("positions", [(), (5,)], ids=["rows", "sequences"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_it_makes_of_two_is_exact(frozen, positions, options):
    if options.get("backend") == "native":
        pytest.skip("its parameters have no kernel")
    own = Model(adapted, a=torch.randn(3, 2), b=torch.randn(2, 3), base=nn.Linear(3, 3))
    own.base.requires_grad_(not frozen)
    net = nn.Sequential(nn.Linear(3, 3), own, nn.Linear(3, 2))
    check(net, square, torch.randn(N, *positions, 3), **options)
