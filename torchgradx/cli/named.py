"""Objects that a command line names: "module:name" or "file.py:name", found, called, checked."""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

LOSSES = ("cross_entropy", "mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


class UsageError(Exception):
    """Error of an argument; the text begins with its name."""


def found(option: str, spec: str) -> Any:
    """Return the object of "package.module:name" or "folder/file.py:name"."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UsageError(f"{option}: expected module:name or file.py:name; got {spec!r}")
    file = Path(where).resolve() if where.endswith(".py") else None
    if file and not file.is_file():
        raise UsageError(f"{option}: there is no file {where}")
    folder = str(file.parent if file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` or `python -m` would
    try:
        module = importlib.import_module(file.stem if file else where)
        target = operator.attrgetter(name)(module)
    except Exception as error:
        raise UsageError(f"{option}: {spec}: {type(error).__name__}: {error}") from error
    if file and Path(module.__file__ or "").resolve() != file:
        raise UsageError(f"{option}: {where} has the name of another module: rename it")
    return target


def _made(option: str, spec: str) -> Any:
    """Return what is named, or what it returns where it is a function or class."""
    target = found(option, spec)
    ready = isinstance(target, (nn.Module, DataLoader)) or hasattr(target, "__getitem__")
    if ready and not isinstance(target, type):
        return target
    try:
        return target()
    except Exception as error:
        raise UsageError(f"{option}: {spec}() failed: {type(error).__name__}: {error}") from error


def model(spec: str, checkpoint: str | None, device: torch.device) -> nn.Module:
    """Return a model, made or found, with the weights of a checkpoint, on a device."""
    target = _made("--model", spec)
    if not isinstance(target, nn.Module):
        raise UsageError(
            f"--model: {spec} must be or return an nn.Module; got {type(target).__name__}"
        )
    if checkpoint is not None:
        try:
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
            for key in ("state_dict", "model_state_dict", "model"):
                state = state[key] if isinstance(state.get(key), dict) else state
            target.load_state_dict(state)
        except Exception as error:
            raise UsageError(f"--checkpoint: {checkpoint} does not load: {error}") from error
    return target.to(device)


def dataset(spec: str) -> Any:
    """Return a dataset or a DataLoader, made or found."""
    target = _made("--data", spec)
    known = hasattr(target, "__len__") and not isinstance(target, (str, bytes, Mapping))
    if not isinstance(target, DataLoader) and not known:
        raise UsageError(
            f"--data: {spec} must be or return a dataset with a length, or a DataLoader; got "
            f"{type(target).__name__}"
        )
    return target


def loss(spec: str) -> Callable[[Any, Any], torch.Tensor]:
    if spec in LOSSES:
        return getattr(nn.functional, spec)
    if ":" not in spec:
        raise UsageError(f"--loss: expected {', '.join(LOSSES)}, or module:function; got {spec!r}")
    target = found("--loss", spec)
    return _made("--loss", spec) if isinstance(target, type) else target  # nn.CrossEntropyLoss, say
