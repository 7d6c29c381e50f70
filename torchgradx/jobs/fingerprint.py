"""Fingerprints: digests of the model, dataset and options that a partial result is of."""

from __future__ import annotations

import functools
import inspect
import random
import re
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from ..graph.arguments import leaves_in
from ..kept import random_state_kept
from .pool import Pool

VALUE_KINDS = (int, float, str, bytes, bool, np.generic, type(None))
SAMPLES = 8  # of a dataset that are looked at, spread over it


def of_values(*values: Any) -> str:
    """Digest tensors by their bits, all else by its repr without addresses."""
    digest = blake2b(digest_size=16)
    for value in leaves_in(values):
        if isinstance(value, Tensor):
            value = getattr(value, "_local_tensor", value)  # of a DTensor
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            if value.layout is torch.strided and not value.is_meta:
                bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(bits.numpy().data)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            digest.update(re.sub(r"\bat 0x[0-9a-fA-F]+", "", repr(value)).encode() + b"\n")
    return digest.hexdigest()


def of_model(model: nn.Module, modes: bool = False) -> str:
    """Digest its modules (and their modes), their plain attributes, parameters and buffers."""
    attributes = [
        (name, value)
        for module in model.modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, VALUE_KINDS) and (modes or name != "training")
    ]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    return of_values(repr(model), attributes, tensors, trained)


def of_dataset(pool: Pool) -> str:
    """Digest its type and length, and the tensors or indices that it holds."""
    dataset: Any = pool.dataset
    contents: list[Any] = []
    while isinstance(dataset, Subset):
        contents.append(np.asarray(dataset.indices))
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        contents += dataset.tensors
    return of_values(type(pool.dataset).__qualname__, len(pool), contents)


def of_samples(pool: Pool) -> str:
    """Digest a few samples, drawn alike each time."""
    with random_state_kept(pool.generators()):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        places = np.unique(np.linspace(0, len(pool) - 1, SAMPLES, dtype=int)).tolist()
        return of_values([pool.sample(index) for index in places if len(pool)])


def of_function(function: Any) -> str:
    """Identify a function by its name and its source text, where inspect finds it.

    Also the arguments of a functools.partial; of an object, or of one whose method it is, its class
    and its plain attributes; of a module all that `of_model` looks at. What a function closes over,
    its globals and what it calls are not looked at. What cannot be called is digested by its value.
    """
    if not callable(function):
        return of_values(function) if isinstance(function, Tensor) else repr(function)
    if isinstance(function, nn.Module):
        return f"{type(function).__qualname__} {of_model(function)}"
    if isinstance(function, functools.partial):
        given = of_values(function.args, [*function.keywords.items()])
        return f"{of_function(function.func)} {given}"
    owner = function.__self__ if inspect.ismethod(function) else function
    plain = {k: v for k, v in getattr(owner, "__dict__", {}).items() if isinstance(v, VALUE_KINDS)}
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError, SyntaxError):  # in C, or typed at a prompt
        source = ""
    digest = of_values(type(owner).__qualname__, repr(plain), source)
    return f"{named.__qualname__} {digest}"
