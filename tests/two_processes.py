"""Scenarios in two gloo processes on the CPU: each rank has samples of its own, and holds its norms
against the loop over them. Run by test_two_processes.py, once for all."""

import contextlib
import datetime
import os
import traceback
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attach_models import Model, square
from attach_oracle import close_named, loop
from attach_steps import refusal
from clip_oracle import bounded, gradients, norms_of, same, weighted
from counters import Counter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T = 4, 6
MODES = {
    "fused": {}, "beside": {"fused": False}, "norms": {"weight_grad": False},
    "vmap": {"backend": "vmap"},
}  # fmt: skip


def block():
    return Model(lambda m, x: x + m.down(torch.tanh(m.up(m.norm(x)))), norm=nn.LayerNorm(4),
                 up=nn.Linear(4, 8), down=nn.Linear(8, 4))  # fmt: skip


def net(reentrant=None, extra=False):
    """Blocks, checkpointed or not; `extra`: a GRU (two outputs) and a parameter of the root's."""

    def forward(m, x):
        x = torch.tanh(m.into(x))
        for block in m.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return m.out(m.gru(x)[0] * m.scale if extra else x)

    torch.manual_seed(0)
    gru, scale = nn.GRU(4, 4, batch_first=True), torch.linspace(0.5, 1.5, 4)
    return Model(forward, into=nn.Linear(3, 4), out=nn.Linear(4, 2),
                 blocks=nn.ModuleList([block(), block()]),
                 **({"gru": gru, "scale": scale} if extra else {})).double()  # fmt: skip


