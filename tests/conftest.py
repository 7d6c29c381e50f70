"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from backends import parameters


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not walk the tens of thousands that are to run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=parameters())
def backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
def threads() -> Iterator[object]:
    """torch.set_num_threads, undone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
