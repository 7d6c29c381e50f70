"""DDP, fully_shard and tensor parallelism: exact on each rank's own samples without a message more,
or refused by name; and jobs. Two processes run all scenarios of a module, once."""

from functools import cache
from sys import intern

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_models
import two_process_jobs
import two_processes

MODULES = {module.__name__: module for module in (two_processes, sharded_models, two_process_jobs)}


def parts(module, name):
    """A scenario as the values of a grid: "FSDP, before, fused" is of each place, in each mode."""
    title, *rest = name.rsplit(", ", 2)
    return [intern(part) for part in (module, title, *[*rest, "", ""][:2])]


SCENARIOS = [
    pytest.param(*parts(name, scenario), id=f"{name}-{scenario}")
    for name, module in MODULES.items()
    for scenario in module.scenarios(rank=0, folder=None)
]


def name_of(*parts):
    return ", ".join(filter(None, parts))


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Run the scenarios of a module that this session has, and return what came of them."""
    cases = [i.callspec.params for i in request.session.items if i.path == request.path]

    def of(module):
        grids = [grid for grid in cases if grid["module"] == module]
        names = [name_of(*(grid[part] for part in ("title", "where", "mode"))) for grid in grids]
        folder = tmp_path_factory.mktemp("ranks")
        return two_processes.outcomes_of(MODULES[module].scenarios, names, folder)

    return cache(of)


@pytest.mark.grid
@pytest.mark.parametrize(("module", "title", "where", "mode"), SCENARIOS)
def test_two_processes(module, title, where, mode, outcomes):
    ranks, ended = outcomes(module)
    name = name_of(title, where, mode)
    for rank, held in enumerate(ranks):
        assert name in held, f"rank {rank} ended before it: {ended}"
        assert not held[name], f"rank {rank}: {held[name]}"
