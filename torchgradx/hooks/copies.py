"""Our hooks and subclasses of modules, which deepcopy and pickle of a model leave out.

"Stock" is the class that a module has without a probe.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from ..refusals import sentence

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FLAGS = ("_with_kwargs", "_always_called")

_hook_counts: Counter[type] = Counter()  # how many Hooks there are, by class
_stock_classes: weakref.WeakKeyDictionary[type, type[nn.Module]] = weakref.WeakKeyDictionary()


def untraced(function: Any, below: bool = True) -> Any:
    """Make torch.compile run a function eagerly; below: and all that the function calls.
    torch.compiler.disable does the same, but takes a second to import."""
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Hook:
    """A hook of ours on a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @untraced
    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        """Return a function that does nothing, for modules that define __deepcopy__ themselves."""
        return _do_nothing

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as None, for models that keep the handle of a hook and so its table of hooks."""
        return type(None), ()


# torch.compile breaks its graph here, and under fullgraph=True shows the reason.
Hook.__call__._torchdynamo_disable = True
Hook.__call__._torchdynamo_disable_msg = sentence("graph_break")


class TracedHook(Hook):
    """A hook that `traced` replaces in a full graph, unless it returns NotImplemented: then the
    graph may break."""

    def __init__(self, function: Callable[..., Any], traced: Callable[..., Any]) -> None:
        super().__init__(function)
        # Dynamo limits the compilations of each code object: one for each hook.
        self._run = FunctionType(TracedHook._run_traced.__code__.replace(), globals())
        self._traced = traced

    def __call__(self, *args: Any) -> Any:
        return self._run(self, *args)

    def _run_traced(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            result = self._traced(*args)
            if result is not NotImplemented:
                return result
        return Hook.__call__(self, *args)


untraced(TracedHook.__call__, below=False)


class Hooks:
    """Our hooks on one module, which copies of its class's modules leave out."""

    def __init__(self, module: nn.Module, every: list[Hooks]) -> None:
        """every: the hooks of a probe, which these join."""
        self._kind = stock_of(type(module))
        self._handles: list[Any] = []
        _hook_counts[self._kind] += 1
        copyreg.dispatch_table.setdefault(self._kind, _reduce)
        every.append(self)

    def add(self, register: Any, function: Any, traced: Any = None, **options: Any) -> None:
        """Register a hook by one of the module's methods. traced: see TracedHook."""
        hook = TracedHook(function, traced) if traced else Hook(function)
        self._handles.append(register(hook, **options))

    def remove(self) -> None:
        """Remove these; the last ones on modules of a class restore how copies are made."""
        for handle in self._handles:
            handle.remove()
        _hook_counts[self._kind] -= 1
        if not _hook_counts[self._kind] and copyreg.dispatch_table.get(self._kind) is _reduce:
            del copyreg.dispatch_table[self._kind]


def _reduce(module: Any) -> tuple[Any, ...]:
    reduced = module.__reduce_ex__(2)
    return (*reduced[:2], *map(_without_hooks, reduced[2:3]), *reduced[3:])


def _without_hooks(state: Any) -> Any:
    """Return a module's state without our hooks in its tables of hooks."""
    if not isinstance(state, dict):
        return state
    state = dict(state)
    for name in HOOKS:
        ours = {key for key, hook in state.get(name, {}).items() if isinstance(hook, Hook)}
        for table in (name, *(name + flag for flag in FLAGS)) if ours else ():
            if table in state:
                state[table] = _UserHooks(state[table], ours)
    return state


class _UserHooks(OrderedDict[int, Any]):
    """A module's table of hooks without ours. Handles refer to that table too: a deep copy of both
    must be one table again, else the handle's dies and torch cannot copy it a second time."""

    def __init__(self, table: Mapping[int, Any], ours: Collection[int]) -> None:
        super().__init__((key, hook) for key, hook in table.items() if key not in ours)
        self._table, self._ours = table, ours

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        copied: OrderedDict[int, Any] = memo.setdefault(id(self._table), OrderedDict())
        for key in self._ours:  # a handle, copied before, has copied the whole table
            copied.pop(key, None)
        for key, hook in self.items():
            copied[key] = deepcopy(hook, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def make_subclass(
    stock: type[nn.Module],
    forward_of: Callable[..., Any],
    sites: dict[int, Any],
    on_change: Callable[[str], None] | None = None,
) -> type[nn.Module]:
    """Return a subclass of `stock` whose forward is forward_of(stock, sites). It looks up the
    module's site by id; without one (a stand-in, a copy of the module's dict) the stock forward
    runs. Modules of a type share one class: Python caches attributes by type, and a class for each
    module would cost more than a small layer does. Copies of the modules have the stock class.

    on_change: called when an option of a module with a site is set to another value; the site knows
    the old one and is deleted.
    """

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        state = stock.__reduce_ex__(self, 2)[2]
        return copyreg._reconstructor, (stock, object, None), _without_hooks(state)  # type: ignore[attr-defined]

    options = frozenset(getattr(stock, "__constants__", ()))

    def set_attribute(self: Any, name: str, value: Any) -> None:
        has_option = on_change and name in options and id(self) in sites
        if on_change and has_option and getattr(self, name, None) != value:
            del sites[id(self)]
            on_change(f"{stock.__name__}.{name}")
        stock.__setattr__(self, name, value)

    body = {
        "forward": forward_of(stock, sites),
        "__setattr__": set_attribute,
        "__reduce_ex__": reduce,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    kind = type(stock.__name__, (stock,), body)
    _stock_classes[kind] = stock
    return kind


def stock_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class without a probe; one derived from a class of ours is derived anew."""
    if kind in _stock_classes:
        return _stock_classes[kind]
    bases = tuple(stock_of(b) if issubclass(b, nn.Module) else b for b in kind.__bases__)
    if bases == kind.__bases__:
        return kind
    body = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    _stock_classes[kind] = type(kind.__name__, bases, body)
    return _stock_classes[kind]
