"""Half precision, mixed dtypes, GradScaler; steps of inf and nan are shown, and prove nothing."""

import copy
from functools import partial

import pytest
import torch
from attach_models import DEVICE, Model, mlp, square, under_autocast
from attach_modes import a_few_modes
from attach_oracle import check, loop, loop_model
from attach_steps import exact_step, exact_steps, refusal
from recurrent_models import computes_halves
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops
from torchgradx.plan.cost import Problem, make_plan

N = 4
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def inside_and_outside(m, x):
    hidden = torch.tanh(m.l(x))
    with torch.autocast(x.device.type, enabled=False):
        hidden = m.l(hidden.float())
    return m.out(hidden)


def checkpointed(reentrant):
    return lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.l(x)), use_reentrant=reentrant))


def shared(function, **more):
    return lambda: Model(function, l=nn.Linear(8, 8), out=nn.Linear(8, 2), **more)


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


MODELS = {
    "a layer used twice": (
        shared(lambda m, x: m.out(torch.tanh(m.l(torch.tanh(m.l(x)))))), (N, 8)),
    "under autocast and beside it": (shared(inside_and_outside), (N, 5, 8)),
    "recurrent": (shared(lambda m, x: m.out(m.g(m.l(x))[0]),
                         g=nn.GRU(8, 8, batch_first=True)), (N, 5, 8)),
    "attention": (shared(lambda m, x: m.out(m.a(x, x, x, need_weights=False)[0]),
                         a=nn.MultiheadAttention(8, 2, batch_first=True)), (N, 5, 8)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(),
                                     nn.Flatten(), nn.Linear(64, 2)), (N, 3, 6, 6)),
    "checkpointed": (shared(checkpointed(False), block=block()), (N, 8)),
    "checkpointed reentrantly": (shared(checkpointed(True), block=block()), (N, 8)),
}  # fmt: skip
WIDENED = ("layer_norm", "native_layer_norm", "group_norm", "_softmax", "tanh")


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def normalisations(request):
    """A GPU's autocast computes some operators in float32, which the CPU's leaves as they are."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")

    def wide(t):
        return t.float() if t.is_floating_point() else t

    def widened(stock, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return stock(*tree_map_only(torch.Tensor, wide, args), **kwargs)

    for name in WIDENED if request.param == "as on a GPU" else ():
        library.impl(name, partial(widened, getattr(torch.ops.aten, name).default))
    yield
    library._destroy()


@pytest.mark.grid("name", "normalisations")
@a_few_modes
@halves
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_exact_within_its_rounding(name, dtype, options, normalisations):
    make, shape = MODELS[name]
    net, x, under = make(), torch.randn(shape), under_autocast(dtype)
    want = loop(net, under, x, dtype=torch.float32)
    # two dozen roundings to half on a sample's way, which differ between one sample and a batch
    rtol = 24 * torch.finfo(dtype).eps
    check(net, under, x, dtype=torch.float32, want=want, rtol=rtol, **options)


@a_few_modes
def test_parameters_of_several_dtypes_count_together_in_the_widest(options):
    def forward(m, x):
        return m.c(m.b(torch.tanh(m.a(x)).double()).bfloat16()).float()

    net = Model(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8).double(),
                c=nn.Linear(8, 2).bfloat16())  # fmt: skip
    x = torch.randn(N, 8)
    want, rtol = loop(net, square, x, dtype=None), 24 * torch.finfo(torch.bfloat16).eps
    with torchgradx.attach(net, **options) as probe:
        exact_step(probe, net, x, rtol=rtol, want=want)
        assert probe.norms().dtype == torch.float64


@a_few_modes
def test_a_step_that_overflows_is_shown_and_the_next_are_exact(options):
    net, x = mlp(), torch.randn(N, 3)
    want = loop_model(net, square, x)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, backoff_factor=2.0**-30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with torchgradx.attach(net, loss_scale=scaler, **options) as probe:
        for overflows in (True, False, False):
            scaler.scale(under_autocast(torch.float16)(net, x)).backward()
            norms = probe.norms()
            if overflows:
                assert not norms.isfinite().any(), norms
            else:
                assert torch.allclose(norms.double(), want, rtol=24 * 2**-10)
            if options.get("weight_grad", True):
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler.update(1024.0)
            optimizer.zero_grad()


POISONED = {
    "positions": (mlp, (N, 6, 3)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(),
                                     nn.Linear(64, 2)), (N, 3, 6, 6)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", POISONED)
def test_one_sample_of_nan_is_that_samples_alone_and_the_next_batch_is_exact(name, value, options):
    make, shape = POISONED[name]
    net, x = make().double(), torch.randn(shape).double()
    want, poisoned = loop_model(net, square, x), x.clone()
    poisoned[1].view(-1)[0] = value
    with torchgradx.attach(net, **options) as probe:
        for batch, healthy in ((poisoned, [0, 2, 3]), (poisoned, [0, 2, 3]), (x, [0, 1, 2, 3])):
            square(net, batch).backward()
            norms = probe.norms()
            assert norms.isfinite().nonzero().flatten().tolist() == healthy
            assert torch.allclose(norms[healthy], want[healthy], rtol=1e-9)


@a_few_modes
def test_a_first_pass_of_nan_approves_of_no_later_one(options):
    """A model that mixes samples, which nan hides."""

    def forward(m, x):
        hidden = m.l(x)
        return m.o(torch.tanh(hidden - hidden.mean(0)))

    net = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(net, **options) as probe:
        square(net, x * float("nan")).backward()
        assert not probe.norms().isfinite().any()
        square(net, x).backward()
        error = refusal(probe)
    assert "l.weight" in error.parameters


@pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="the extension is asked")
@pytest.mark.parametrize(("enabled", "itemsize"), [(False, 4), (True, 2)])
def test_an_algorithm_is_chosen_by_the_dtype_that_is_multiplied(enabled, itemsize):
    model = nn.Linear(64, 64)
    with torchgradx.attach(model) as probe:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = model(torch.randn(8, 32, 64))
        output.float().square().sum().backward()
        chosen = repr(make_plan(Problem("linear", 8, 32, 64, 64, 1, itemsize, True)))
        assert chosen.splitlines()[1].strip() in probe.explain(verbose=True)


@pytest.mark.skipif(not ops.NATIVE, reason="replayed without the extension")
@pytest.mark.skipif(not computes_halves(), reason="oneDNN needs AVX-512 for halves")
@pytest.mark.parametrize("more", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"weight_grad": False}], ids=str)
def test_an_lstm_under_autocast_goes_through_time(more, options):
    rnn = nn.LSTM(48, 80, batch_first=True, **more)
    model, x = Model(lambda m, x: m.r(x)[0], r=rnn), torch.randn(5, 20, 48)
    twin, under, rtol = copy.deepcopy(model), under_autocast(), 24 * torch.finfo(torch.bfloat16).eps
    want, stepped = loop(twin, under, x), twin if options.get("weight_grad", True) else None
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            exact_step(probe, model, x, loss=under, rtol=rtol, want=want, twin=stepped)
        assert "run again" not in probe.explain().partition("\n")[0]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), twin(x))


@a_few_modes
def test_a_parameter_that_is_rounded_on_its_way_is_compared_as_such(options):
    forward = lambda m, x: m.l(x) * m.p.bfloat16().to(x.dtype)  # noqa: E731
    model, x = Model(forward, l=nn.Linear(3, 5), p=torch.randn(5)), torch.randn(4, 6, 3)
    exact_steps(model, x, x[:3], rtol=1e-2, **options)
