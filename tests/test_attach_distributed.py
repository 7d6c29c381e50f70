"""DDP, fully_shard and tensor parallelism: exact on each rank's own samples without a message more,
or refused by name. Two processes run all scenarios of a module, once."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_models
import two_processes


@pytest.fixture(scope="module")
def two_processes_outcomes(tmp_path_factory):
    return two_processes.outcomes(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def sharded_outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return two_processes.outcomes_of(sharded_models.scenarios, folder)


def held_on_each_rank(name, outcomes):
    ranks, ended = outcomes
    for rank, held in enumerate(ranks):
        assert name in held, f"rank {rank} ended before it: {ended}"
        assert not held[name], f"rank {rank}: {held[name]}"


@pytest.mark.parametrize("name", two_processes.scenarios(rank=0))
def test_two_processes(name, two_processes_outcomes):
    held_on_each_rank(name, two_processes_outcomes)


@pytest.mark.parametrize("name", sharded_models.scenarios(rank=0, folder=None))
def test_sharded(name, sharded_outcomes):
    held_on_each_rank(name, sharded_outcomes)
