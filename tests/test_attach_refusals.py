"""What changes or cannot be accounted for is refused by name when read, and `.grad` is whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, mlp, penalised, square
from attach_modes import a_few_modes, every_mode, fallback_mode, native_missing
from attach_oracle import close_named, loop, same_gradients
from attach_steps import (
    exact_or_refused,
    exact_step,
    read_or_refused,
    refusal,
    refused,
    step_or_refused,
)
from torch import nn
from torch.func import functional_call

import torchgradx

N = 4


@every_mode
def test_a_penalty_inside_the_loss_is_refused_by_name(options):
    names, spared = ["0.weight"], ["2.weight", "2.bias"]
    refused(mlp(), penalised, torch.randn(N, 3), names=names, spared=spared, **options)


@every_mode
def test_a_penalty_that_appears_at_a_later_step_is_refused(options):
    model, x = mlp(), torch.randn(N, 3)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            square(model, x).backward()
            probe.norms()
        penalised(model, x).backward()
        refusal(probe, r"0\.weight")


@a_few_modes
def test_a_submodule_called_beside_the_root_in_one_loss_is_refused_by_name(options):
    model = Model(lambda m, x: m.head(torch.tanh(m.body(x))), body=nn.Linear(3, 4),
                  head=nn.Linear(4, 2))  # fmt: skip
    refused(model, lambda m, x: square(m, x) + square(m.body, 2 * x), torch.randn(N, 3),
            names=["body.weight"], spared=["head.weight"], **options)  # fmt: skip


def batch_normed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@fallback_mode
def test_batch_norm_in_training_mode_is_refused_with_what_to_do(options):
    refused(batch_normed(), square, torch.randn(N, 3), names=["1.weight", "1.bias"],
            match=r"eval|GroupNorm", **options)  # fmt: skip


@a_few_modes
def test_double_backward_is_exact_or_refused(options):
    def gradient_penalty(model, x):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(square(model, x) * len(x), x, create_graph=True)
        return gradient.square().sum(1).mean()

    exact_or_refused(mlp(), gradient_penalty, torch.randn(N, 3), **options)


@a_few_modes
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_backward_that_creates_a_graph_is_exact_or_refused(options):
    model, x = mlp().double(), torch.randn(N, 3).double()
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward(create_graph=True)
        read_or_refused(probe, want, "create_graph")
        loss = square(model, x)
        loss.backward(create_graph=True)
        probe.reset()
        loss.backward()
        close_named(probe.norms(per="parameter"), want)
    model.zero_grad()


D = 6
PARTS = {  # of x [N, 2 D]
    "linear": lambda: nn.Sequential(nn.Linear(2 * D, D), nn.Linear(D, 2 * D)),
    "attention": lambda: Model(lambda m, x: m.a(*[x.view(len(x), 2, D)] * 3)[0].flatten(1),
                               a=nn.MultiheadAttention(D, 2, batch_first=True)),
    "no kernel": lambda: nn.Sequential(
        nn.Linear(2 * D, 2 * D), Model(lambda m, x: torch.sin(x * m.w), w=torch.randn(2 * D))),
}  # fmt: skip
ASTRAY = {
    "a part": lambda model, x: square(model.body, x),
    "by forward": lambda model, x: square(model.forward, x),
}
parts = pytest.mark.parametrize("part", PARTS)


def with_part(part, options):
    if options.get("backend") == "native" and part == "no kernel":
        pytest.skip("backend='native' refuses it at attach")
    parts = {"body": PARTS[part](), "head": nn.Linear(2 * D, 2)}
    model = Model(lambda m, x: m.head(torch.tanh(m.body(x))), **parts)
    return model.double(), torch.randn(N, 2 * D).double()


@every_mode
@parts
@pytest.mark.parametrize("read", ["at first", "after a read"])
@pytest.mark.parametrize("way", ASTRAY)
def test_is_refused_and_then_forgotten(part, way, read, options):
    (model, x), astray = with_part(part, options), ASTRAY[way]
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        if read == "after a read":
            exact_step(probe, model, x)
        model.zero_grad()
        astray(model, 2 * x).backward()
        error = refusal(probe, "outside of the model's own")
        concerned = dict(model.named_parameters() if way == "by forward" else
                         model.body.named_parameters(prefix="body"))  # fmt: skip
        assert set(error.parameters) == set(concerned)
        astray(twin, 2 * x).backward()
        same_gradients(model, twin, 1e-9)  # nothing of it is taken away, not by norms only either
        exact_step(probe, model, x)


def test_a_backward_to_some_parameters_only_is_refused():
    model, x = mlp().double(), torch.randn(N, 6, 3).double()
    with torchgradx.attach(model) as probe:
        square(model, x).backward(inputs=[model[2].weight])
        refusal(probe, "inputs=")


IMAGES, ROWS, IDS = torch.randn(N, 4, 6, 6), torch.randn(N, 3, 4), torch.randint(5, (N, 3))
ALTERED = {
    "LayerNorm.eps": (lambda: nn.LayerNorm(4), ROWS, ("eps", 0.5)),
    "GroupNorm.num_groups": (lambda: nn.GroupNorm(2, 4), IMAGES, ("num_groups", 4)),
    "BatchNorm.eps": (lambda: nn.BatchNorm2d(4).eval(), IMAGES, ("eps", 0.5)),
    "Conv2d.stride": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("stride", (2, 2))),
    "Conv2d.padding as a word": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", "same")),
    "ConvTranspose2d.stride": (lambda: nn.ConvTranspose2d(4, 2, 3), IMAGES, ("stride", 2)),
    "Embedding.padding_idx": (lambda: nn.Embedding(5, 3), IDS, ("padding_idx", 1)),
}


@every_mode
@pytest.mark.parametrize("name", ALTERED)
def test_the_model_computes_with_it_and_norms_are_exact_or_refused(name, options):
    make, x, (option, value) = ALTERED[name]
    model = nn.Sequential(make(), nn.Tanh()).double()
    x = x.double() if x.is_floating_point() else x
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        read_or_refused(probe, loop(model, square, x))
        model.zero_grad()
        setattr(model[0], option, value)
        twin = copy.deepcopy(model)
        assert getattr(twin[0], option) == value
        losses = square(model, x), square(twin, x)
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        if options.get("weight_grad", True):
            same_gradients(model, twin, 1e-12)
        read_or_refused(probe, loop(twin, square, x))
    assert torch.equal(square(model, x), losses[1])
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        read_or_refused(probe, loop(model, square, x))


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def twice_the_weight(m, x):
    weight = m.l.weight * 2 if m.twice else m.l.weight
    return m.o(functional_call(m.l, {"weight": weight}, (x,)))


@every_mode
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_called_with_what_is_computed_from_its_weight_is_exact_or_refused(frozen, options):
    model = Model(twice_the_weight, l=nn.Linear(3, 5), o=nn.Linear(5, 2)).double()
    model.l.bias.requires_grad_(not frozen)
    with torchgradx.attach(model, **options) as probe:
        for model.twice in (False, True, False, True):  # also where the structure is known by then
            error = step_or_refused(probe, model, drawn(N, 3))
            is_plain = options.get("backend") != "vmap" and not native_missing()
            assert error is None or (model.twice and not is_plain)


def functionally_normed():
    def forward(m, x):
        h = m.l(x)
        return m.o(F.batch_norm(h, h.new_zeros(5), h.new_ones(5), training=m.training))

    return Model(forward, l=nn.Linear(3, 5), o=nn.Linear(5, 2))


@fallback_mode
@pytest.mark.parametrize("make", [batch_normed, functionally_normed])
def test_a_verdict_of_eval_mode_does_not_hold_in_training(make, options):
    model, x = make().double().eval(), drawn(N, 3)
    with torchgradx.attach(model, **options) as probe:
        exact_step(probe, model, x)
        model.train()
        square(model, x).backward()
        refusal(probe, r"eval|GroupNorm" if make is batch_normed else None)


CHANGES = {
    "replaced": lambda m: m.insert(1, m.pop(1) and nn.Linear(4, 3)),
    "appended": lambda m: m.append(nn.Linear(4, 3)),
    "untied": lambda m: setattr(m[1], "weight", nn.Parameter(torch.randn(4, 4))),
    "renamed": lambda m: vars(m[1]).update(
        bias=setattr(m[1], "b", nn.Parameter(1 * m[1]._parameters.pop("bias")))
    ),
}


@fallback_mode
@pytest.mark.parametrize("how", CHANGES)
def test_a_model_changed_after_attach_is_refused(how, options):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(N, 4)
    if how == "untied":
        model[1].weight = model[0].weight
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        CHANGES[how](model)
        square(model, x).backward()
        refusal(probe, "attach again")


def test_a_lazy_model_is_told_to_run_first():
    with pytest.raises(ValueError, match="forward first"):
        torchgradx.attach(nn.Sequential(nn.LazyLinear(3)))


class Listing(nn.Linear):
    """As torchrl's losses: lists its parameters in its own way."""

    others = ()

    def named_parameters(self, prefix="", recurse=True):
        return [*super().named_parameters(prefix, recurse), *self.others]


