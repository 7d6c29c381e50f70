"""fully_shard, in both orders: parameters beside sharded modules are exact, and what is used where
no module's call shows it is refused by name."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_models
import two_processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return two_processes.outcomes_of(sharded_models.scenarios, folder)


@pytest.mark.parametrize("name", sharded_models.scenarios(rank=0, folder=None))
def test_sharded(name, outcomes):
    ranks, ended = outcomes
    for rank, held in enumerate(ranks):
        assert name in held, f"rank {rank} ended before it: {ended}"
        assert not held[name], f"rank {rank}: {held[name]}"
