"""Whether a model can be copied whole, so that to run the copy changes nothing that is not its own:
what it holds, what its classes do, and what its functions find in their file.

A model that is only looked at more closely need not be: where nobody knows, it is not copied.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from dis import opmap
from logging import Logger
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .stand_in import DEPTH, DRAW, SAID, attributes, is_memory

__all__ = ["Whole"]

MANY, MOST = 1 << 12, 1 << 26  # things, and bytes, that are copied
DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
GLOBALS = opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"]
MUTABLE = 1 << 9  # of a class's flags: Py_TPFLAGS_HEAPTYPE
LIBRARIES = {"torch", *sys.stdlib_module_names}
WRAPPERS = {property: "fget", staticmethod: "__func__", classmethod: "__func__",
            functools.cached_property: "func"}  # fmt: skip


class Whole:
    """A model that can be copied so."""

    def __init__(self, holders: dict[int, type | ModuleType], containers: list[Any]) -> None:
        self._holders, self._containers = list(holders.values()), containers

    @staticmethod
    def of(module: nn.Module, arguments: Iterable[Any]) -> Whole | None:
        """None: copies of both would share what a forward could change and nobody put back."""
        theirs, reach = _kinds(module), _Reach()
        if _has_any_global_hook() or any(hasattr(kind, "__del__") for kind in theirs):
            return None
        size, values = 0, [*attributes(module), *arguments]
        for count, part in enumerate(p for v in (*module.buffers(), *values) for p in _parts(v, 0)):
            size += getattr(part, "nbytes", 0)
            if count > MANY or size > MOST or isinstance(part, (torch.Generator, *DRAW)):
                return None
            theirs += [] if isinstance(part, (*SAID, nn.Module)) else type(part).__mro__
        held = all(is_memory(v, 1) or reach.constant(v) for v in values)
        return Whole(reach.holders, reach.containers) if held and reach.kinds(theirs) else None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What runs inside and counts in its class, as by `type(self).calls += 1`, or in a list of
        its file, counts nothing."""
        before = [(holder, dict(vars(holder))) for holder in self._holders]
        held = [(container, container.copy()) for container in self._containers]
        try:
            yield
        finally:
            for holder, values in before:
                for name, value in values.items():
                    if isinstance(value, SAID) and vars(holder).get(name) is not value:
                        setattr(holder, name, value)
            for container, was in held:
                if container != was:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(was)


def _kinds(module: nn.Module) -> list[type]:
    """The classes that are not torch's."""
    kinds = {kind for m in module.modules() for kind in type(m).__mro__}
    return [kind for kind in kinds if not _of_a_library(kind.__module__)]


def _of_a_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


@dataclass
class _Reach:
    """What functions and classes can reach."""

    seen: set[int] = field(default_factory=set)
    holders: dict[int, type | ModuleType] = field(default_factory=dict)  # of numbers, to put back
    containers: list[Any] = field(default_factory=list)  # of what is said, to put back

    def kinds(self, kinds: Iterable[type]) -> bool:
        """Whether nothing that classes hold changes for good, whatever their functions do."""
        return all(map(self._kind, kinds))

    def constant(self, value: Any) -> bool:
        if isinstance(value, (*SAID, *DESCRIPTORS, Tensor, Logger)):
            return True
        if isinstance(value, type):
            return self.kinds(value.__mro__)
        if isinstance(value, ModuleType):
            self._elsewhere(value, value.__name__)
            return True
        if isinstance(value, BuiltinFunctionType):  # of a generator, it draws
            return isinstance(value.__self__, (type, ModuleType, type(None)))
        if id(value) in self.seen:
            return True
        self.seen.add(id(value))
        if type(value) in WRAPPERS:
            return self.constant(getattr(value, WRAPPERS[type(value)]))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, (tuple, frozenset)):
            return all(map(self.constant, value))
        if type(value) not in (dict, list, set):
            return False
        self.containers.append(value)
        return all(isinstance(v, SAID) or (isinstance(v, type) and self.constant(v))
                   for v in _inside(value))  # fmt: skip

    def _function(self, function: FunctionType) -> bool:
        """As far as its own file: libraries draw and remember for themselves."""
        here, code = function.__globals__, function.__code__
        if _sets_globals(code):
            return False
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        named = [here[name] for name in _names(code) if name in here]
        inner = [v for v in named if getattr(v, "__globals__", here) is here]
        ours = [v for v in inner if not isinstance(v, type) or v.__module__ == function.__module__]
        for kind in (v for v in inner if isinstance(v, type) and v not in ours):
            self._elsewhere(kind, kind.__module__)
        self.containers.append(vars(function))
        return all(map(self.constant, (*cells, *defaults, *vars(function).values(), *ours)))

    def _kind(self, kind: type) -> bool:
        if id(kind) in self.seen or _of_a_library(kind.__module__) or not kind.__flags__ & MUTABLE:
            return True
        self.seen.add(id(kind))
        self.holders[id(kind)] = kind
        return all(self.constant(v) for name, v in vars(kind).items()
                   if name == "__call__" or (name[:2] != "__" and name != "_abc_impl"))  # fmt: skip

    def _elsewhere(self, holder: type | ModuleType, name: str) -> None:
        """What another file has, and functions count in: as far as that is plain."""
        if id(holder) in self.holders or _of_a_library(name):
            return
        self.holders[id(holder)] = holder
        held = [v for v in vars(holder).values() if type(v) in (dict, list, set)]
        self.containers += [v for v in held if all(isinstance(x, SAID) for x in _inside(v))]


def _inside(container: Any) -> Iterable[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else container


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _sets_globals(code: CodeType) -> bool:
    inner = any(_sets_globals(c) for c in code.co_consts if isinstance(c, CodeType))
    return inner or any(op in GLOBALS for op in code.co_code[::2])


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """It, and what it holds."""
    yield value
    if depth > DEPTH or isinstance(value, (*SAID, Tensor, nn.Module, type)):
        return
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        inner = (getattr(value, "__dict__", None) or {}).values()
    for v in inner:
        yield from _parts(v, depth + 1)
