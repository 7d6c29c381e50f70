"""Which classes stand in for those of an attached model's modules, one probe's before another's.

What a checkpoint runs again must save what its forward did, and torch compares no more than shapes:
a removed probe's classes stay while one may run its layers again. Those of the next probe stand
before them, and let them have what is theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..hooks.copies import make_subclass, stock_of

_standing: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[StandIns]]] = (
    weakref.WeakKeyDictionary()
)


class StandIns:
    """What one probe has put in the place of modules' classes."""

    def __init__(self, model: nn.Module) -> None:
        """Raises RuntimeError where another probe is on."""
        self.on = True  # False from remove() on
        self.formers = _removed_from(model)
        self._modules = list(model.modules())
        self._recorder: Any = None
        self._classes: dict[type, tuple[type, dict[int, Any]]] = {}
        self._kinds: dict[int, type] = {}  # by module's id

    def enter(self, recorder: Any) -> None:
        self._recorder = recorder
        recorder.follow([former._recorder for former in self.formers])
        for module in self._modules:
            _standing.setdefault(module, []).append(weakref.ref(self))

    def put(
        self,
        module: nn.Module,
        forward_of: Callable[..., Any],
        altered: Callable[[str], None] | None = None,
    ) -> dict[int, Any]:
        """Have a class stand in for a module's; returns its table of sites by module's id."""
        stock = stock_of(type(module))
        if stock not in self._classes:
            sites: dict[int, Any] = {}
            former = self._former if self.formers else None
            self._classes[stock] = make_subclass(stock, forward_of, sites, altered, former), sites
        kind, sites = self._classes[stock]
        self._kinds[id(module)] = module.__class__ = kind
        return sites

    def _former(self, module: nn.Module) -> type | None:
        """Return the class whose forward runs again now, where that is not ours."""
        k = self._recorder.former() if self.formers else -1
        if k < 0:
            return None
        return self.formers[k]._kinds.get(id(module)) or stock_of(type(module))

    def leave(self) -> None:
        """Give the modules back the classes that stood there before, if these have not left."""
        for module in self._modules:
            others = [one for one in _those_of(module) if one is not self]
            for other in others:
                other._forget(self)
            kind = self._kinds.pop(id(module), None)
            if kind is not None and kind in type(module).__mro__:
                below = [one._kinds[id(module)] for one in others if id(module) in one._kinds]
                module.__class__ = below[-1] if below else stock_of(type(module))
            if others:
                _standing[module] = [weakref.ref(one) for one in others]
            else:
                _standing.pop(module, None)
        self._classes, self._modules = {}, []

    def _forget(self, former: StandIns) -> None:
        if former in self.formers:
            self.formers.remove(former)
            self._recorder.follow([one._recorder for one in self.formers])


def _those_of(module: nn.Module) -> list[StandIns]:
    """Return them in the order in which they came."""
    return [one for ref in _standing.get(module, ()) if (one := ref()) is not None]


def _removed_from(model: nn.Module) -> list[StandIns]:
    """Whose layers graphs in flight may run again."""
    found: dict[StandIns, None] = {}
    for name, module in model.named_modules():
        for one in _those_of(module):
            if one.on:
                where = f"its module {name!r}" if name else "the model"
                raise RuntimeError(
                    f"{where} is attached already: remove() the other probe first, which "
                    "torchgradx.attached(model) returns"
                )
            found[one] = None
    return list(found)
