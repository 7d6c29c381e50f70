"""What tells that a partial result is of the same model, dataset and options."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

from .pool import Pool, random_state_kept

__all__ = ["of_dataset", "of_function", "of_model", "of_option", "of_values"]

PLAIN = (int, float, str, bytes, bool, np.generic, type(None))
SAMPLES = 8  # of a dataset that are looked at, spread over it


def of_model(model: nn.Module, modes: bool = False) -> str:
    """Digest its modules and modes, bits of parameters and buffers, and plain attributes."""
    seen = blake2b(_text(repr(model)), digest_size=16)
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str)) and (modes or name != "training"):
                seen.update(f"{name}={value!r}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.update(f"{name} {tensor.requires_grad}".encode())
        _add(seen, tensor)
    return seen.hexdigest()


def of_dataset(pool: Pool, samples: int = SAMPLES) -> str:
    """Digest its length, a few samples drawn alike, and tensors or indices that it holds."""
    seen = blake2b(f"{type(pool.dataset).__qualname__} {len(pool)}".encode(), digest_size=16)
    with random_state_kept(pool.generators()):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        for index in np.unique(np.linspace(0, len(pool) - 1, samples, dtype=int)).tolist():
            for leaf in tree_leaves(pool.sample(index)) if len(pool) else ():
                _add(seen, leaf)
    dataset = pool.dataset
    while isinstance(dataset, Subset):
        _add(seen, np.asarray(dataset.indices))
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        _add(seen, dataset.tensors)
    return seen.hexdigest()


def of_function(function: Callable[..., Any] | None) -> str:
    """Identify a function by its qualified name and its source text, where inspect finds it.

    Of a functools.partial the arguments count too; of an object, or of one whose method it is, the
    class and those attributes that are numbers or words; of a module all that `of_model` looks at.
    What a function closes over, its globals and what it calls are not looked at.
    """
    if function is None:
        return ""
    seen = blake2b(digest_size=8)
    _add(seen, function)
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} {seen.hexdigest()}"


def of_option(value: Any) -> str:
    return repr(value) if isinstance(value, PLAIN) else of_function(value)


def of_values(values: Any) -> str:
    seen = blake2b(digest_size=16)
    _add(seen, values)
    return seen.hexdigest()


def _text(text: str) -> bytes:
    return re.sub(r"\bat 0x[0-9a-f]+", "", text).encode()


def _add(seen: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = getattr(value, "_local_tensor", value)  # of a DTensor: what is here
        seen.update(f"{value.dtype}{list(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_meta:
            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            seen.update(bits.numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        seen.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, PLAIN):
        seen.update(repr(value).encode())
    elif isinstance(value, nn.Module):
        seen.update(of_model(value).encode())
    elif hasattr(value, "__qualname__") and not isinstance(value, MethodType):
        seen.update(f"{value.__qualname__} {_source(value)}".encode())
    else:
        parts = _parts(value)
        seen.update(f"{type(value).__qualname__} {len(parts)}".encode())
        for part in parts:
            _add(seen, part)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(itertools.chain.from_iterable(value.items()))
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (set, frozenset)):  # whose order is another in each process
        return sorted(map(repr, value))
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    held = getattr(value, "__dict__", {})
    plain = {name: held[name] for name in sorted(held) if isinstance(held[name], PLAIN)}
    return type(value), plain


def _source(named: Any) -> str:
    """Return the source text of a function or class; "" for one in C or typed at a prompt."""
    try:
        return inspect.getsource(named)
    except (OSError, TypeError, SyntaxError):
        return ""
