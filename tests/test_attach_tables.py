"""What all samples share (position tables, bare parameters, modules called without samples) and
each way in which samples meet it."""

import copy
from functools import partial

import broadcast_models as shared
import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, square, square_second
from attach_modes import ANY, VMAP, a_few_modes, each_of, fallback_mode
from attach_oracle import check, close_named, loop, same_gradients
from attach_steps import exact_or_refused, exact_step, exact_steps, read_or_refused, refused
from broadcast_models import WAYS, D, N, T, against_all, constant, in_place, placed, tokens
from recurrent_models import KINDS, made, net
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchgradx

sizes = pytest.mark.parametrize(("n", "t"), [(N, T), (N, N), (D, T), (1, T), (T, 1), (2, 2 * N)])
IDS = {"[T]": torch.arange, "[1, T]": lambda t: torch.arange(t)[None]}
POSITIONS = torch.arange(T)[None]
MASKS = {
    "[1, T] > 1": lambda t: torch.arange(t)[None] > 1,
    "[T] > 1": lambda t: torch.arange(t) > 1,
}
NUMBERS = {"[]": lambda t: torch.tensor(3), "[1]": lambda t: torch.tensor([1.5])}


@fallback_mode
@sizes
@pytest.mark.parametrize("ids", IDS)
def test_a_position_table_is_exact(ids, n, t, options):
    check(placed(lambda m, i: m.p(IDS[ids](i.shape[1]))), square, tokens(n, t), **options)


@fallback_mode
@pytest.mark.parametrize("kept", [(POSITIONS, ...), ([POSITIONS], 0), ({"a": POSITIONS}, "a")])
def test_ids_that_a_module_keeps_are_of_no_sample(kept, options):
    model = placed(lambda m, i: m.p(m.kept[kept[1]]))
    model.kept = kept[0]
    check(model, square, tokens(N, T), **options)


@fallback_mode
@pytest.mark.parametrize("ids", ["[T]", "[1, T]", *MASKS, *NUMBERS])
def test_what_a_model_is_called_with_for_all_samples_is_of_none(ids, options):
    """Ids, masks, a time; of as many positions as samples there may be refusals."""
    given = (IDS | MASKS | NUMBERS)[ids]
    model = placed(lambda m, i, p: m.p(p.long()))
    for n, t in [(N, T), (N, 2 * N), (1, T), (N, 1), (2, T)]:
        check(model, lambda m, i: square(m, i, given(i.shape[1])), tokens(n, t), **options)
    exact_or_refused(model, lambda m, i: square(m, i, given(N)), tokens(N, N), **options)


@a_few_modes
def test_a_parameter_has_no_rows_by_chance(options):
    """Each of its elements receives the gradient of one sample in the first batch."""
    model = Model(lambda m, x: torch.clamp(m.a(x), m.p - 1, m.p + 1), a=nn.Linear(4, 4),
                  p=torch.zeros(4)).double()  # fmt: skip
    model.a.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
    x = torch.tensor([[-3.0, 0, 0, 0], [0, -4, 0, 0]]).double()
    loss = lambda m, x: (m(x).sum(1) * x.abs().sum(1)).mean()  # noqa: E731
    exact_steps(model, x, x.flip(1), x[:, [1, 0, 2, 3]], loss=loss, **options)


@a_few_modes
def test_positions_of_a_sequence_first_model_are_exact(options):
    model = placed(lambda m, i: m.p(torch.arange(len(i)))[:, None])
    for t in (T, N):
        check(model, square_second, tokens(N, t).T, dims=1, batch_dim=1, **options)


@fallback_mode
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_use_that_no_output_shows_is_exact_unless_it_receives_a_gradient(tiles, hidden, options):
    """As DoRA calls its adapters on an identity matrix, and detaches what comes of it; as LLaVA's
    vision tower returns what it makes of all tiles, of which the last layer is not used."""

    def forward(m, x):
        m.seen[:] = [m.o(x.repeat(2, 1) if tiles else torch.eye(D).to(x))]
        out = m.o(x)
        return (out, m.seen[0]) if tiles else out * m.seen[0].detach().norm()

    def loss(m, x):
        out = m(x)
        used = out[0] if tiles else out
        return used.square().sum(1).mean() + (m.seen[0].sum() if hidden else 0)

    model, x = Model(forward, o=nn.Linear(D, 2), seen=[]), torch.randn(N, D)
    if hidden:
        names = ["o.weight", "o.bias"]
        refused(model, loss, x, names=names, match="not come from the model's outputs", **options)
    else:
        check(model, loss, x, **options)


