"""Replaced classes of an attached model's modules, also while a removed probe's graph is in flight.

A checkpoint's recomputation must save what its forward saved, and torch compares shapes only. So a
removed probe's classes stay until no graph can run its layers again, or another probe's replace
them.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..hooks.copies import make_subclass, stock_of

_by_module: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[StandIns]]] = (
    weakref.WeakKeyDictionary()
)


class StandIns:
    """Classes that one probe puts in place of modules' own."""

    on = True  # False after remove()

    def __init__(self, model: nn.Module) -> None:
        """Raise RuntimeError if a probe is attached to the model, or to a module that has something
        of its own: two models may share an activation."""
        for name, module in model.named_modules():
            has_own = not name or module._parameters or module._buffers
            if has_own and any(one.on for one in _stand_ins_of(module)):
                where = f"its module {name!r}" if name else "the model"
                raise RuntimeError(
                    f"{where} is attached already: remove() the other probe first, which "
                    "torchgradx.attached(model) returns"
                )
        self._modules = list(model.modules())
        self._classes: dict[type, tuple[type, dict[int, Any]]] = {}  # by stock class, with sites
        self._class_of: dict[int, type] = {}  # by module's id

    def enter(self) -> None:
        """Register this probe at all modules of the model."""
        for module in self._modules:
            _by_module.setdefault(module, []).append(weakref.ref(self))

    def put(self, module: nn.Module, forward_of: Any, on_change: Any = None) -> dict[int, Any]:
        """Replace a module's class; return the new class's table of sites, by module's id.
        forward_of, on_change: see `make_subclass`; those of the first module of a class count."""
        stock = stock_of(type(module))
        if stock not in self._classes:
            sites: dict[int, Any] = {}
            self._classes[stock] = make_subclass(stock, forward_of, sites, on_change), sites
        kind, sites = self._classes[stock]
        self._class_of[id(module)] = module.__class__ = kind
        return sites

    def leave(self) -> None:
        """Restore the modules' classes: another probe's if one is left, else the stock ones."""
        for module in self._modules:
            others = [other for other in _stand_ins_of(module) if other is not self]
            kind = self._class_of.pop(id(module), None)
            if kind is not None and kind in type(module).__mro__:
                left = [one._class_of[id(module)] for one in others if id(module) in one._class_of]
                module.__class__ = left[-1] if left else stock_of(type(module))
            if others:
                _by_module[module] = [weakref.ref(other) for other in others]
            else:
                _by_module.pop(module, None)
        self._classes, self._modules = {}, []


def _stand_ins_of(module: nn.Module) -> list[StandIns]:
    """Return those of all probes at a module, oldest first."""
    return [one for ref in _by_module.get(module, ()) if (one := ref()) is not None]
