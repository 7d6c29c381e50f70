"""torch.compile: exact through graph breaks or in a whole graph, whichever came first, or refused.
`eager` and `aot_eager` trace as the others do, and need no compiler."""

import copy
import gc

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch.nn.functional as F
from attach_models import Model, mlp, penalised, square, under_autocast
from attach_oracle import close_named, joined, loop, same_gradients
from attach_steps import refusal
from torch import nn

import torchgradx

extension = pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="needs the extension")
N = 4
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(36, 2),
    )  # fmt: skip


def tokens():
    def forward(m, ids):
        x = m.norm(m.table(ids))
        return m.head(F.gelu(m.up(x)) + m.up(x)).mean(1)

    return Model(forward, table=nn.Embedding(7, 4), norm=nn.LayerNorm(4), up=nn.Linear(4, 6),
                 head=nn.Linear(6, 3))  # fmt: skip


def tied():
    model = tokens()
    model.head = nn.Linear(6, 7)
    model.out, model.back = nn.Linear(4, 7, bias=False), nn.Linear(7, 4)
    model.out.weight = model.table.weight
    model.function = lambda m, ids: m.out(m.norm(m.table(ids)) + m.back(m.head(m.up(m.table(ids)))))
    return model


def rows(n):
    return torch.randn(n, 5, 3).double()


def images(n):
    return torch.randn(n, 3, 9, 9).double()


def ids(n, t=5):
    return torch.randint(0, 7, (n, t))


MODELS = {
    "Linear": (mlp, rows),
    "Conv2d, GroupNorm": (cnn, images),
    "Embedding, LayerNorm, a Linear twice": (tokens, ids),
    "a head tied to the table": (tied, ids),
}
every_model = pytest.mark.parametrize(("make", "draw"), MODELS.values(), ids=MODELS)
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def attached(model, backend="aot_eager", **options):
    if not torchgradx.ops.NATIVE:
        pytest.skip("a graph is whole with the extension only")
    probe = torchgradx.attach(model, **options)
    return probe, torch.compile(model, backend=backend, fullgraph=True)


def held_against_a_loop(model, probe, compiled, *batch, loss=square):
    twin, want = copy.deepcopy(model), loop(model, loss, *batch)
    loss(compiled, *batch).backward()
    loss(twin, *batch).backward()
    got = probe.norms(per="parameter")  # of a compiled module names begin with what holds it
    close_named({name.removeprefix("_orig_mod."): norms for name, norms in got.items()}, want)
    same_gradients(model, twin, 1e-9)
    model.zero_grad()


CASES = [(name, "attach, compile") for name in MODELS]
CASES += [("Linear", "compile, attach"), ("Linear", "attach to the compiled")]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_a_compiled_model_is_exact_at_every_batch_size(name, order):
    if name != "Linear" and not torchgradx.ops.NATIVE:
        pytest.skip("refused without the extension, as its layers cannot be run again in a trace")
    make, draw = MODELS[name]
    model = make().double()
    if order == "attach, compile":
        probe = torchgradx.attach(model)
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
        probe = torchgradx.attach(model if order == "compile, attach" else compiled)
    for n in (N, 6, N):
        held_against_a_loop(model, probe, compiled, draw(n))
    probe.remove()
    twin, x = copy.deepcopy(model), draw(N)
    square(compiled, x).backward()
    square(twin, x).backward()
    same_gradients(model, twin, 1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_a_part_that_is_compiled_is_exact_at_every_batch_size(fused):
    part = torch.compile(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), backend="eager")
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), part).double()
    with torchgradx.attach(model, fused=fused) as probe:
        for n in (1, N, 6):  # from the second on, the compiler traces with symbols for sizes
            held_against_a_loop(model, probe, model, torch.randn(n, 3, dtype=torch.float64))


BETWEEN = {
    "aot_eager": lambda m, x: m.l(m.scale * m.l(x) + m.p(torch.arange(x.shape[1]))),
    "inductor": lambda m, x: m.l(torch.sin(m.scale * x) + m.p(torch.arange(x.shape[1]))),
    "mixing, aot_eager": lambda m, x: m.l(torch.tanh(m.l(x)) - m.l(x).mean(0)),
}


