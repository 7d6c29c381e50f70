"""Whether a model can be copied whole, so that to run the copy changes nothing that is not its own:
what it holds, what its classes do, and what its functions find in their file.

A model that is only looked at more closely need not be: where nobody knows, it is not copied.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from dis import get_instructions
from inspect import getmro
from logging import Logger
from types import (
    BuiltinFunctionType,
    CellType,
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
DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType,
               type(vars(namedtuple("_", "field"))["field"]))  # fmt: skip
CONTAINERS = {dict, list, set, deque, Counter, OrderedDict, defaultdict}
GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
MUTABLE = 1 << 9  # of a class's flags: Py_TPFLAGS_HEAPTYPE
LIBRARIES = {"torch", *sys.stdlib_module_names}
WRAPPERS = {property: "fget", staticmethod: "__func__", classmethod: "__func__",
            functools.cached_property: "func"}  # fmt: skip
PLAIN = (*SAID, Tensor, Logger, type, ModuleType, FunctionType, BuiltinFunctionType, tuple)
NOTHING = object()


class Whole:
    """A model that can be copied so, and what it can reach beside itself as that is now."""

    def __init__(self, reach: _Reach) -> None:
        self._reach, self._before = reach, _Snapshot(reach)

    @staticmethod
    def of(module: nn.Module, arguments: Iterable[Any]) -> Whole | None:
        """None: copies of both would share what a forward could change and nobody put back."""
        theirs, reach = _kinds(module), _Reach()
        if _has_any_global_hook() or any(hasattr(kind, "__del__") for kind in theirs):
            return None
        size, values = 0, [*attributes(module), *arguments]
        for count, part in enumerate(p for v in (*module.buffers(), *values) for p in _parts(v, 0)):
            size += getattr(part, "nbytes", 0)
            draws = isinstance(part, (torch.Generator, *DRAW))
            if count > MANY or size > MOST or draws or not reach.instance(part):
                return None
            theirs += [] if isinstance(part, (*SAID, nn.Module)) else type(part).__mro__
        held = all(is_memory(v, 1) or reach.constant(v) for v in values)
        return Whole(reach) if held and reach.kinds(theirs) else None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What runs inside finds all as it was then, and counts nothing: in its class, as by
        `type(self).calls += 1`, in its file, in a closure."""
        now = _Snapshot(self._reach)
        self._before.put_back()
        try:
            yield
        finally:
            now.put_back()


class _Snapshot:
    """What can be reached, by identity."""

    def __init__(self, reach: _Reach) -> None:
        self._holders = [(h, dict(vars(h))) for h in reach.holders.values()]
        self._contents = [(c, c.copy()) for c in reach.containers.values()]
        self._cells = [(cell, _content(cell)) for cell in reach.cells.values()]
        self._defaults = [(f, f.__defaults__, f.__kwdefaults__) for f in reach.functions]

    def put_back(self) -> None:
        for holder, was in self._holders:
            for name, value in vars(holder).copy().items():
                if name not in was and name[:2] != "__":
                    delattr(holder, name)
                elif was.get(name, value) is not value:
                    setattr(holder, name, was[name])
            for name in was.keys() - vars(holder).keys():
                setattr(holder, name, was[name])
        for container, was in self._contents:
            _put_back(container, was)
        for cell, value in self._cells:
            if _content(cell) is not value and value is not NOTHING:
                cell.cell_contents = value
        for function, defaults, by_name in self._defaults:
            function.__defaults__, function.__kwdefaults__ = defaults, by_name


def _put_back(container: Any, was: Any) -> None:
    if isinstance(container, dict):  # a file's globals are never without a name
        for key in [key for key in container if key not in was]:
            del container[key]
        for key, value in was.items():
            if container.get(key, NOTHING) is not value:
                container[key] = value
        for key in was if not _same(container, was) else ():
            container[key] = container.pop(key)
    elif not _same(container, was):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(was)


def _same(a: Any, b: Any) -> bool:
    """The same things, in the same order."""
    inside = zip(_inside(a), _inside(b), strict=False)
    return len(a) == len(b) and all(x is y for x, y in inside)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return NOTHING


def _kinds(module: nn.Module) -> list[type]:
    """The classes that are not torch's."""
    kinds = {kind for m in module.modules() for kind in type(m).__mro__}
    return [kind for kind in kinds if not _of_a_library(kind.__module__)]


def _of_a_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in LIBRARIES


