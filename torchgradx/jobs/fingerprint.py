"""What tells that a partial result is of the same model, dataset and options."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from hashlib import blake2b
from types import CodeType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .pool import Pool, random_state_kept

__all__ = ["of_dataset", "of_function", "of_model", "of_values"]

SAMPLES = 8  # of a dataset that are looked at, spread over it


def of_model(model: nn.Module, modes: bool = False) -> str:
    """Of its modules (and their modes), of the bits of its parameters and buffers, and of plain
    numbers and words: a label_smoothing, an eps."""
    seen = blake2b(_text(repr(model)), digest_size=16)
    for module in model.modules():
        for name, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str)) and (modes or name != "training"):
                seen.update(f"{name}={value!r}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen.update(name.encode())
        _add(seen, tensor.detach())
    return seen.hexdigest()


def of_dataset(pool: Pool) -> str:
    """Of its length and of a few of its samples; random numbers in them are drawn alike."""
    seen = blake2b(f"{type(pool.dataset).__qualname__} {len(pool)}".encode(), digest_size=16)
    with random_state_kept(pool.generators()):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        for index in np.unique(np.linspace(0, len(pool) - 1, SAMPLES, dtype=int)).tolist():
            for leaf in tree_leaves(pool.sample(index)) if len(pool) else ():
                _add(seen, leaf)
    return seen.hexdigest()


def of_function(function: Callable[..., Any] | None) -> str:
    """Of its name, its code, and the plain values it closes over; of a module, also its tensors."""
    if isinstance(function, nn.Module):
        return of_model(function)
    if isinstance(function, functools.partial):
        bound = f"{function.args}{function.keywords}"
        return f"{of_function(function.func)} {_text(bound).decode()}"
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return getattr(function, "__qualname__", type(function).__qualname__)
    seen = blake2b(digest_size=8)
    _add_code(seen, code)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (*cells, *(getattr(function, "__defaults__", None) or ())):
        _add(seen, value)
    return f"{getattr(function, '__qualname__', '')} {seen.hexdigest()}"


def of_values(values: NDArray[Any]) -> str:
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
    elif isinstance(value, (int, float, str, bytes, bool, np.generic, type(None))):
        seen.update(repr(value).encode())
    else:
        seen.update(type(value).__qualname__.encode())


def _add_code(seen: Any, code: CodeType) -> None:
    seen.update(code.co_code)
    seen.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(seen, constant)
        else:  # the order of a set is another in each process
            held = sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
            seen.update(repr(held).encode())
