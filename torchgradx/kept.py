"""Keep what a call must leave as it was: a model's attributes and buffers, random generators; and
detect writes into tensors that we keep while others may write into them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def random_state_kept(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Whatever is drawn inside, of torch, numpy or Python, is drawn again after it."""
    python, numpy = random.getstate(), np.random.get_state()
    states = [generator.get_state() for generator in generators]
    try:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def model_kept(model: nn.Module, evaluates: bool = False) -> Iterator[None]:
    """Modules keep attributes and buffers, and these their values. evaluates: in eval mode."""
    tables = [(table, dict(table)) for m in model.modules() for table in (vars(m), m._buffers)]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    if evaluates:
        model.eval()
    try:
        yield
    finally:
        for table, before in tables:
            if table.keys() != before.keys() or any(table[k] is not v for k, v in before.items()):
                table.clear()
                table.update(before)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class Versions:
    """Version counters of some tensors; inference tensors have none and are left out."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]

    @property
    def intact(self) -> bool:
        """Return True if no tensor was written into since."""
        return all(t._version == version for t, version in self._versions)
