"""DDP, fully_shard and tensor parallelism: exact on each rank's own samples without a message more,
or refused by name. Two processes run all of two_processes.py, once."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import two_processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return two_processes.outcomes(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", two_processes.scenarios(rank=0))
def test_two_processes(name, outcomes):
    ranks, ended = outcomes
    for rank, held in enumerate(ranks):
        assert name in held, f"rank {rank} ended before it: {ended}"
        assert not held[name], f"rank {rank}: {held[name]}"
