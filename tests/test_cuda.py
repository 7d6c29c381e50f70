"""What only a GPU has: streams, graphs, an allocator, TF32, a second device; and attached models.

The operators themselves are tested by test_ops.py and test_properties.py, "cuda" being one of
their backends. Where there is no GPU all of this is skipped.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, mlp, square
from attach_oracle import check
from backends import BACKENDS, to
from oracle import Conv2d, Linear
from test_memory import BOUND, CASES, MIB, WIDE
from test_properties import PROBLEMS, each_way, operands
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchgradx
from torchgradx.graph.segments import segments_from

CUDA = BACKENDS["cuda"]
pytestmark = pytest.mark.skipif(bool(CUDA.missing), reason=CUDA.missing)


@pytest.fixture(autouse=True)
def matmul():
    """The framework that results are compared with: float32 in earnest, the same bits each time."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = True, False, False
    yield matmul
    cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before


def results(way, a, b):
    layer, algorithm = way
    problem = PROBLEMS.get(layer)
    if algorithm == "fused":
        return CUDA.fused(a, b, problem)
    return (CUDA.norms(algorithm, a, b, problem),)


def same(these, those):
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(these, those, strict=True))


@each_way
def test_launches_wait_for_what_their_stream_has_yet_to_do(way):
    a, b = to(CUDA, *operands(way))
    expected, late = results(way, a, b), torch.zeros_like(a)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # some 50 ms, in which another stream would read zeros
        late.copy_(a)
        actual = results(way, late, b)
    side.synchronize()
    assert same(actual, expected)