@extension
@pytest.mark.parametrize("kind", BETWEEN)
def test_what_is_compiled_between_layers_is_exact_or_refused(kind):
    own = {"l": nn.Linear(3, 3), "p": nn.Embedding(9, 3), "scale": torch.randn(3)}
    model = Model(BETWEEN[kind], **own).double()
    dynamic = True if kind == "inductor" else None  # it takes ten seconds for each graph
    compiled = torch.compile(model, backend=kind.split()[-1], dynamic=dynamic)
    probe = torchgradx.attach(model)
    for n in (N, N, 6, 7):
        if "mixing" not in kind:
            held_against_a_loop(model, probe, compiled, rows(n))
        else:
            square(compiled, rows(n)).backward()
            refusal(probe, "mix")


@pytest.mark.grid
@every_model
@backends
@pytest.mark.parametrize("fused", [True, False])
def test_a_whole_graph_is_exact_at_every_batch_size(make, draw, backend, fused):
    model = make().double()
    probe, compiled = attached(model, backend, fused=fused)
    for n in (N, 6, 7, 5, 1, N):  # 5 is as many as there are positions
        held_against_a_loop(model, probe, compiled, draw(n))


@extension
def test_one_graph_serves_every_size():
    model = tokens().double()
    probe = torchgradx.attach(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for n in (N, 6, 8):
        held_against_a_loop(model, probe, compiled, ids(n, n + 1))
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


def test_code_that_changes_is_looked_at_again():
    """The hooks are compiled apart from the forward of a model of one's own."""

    def forward(m, x):
        return F.linear(m.l(x), m.l.weight) if m.also else m.l(x)

    model = Model(forward, l=nn.Linear(3, 3)).double()
    model.also = False
    probe, compiled = attached(model)
    held_against_a_loop(model, probe, compiled, rows(N))
    model.also = True
    square(compiled, rows(N)).backward()
    refusal(probe, r"l\.weight")


def test_accumulation_and_passes_of_the_same_samples():
    model = mlp().double()
    probe, compiled = attached(model)
    batches = [rows(N), rows(N), rows(3)]
    want = [loop(model, square, x) for x in batches]
    for x in batches:
        square(compiled, x).backward()
    close_named(probe.norms(per="parameter"), joined(want))

    def siamese(model, a, b):
        return (model(a) - model(b)).square().flatten(1).sum(1).mean()

    want = loop(model, siamese, *batches[:2])
    with probe.same_samples():
        siamese(compiled, *batches[:2]).backward()
    close_named(probe.norms(per="parameter"), want)


@extension
def test_in_a_compiled_step():
    """The model is called by what is compiled, beside another."""
    model, other = tokens().double(), mlp(4).double()
    x, y = ids(N), torch.randn(N, 3).double()

    def step(model, x, y):
        return (model(x) + 0 * other(y).sum()).square().flatten(1).sum(1).mean()

    want = loop(model, step, x, y)
    with torchgradx.attach(model) as probe:
        torch.compile(step, backend="aot_eager", fullgraph=True)(model, x, y).backward()
        close_named(probe.norms(per="parameter"), want)


@extension
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.grid
@pytest.mark.parametrize("make", [tokens, cnn])
@backends
def test_autocast_is_that_of_the_eager_model(make, backend, dtype):
    model, x = make(), ids(N) if make is tokens else images(N).float()
    loss = under_autocast(dtype)
    with torchgradx.attach(model) as probe:
        loss(model, x).backward()
        want = probe.norms(per="parameter")
    model.zero_grad()
    probe, compiled = attached(model, backend)
    loss(compiled, x).backward()
    got = probe.norms(per="parameter")
    for name in want:
        rtol = 64 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[name], want[name], rtol=rtol, atol=0.0)


NEVER = {
    "a functional use": (
        lambda: Model(lambda m, x: F.linear(m.l(x), m.l.weight), l=nn.Linear(3, 3)), square),
    "samples that mix": (
        lambda: Model(lambda m, x: m.l(x) + m.l(x).flip(0), l=nn.Linear(3, 3)), square),
    "a table of positions": (
        lambda: Model(lambda m, x: m.l(x + m.p(torch.arange(x.shape[1]))), l=nn.Linear(3, 3),
                      p=nn.Embedding(5, 3)), square),
    "a penalty on the weights": (mlp, penalised),
}  # fmt: skip


@pytest.mark.parametrize(("make", "loss"), NEVER.values(), ids=NEVER)
@backends
def test_what_is_not_exact_is_refused(make, loss, backend):
    model = make().double()
    twin = copy.deepcopy(model)
    probe, compiled = attached(model, backend)
    for n in (N, 6):
        x = rows(n)
        loss(compiled, x).backward()
        loss(twin, x).backward()
        refusal(probe)
        same_gradients(model, twin, 1e-9)


