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


# ---- Models --------------------------------------------------------------------------------------
class Block(nn.Module):
    """A layer scale of its own, beside layers that may be sharded apart from it."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.layer(self.norm(x)))


class ViT(nn.Module):
    """A class token, a table of positions and a layer scale in the root."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.into, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, T + 1, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.linspace(1.5, 0.5, WIDTH))

    def forward(self, x):
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.into(x)], 1) + self.positions
        for block in self.blocks:
            kind = self.reentrant
            x = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
        return self.out(x * self.scale)


class Chain(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.into, self.out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = torch.tanh(self.into(x))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


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
    return Chain(rows, scale())


def token():
    """Calls a block on what no sample entered."""
    return Model(lambda m, x: m.out(torch.tanh(m.into(x)) + m.blocks[0](m.token)),
                 token=torch.randn(1, 1, WIDTH), blocks=nn.ModuleList([Block()]),
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


# ---- What is asserted ----------------------------------------------------------------------------
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


# ---- The table -----------------------------------------------------------------------------------
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
            yield f"{plan}, {way}", exact, functools.partial(ViT, reentrant), shard, {}, {}
    title = "a weight without its layer"
    yield title, exact, lambda: Chain(uncalled(), scale()), by_block, {}, {}
    yield f"{title}, checkpointed", exact, lambda: Chain(uncalled(True)), by_block, {}, {}
    names = {"names": ["blocks.0.scale"]}
    yield "another run", refused, lambda: Chain(counts()), by_block, BLOCK_TOLD, names
    for name in ("into.weight", "blocks.0.scale"):
        how = {"names": [name], "penalised": name}
        freed = WAYS["by block, freed"]
        yield f"a penalty on {name}", refused, lambda: Chain(scale()), freed, {}, how
    makes = {title: functools.partial(reshaped, *between) for title, between in ROWS.items()}
    makes["token"] = token
    for title, make in makes.items():
        yield title, exact, make, by_block, {}, {}
    flattened = makes["flattened"]
    names = {"names": [name for name, _ in flattened().named_parameters()]}
    yield "equal sizes", refused, flattened, by_block, {}, {"n": T, **names}
    yield "equal sizes that are told", exact, flattened, by_block, TOLD, {"n": T}


def scenarios(rank, folder):
    table = {}
    for order in PLACE:
        for mode, options in MODES.items():
            for title, run, make, shard, more, how in rows(mode):
                call = functools.partial(run, make, shard, order, options | more, **how)
                table[f"{title}, {order}, {mode}"] = call
    return table
