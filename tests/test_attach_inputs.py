"""What a layer is given and gives: in any memory format, by keyword, of any class, written into."""

import copy

import pytest
import torch
from attach_oracle import (
    ANY,
    Model,
    a_few_modes,
    check,
    close,
    close_named,
    each_of,
    every_mode,
    loop,
    per_model,
    read_or_refused,
    same_gradients,
    square,
)
from torch import nn

import torchgradx

N, C, SIDE = 4, 8, 9
ROWS, IMAGES = torch.randn(N, SIDE, C), torch.randn(N, SIDE, SIDE, C)  # channels last
CIRCULAR = {"padding": 1, "padding_mode": "circular"}
GIVEN = {
    "conv1d padded": (lambda: nn.Conv1d(C, 6, 3, **CIRCULAR), lambda: ROWS.transpose(1, 2)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(C, 6, 3), lambda: ROWS.transpose(1, 2)),
    "conv2d, samples second": (lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(1, 3, 0, 2)),
    "conv3d": (lambda: nn.Conv3d(C, 6, (1, 2, 2)), lambda: IMAGES[:, None].permute(0, 4, 1, 2, 3)),
    "linear, samples second": (lambda: nn.Linear(C, 6), lambda: ROWS.transpose(0, 1)),
    "linear without bias, one sample": (
        lambda: nn.Linear(C, 6, bias=False),
        lambda: ROWS[:, :1].transpose(0, 1),  # contiguous, though its first stride is no product
    ),
    "layer norm": (lambda: nn.LayerNorm(SIDE), lambda: ROWS.transpose(1, 2)),
    "group norm": (lambda: nn.GroupNorm(2, C), lambda: IMAGES.permute(0, 3, 1, 2)),
    "batch norm": (lambda: nn.BatchNorm2d(C).eval(), lambda: IMAGES.permute(0, 3, 1, 2)),
    "prelu": (lambda: nn.PReLU(C), lambda: IMAGES.permute(0, 3, 1, 2)),
    "embedding": (lambda: nn.Embedding(9, 6), lambda: torch.randint(9, (SIDE, N)).t()),
    "lstm": (lambda: nn.LSTM(SIDE, 6, batch_first=True), lambda: ROWS.transpose(1, 2)),
    "gru cell": (lambda: nn.GRUCell(C, 6), lambda: ROWS[:, 0]),
}


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GIVEN)
def test_outputs_lie_in_memory_as_they_would(name, dtype, options):
    make, given = GIVEN[name]
    model, x = make().to(dtype), given()
    x = x.to(dtype) if x.is_floating_point() else x
    want = model(x)
    with torchgradx.attach(model, **options):
        got = model(x)
    for a, b in zip(*([t] if torch.is_tensor(t) else t[:1] for t in (got, want)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert a._base is None or b._base is not None, "a view cannot be detached in place"


@every_mode
@pytest.mark.parametrize("what", ["input", "model", "both"])
def test_channels_last_changes_nothing(what, options):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, stride=2))
    x = torch.randn(N, 3, 8, 7)
    want = loop(model, square, x)
    if what != "input":
        model = model.to(memory_format=torch.channels_last)
    if what != "model":
        x = x.to(memory_format=torch.channels_last)
    check(model, square, x, want=want, **options)


@every_mode
def test_strided_and_expanded_inputs_are_as_good_as_contiguous_ones(options):
    images = torch.randn(N, 8, 2, 9).permute(0, 2, 1, 3)[..., ::2]
    check(nn.Conv2d(2, 3, 3), square, images, **options)
    check(nn.Linear(3, 4), square, torch.randn(3, N, 5).permute(1, 2, 0), **options)
    check(nn.Linear(3, 4), square, torch.randn(N, 1, 3).expand(N, 5, 3), **options)


@every_mode
def test_an_expanded_output_gradient_is_as_good_as_a_dense_one(options):
    def total(model, x):
        return model(x).flatten(1).sum(1).mean()

    check(nn.Linear(3, 4), total, torch.randn(N, 5, 3), **options)
    check(nn.Conv2d(2, 3, 3, padding=1), total, torch.randn(N, 2, 5, 5), **options)


LAYERS = {
    "Linear": (lambda: nn.Linear(3, 3), (N, 5, 3)),
    "Conv2d": (lambda: nn.Conv2d(3, 2, 2), (N, 3, 4, 4)),
    "Conv2d, reflected": (
        lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect"), (N, 3, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(3), (N, 5, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), (N, 5, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (N, 4, 3, 2)),
    "PReLU": (lambda: nn.PReLU(4), (N, 4, 3)),
    "Embedding": (lambda: nn.Embedding(7, 3), (N, 5)),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)


def layer_and_input(name):
    make, shape = LAYERS[name]
    x = torch.randint(0, 7, shape) if name == "Embedding" else torch.randn(shape).double()
    return make().double(), x


@a_few_modes
@every_layer
def test_by_keyword(name, options):
    layer, x = layer_and_input(name)
    keyword = "x" if name == "RMSNorm" else "input"
    check(Model(lambda m, t: m.layer(**{keyword: t}), layer=layer), square, x, **options)


T, D = 5, 6
WORDS = "written into before"


def bare(m, x):
    return m.o(torch.tanh(x @ m.w))


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)),
    "bare": lambda: Model(bare, w=torch.randn(D, 4), o=nn.Linear(4, 2)),
}
models = pytest.mark.parametrize("name", MODELS)