def biased(m, x):
    """A bias for each pair of positions and each head, as in T5; used twice."""
    t = x.shape[1]
    bias = m.p((torch.arange(t)[:, None] - torch.arange(t)).abs()).permute(2, 0, 1)[None]
    for layer in (m.a, m.b):
        h = layer(x).unflatten(2, (2, -1)).transpose(1, 2)
        scores = h @ h.transpose(2, 3)
        scores += bias
        x = x + (torch.softmax(scores, -1) @ h).transpose(1, 2).flatten(2)
    return m.o(x)


@fallback_mode
@sizes
def test_a_bias_of_attention_used_in_several_layers_is_exact(n, t, options):
    model = Model(biased, p=nn.Embedding(2 * N, 2), a=nn.Linear(D, D), b=nn.Linear(D, D),
                  o=nn.Linear(D, 2))  # fmt: skip
    check(model, square, torch.randn(n, t, D), **options)


def tied_embedding(m, i):
    return m.o(torch.tanh(m.t(i) + m.t(torch.arange(i.shape[1]))))


def in_two_places(m, i):
    t = i.shape[1]
    h = torch.tanh(m.t(i) + m.p(torch.arange(t)))
    return m.o(torch.tanh(h * m.p(torch.arange(t).flip(0))[None]))


def beside_samples(m, i):
    return m.o(torch.tanh(m.t(i) + m.l(m.c) + m.l(m.t(i))))


@fallback_mode
@pytest.mark.parametrize("use", [tied_embedding, in_two_places, beside_samples])
@pytest.mark.parametrize("t", [T, N])
def test_all_uses_of_a_parameter_add_up(use, t, options):
    parts = {"t": nn.Embedding(shared.TOKENS, D), "o": nn.Linear(D, 2)}
    if use is in_two_places:
        parts["p"] = nn.Embedding(2 * N, D)
    if use is beside_samples:
        parts["l"] = nn.Linear(D, D)
    check(constant(use, (t, D), **parts), square, tokens(N, t), **options)


MIXED = {
    "mean of the inputs": lambda m, x: m.l(x.mean(0)),
    "a constant scaled by the batch": lambda m, x: m.l(m.c[:1] * x.mean()),
    "written into": lambda m, x: m.l(in_place(0 * m.c, lambda z: z[1:].add_(x[0, 1]))),
    "written by a list of tensors": lambda m, x: m.l(in_place(0 * m.c, lambda z:
                                                     torch._foreach_add_([z], [x[0]]))),
    "mean of what was learned": lambda m, x: m.l(m.i(x).mean(0)),
    "the neighbour": lambda m, x: m.l(x).flip(0),
    "batch statistics": lambda m, x: F.batch_norm(m.l(x).mT, None, None, training=True).mT,
}  # fmt: skip
# Statistics of data concern all parameters: a sample alone has others.
OF_DATA = {"mean of the inputs", "a constant scaled by the batch"}


@fallback_mode
@pytest.mark.parametrize("t", [T, N])
@pytest.mark.parametrize("how", MIXED)
def test_what_is_computed_from_several_samples_is_refused(how, t, options):
    model = constant(lambda m, x: m.o(torch.tanh(m.i(x) + MIXED[how](m, x))), (t, D),
                     l=nn.Linear(D, D, bias=False), i=nn.Linear(D, D))  # fmt: skip
    spared = set() if how in OF_DATA else {"o.weight"}
    refused(model, square, torch.randn(N, t, D), names={"l.weight"}, spared=spared, **options)


@fallback_mode
def test_a_row_of_the_samples_own_ids_is_theirs(options):
    """Given once more, it looks like positions; it is a view of the same memory."""
    model = placed(lambda m, i, p: m.t(p) - m.t(i).mean(0))
    refused(model, lambda m, i: square(m, i, i[:1]), tokens(), names={"t.weight"}, **options)


# ---- Each way in which samples meet it; changed in place, saved, over steps ----------------------
SHARED = {
    "positions": (shared.positional, tokens),
    "queries": (lambda: constant(against_all, l=nn.Linear(D, D)), lambda: torch.randn(N, T, D)),
    "patches": (shared.vision_transformer, lambda: torch.randn(N, T, 3)),
}
RECURRENT = {  # several outputs, which run again when the backward ends
    kind: (lambda kind=kind: net(made(kind, "both ways")), lambda: torch.randn(N, T, 3))
    for kind in KINDS
}
each_model = pytest.mark.parametrize("name", SHARED)


def shared_example(name, dtype=torch.float64):
    make, data = (SHARED | RECURRENT)[name]
    model, x = make(), data()
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("name", SHARED | RECURRENT)
@a_few_modes
def test_several_backwards_through_one_graph_add_up(name, options):
    model, x = shared_example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, x[:1], x[:1]):
            want = loop(model, lambda *batch: 3 * square(*batch), batch)
            model.zero_grad()
            loss = square(model, batch)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_batches_of_other_sizes_follow(name, options):
    """Where a sample's value goes is seen once; where the samples stand is proven for each size."""
    model, x = shared_example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, torch.cat([x, x])[:7], x[:1], x[:, :3], torch.cat([x, x])[:T], x[:3], x):
            exact_step(probe, model, batch)
        model.eval()
        exact_step(probe, model, x)