@a_few_modes
def test_a_model_that_lists_its_parameters_itself(options):
    model, x = Listing(3, 2).double(), torch.randn(N, 3).double()
    exact_or_refused(model, square, x, **options)
    model.others = [("hidden", nn.Parameter(torch.ones(2)))]
    with pytest.raises(ValueError, match=r"no module of it holds \(hidden\)"):
        torchgradx.attach(model)


@a_few_modes
def test_an_output_that_was_left_out_is_proven_when_it_is_there(options):
    def forward(m, x):
        h = torch.tanh(m.i(x))
        apart, out = h - h.mean(0), m.b(h)
        return (out, apart) if m.both else (out,)

    def loss(m, x):
        return sum(t.square().sum() for t in m(x)) / len(x)

    net = Model(forward, i=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    with torchgradx.attach(net, **options) as probe:
        for net.both in (False, False, True, True, False):
            assert (step_or_refused(probe, net, drawn(N, 3), loss=loss) is not None) == net.both


@fallback_mode
def test_a_model_called_with_what_is_computed_from_its_parameters_is_refused(options):
    model, x = mlp().double(), drawn(N, 3)
    with torchgradx.attach(model, **options) as probe:
        exact_step(probe, model, x)
        others = {name: p * 2 for name, p in model.named_parameters()}
        functional_call(model, others, (x,)).square().sum().backward()
        refusal(probe, "computed from")
        probe.reset()
        exact_step(probe, model, x)
