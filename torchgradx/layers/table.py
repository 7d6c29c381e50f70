"""What a probe sees of a model before any data: its parameters by place, its layers in order."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import ops
from ..graph.layout import BATCH, SEQUENCE
from ..refusals import refused_all
from ..sharding import FSDP, communicates, parts_and_wholes
from .modules import is_opaque, modules_in_order, own_names, recurrent_weights
from .rules import Layer, rule_of

if TYPE_CHECKING:
    pass

LAYOUTS = {"batch": BATCH, "sequence": SEQUENCE}
_MODES = "training", "_backward_hooks", "_backward_pre_hooks"  # hooks make nodes of the graph


class Parameters:
    """The table of a model's parameters: by place, by first name, and whatever stands there now."""

    def __init__(self, model: nn.Module) -> None:
        places: dict[int, int] = {}
        self.names: list[str] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._aliases: dict[str, int] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) not in places:
                places[id(p)] = len(self.names)
                self.names.append(name)
                owner, _, key = name.rpartition(".")
                self._slots.append((modules[owner]._parameters, key))
            self._aliases[name] = places[id(p)]
        self._tensors: list[Tensor] = list(model.parameters())
        self.computed = False  # whether any is none, but made of some
        self.altered: list[str] = []  # options of modules that sites know
        self._modules = list(model.modules())
        self._children = [m._modules for m in self._modules if m._modules]
        self._childless = [m._modules for m in self._modules if not m._modules]
        self._held = [m._parameters for m in self._modules]
        self._standing, self._there = _values(self._held), _values(self._children)
        self._lengths = list(map(len, self._held))
        self._states = list(map(vars, self._modules))
        self._odd = [m for m in self._modules if "training" not in vars(m)]  # it is computed
        tied = [(*name.rpartition("."), place) for name, place in self._aliases.items()
                if self.names[place] != name]  # fmt: skip
        self._tied = [(modules[owner]._parameters, key, place) for owner, _, key, place in tied]

    def place(self, name: str) -> int:
        return self._aliases[name]

    def tensor(self, place: int) -> Tensor:
        """Return the tensor in one place, as `tensors` has it."""
        own, key = self._slots[place]
        now = own.get(key)
        return self._tensors[place] if now is None else now

    def tensors(self) -> list[Tensor]:
        """Return the tensor in each place now; the last one, where there is none."""
        if not stand(self._held, self._standing):
            self._tensors = list(map(self.tensor, range(len(self._slots))))
            self._standing = _values(self._held)
            self.computed = not all(p.is_leaf for p in self._tensors)
        return self._tensors

    def parts(self) -> list[Tensor]:
        """Return the same, of what fully_shard brings together the part that is kept."""
        if FSDP not in sys.modules:
            return self.tensors()
        kept = {id(whole): part for part, whole in parts_and_wholes(self._modules)}
        return [kept.get(id(p), p) for p in self.tensors()] if kept else self.tensors()

    def wholes(self) -> list[Tensor]:
        """Return the same, as forwards have computed with them."""
        found = {id(part): whole for part, whole in parts_and_wholes(self._modules)}
        return [found.get(id(p), p) for p in self.tensors()] if found else self.tensors()

    def gathered(self) -> bool:
        """Return True if a backward gathers parameters from several processes."""
        return FSDP in sys.modules and communicates(self._modules)

    def regime(self) -> tuple[Any, ...]:
        """Return modes, hooks that add or hide graph nodes, and what is trained."""
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        odd = [m.training for m in self._odd]
        return facts(self._states, _MODES, self._tensors), saving, *odd

    def changed(self) -> bool:
        """Return True if modules, parameters, ties or options changed since attach."""
        here = stand(self._children, self._there) and list(map(len, self._held)) == self._lengths
        if self.altered or any(self._childless) or not here:
            return True
        now = self.tensors() if self._tied else []
        return any(own.get(key) is not now[place] for own, key, place in self._tied)

    def trainable(self) -> list[int]:
        return [place for place, p in enumerate(self.tensors()) if p.requires_grad]


