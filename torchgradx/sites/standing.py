"""Replaced classes of an attached model's modules, also while a removed probe's graph is in flight.

A checkpoint's recomputation must save what its forward saved, and torch compares shapes only. So a
removed probe's classes stay until no graph can run its layers again. The classes of the next probe
replace them, and run the former forward where a recomputation is the former probe's.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..extension import Recorder
from ..hooks.copies import make_subclass, stock_of

_by_module: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[StandIns]]] = (
    weakref.WeakKeyDictionary()
)


class StandIns:
    """Classes that one probe puts in place of modules' own."""

    def __init__(self, model: nn.Module) -> None:
        """Raise RuntimeError if another probe is attached."""
        self.on = True  # False after remove()
        self.formers = _find_formers(model)
        self._modules = list(model.modules())
        self._recorder: Any = None
        self._classes: dict[type, tuple[type, dict[int, Any]]] = {}  # by stock class, with sites
        self._class_of: dict[int, type] = {}  # by module's id

    def enter(self, recorder: Recorder) -> None:
        """Register this probe at all modules of the model."""
        self._recorder = recorder
        recorder.follow([former._recorder for former in self.formers])
        for module in self._modules:
            _by_module.setdefault(module, []).append(weakref.ref(self))

    def put(self, module: nn.Module, forward_of: Any, on_change: Any = None) -> dict[int, Any]:
        """Replace a module's class; return the new class's table of sites, by module's id.
        forward_of, on_change: see `make_subclass`; those of the first module of a class count."""
        stock = stock_of(type(module))
        if stock not in self._classes:
            sites: dict[int, Any] = {}
            former = self._former_class_of if self.formers else None
            self._classes[stock] = make_subclass(stock, forward_of, sites, on_change, former), sites
        kind, sites = self._classes[stock]
        self._class_of[id(module)] = module.__class__ = kind
        return sites

    def _former_class_of(self, module: nn.Module) -> type | None:
        """Return a former probe's class of a module if that probe's graph runs the module again."""
        k = self._recorder.former() if self.formers else -1
        if k < 0:
            return None
        return self.formers[k]._class_of.get(id(module)) or stock_of(type(module))

    def leave(self) -> None:
        """Restore the modules' classes: another probe's if one is left, else the stock ones."""
        for module in self._modules:
            others = [other for other in _stand_ins_of(module) if other is not self]
            for other in others:
                if self in other.formers:
                    other.formers.remove(self)
                    other._recorder.follow([one._recorder for one in other.formers])
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


def _find_formers(model: nn.Module) -> list[StandIns]:
    """Return those of removed probes that graphs in flight may need; raise if a probe is on."""
    formers: dict[StandIns, None] = {}
    for name, module in model.named_modules():
        for one in _stand_ins_of(module):
            if one.on:
                where = f"its module {name!r}" if name else "the model"
                raise RuntimeError(
                    f"{where} is attached already: remove() the other probe first, which "
                    "torchgradx.attached(model) returns"
                )
            formers[one] = None
    return list(formers)
