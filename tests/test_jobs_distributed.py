"""Jobs under torch.distributed. Two processes run all of two_process_jobs.py, once."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

import two_process_jobs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return two_process_jobs.outcomes(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", two_process_jobs.SCENARIOS)
def test_two_processes(name, outcomes):
    ranks, ended = outcomes
    for rank, held in enumerate(ranks):
        assert name in held, f"rank {rank} ended before it: {ended}"
        assert not held[name], f"rank {rank}: {held[name]}"