checkpointed = partial(checkpoint, use_reentrant=False)


def offloaded(function, *args):
    with save_on_cpu():
        return function(*args)


AROUND = {
    "checkpoint": checkpointed,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "offloaded": offloaded,
    "nested": lambda function, *args: checkpointed(partial(checkpointed, function), *args),
    "inputs offloaded": partial(offloaded, checkpointed),
}
MAY_REFUSE = {"stacked"}  # each sample alone: its nodes hold no row for the others


@a_few_modes
@pytest.mark.parametrize("positions", [T, N])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_for_samples_to_come_in_is_exact(way, positions, options):
    def forward(m, x):
        return m.o(torch.tanh(WAYS[way](x, m.l(m.c))))

    model = constant(forward, (positions, D), l=nn.Linear(D, D))
    x = torch.randn(N, positions, D)
    if way in MAY_REFUSE or positions == N:  # outputs [N, N, ...] may have the samples in either
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


MAY_RUN_AGAIN = {"divided by", "into a part", "stacked", "attention", "maximum", "where", "norm",
                 "indexed"}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("way", WAYS)
def test_a_bare_parameter_is_exact_without_running_its_owner_again(way, options):
    model = Model(lambda m, x: m.o(torch.tanh(WAYS[way](m.i(x), m.w))), w=torch.randn(T, D),
                  i=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    x = torch.randn(N, T, D)
    if way in MAY_RUN_AGAIN:
        exact_or_refused(model, square, x, **options)
        return
    check(model, square, x, **options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        assert "(root): Model  [w]: lifted" in probe.explain()


@a_few_modes
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", WAYS)
def test_where_samples_come_in_inside_a_checkpoint(way, around, options):
    def forward(m, x):
        return m.o(AROUND[around](lambda x, s: torch.tanh(WAYS[way](x, s)), m.i(x), m.l(m.c)))

    model = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D))
    x = torch.randn(N, T, D)
    if around == "reentrant" or way in {*MAY_REFUSE, "into a part"}:  # CopySlices shows to nobody
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


ONE = {
    "a factor": lambda m, x: m.l(x) * m.t(),
    "twice": lambda m, x: torch.tanh(m.l(x * m.t())) * m.t(),
    "in a checkpoint": lambda m, x: checkpoint(
        lambda x: torch.tanh(m.l(x)) * m.t(), x, use_reentrant=False),
    "detached": lambda m, x: m.l(x) * m.t().detach(),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("numbers", [(), (3,)], ids=str)
@pytest.mark.parametrize("way", ONE)
def test_a_module_may_give_one_number(way, numbers, n, options):
    """As a temperature: of a submodule that is given no sample."""
    number = Model(lambda m: m.weight.exp().sum(), weight=torch.randn(numbers))
    check(Model(ONE[way], l=nn.Linear(D, D), t=number), square, torch.randn(n, T, D), **options)


MODES = [*ANY, *VMAP, {"clip": True}, {"clip": True, "fused": False}]
modes = each_of(MODES)


@modes
@pytest.mark.parametrize("around", ["checkpoint", "offloaded"])
def test_samples_changed_in_place_by_what_they_share(around, options):
    """Exact, or refused in a checkpoint: that gives each saved tensor once."""

    def change(m, x):
        h = m.i(x)
        h[:, 1:] *= m.l(m.c)[1:]
        return m.l(h)

    def forward(m, x):
        return m.o(torch.tanh(AROUND[around](lambda x: change(m, x), m.f(x))))

    parts = {name: nn.Linear(D, D) for name in ("f", "i", "l")}
    shows = exact_or_refused if around == "checkpoint" else check
    shows(constant(forward, (T, D), **parts), square, torch.randn(N, T, D), **options)


class Once(saved_tensors_hooks):
    """They forget what they gave, as those of libraries that move activations away."""

    def __init__(self):
        self.kept = {}
        super().__init__(self.pack, self.kept.pop)

    def pack(self, t):
        key = object()
        self.kept[key] = t
        return key


@a_few_modes
@each_model
def test_hooks_that_give_once_are_asked_by_the_engine_alone(name, options):
    """Nothing is asked for twice, gradients are what they are, and norms exact or refused."""
    net, x = shared_example(name)
    twin, want = copy.deepcopy(net), loop(net, square, x)
    square(twin, x).backward()
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            net.zero_grad()
            with Once():
                loss = square(net, x)
            loss.backward()
            if options.get("weight_grad", True):
                same_gradients(net, twin, 1e-9)
            read_or_refused(probe, want)