OUTSIDE = {
    "a module without a graph's operator": (lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU()), {}),
    "norms only": (mlp, {"weight_grad": False}),
    "no kernels": (mlp, {"backend": "vmap"}),
}


@extension
@pytest.mark.parametrize(("make", "options"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_no_graph_can_hold_says_what_to_do(make, options):
    model = make().double()
    with torchgradx.attach(model, **options):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torchgradx.*without fullgraph"):
            compiled(rows(N))
    assert square(model, rows(N)).isfinite()


def test_a_thousand_steps_leave_nothing_behind():
    model = mlp()
    probe, compiled = attached(model)
    x = rows(N).float()

    def step():
        square(compiled, x).backward()
        model.zero_grad()
        return probe.norms()

    step()
    gc.collect()  # what other tests left in cycles
    alive = torchgradx._C.links()
    for _ in range(1000):
        step()
        compiled(x)  # meets no backward
    assert torchgradx._C.links() <= alive


def warming_up(m, x, weight):
    return square(m, x) + weight * m[0].weight.square().sum()


@extension
def test_a_penalty_that_comes_later_is_refused():
    """The first pass of a structure shows nothing of it, and one graph has no edges of its own."""
    model, x = mlp().double(), rows(N)
    with torchgradx.attach(model) as probe:
        step = torch.compile(warming_up, backend="aot_eager", fullgraph=True)
        for weight in (0.0, 0.0, 5.0):
            step(model, x, torch.tensor(weight)).backward()
            if weight:
                refusal(probe, r"0\.weight")
            else:
                close_named(probe.norms(per="parameter"), loop(model, square, x))


@extension
def test_the_root_of_a_backward_is_seen():
    """A compiled loss with a penalty that begins at nothing, on a model that is not compiled."""
    model, x = mlp().double(), rows(N)

    def loss(out, w, weight):
        return out.square().flatten(1).sum(1).mean() + weight * w.square().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    with torchgradx.attach(model) as probe:
        for weight in (0.0, 0.0, 5.0):
            compiled(model(x), model[0].weight, torch.tensor(weight)).backward()
            refusal(probe, r"0\.weight")


def remembering(m, x, k):
    m.calls += 1
    h = m.l(x)
    k.add_(1)
    m.seen = m.seen * 0.5 + h.detach().mean()
    return h * k


@extension
def test_the_look_from_outside_leaves_attributes_and_arguments():
    model = Model(remembering, l=nn.Linear(3, 2)).double()
    model.calls, model.seen = 0, torch.zeros((), dtype=torch.float64)
    twin, x = copy.deepcopy(model), rows(N)
    found = []
    for m in (model, twin):
        torch._dynamo.reset()
        m.k = torch.zeros(N, 1, 1, dtype=torch.float64)
        if m is model:
            probe = torchgradx.attach(m)
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            out = compiled(x, m.k)
            out.square().sum().backward()
        found += [(out.detach(), m.k, m.calls, m.seen)]
    assert probe.norms().shape == (2 * N,)
    torch.testing.assert_close(*found)
    same_gradients(model, twin, 1e-9)


def test_compiled_autograd_is_refused():
    model, x = mlp().double(), rows(N)
    twin = copy.deepcopy(model)
    probe, compiled = attached(model)
    loss = square(compiled, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    square(twin, x).backward()
    same_gradients(model, twin, 1e-9)
    refusal(probe)


# The operators that a whole graph records with, by themselves
# A token is another each time, which AOTAutograd's own check would hold against the operator.
STATIC = ("test_schema", "test_autograd_registration", "test_faketensor")


@extension
def test_the_operators_keep_what_they_tell_the_compiler():
    model = mlp()
    with torchgradx.attach(model) as probe:
        use = f"{probe._trace._site_keys[0]}/1"
        x = torch.randn(N, 3, requires_grad=True)
        args = (x, model[0].weight, model[0].bias, torchgradx._C.token(None), use)
        torch.library.opcheck(torch.ops.torchgradx.trace_layer.default, args, test_utils=STATIC)
        given = [t.detach() for t in args[:4]]  # never beneath autograd
        back = (torch.randn(N, 5), *given, use, [True, False, True])
        torch.library.opcheck(torch.ops.torchgradx.trace_backward.default, back)