def _installed(module: ModuleType) -> bool:
    """Nothing of a user's, who counts in it."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    return _of_a_library(module.__name__) or "-packages" in (getattr(top, "__file__", None) or "")


@dataclass
class _Reach:
    """What functions and classes can reach."""

    seen: set[int] = field(default_factory=set)
    holders: dict[int, Any] = field(default_factory=dict)  # of attributes; to be put back, by id
    containers: dict[int, Any] = field(default_factory=dict)
    cells: dict[int, CellType] = field(default_factory=dict)
    functions: list[FunctionType] = field(default_factory=list)

    def kinds(self, kinds: Iterable[type]) -> bool:
        """Whether nothing that classes hold changes for good, whatever their functions do."""
        return all(map(self._kind, kinds))

    def instance(self, value: Any) -> bool:
        """Whether a copy is one: a number or a list of a class of the user's may hold more."""
        kinds = [k for k in type(value).__mro__ if not _of_a_library(k.__module__)]
        if kinds and isinstance(value, (*SAID, list, dict, set, tuple, deque)):
            self._held_by(value)
        return not any(vars(kind).get("__slots__") for kind in kinds)

    def constant(self, value: Any) -> bool:
        if isinstance(value, SAID):
            return self.instance(value)
        if isinstance(value, (*DESCRIPTORS, Tensor, Logger)):
            return True
        if isinstance(value, type):
            return self.kinds(value.__mro__)
        if isinstance(value, ModuleType):
            self._file(value)
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
        if type(value) not in CONTAINERS:
            return False
        self.containers[id(value)] = value
        return all(map(self.constant, _inside(value)))

    def _function(self, function: FunctionType) -> bool:
        """As far as its own file: libraries draw and remember for themselves."""
        if _of_a_library(function.__module__):
            return True
        here, code = function.__globals__, function.__code__
        self.functions.append(function)
        self.containers[id(here)] = here
        self.containers[id(vars(function))] = vars(function)
        cells = function.__closure__ or ()
        self.cells.update((id(cell), cell) for cell in cells)
        held = [_content(cell) for cell in cells]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        found = [*_named(code, here)]
        inner = [v for v in found if getattr(v, "__globals__", here) is here]
        ours = [v for v in inner if not isinstance(v, type) or v.__module__ == function.__module__]
        for kind in (v for v in inner if isinstance(v, type) and v not in ours):
            if not _of_a_library(kind.__module__):
                self._held_by(kind)
        for module in (v for v in found if isinstance(v, ModuleType) and not _installed(v)):
            names = {name for each in _codes(code) for name in each.co_names}
            used = [vars(module)[name] for name in names & vars(module).keys()]
            if not all(isinstance(v, PLAIN) or type(v) in CONTAINERS for v in used):
                return False
        values = (*held, *vars(function).values(), *ours)
        return all(v is NOTHING or self.constant(v) for v in values)

    def _kind(self, kind: type) -> bool:
        if id(kind) in self.seen or _of_a_library(kind.__module__) or not kind.__flags__ & MUTABLE:
            return True
        self.seen.add(id(kind))
        self._held_by(kind)
        files = [v.__globals__ for v in vars(kind).values() if isinstance(v, FunctionType)]
        self.containers.update((id(file), file) for file in files)
        return all(self.constant(v) for name, v in vars(kind).items()
                   if name == "__call__" or (name[:2] != "__" and name != "_abc_impl")
                   ) and self.kinds(getmro(type(kind)))  # fmt: skip

    def _file(self, module: ModuleType) -> None:
        if not _installed(module) and id(module) not in self.holders:
            self._held_by(module)
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == module.__name__:
                    self._held_by(kind)

    def _held_by(self, holder: Any) -> None:
        """What it has, and functions of any file count in: as far as that is plain."""
        if not hasattr(holder, "__dict__"):
            return
        self.holders[id(holder)] = holder
        todo = [v for v in vars(holder).values() if type(v) in CONTAINERS]
        while todo and len(self.containers) < MANY:
            container = todo.pop()
            if id(container) not in self.containers:
                self.containers[id(container)] = container
                todo += [v for v in _inside(container) if type(v) in CONTAINERS]


def _inside(container: Any) -> Iterable[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else container


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It, and those of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _named(code: CodeType, here: dict[str, Any]) -> Iterator[Any]:
    """What it knows by name: of its file, or as it imports it."""
    for step in (step for each in _codes(code) for step in get_instructions(each)):
        if step.opname in GLOBALS and step.argval in here:
            yield here[step.argval]
        elif step.opname == "IMPORT_NAME" and step.argval in sys.modules:
            yield sys.modules[step.argval]


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
