"""DDP, fully_shard and tensor parallelism: exact on each rank's own samples without a message more,
or refused by name; and jobs. Two processes run all scenarios of a module, once."""

from functools import cache

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_models
import two_process_jobs
import two_processes

MODULES = (two_processes, sharded_models, two_process_jobs)
SCENARIOS = [
    pytest.param(module, name, id=f"{module.__name__}-{name}")
    for module in MODULES
    for name in module.scenarios(rank=0, folder=None)
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    def of(module):
        return two_processes.outcomes_of(module.scenarios, tmp_path_factory.mktemp("ranks"))

    return cache(of)


@pytest.mark.parametrize(("module", "name"), SCENARIOS)
def test_two_processes(module, name, outcomes):
    ranks, ended = outcomes(module)
    for rank, held in enumerate(ranks):
        assert name in held, f"rank {rank} ended before it: {ended}"
        assert not held[name], f"rank {rank}: {held[name]}"
