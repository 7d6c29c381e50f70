"""What a layer is given and gives: in any memory format, by keyword, of any class, written into."""

import copy

import pytest
import torch
from attach_models import Model, square
from attach_modes import ANY, a_few_modes, each_of, every_mode
from attach_oracle import check, close, loop, per_model
from attach_steps import exact_step, read_or_refused
from test_attach_layers import ELEMENTWISE_LAYERS, KERNEL_LAYERS
from torch import nn

import torchgradx

N, C, SIDE = 4, 8, 9
ROWS, IMAGES = torch.randn(N, SIDE, C), torch.randn(N, SIDE, SIDE, C)  # channels last
CIRCULAR = {"padding": 1, "padding_mode": "circular"}
GIVEN = {
    "conv1d padded": (lambda: nn.Conv1d(C, 6, 3, **CIRCULAR), lambda: ROWS.transpose(1, 2)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(C, 6, 3), lambda: ROWS.transpose(1, 2)),
    "conv2d, samples second": (lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(1, 3, 0, 2)),
    "conv2d, every other pixel": (
        lambda: nn.Conv2d(C, 6, 3), lambda: IMAGES.permute(0, 3, 1, 2)[..., ::2]),
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
    "gru": (lambda: nn.GRU(C, 6, batch_first=True), lambda: ROWS[:, :1].expand(-1, 4, -1)),
    "rnn": (lambda: nn.RNN(C, 6, batch_first=True), lambda: ROWS.transpose(0, 1)),
    "gru cell": (lambda: nn.GRUCell(C, 6), lambda: ROWS[:, 0]),
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GIVEN)
def test_outputs_lie_in_memory_as_they_would_and_norms_are_exact(name, dtype, options):
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
    if name != "group norm":  # backward of channels_last crashes torch itself
        out = Model(lambda m, t: m.l(t)[0] if isinstance(want, tuple) else m.l(t), l=model)
        check(out, square, x, dtype=dtype, **options)


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
def test_expanded_inputs_and_output_gradients_are_as_good_as_dense_ones(options):
    check(nn.Linear(3, 4), square, torch.randn(N, 1, 3).expand(N, 5, 3), **options)

    def total(model, x):
        return model(x).flatten(1).sum(1).mean()

    check(nn.Linear(3, 4), total, torch.randn(N, 5, 3), **options)
    check(nn.Conv2d(2, 3, 3, padding=1), total, torch.randn(N, 2, 5, 5), **options)


@a_few_modes
@pytest.mark.parametrize("name", ["linear 3-D", "conv2d", "conv2d reflect", *ELEMENTWISE_LAYERS])
def test_by_keyword(name, options):
    make, shape = (KERNEL_LAYERS | ELEMENTWISE_LAYERS)[name]
    x = torch.randint(0, 7, shape) if "embedding" in name else torch.randn(shape)
    keyword = "x" if "rms norm" in name else "input"
    check(Model(lambda m, t: m.layer(**{keyword: t}), layer=make()), square, x, **options)


T, D = 5, 6


@every_mode
@pytest.mark.parametrize("own", [False, True], ids=["", "a parameter of its own"])
@pytest.mark.parametrize("retain", [False, True])
def test_an_input_after_a_backward(retain, own, options):
    if own and options.get("backend") == "native":
        pytest.skip("backend='native' refuses it at attach")
    first = Model(lambda m, x: x @ m.w, w=torch.randn(D, 4)) if own else nn.Linear(D, 4)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(N, D).double()
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffer = x.clone()
            square(model, buffer).backward(retain_graph=retain)
            buffer.normal_()
            if retain:
                read_or_refused(probe, want, "written into before")
            else:
                close(probe.norms(), per_model(want))


def views(m, x):
    """Two outputs, the first of which lies otherwise than it was made."""
    h = torch.tanh(x @ m.w)
    return h.transpose(1, 2).contiguous().transpose(1, 2), h.sum(1)


STOCK = {
    "an LSTM both ways": lambda: nn.LSTM(D, D // 2, batch_first=True, bidirectional=True),
    "attention": lambda: Model(
        lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(D, 2, batch_first=True)),
    "a GRU": lambda: nn.GRU(D, D, batch_first=True),
    "a Linear": lambda: nn.Linear(D, D),
    "a LayerNorm": lambda: nn.LayerNorm(D),
    "a transposed convolution": lambda: nn.ConvTranspose1d(T, T, 3, padding=1),
}  # fmt: skip
OWN = {
    "views": lambda: Model(views, w=torch.randn(D, D)),
    "one view": lambda: Model(lambda m, x: views(m, x)[0], w=torch.randn(D, D)),
}
CHANGES = {"all": torch.relu_, "by its transpose": lambda y: y.transpose(-1, -2).mul_(3.0)}
THEN = {"nothing": lambda m, y: y, "a layer": lambda m, y: m.l(y)}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
every_end = pytest.mark.parametrize("then", THEN.values(), ids=THEN)


def around(module, change, then):
    def forward(m, x):
        out = m.r(torch.tanh(m.i(x)))
        y = out[0] if isinstance(out, tuple) else out
        change(y)
        return then(m, y)

    end = {"l": nn.Linear(D, 3)} if then is THEN["a layer"] else {}
    return Model(forward, i=nn.Linear(D, D), r=module, **end).double()


@a_few_modes
@every_end
@every_change
@pytest.mark.parametrize("make", STOCK.values(), ids=STOCK)
def test_outputs_of_torch_s_modules(make, change, then, options):
    check(around(make(), change, then), square, torch.randn(N, T, D), **options)


@a_few_modes
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
            refusal = read_or_refused(probe, want)
            assert refusal is None or missed <= set(refusal.parameters)
            model.zero_grad()


def pieces(model, x):
    """The loss of a sequence in three pieces, the state being detached in place between them."""
    state, total = None, 0.0
    for piece in x.chunk(3, 1):
        y, state = model(piece, state)
        total = total + y.flatten(1).square().sum(1).mean()
        for t in state if isinstance(state, tuple) else (state,):
            t.detach_()
    return total


@each_of(ANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_that_are_detached_in_place(kind, dtype, options):
    model = Model(lambda m, x, s: m.r(x, s), r=kind(D, D, batch_first=True)).to(dtype)
    twin = copy.deepcopy(model) if options.get("weight_grad", True) else None
    x, rtol = torch.randn(N, 3 * T, D, dtype=dtype), 1e-9 if dtype == torch.float64 else 1e-4
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with probe.same_samples():
                exact_step(probe, model, x, loss=pieces, rtol=rtol, twin=twin)


EMPTY = {
    "samples": (Model(lambda m, x: m.l(x, x), l=nn.Bilinear(3, 3, 2)), (0, 3), 0),
    "outputs": (nn.Linear(3, 0), (N, 2, 3), 0),
    "zeros": (Model(lambda m, x: (x * m.w).to_sparse(), w=torch.ones(3)), (N, 2, 3), 0),
    "in": (Model(lambda m, x: m.l(x.flatten(0, 1)).view(5, N, 2), l=nn.Linear(0, 2)), (5, N, 0), 1),
}


@pytest.mark.parametrize("name", EMPTY)
def test_where_there_is_nothing_no_backward_fails(name):
    model, shape, dim = EMPTY[name]
    with torchgradx.attach(model, batch_dim=dim) as probe:
        model(torch.randn(shape)).to_dense().square().sum().backward()
        assert probe.norms().shape == shape[dim : dim + 1]
