"""What a command line names: "module:name" or "file.py:name", found, called, checked."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["LOSSES", "UsageError", "dataset", "found", "loss", "model"]

LOSSES = ("cross_entropy", "mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits")


class UsageError(Exception):
    """What is wrong with an argument; the text begins with its name."""


def found(option: str, spec: str) -> Any:
    """Return the object of "package.module:name" or "folder/file.py:name"."""
    where, colon, names = spec.rpartition(":")
    if not colon or not where or not names:
        raise UsageError(f"{option}: expected module:name or file.py:name; got {spec!r}")
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(f"{option}: there is no file {where}")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _imported(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise UsageError(
                f"{option}: there is no module {error.name!r} here or on PYTHONPATH"
            ) from None
        raise UsageError(f"{option}: importing {where} failed: {error}") from error
    except Exception as error:
        raise UsageError(
            f"{option}: importing {where} failed: {type(error).__name__}: {error}"
        ) from error
    held: Any = module
    for name in names.split("."):
        if not hasattr(held, name):
            known = [key for key, value in vars(module).items() if _own(module, key, value)]
            raise UsageError(f"{option}: {where} has no {names!r}; it has {', '.join(known)}")
        held = getattr(held, name)
    return held


def _own(module: Any, name: str, value: Any) -> bool:
    """Return True if a module defines this name rather than imports it."""
    if isinstance(value, (type, FunctionType)):
        return not name.startswith("_") and value.__module__ == module.__name__
    return not name.startswith("_") and not isinstance(value, ModuleType)


def _imported(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # as `python -m` would
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    name = re.sub(r"\W", "_", f"_given_{path.resolve()}")
    if name not in sys.modules:  # --model and --data are often of one file
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # for the workers of a DataLoader
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _made(option: str, spec: str) -> Any:
    """Return what is named, or what it returns where it is a function or class."""
    held = found(option, spec)
    ready = isinstance(held, (nn.Module, DataLoader)) or hasattr(held, "__getitem__")
    if ready and not isinstance(held, type):
        return held
    if not callable(held):
        raise UsageError(f"{option}: {spec} is a {type(held).__name__}, and cannot be called")
    try:
        return held()
    except Exception as error:
        raise UsageError(f"{option}: {spec}() failed: {type(error).__name__}: {error}") from error


def model(spec: str, checkpoint: str | None, device: torch.device) -> nn.Module:
    """Return a model, made or found, with the weights of a checkpoint, on a device."""
    held = _made("--model", spec)
    if not isinstance(held, nn.Module):
        raise UsageError(
            f"--model: {spec} must be or return an nn.Module; got {type(held).__name__}"
        )
    if checkpoint is not None:
        _load(held, checkpoint)
    return held.to(device)


def _load(module: nn.Module, checkpoint: str) -> None:
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(state, dict) and isinstance(state.get(key), dict):
                state = state[key]
        module.load_state_dict(state)
    except Exception as error:
        raise UsageError(f"--checkpoint: {checkpoint} does not load: {error}") from error


def dataset(spec: str) -> Any:
    """Return a dataset or a DataLoader, made or found."""
    held = _made("--data", spec)
    known = hasattr(held, "__len__") and not isinstance(held, (str, bytes, Mapping))
    if not isinstance(held, DataLoader) and not known:
        raise UsageError(
            f"--data: {spec} must be or return a dataset with a length, or a DataLoader; got "
            f"{type(held).__name__}"
        )
    return held


def loss(spec: str) -> Callable[[Any, Any], torch.Tensor]:
    if spec in LOSSES:
        known: Callable[[Any, Any], torch.Tensor] = getattr(nn.functional, spec)
        return known
    if ":" not in spec:
        raise UsageError(f"--loss: expected {', '.join(LOSSES)}, or module:function; got {spec!r}")
    held = found("--loss", spec)
    if not callable(held):
        raise UsageError(f"--loss: {spec} is a {type(held).__name__}, and cannot be called")
    return _made("--loss", spec) if isinstance(held, type) else held  # nn.CrossEntropyLoss, say
