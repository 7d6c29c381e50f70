"""What changes while a model is attached: options, modules, what stands in a parameter's place,
sizes."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    attempt,
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
    refused,
    same_gradients,
    square,
    square_sum,
)
from clip_oracle import bounded, gradients, norms_of, same, weighted
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torchgradx

N = 4
IMAGES, ROWS, IDS = torch.randn(N, 4, 6, 6), torch.randn(N, 3, 4), torch.randint(5, (N, 3))
ALTERED = {
    "LayerNorm.eps": (lambda: nn.LayerNorm(4), ROWS, ("eps", 0.5)),
    "RMSNorm.eps": (lambda: nn.RMSNorm(4), ROWS, ("eps", 0.5)),
    "GroupNorm.num_groups": (lambda: nn.GroupNorm(2, 4), IMAGES, ("num_groups", 4)),
    "InstanceNorm.eps": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES, ("eps", 0.5)),
    "BatchNorm.eps": (lambda: nn.BatchNorm2d(4).eval(), IMAGES, ("eps", 0.5)),
    "Conv2d.stride": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("stride", (2, 2))),
    "Conv2d.padding": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", (1, 1))),
    "Conv2d.padding as a number": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", 1)),
    "Conv2d.padding as a word": (lambda: nn.Conv2d(4, 2, 3), IMAGES, ("padding", "same")),
    "Conv2d.dilation": (lambda: nn.Conv2d(4, 2, 3, padding=2), IMAGES, ("dilation", 2)),
    "Conv1d.stride": (lambda: nn.Conv1d(4, 2, 3), IMAGES.flatten(2), ("stride", 2)),
    "ConvTranspose2d.stride": (lambda: nn.ConvTranspose2d(4, 2, 3), IMAGES, ("stride", 2)),
    "Embedding.padding_idx": (lambda: nn.Embedding(5, 3), IDS, ("padding_idx", 1)),
}


@every_mode
@pytest.mark.parametrize("name", ALTERED)
def test_the_model_computes_with_it_and_norms_are_exact_or_refused(name, options):
    need_native(options)
    make, x, (option, value) = ALTERED[name]
    model = nn.Sequential(make(), nn.Tanh()).double()
    x = x.double() if x.is_floating_point() else x
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x))
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
        exact_or(torchgradx.CoverageError, "", probe, loop(twin, square, x))
    assert torch.equal(square(model, x), losses[1])
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x))


def test_it_is_named_and_the_same_value_changes_nothing():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).double()
    with torchgradx.attach(model) as probe:
        model[0].eps = model[0].eps
        square(model, ROWS.double()).backward()
        probe.norms()
        model[0].eps = 0.5
        square(model, ROWS.double()).backward()
        if torchgradx.ops.NATIVE:
            with pytest.raises(torchgradx.CoverageError, match="ties or options changed"):
                probe.norms()


@pytest.mark.parametrize("into", [nn.Sequential, lambda: nn.ModuleList([nn.Tanh()]), nn.ModuleDict])
@every_mode
def test_a_module_that_comes_later_is_refused(into, options):
    """Adapters are added to empty containers, and to layers that had no modules inside."""
    need_native(options)

    def forward(model, x):
        later = model.later.values() if isinstance(model.later, nn.ModuleDict) else model.later
        for layer in later:
            x = layer(x)
        return model.head(x)

    model = Model(forward, later=into(), head=nn.Linear(4, 2)).double()
    x = torch.randn(N, 4).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        layer = nn.Linear(4, 4).double()
        holder = model.later[0] if len(model.later) else model.later
        holder.add_module("0", layer)
        if holder is not model.later:
            holder.register_forward_hook(lambda module, args, out: layer(out))
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match="attach again"):
            probe.norms()


def test_dropout_of_a_recurrent_module_may_change():
    model = nn.LSTM(4, 3, num_layers=2, batch_first=True, dropout=0.5).double()

    def loss(m, x):
        return m(x)[0].flatten(1).square().sum(1).mean()

    with torchgradx.attach(model) as probe:
        loss(model, ROWS.double()).backward()
        probe.norms()
        model.dropout = 0.0
        loss(model, ROWS.double()).backward()
        exact_or(AssertionError, "", probe, loop(model, loss, ROWS.double()))


CHANGES = {
    "a module in its place": lambda m: setattr(m, "soft", nn.Softmax(0)),
    "an option of a module": lambda m: setattr(m.soft, "dim", 0),
    "a function": lambda m: setattr(m, "soft", lambda h: torch.softmax(h, 0)),
    "a forward of its own": lambda m: setattr(m.soft, "forward", lambda h: torch.softmax(h, 0)),
}


@a_few_modes
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_proven_before_a_change_is_not_believed_after_attaching_again(name, options):
    model = Model(lambda m, x: m.out(m.soft(m.l(x))), l=nn.Linear(3, 3), soft=nn.Softmax(1),
                  out=nn.Linear(3, 2))  # fmt: skip
    if name == "a function":
        del model.soft
        model.soft = lambda h: torch.softmax(h, 1)
    x = torch.randn(N, 3)
    for change, wrong in ((None, False), (CHANGES[name], True)):
        if change:
            change(model)
        with torchgradx.attach(model, **options) as probe:
            for _ in range(2):
                square(model, x).backward()
                if wrong:
                    with pytest.raises(torchgradx.CoverageError, match=r"l\.weight"):
                        probe.norms()
                    probe.reset()
                else:
                    assert probe.norms().shape == (N,)


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def twice_the_weight(m, x):
    weight = m.l.weight * 2 if len(x) == 3 else m.l.weight
    return m.o(functional_call(m.l, {"weight": weight}, (x,)))


@every_mode
def test_a_layer_called_with_what_is_computed_from_its_weight_is_refused(options):
    need_native(options)
    model = Model(twice_the_weight, l=nn.Linear(3, 5), o=nn.Linear(5, 2)).double()
    with torchgradx.attach(model, **options) as probe:
        for n in (N, 3, N):  # also where the structure is known by then
            x = rows(n, 3)
            square(model, x).backward()
            if n == N:
                close_named(probe.norms(per="parameter"), loop(model, square, x))
                continue
            with pytest.raises(torchgradx.CoverageError, match="computed from") as refusal:
                probe.norms()
            assert "l.weight" in refusal.value.parameters
            probe.reset()


@fallback_mode
def test_a_model_called_with_what_is_computed_from_its_parameters_is_refused(options):
    model, x = mlp().double(), rows(N, 3)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))
        others = {name: p * 2 for name, p in model.named_parameters()}
        functional_call(model, others, (x,)).square().sum().backward()
        with pytest.raises(torchgradx.CoverageError, match="computed from"):
            probe.norms()
        probe.reset()
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))


def replaced(model):
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def assigned(model):
    state = {name: torch.randn_like(p) for name, p in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [replaced, assigned])
def test_parameters_that_were_replaced_are_clipped(change):
    model, x = mlp().double(), rows(N, 3)
    with torchgradx.attach(model, clip=True) as probe:
        for _ in range(3):
            model.zero_grad()
            grads = gradients(model, square, x)
            square(model, x).backward()
            norms = norms_of(grads, "model")
            bound = float(norms[""].median())
            close(probe.clip_grad_norm_(bound), norms[""])
            share = {"": bounded(norms, bound)[""] / N}
            terms = {name: sum(row[name].norm() for row in grads) for name in grads[0]}
            same(model, weighted(grads, share, "model"), 1e-9, terms)
            change(model)


@fallback_mode
def test_directions_follow_a_model_that_is_cast(options):
    model, x = mlp(), rows(N, 3)
    v = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    with torchgradx.attach(model, directions=v, **options) as probe:
        square(model, x.float()).backward()
        probe.dot()
        model.double().zero_grad()
        square(model, x).backward()
        want = [sum((g * v[name]).sum() for name, g in row.items())
                for row in gradients(model, square, x)]  # fmt: skip
        assert torch.allclose(probe.dot(), torch.stack(want), rtol=1e-9)


@fallback_mode
def test_a_pass_of_which_nothing_is_recorded_is_refused_and_not_that_before_it(options):
    def forward(m, x):
        if len(x) != 3:
            return m.scale((x,))
        packed = pack_padded_sequence(x, torch.tensor([6, 5, 3]), batch_first=True)
        rows = PackedSequence(m.scale(packed), *packed[1:])
        return pad_packed_sequence(rows, batch_first=True)[0]

    model = Model(forward, scale=Model(lambda m, held: held[0] * m.w, w=torch.randn(3))).double()
    if options.get("fused", True) and options.get("backend") != "vmap":
        options = {**options, "fused": False, "weight_grad": True}
    with torchgradx.attach(model, **options) as probe:
        x = rows(N, 6, 3)
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, square, x))
        square(model, rows(3, 6, 3)).backward()
        with pytest.raises(torchgradx.CoverageError, match="packed sequence"):
            probe.norms()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_scripted_model_is_refused():
    for made in (torch.jit.script(mlp()), torch.jit.trace(mlp(), torch.randn(2, 3))):
        with pytest.raises(torchgradx.CoverageError, match="made from") as refusal:
            torchgradx.attach(made)
        assert list(refusal.value.parameters) == [name for name, _ in made.named_parameters()]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_model_with_a_scripted_part_is_refused_and_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(mlp()))
    with pytest.raises(torchgradx.CoverageError, match="made from"):
        torchgradx.attach(model)
    assert not any(m._forward_pre_hooks for m in (model, model[0]))


@fallback_mode
def test_a_table_of_positions_is_cut_to_each_batchs_length(options):
    def forward(m, x):
        x = torch.cat([m.c.expand(len(x), -1, -1), m.i(x)], 1) + m.p[:, : x.shape[1] + 1]
        return m.o(torch.tanh(x))

    model = Model(forward, c=torch.randn(1, 1, 5), p=torch.randn(1, 7, 5),
                  i=nn.Linear(3, 5), o=nn.Linear(5, 2)).double()  # fmt: skip
    with torchgradx.attach(model, **options) as probe:
        for n, t in ((4, 6), (3, 4), (4, 6), (5, 2), (7, 6), (5, 4)):
            x = rows(n, t, 3)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, square, x))


ALONE = {
    "conv1d": (nn.Conv1d(3, 4, 2, padding=1), (3, 6)),
    "conv2d": (nn.Conv2d(3, 4, 2, groups=1), (3, 5, 4)),
    "circular": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 5, 4)),
    "conv3d": (nn.Conv3d(3, 4, 2), (3, 4, 3, 3)),
    "transposed": (nn.ConvTranspose2d(3, 4, 2, stride=2), (3, 4, 3)),
    "transposed1d": (nn.ConvTranspose1d(3, 4, 2), (3, 4)),
}


@every_mode
@pytest.mark.parametrize("name", ALONE)
def test_a_convolution_of_one_sample_without_a_dimension_of_samples(name, options):
    layer, shape = ALONE[name]

    def loss(m, x):
        return m(x[0]).square().sum()

    check(layer, loss, rows(1, *shape), batch_size=1, input_grad=True, **options)


@every_mode
def test_images_one_by_one_are_refused_for_a_batch(options):
    def forward(m, x):
        return torch.stack([m.c(image) for image in x])

    model = Model(forward, c=nn.Conv2d(3, 4, 2))
    refused(model, square, rows(3, 3, 5, 4), names=["c.weight", "c.bias"], **options)


@pytest.mark.parametrize("dims", [1, 2, 3])
@fallback_mode
def test_an_instance_norm_of_one_sample_alone_is_exact_or_refused(dims, options):
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    layer = kind(3, affine=True).double()
    nn.init.normal_(layer.bias)
    x = rows(1, 3, *(4, 5, 2)[:dims])

    def loss(m, x):
        return m(x[0]).square().sum()

    twin = copy.deepcopy(layer)
    loss(twin, x).backward()
    got, _, _ = attempt(layer, loss, x, batch_size=1, **options)
    if options.get("weight_grad", True):
        assert torch.allclose(layer.weight.grad, twin.weight.grad)
    if got is not None:
        close_named(got, loop(layer, loss, x))


@fallback_mode
@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.LayerNorm(3)], ids=["linear", "layernorm"])
def test_samples_without_positions_have_no_norms(layer, options):
    layer = copy.deepcopy(layer).double()
    with torchgradx.attach(layer, loss_reduction="sum", **options) as probe:
        square_sum(layer, rows(N, 0, 3)).backward()
        assert not probe.norms().any()
        x = rows(N, 2, 3)
        square_sum(layer, x).backward()
        close_named(probe.norms(per="parameter"), loop(layer, square_sum, x))