def _values(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return [value for table in tables for value in table.values()]


if ops.NATIVE:
    from .._C import facts, stand
else:

    def facts(tables: Iterable[dict[str, Any]], keys: Any, tensors: list[Tensor]) -> bytes:
        """Return of each dictionary whether these are true, of each tensor if it is trained."""
        own = [bool(table.get(key)) for table in tables for key in keys]
        return bytes([*own, *(t.requires_grad for t in tensors)])

    def stand(tables: Iterable[dict[str, Any]], before: list[Any]) -> bool:
        """Return True if these dictionaries hold what they did, in order."""
        now = _values(tables)
        return len(now) == len(before) and all(map(is_, now, before))


def find_layers(
    model: nn.Module, parameters: Parameters, options: Mapping[str, Any]
) -> list[Layer]:
    """Return a Layer for each module that owns parameters, or whose statistics mix samples."""
    layers = []
    uncovered = []
    for name, module in modules_in_order(model):
        names = own_names(module)
        if not names and not isinstance(module, _BatchNorm):
            continue
        prefix = f"{name}." if name else ""
        own = {key: parameters.place(prefix + key) for key in names}
        rule = rule_of(module)
        weights = recurrent_weights(module) if _through_time(module) else []
        native = bool(rule or weights) and _runs_natively(module, options["backend"])
        kind, title = "vmap", type(module).__name__
        if native:
            kind = rule.name if rule else "recurrent"
        if rule and native and rule.parts:
            layers += [Layer(name, type_name=title, **part) for part in rule.parts(module, own)]
            continue
        layer = Layer(
            name=name,
            kind=kind,
            type_name=title,
            weight=own.get("weight", -1),
            bias=own.get("bias", -1),
            parameters=tuple(dict.fromkeys(own.values())),
            ruled=bool(rule and not rule.parts and not rule.closed),
            **(rule.describe(module) if rule and native else {}),
        )
        layers.append(layer)
        if native and weights and owns_backward(options):
            layers += [_product(module, name, own, *weight) for weight in weights]
        if options["backend"] == "native" and not native and names:
            uncovered += [prefix + key for key in names]
    if uncovered:
        raise refused_all("no_kernel", uncovered)
    return layers


def _product(
    module: nn.Module, name: str, own: Mapping[str, int], weight: str, bias: str | None
) -> Layer:
    """Return one weight of a recurrent module: over all steps it is a Linear."""
    out_features, in_features = getattr(module, weight).shape
    places = (own[weight], own[bias] if bias else -1)
    return Layer(
        name=name,
        kind="linear",
        type_name=type(module).__name__,
        weight=places[0],
        bias=places[1],
        parameters=tuple(place for place in places if place >= 0),
        inside=True,
        in_features=in_features,
        out_features=out_features,
    )


def _runs_natively(module: nn.Module, backend: str) -> bool:
    return backend != "vmap" and all(ops.kernels_on(p.device) for p in module.parameters(False))


def _through_time(module: nn.Module) -> bool:
    on_cpu = all(p.device.type == "cpu" for p in module.parameters(False))
    return on_cpu and not is_opaque(module)


def owns_backward(options: Mapping[str, Any]) -> bool:
    """Return True if our backward may replace the framework's."""
    return options["fused"] or not options["weight_grad"]


def declared_layout(layer: Layer, options: Mapping[str, Any]) -> int:
    """Return what `layout` says of a module: its name, then the first pattern that fits; or -1."""
    layout = options["layout"] or {}
    if layer.name in layout:
        return LAYOUTS[layout[layer.name]]
    fits = (how for pattern, how in layout.items() if fnmatch.fnmatchcase(layer.name, pattern))
    return LAYOUTS.get(next(fits, ""), -1)
