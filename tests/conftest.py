"""Fixtures shared by all tests."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from backends import parameters
from emulation.emulator import ORDERS
from grids import in_default_mode, thin

# Here, before any test module is imported: many make tensors while they are.
if "TORCHGRADX_TEST_DEVICE" in os.environ:
    torch.set_default_device(os.environ["TORCHGRADX_TEST_DEVICE"])


# Their tests are few and long: begun last, one would keep a process busy when the others are done.
LONG = ("cuda_static", "emulated", "gpu_stages", "pages", "two_processes", "packaging", "compile")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of each grid")
    parser.addoption("--default-mode", action="store_true", help="run no other options of attach()")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "grid(*together, pairs=True): see tests/grids.py")
    config.addinivalue_line("markers", "long: runs with --all-cases only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin the grids, unless all cases are asked for or single ones are named; long files first."""
    if config.getoption("--default-mode"):
        items[:], left_out = in_default_mode(items)
        config.hook.pytest_deselected(items=left_out)
    if not config.getoption("--all-cases") and not any("[" in arg for arg in config.args):
        items[:], left_out = thin(items)
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: not item.path.stem.endswith(LONG))


def pytest_collection_finish() -> None:
    """Tests that collect garbage need not walk the tens of thousands that are to run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Small problems: one thread, or a busy machine spends its time waking the others."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _native_where_it_is_asked_for(options: dict[str, object]) -> None:
    from attach_modes import need_native

    need_native(options)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=parameters())
def backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(params=ORDERS)
def _each_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """In which threads run, of the emulator that the module has as unit()."""
    with request.module.unit().order(request.param):
        yield


@pytest.fixture
def threads() -> object:
    """torch.set_num_threads, which `seeded` undoes."""
    return torch.set_num_threads


@pytest.fixture
def backwards(monkeypatch):
    """How many were run beside the user's own."""
    count, plain = [], torch.autograd.grad

    def grad(*args, **options):
        count.append(1)
        with torch._C.DisableTorchFunction():  # a default device is a mode, which would call again
            return plain(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    return count


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles stay, as if the collector came late."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
