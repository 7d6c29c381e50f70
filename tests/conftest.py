"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from backends import parameters

# Here, before any test module is imported: many make tensors while they are.
if "TORCHGRADX_TEST_DEVICE" in os.environ:
    from on_device import make_all_tensors_on

    make_all_tensors_on(os.environ["TORCHGRADX_TEST_DEVICE"])


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


@pytest.fixture
def backwards(monkeypatch):
    """How many were run beside the user's own."""
    count, plain = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: count.append(1) or plain(*a, **k))
    return count
