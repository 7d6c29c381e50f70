"""Models with parameters beside sharded blocks, in two gloo processes: run by
test_two_processes.py, once for all."""

import functools

import torch
import torch.nn.functional as F
from attach_models import Model, square
from attach_steps import refusal
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from two_processes import MODES, N, attached, samples, steps

T, WIDTH = 6, 8


def block():
    """A layer scale of its own, beside layers that may be sharded apart from it."""
    layers = {"norm": nn.LayerNorm(WIDTH), "layer": nn.Linear(WIDTH, WIDTH)}
    return Model(lambda m, x: x + m.scale * torch.tanh(m.layer(m.norm(x))), **layers,
                 scale=torch.linspace(0.5, 1.5, WIDTH))  # fmt: skip


def vit(reentrant=None):
    """A class token, a table of positions and a layer scale in the root."""

    def forward(m, x):
        x = torch.cat([m.cls.expand(len(x), -1, -1), m.into(x)], 1) + m.positions
        for block in m.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return m.out(x * m.scale)

    return Model(forward, into=nn.Linear(3, WIDTH), out=nn.Linear(WIDTH, 2),
                 cls=torch.randn(1, 1, WIDTH), positions=torch.randn(1, T + 1, WIDTH),
                 blocks=nn.ModuleList([block(), block()]),
                 scale=torch.linspace(1.5, 0.5, WIDTH))  # fmt: skip


def chain(*blocks):
    def forward(m, x):
        x = torch.tanh(m.into(x))
        for block in m.blocks:
            x = block(x)
        return m.out(x)

    return Model(forward, into=nn.Linear(3, WIDTH), out=nn.Linear(WIDTH, 2),
                 blocks=nn.ModuleList(blocks))  # fmt: skip


def uncalled(checkpointed=False):
    """Computes with a layer's weight, and does not call the layer."""

    def forward(m, x):
        if checkpointed:
            return checkpoint(F.linear, x, m.layer.weight, use_reentrant=False)
        return F.linear(x, m.layer.weight)

    return Model(forward, layer=nn.Linear(WIDTH, WIDTH))


def counts():
    """Multiplies by how often it was called: running it again is something else."""

    def forward(m, x):
        m.calls += 1
        return x * m.scale * m.calls

    return Model(forward, scale=torch.linspace(0.5, 1.5, WIDTH), calls=0)


ROWS = {
    "sequence first": (lambda x: x.transpose(0, 1),) * 2,
    "flattened": (lambda x: x.flatten(0, 1), lambda y: y.unflatten(0, (-1, T))),
    "windows": (lambda x: x.unflatten(1, (2, T // 2)).flatten(0, 1),
        lambda y: y.unflatten(0, (-1, 2)).flatten(1, 2)),
    "flattened, sequence first": (lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y: y.unflatten(0, (T, -1)).transpose(0, 1)),
}  # fmt: skip


def reshaped(into, back):
    """A layer between reshapes of what it is given and what it gives."""
    rows = Model(lambda m, x: back(m.layer(into(x))), layer=nn.Linear(WIDTH, WIDTH))
    return chain(rows, scale())


def token():
    """Calls a block on what no sample entered."""
    return Model(lambda m, x: m.out(torch.tanh(m.into(x)) + m.blocks[0](m.token)),
                 token=torch.randn(1, 1, WIDTH), blocks=nn.ModuleList([block()]),
                 into=nn.Linear(3, WIDTH), out=nn.Linear(WIDTH, 2))  # fmt: skip


def scale():
    return Model(lambda m, x: x * m.scale, scale=torch.linspace(0.5, 1.5, WIDTH))


# ---- Ways of sharding ----------------------------------------------------------------------------
def by_block(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def by_layer(model, **options):
    for block in model.blocks:
        fully_shard(block.norm, **options)
        fully_shard(block.layer, **options)
    by_block(model, **options)


def in_place(shard):
    return lambda model: shard(model) or model


PLACE = {"before": "before", "after": "inside"}  # of the probe, as two_processes calls it


def made(make):
    torch.manual_seed(0)
    return make().double()


def exact(make, shard, order, options, n=N):
    """Sizes of the second step are others."""
    steps(lambda: made(make), in_place(shard), PLACE[order], options, ((n, T), (n + 1, T)))


def refused(make, shard, order, options, names, penalised=None, n=N):
    model, probe, _ = attached(made(make), in_place(shard), PLACE[order], options)
    with probe:
        for step in range(2):
            loss = square(model, samples(step, n, T))
            if penalised:
                penalty = model.get_parameter(penalised).square().sum()
                loss = loss + getattr(penalty, "full_tensor", lambda p=penalty: p)()
            loss.backward()
            error = refusal(probe)
            assert set(error.parameters) == set(names), str(error)
            probe.reset()


TOLD, BLOCK_TOLD = {"layout": {"*": "batch"}}, {"layout": {"blocks.0": "batch"}}
WAYS = {"by block": by_block, "by layer": by_layer,
        "by block, kept": functools.partial(by_block, reshard_after_forward=False),
        "by block, freed": functools.partial(by_block, reshard_after_forward=True)}  # fmt: skip
PLANS = {"plain": None, "checkpointed": False, "checkpointed reentrantly": True}


def rows(mode):
    """Yield (title, what is asserted, model, way of sharding, options, what else it is given)."""
    for way, shard in WAYS.items():
        for plan, reentrant in PLANS.items():
            if (way == "by layer" and plan != "plain") or ("," in way and mode == "vmap"):
                continue
            yield f"{plan}, {way}", exact, functools.partial(vit, reentrant), shard, {}, {}
    title = "a weight without its layer"
    yield title, exact, lambda: chain(uncalled(), scale()), by_block, {}, {}
    yield f"{title}, checkpointed", exact, lambda: chain(uncalled(True)), by_block, {}, {}
    names = {"names": ["blocks.0.scale"]}
    yield "another run", refused, lambda: chain(counts()), by_block, BLOCK_TOLD, names
    for name in ("into.weight", "blocks.0.scale"):
        how = {"names": [name], "penalised": name}
        freed = WAYS["by block, freed"]
        yield f"a penalty on {name}", refused, lambda: chain(scale()), freed, {}, how
    makes = {title: functools.partial(reshaped, *between) for title, between in ROWS.items()}
    makes["token"] = token
    for title, make in makes.items():
        yield title, exact, make, by_block, {}, {}
    flattened = makes["flattened"]
    names = {"names": [name for name, _ in flattened().named_parameters()]}
    yield "equal sizes", refused, flattened, by_block, {}, {"n": T, **names}
    yield "equal sizes that are told", exact, flattened, by_block, TOLD, {"n": T}


def scenarios(rank, folder):
    """Half of all: each row in each mode, in one order and in the other by turns."""
    table = {}
    for j, (mode, options) in enumerate(MODES.items()):
        for k, (title, run, make, shard, more, how) in enumerate(rows(mode)):
            order = [*PLACE][(j + k) % 2]
            call = functools.partial(run, make, shard, order, options | more, **how)
            table[f"{title}, {order}, {mode}"] = call
    return table