def made(name, options):
    model = MODELS[name]().double()
    if "bare" in name and options.get("backend") == "native":
        pytest.skip("backend='native' refuses it at attach")
    x = torch.randn(N, D).double()
    return model, x, loop(model, square, x)


@every_mode
@models
@pytest.mark.parametrize("retain", [False, True])
def test_an_input_after_a_backward(retain, name, options):
    model, x, want = made(name, options)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffer = x.clone()
            square(model, buffer).backward(retain_graph=retain)
            buffer.normal_()
            if retain:
                read_or_refused(probe, want, WORDS)
            else:
                close(probe.norms(), per_model(want))


every_option = each_of([*ANY, {"backend": "vmap"}])


def views(m, x):
    """Two outputs, the first of which lies otherwise than it was made."""
    h = torch.tanh(x @ m.w)
    return h.transpose(1, 2).contiguous().transpose(1, 2), h.sum(1)


class Attends(nn.MultiheadAttention):
    """Of its own kind, or torch's as it stands: the first of both is a view."""

    def forward(self, x):
        return super().forward(x, x, x)


def attention():
    return Model(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(D, 2, batch_first=True))


STOCK = {
    "an LSTM both ways": lambda: nn.LSTM(D, D // 2, batch_first=True, bidirectional=True),
    "attention": attention,
    "a GRU": lambda: nn.GRU(D, D, batch_first=True),
    "an RNN of two layers": lambda: nn.RNN(D, D, 2, batch_first=True),
    "a Linear": lambda: nn.Linear(D, D),
    "a LayerNorm": lambda: nn.LayerNorm(D),
    "a convolution": lambda: nn.Conv1d(T, T, 3, padding=1),
    "a transposed convolution": lambda: nn.ConvTranspose1d(T, T, 3, padding=1),
}
OWN = {
    "views": lambda: Model(views, w=torch.randn(D, D)),
    "one view": lambda: Model(lambda m, x: views(m, x)[0], w=torch.randn(D, D)),
    "attention": lambda: Attends(D, 2, batch_first=True),
}
CHANGES = {"all": torch.relu_, "by its transpose": lambda y: y.transpose(-1, -2).mul_(3.0)}
THEN = {"nothing": lambda m, y: y, "a layer": lambda m, y: m.l(y)}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
every_end = pytest.mark.parametrize("then", THEN.values(), ids=THEN)


def around(module, change, then):
    """[N, T, D] -> [N, T, D or 3]"""

    def forward(m, x):
        out = m.r(torch.tanh(m.i(x)))
        y = out[0] if isinstance(out, tuple) else out
        change(y)
        return then(m, y)

    end = {"l": nn.Linear(D, 3)} if then is THEN["a layer"] else {}
    return Model(forward, i=nn.Linear(D, D), r=module, **end).double()


@every_option
@every_end
@every_change
@pytest.mark.parametrize("make", STOCK.values(), ids=STOCK)
def test_outputs_of_torch_s_modules(make, change, then, options):
    check(around(make(), change, then), square, torch.randn(N, T, D), **options)


@every_option
@every_end
@every_change
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_outputs_of_a_user_s_modules_are_not_missed(make, change, then, options):
    """Also where its gradient comes before any other, and in later steps."""
    model, x = around(make(), change, then), torch.randn(N, T, D, dtype=torch.float64)
    want = loop(model, square, x)
    missed = {name for name, norms in want.items() if name.startswith("r.") and norms.any()}
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            square(model, x).backward()
            try:
                close_named(probe.norms(per="parameter"), want)
                refused = missed
            except torchgradx.CoverageError as error:
                refused = set(error.parameters)
            assert missed <= refused
            model.zero_grad()


any_option = each_of(ANY)


def pieces(model, x, detach):
    """The loss of a sequence in three pieces, the state being detached between them."""
    state, total = None, 0.0
    for piece in x.chunk(3, 1):
        y, state = model(piece, state)
        total = total + y.flatten(1).square().sum(1).mean()
        for t in state if isinstance(state, tuple) else (state,):
            detach(t)
    return total


@any_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_that_are_detached_in_place(kind, dtype, options):
    model = Model(lambda m, x, s: m.r(x, s), r=kind(D, D, batch_first=True)).to(dtype)
    twin, x = copy.deepcopy(model), torch.randn(N, 3 * T, D, dtype=dtype)
    pieces(twin, x, torch.Tensor.detach_).backward()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            model.zero_grad()
            with probe.same_samples():
                pieces(model, x, torch.Tensor.detach_).backward()
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            want = loop(model, lambda m, x: pieces(m, x, torch.Tensor.detach_), x)
            close_named(probe.norms(per="parameter"), want, rtol)
            if options.get("weight_grad", True):
                same_gradients(model, twin, rtol)
