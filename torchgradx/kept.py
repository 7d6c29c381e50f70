"""Keep what a call must leave as it was: a model's buffers and modes, random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


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
    """Modules keep their modes and buffers, and these their values. evaluates: in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    if evaluates:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
