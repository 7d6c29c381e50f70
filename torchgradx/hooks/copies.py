"""Copies of an attached model are unattached: deepcopy and pickle leave out what a probe added."""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from ..refusals import sentence

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FLAGS = ("_with_kwargs", "_always_called")

_kept_out: Counter[type] = Counter()
_stock: weakref.WeakKeyDictionary[type, type[nn.Module]] = weakref.WeakKeyDictionary()


def untraced(function: Any, below: bool = True) -> Any:
    """Let compiled programs call a function as it is, with all that it calls (`below`), untraced.
    torch.compiler.disable would do so too, and takes a second to import."""
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if below else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Hook:
    """A hook of ours on a module; `traced` stands in for it in a graph, where that can be whole."""

    def __init__(
        self, function: Callable[..., Any], traced: Callable[..., Any] | None = None
    ) -> None:
        self.function, self.traced = function, traced
        self._called: Callable[..., Any] = Hook._outside
        if traced:  # the compiler bounds how often it compiles one code: a code for each hook
            self._called = FunctionType(Hook._inside.__code__.replace(), globals())

    def __call__(self, *args: Any) -> Any:
        return self._called(self, *args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        """Copy a class with its own deepcopy, which the table of reductions misses."""
        return _nothing

    def _inside(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            result = self.traced(*args)  # type: ignore[misc]
            if result is not NotImplemented:
                return result
        return self._outside(*args)

    @untraced
    def _outside(self, *args: Any) -> Any:
        return self.function(*args)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A model that keeps a hook's handle holds the hooks beside it: pickled, ours is None."""
        return type(None), ()


untraced(Hook.__call__, below=False)

# torch.compile breaks its graph here, and under fullgraph=True shows the reason.
for _name, _value in {
    "_torchdynamo_disable": True,
    "_torchdynamo_disable_msg": sentence("graph_break"),
}.items():
    setattr(Hook._outside, _name, _value)


def exclude_from_copies(kind: type) -> None:
    """While any probe has hooks on modules of this class; nothing is added to the modules."""
    _kept_out[kind] += 1
    copyreg.dispatch_table.setdefault(kind, _reduce)


def include_in_copies(kind: type) -> None:
    _kept_out[kind] -= 1
    if not _kept_out[kind] and copyreg.dispatch_table.get(kind) is _reduce:
        del copyreg.dispatch_table[kind]


def _reduce(module: Any) -> tuple[Any, ...]:
    made = module.__reduce_ex__(2)
    return (*made[:2], _without_hooks(made[2]), *made[3:])


def _without_hooks(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    state = dict(state)
    for name in HOOKS:
        hooks = state.get(name, {})
        ours = {key for key, hook in hooks.items() if isinstance(hook, Hook)}
        for part in (name, *(name + flag for flag in FLAGS)) if ours else ():
            if part in state:
                state[part] = _Theirs(state[part], ours)
    return state


class _Theirs(OrderedDict[int, Any]):
    """A module's table of hooks less ours. Handles of hooks hold that table too, and a deep copy of
    both must be one table again: else the handle's dies, and torch cannot copy it a second time."""

    def __init__(self, table: Mapping[int, Any], ours: Collection[int]) -> None:
        super().__init__((key, hook) for key, hook in table.items() if key not in ours)
        self._table, self._ours = table, ours

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[int, Any]:
        copied: OrderedDict[int, Any] = memo.setdefault(id(self._table), OrderedDict())
        for key in self._ours:  # a handle was copied before
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
    altered: Callable[[str], None] | None = None,
    former: Callable[[nn.Module], type | None] | None = None,
) -> type[nn.Module]:
    """Make a subclass whose forward is forward_of(stock, sites) and looks up the module's site by
    its id; where there is none (a stand-in that runs again, another's copy of the dict) it is the
    stock one's. Copies are stock. `altered`: called where an option of a module that has a site
    is set to another value: that site, which knows the old one, serves no more. `former`: whose
    forward is to run in place of ours, if another's.

    One class serves all modules of a type: Python's own caches are by type, and a class for each
    module would cost more than a small layer does.
    """

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        made = stock.__reduce_ex__(self, 2)
        return (copyreg._reconstructor, (stock, object, None), _without_hooks(made[2]))  # type: ignore[attr-defined]

    options = frozenset(getattr(stock, "__constants__", ()))

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if altered and name in options and id(self) in sites and getattr(self, name, None) != value:
            del sites[id(self)]
            altered(f"{stock.__name__}.{name}")
        stock.__setattr__(self, name, value)

    body = {
        "forward": _in_turn(forward_of(stock, sites), former),
        "__setattr__": set_attribute,
        "__reduce_ex__": reduce,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    kind = type(stock.__name__, (stock,), body)
    _stock[kind] = stock
    return kind


def _in_turn(
    ours: Callable[..., Any], former: Callable[[nn.Module], type | None] | None
) -> Callable[..., Any]:
    if former is None:
        return ours

    @wraps(ours)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = None if torch.compiler.is_dynamo_compiling() else former(self)
        return (ours if kind is None else kind.forward)(self, *args, **kwargs)  # type: ignore[attr-defined]

    return forward


def stock_of(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that one of ours stands in for; others made a subclass of ours, keep that one."""
    if kind in _stock:
        return _stock[kind]
    bases = tuple(
        stock_of(base) if issubclass(base, nn.Module) else base for base in kind.__bases__
    )
    if bases == kind.__bases__:
        return kind
    body = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    _stock[kind] = type(kind.__name__, bases, body)
    return _stock[kind]