@pytest.mark.parametrize("lengths", [[1, 4000], [300, 17, 64, 900, 5] * 20], ids=str)
def test_samples_of_several_lengths_take_one_call(lengths):
    a = torch.randn(sum(lengths), 512, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(sum(lengths), 264, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    found = torch.ops.torchgradx.segments_fused(a, g, starts, max(lengths), True, True)
    if not found:
        pytest.skip("Hopper's kernel alone takes them")
    weight, _, norms = found
    pairs = zip(a.double().split(lengths), g.double().split(lengths), strict=True)
    each = torch.stack([y.T @ x for x, y in pairs])
    assert torch.allclose(norms[0].double(), each.square().sum((1, 2)), rtol=1e-4)
    assert torch.allclose(weight.double(), each.sum(0), 1e-2, 1e-2 * float(each.sum(0).abs().max()))


@each_way
def test_a_captured_call_replays_on_new_operands(way):
    a, b = to(CUDA, *operands(way))
    results(way, a, b)  # before capture, as torch.cuda.graph asks: libraries load
    held, graph = a.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(way, held, b)
    for new in (a, a.flip(0), 3 * a):
        held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, results(way, new, b))


@each_way
def test_nothing_waits_for_the_device(way):
    a, b = to(CUDA, *operands(way))
    owners = torch.tensor([1, 0, 1, 2], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(way, a, b)
        segments_from(owners, 3, [1, 2, 1])
        with pytest.raises(RuntimeError, match="synchroniz"):
            a.sum().item()  # so it would have been noticed
    finally:
        torch.cuda.set_sync_debug_mode("default")


LARGE = {  # many blocks, samples split over them
    "linear": (Linear(8, 1024, 768, 768), torch.bfloat16),
    "linear float32": (Linear(8, 256, 512, 512), torch.float32),
    "conv2d": (Conv2d(16, 64, 64, (28, 28), (3, 3), padding=(1, 1)), torch.bfloat16),
    "depthwise": (Conv2d(16, 96, 96, (28, 28), (3, 3), padding=(1, 1), groups=96), torch.bfloat16),
}


@pytest.mark.parametrize("name", LARGE)
def test_many_blocks_give_the_same_bits_each_time(name):
    problem, dtype = LARGE[name]
    a, b = to(CUDA, *problem.operands(dtype, "gaussians"))

    def run():
        each = (CUDA.norms(x, a, b, problem) for x in ("gram", "direct"))
        return (*CUDA.fused(a, b, problem), *each)

    first = run()
    assert all(same(run(), first) for _ in range(5))


# Runs of batched products: of samples, of the weight's rows, of Grams
RUNS = Linear(12, 130, 1024, 1024), Linear(2, 130, 4096, 2304), Linear(60, 300, 40, 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem", RUNS, ids=str)
def test_many_runs_have_the_norms_of_one(problem, dtype):
    a, b = to(CUDA, *problem.operands(dtype, "integers"))
    scale = torch.linspace(0.5, 2, problem.n, device="cuda")
    each = (b[n].double().T @ a[n].double() for n in range(problem.n))
    parts = [(g.square().sum(), scale[n].double() * g) for n, g in enumerate(each)]
    sq = torch.stack([s for s, _ in parts])
    weight, _, fused = CUDA.fused(a, b, problem, scale)
    for sq_norms in (fused, CUDA.norms("direct", a, b), CUDA.norms("gram", a, b)):
        torch.testing.assert_close(sq_norms[0].double(), sq, rtol=2.0**-23, atol=0)
    total = sum(g for _, g in parts)
    assert isinstance(total, Tensor)
    adding = problem.n * 2.0**-24 * 2 * problem.n * problem.t  # n roundings of what |terms| make
    torch.testing.assert_close(weight.double(), total, rtol=torch.finfo(dtype).eps, atol=adding)


def _extra_bytes(function):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", CASES)
def test_workspaces_are_bounded(name):
    algorithm, problem = CASES[name]
    a, b = to(CUDA, *problem.operands(torch.float32, "integers"))
    torch.bmm(a.flatten(1)[:, None, :8], a.flatten(1)[:, :8, None])  # cuBLAS' own, taken once
    extra = _extra_bytes(lambda: CUDA.norms(algorithm, a, b, problem))
    assert 0 < extra <= BOUND, f"{extra / MIB:.0f} MiB"


def test_the_measure_of_workspaces_sees_materialised_gradients():
    a, b = to(CUDA, *WIDE.operands(torch.float32, "integers"))
    assert _extra_bytes(lambda: (b.mT @ a).square().sum((1, 2))) >= 128 * MIB


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
@each_way
def test_a_call_runs_where_its_operands_are(way):
    a, b = operands(way)
    elsewhere = results(way, a.to("cuda:1"), b.to("cuda:1"))
    assert {x.device for x in elsewhere} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    assert same(elsewhere, results(way, *to(CUDA, a, b)))


@pytest.mark.parametrize("allowed", [False, True])
def test_float32_is_rounded_to_tf32_where_torch_allows_it_and_only_there(allowed, matmul):
    matmul.allow_tf32 = allowed
    a = torch.full((2, 64, 128), 1 + 2.0**-12, device="cuda")  # TF32 keeps ten bits
    ones = torch.ones(2, 64, 128, device="cuda")
    assert bool((CUDA.fused(a, ones)[0] == (128.0 if allowed else 128 * (1 + 2.0**-12))).all())


def test_copies_on_the_device_keep_strides_and_offsets():
    view = torch.arange(60.0).view(3, 4, 5)[1:, ::2, 1:4]
    (copy,) = to(CUDA, view)
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())
    assert torch.equal(copy.cpu(), view)


def test_a_step_on_a_side_stream_has_the_same_norms():
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        check(mlp(64), square, torch.randn(8, 33, 3), device="cuda")


def strided_copies(step):
    """Kernels of the framework that copy from one order into another."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum("nocast<at::native::direct_copy" in event.name for event in seen.events())


def test_convolutions_and_norms_in_channels_last_turn_no_operand_twice():
    """Plain: before each GroupNorm and each convolution, and both operands of its backward."""

    def block(channels, out, kernel):
        convolution = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
        return [convolution, nn.GroupNorm(8, out), nn.ReLU()]

    model = nn.Sequential(*block(16, 32, 3), *block(32, 64, 1), *block(64, 32, 3))
    model = model.to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    x = torch.randn(8, 16, 24, 24, device="cuda").bfloat16()
    x = x.contiguous(memory_format=torch.channels_last)

    def step():
        model.zero_grad()
        model(x).float().square().mean().backward()

    plain = strided_copies(step)
    with torchgradx.attach(model) as probe:
        attached = strided_copies(step)
        assert probe.norms().shape == (16,)  # of both steps
    assert plain >= 8
    assert attached <= plain // 4


def loss_of(output, y):
    return F.cross_entropy(output, y.to(output.device))


def jobs_on(device, last=None, pinned=False):
    """Numbers of all jobs: scores of a pool, and what a step of training tells. Without a proof the
    first layer's output [8, 8] would be refused."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5)).to(device)
    b = nn.Linear(8, 4).to(last or device)
    model = Model(lambda m, x: m.b(m.a(x).to(m.b.weight.device)), a=first, b=b)
    x, y = torch.randn(20, 3), torch.randint(0, 4, (20,))
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, pin_memory=pinned)
    state = torch.get_rng_state()
    found = [
        torchgradx.score(model, loss_of, loader, kind=kind, progress=False)
        for kind in ("norm", "el2n", "egl")
    ]
    assert torch.equal(torch.get_rng_state(), state)
    x, y = x.to(device), y.to(device)
    torchgradx.verify(model.eval(), loss_of, x, y)
    sampler = torchgradx.ImportanceSampler(20)
    noise, watch = torchgradx.NoiseScale(), torchgradx.OutlierWatch(warmup=10, factor=0.5)
    with torchgradx.attach(model.eval()) as probe:
        loss_of(model(x), y).backward()
        norms = probe.norms()
        noise.update(probe)
    sampler.update(torch.arange(20, device=device), norms)
    next(iter(sampler))
    weights = sampler.weights(torch.arange(20, device=device))
    assert weights.device == x.device
    watch.update(norms)
    return [*found, noise.trace, noise.sq_grad_norm, weights.cpu().numpy(), watch.threshold]


@pytest.mark.parametrize(("last", "pinned"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_jobs_find_on_a_gpu_what_they_find_on_the_cpu(last, pinned):
    for got, want in zip(jobs_on("cuda", last, pinned), jobs_on("cpu"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_rows_are_found_on_each_device():
    """By indices on the CPU; by ids, of a model on two devices."""
    b, x = nn.Linear(6, 4), torch.randn(4, 5, 3, device="cuda")
    model = Model(lambda m, x, at: m.b(m.a(x).tanh().flatten(0, 1)[at].cpu()),
                  a=nn.Linear(3, 6).cuda(), b=b)  # fmt: skip
    ids = torch.arange(20) // 5
    some = torch.tensor([0, 1, 5, 11, 12, 13, 19])
    for at, named in ((some, {}), (torch.arange(20), {"sample_ids": lambda *_: ids})):
        each = []
        for n in range(4):
            model.zero_grad(), model(x, at[ids[at] == n]).square().sum().backward()
            each.append(torch.stack([p.grad.norm().cpu() for p in model.parameters()]).norm())
        with torchgradx.attach(model, loss_reduction="sum", **named) as probe:
            model(x, at).square().sum().backward()
            torch.testing.assert_close(probe.norms().cpu(), torch.stack(each))