def samples(step, n=N, t=T, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(n, t, 3, generator=generator, dtype=torch.float64)


# ---- Ways of distributing ------------------------------------------------------------------------
def ddp(**options):
    return lambda model: DistributedDataParallel(model, **options)


def sharded(**options):
    def wrap(model):
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    return wrap


def split(model):
    plan = {}
    for k in range(len(model.blocks)):
        plan |= {f"blocks.{k}.up": ColwiseParallel(), f"blocks.{k}.down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def sent_by(func, args):
    return str(func) if func.namespace in ("c10d", "_c10d_functional") else None


# ---- What is asserted ----------------------------------------------------------------------------
def attached(model, wrap, where, options):
    """The wrapped model, its probe, and what stands before the names of parameters."""
    if where == "before":
        probe = torchgradx.attach(model, **options)
        return wrap(model), probe, ""
    wrapped = wrap(model)
    inside = where == "inside" or wrapped is model
    probe = torchgradx.attach(model if inside else wrapped, **options)
    return wrapped, probe, "" if inside else "module."


def same_gradients(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            got, want = (getattr(g, "_local_tensor", g) for g in (p.grad, q.grad))
            assert torch.allclose(got, want, rtol=1e-9, atol=0), f"{name}.grad"


def steps(make, wrap, where, options, shapes=((N, T),) * 2, counted=False, refused=()):
    """Norms are those of the loop over this rank's samples, gradients those of an unattached twin;
    `refused`: the parameters whose norms, and no others', are refused."""
    single, model, twin = make(), make(), make()
    plain = wrap(twin)
    wrapped, probe, prefix = attached(model, wrap, where, options)
    for m in (plain, wrapped) if getattr(plain, "static_graph", False) else ():
        with probe.paused():  # the first backward shows it the graph
            square(m, samples(7)).backward()
        m.zero_grad()
    with probe:
        for step, shape in enumerate(shapes):
            x = samples(step, *shape)
            want = {prefix + name: value for name, value in loop(single, square, x).items()}
            expected, sent = Counter(sent_by), Counter(sent_by)
            makes_none, held = not options.get("weight_grad", True), 7.0 + dist.get_rank()
            for p in model.parameters() if makes_none and step else ():
                p.grad = torch.full_like(p, held)
            with expected if counted else contextlib.nullcontext():
                square(plain, x).backward()
            with sent if counted else contextlib.nullcontext():
                square(wrapped, x).backward()
                if refused:
                    error = refusal(probe)
                    assert set(error.parameters) == set(refused), str(error)
                    probe.reset()
                else:
                    close_named(probe.norms(per="parameter"), want)
            if counted:
                assert expected.counts
                # Less is sent where no weight gradient is made, and so none reduced.
                assert not sent.counts - expected.counts, "the probe communicates"
            if not makes_none:
                same_gradients(model, twin)
            elif not refused:
                grads = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
                assert all(bool((g == held).all()) if step else g is None for g in grads)
            model.zero_grad()
            twin.zero_grad()
    for step in () if refused else (4, 5, 6):  # afterwards all is reduced as ever
        square(wrapped, samples(step)).backward()
        square(plain, samples(step)).backward()
        same_gradients(model, twin)


def half_precision(options):
    """Parameters gathered as bfloat16: eight bits, over a dozen roundings of a sample's way."""
    single, model = net().float(), net().float()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    sharded(mp_policy=policy)(model)
    x = samples(0).float()
    with torchgradx.attach(model, **options) as probe:
        model(x).float().square().flatten(1).sum(1).mean().backward()
        got = probe.norms(per="parameter")
    close_named(got, loop(single, square, x), 24 * 2**-8)


def skips():
    """Uses a layer where there are three samples or more: on rank 0."""
    torch.manual_seed(0)
    return Model(lambda m, x: m.a(x) if len(x) < 3 else m.b(m.a(x)),
                 a=nn.Linear(3, 3), b=nn.Linear(3, 3)).double()  # fmt: skip


def clipping(make, wrap, where, options, bound=0.5):
    """`.grad` is the mean over the ranks of what each clips of its own, with one reduction more."""
    model = make()
    wrapped, probe, _ = attached(model, wrap, where, {"clip": True, "loss_scale": 0.5, **options})
    rank, sizes, inf = dist.get_rank(), [(3, 1), (N, 2)], float("inf")  # sizes: by pass and rank
    with probe:
        for limits in ((bound, bound), (inf, inf), (inf, bound)):  # by rank
            model.zero_grad()
            with wrapped.no_sync():
                (square(wrapped, samples(0, sizes[0][rank])) / 2).backward()
            (square(wrapped, samples(1, sizes[1][rank])) / 2).backward()
            before = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
            each = torch.full((sum(by_rank[rank] for by_rank in sizes),), limits[rank])
            with Counter(sent_by) as sent:
                probe.clip_grad_norm_(each if limits == (inf, bound) else limits[0])
            if limits == (inf, inf) and options.get("weight_grad", True):
                for p, g in zip(model.parameters(), before, strict=True):
                    assert torch.equal(p.grad, g)
                continue
            assert sent.counts.total() == 1, sent.counts
            want = {name: 0 for name, _ in model.named_parameters()}
            for step, by_rank in enumerate(sizes):
                for r, n in enumerate(by_rank):
                    whole = lambda m, x, n=n: square(m, x.expand(n, -1, -1))  # noqa: E731
                    rows = gradients(make(), whole, samples(step, n, rank=r))
                    factors = bounded(norms_of(rows, "model"), limits[r])
                    for name, g in weighted(rows, factors, "model").items():
                        want[name] = want[name] + g / n / 2 / 2
            same(model, want, 1e-9, {name: g.norm() + 1 for name, g in want.items()})


def a_part():
    """DDP reduces as ever what a probe for norms only does not cover."""
    model, twin = net(), net()
    wrapped, plain = map(DistributedDataParallel, (model, twin))
    with torchgradx.attach(model.blocks[0], weight_grad=False):
        for m in (wrapped, plain):
            square(m, samples(0)).backward()
    same_gradients(model.out, twin.out)


def sharded_gradients_are_not_clipped():
    model = net()
    sharded()(model)
    for weight_grad in (True, False):
        with torchgradx.attach(model, clip=True, weight_grad=weight_grad) as probe:
            square(model, samples(0)).backward()
            refusal = pytest.raises(torchgradx.CoverageError, match="DistributedDataParallel")
            with refusal as refused:
                probe.clip_grad_norm_(1.0)
            assert "into.weight" in refused.value.parameters


def flat_parameters():
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    with pytest.raises(torchgradx.CoverageError, match="fully_shard") as refusal:
        torchgradx.attach(model)
    assert refusal.value.parameters


def a_sharded_layer_is_left_as_it_was():
    """fully_shard makes a class of the layer's own, whichever it finds there."""
    model, twin = net(), net()
    with torchgradx.attach(model):
        for m in (model, twin):
            fully_shard(m.into)
            sharded()(m)
        square(model, samples(0)).backward()
    ours, plain = ([k.__name__ for k in type(m.into).__mro__] for m in (model, twin))
    assert ours == plain
    square(model, samples(0)).backward()


def scenarios(rank, folder):
    table = {}

    def add(name, wrap, where=("before",), modes=tuple(MODES), make=net, **how):
        for place in where:
            for mode in modes:
                run = partial(steps, make, wrap, place, MODES[mode], **how)
                table[f"{name}, {place}, {mode}"] = run

    inside_or_out = ("before", "inside", "outside")
    few = ("fused", "vmap")
    add("DDP", ddp(), inside_or_out, counted=True)
    add("DDP of a static graph", ddp(static_graph=True), ("before", "outside"), ("fused", "norms"))
    add("DDP that looks for the unused", ddp(find_unused_parameters=True), ("before", "outside"),
        ("fused",))  # fmt: skip
    add("DDP, checkpointed", ddp(), ("before", "outside"), ("fused", "beside"),
        partial(net, reentrant=False))  # fmt: skip
    add("DDP, checkpointed reentrantly", ddp(static_graph=True), ("inside", "outside"),
        ("fused", "beside"), partial(net, reentrant=True))  # fmt: skip
    add("DDP, recurrent", ddp(), ("before", "outside"), ("fused",), partial(net, extra=True))
    add("FSDP", sharded(), ("before", "inside"), counted=True)
    add("FSDP, recurrent", sharded(), ("before", "inside"), few, partial(net, extra=True),
        shapes=((5, T),) * 2)  # fmt: skip
    # What the root multiplies is as wide as there are samples, and it cannot be run again.
    add("FSDP, recurrent, as many features", sharded(), ("before", "inside"), few,
        partial(net, extra=True), refused=["scale"])  # fmt: skip
    unequal = [[(4, 5), (1, 5)], [(3, 5), (4, 5)], [(5, 5), (4, 3)]]
    shapes = [by_rank[rank] for by_rank in unequal]
    add("DDP, unequal batches", ddp(), ("inside", "outside"), few, shapes=shapes)
    # Where sizes leave a doubt (5 samples of 5 positions) a proof would have to gather.
    shapes, root = shapes[:2], lambda model: fully_shard(model, reshard_after_forward=True) or model
    for name, wrap in (("FSDP", sharded()), ("FSDP of the root", root)):
        add(f"{name}, unequal batches", wrap, ("before", "inside"), few, shapes=shapes,
            counted=True)  # fmt: skip
    names = [name for name, _ in net().named_parameters()]
    add("tensor parallel", split, ("before", "inside"), refused=names)
    for mode, options in MODES.items():
        table[f"FSDP in half precision, {mode}"] = partial(half_precision, options)
    views = ddp(gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    unused = ddp(find_unused_parameters=True)
    for mode in MODES:
        for where in inside_or_out:
            table[f"clipping, {where}, {mode}"] = partial(clipping, net, ddp(), where, MODES[mode])
        for name, *how in (("bucket views", net, views), ("a layer of one rank", skips, unused)):
            table[f"clipping, {name}, {mode}"] = partial(clipping, *how, "outside", MODES[mode])
    table["DDP, a part"] = a_part
    table["clipping, sharded"] = sharded_gradients_are_not_clipped
    table["flat parameters"] = flat_parameters
    table["a sharded layer"] = a_sharded_layer_is_left_as_it_was
    return table


def _work(rank, table, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=20)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    outcomes = {}
    for name, run in table(rank, folder).items():
        try:
            run()
            outcomes[name] = ""
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
        torch.save(outcomes, f"{folder}/{rank}")
        dist.barrier()
    os._exit(0)  # gloo's threads do not always survive an orderly exit


def outcomes_of(table, folder):
    """Of table(rank, folder) -> {scenario: call}, made anew in each process: for each rank
    {scenario: what went wrong, "" where nothing did}; and how the two ended."""
    ended = ""
    try:
        mp.spawn(_work, (table, str(folder)), nprocs=2)
    except Exception as error:  # a rank that died, or that waited in vain for the other
        ended = str(error)
    return [torch.load(f"{folder}/{rank}") for rank in range(2)], ended
