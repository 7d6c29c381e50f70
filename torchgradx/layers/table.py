"""A model's table of parameters, and its list of layers.

A *place* is the index of a parameter in the table. All other files know parameters by place, since
wrappers (FSDP, functional calls) replace the tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import ops
from ..extension import NATIVE
from ..graph.layout import BATCH, SEQUENCE
from ..refusals import refused_all
from ..sharding import parts_and_wholes, sharded
from .modules import modules_in_order, named_in_full, own_names, recurrent_weights
from .rules import Layer, rule_of

LAYOUTS = {"batch": BATCH, "sequence": SEQUENCE}
_MODES = "training", "_backward_hooks", "_backward_pre_hooks"  # such hooks add graph nodes


class Parameters:
    """Table of a model's parameters: their first names, and the tensor in each place now."""

    def __init__(self, model: nn.Module) -> None:
        places: dict[int, int] = {}
        self.names: list[str] = []
        self._slots: list[tuple[dict[str, Any], str]] = []  # by place: its table, and its key there
        self._aliases: dict[str, int] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        self._tied: list[tuple[dict[str, Any], str, int]] = []  # slots of second names
        self._tensors: list[Tensor] = []  # by place
        for name, p in named_in_full(model).items():
            owner, _, key = name.rpartition(".")
            if id(p) in places:
                self._tied.append((modules[owner]._parameters, key, places[id(p)]))
            else:
                places[id(p)] = len(self.names)
                self.names.append(name)
                self._tensors.append(p)
                self._slots.append((modules[owner]._parameters, key))
            self._aliases[name] = places[id(p)]
        self.computed = False  # True: some tensor is not a leaf, but computed from others
        self.altered: list[str] = []  # module options that changed since attach
        self._modules = list(model.modules())
        self._children = [m._modules for m in self._modules]
        self._owners = [m._parameters for m in self._modules]
        self._latest, self._first_children = _values(self._owners), _values(self._children)
        self._first_names, self._has_other_names = list(map(tuple, self._owners)), False
        self._states = list(map(vars, self._modules))
        self._types = list(map(type, self._modules))  # as the latest forward began
        self._sharded = sharded(self._modules)  # likewise
        self._computed_modes = [m for m in self._modules if "training" not in vars(m)]  # a property

    def place(self, name: str) -> int:
        """Return the place of a parameter, by any of its names."""
        return self._aliases[name]

    def tensor(self, place: int) -> Tensor:
        """Return the tensor in one place now; the latest one, if the module has none."""
        own, key = self._slots[place]
        now = own.get(key)
        return self._tensors[place] if now is None else now

    def tensors(self) -> list[Tensor]:
        """Return the tensor in each place now, see `tensor`."""
        if not stand(self._owners, self._latest):
            self._tensors = list(map(self.tensor, range(len(self._slots))))
            self._latest = _values(self._owners)
            self._has_other_names = list(map(tuple, self._owners)) != self._first_names
            self.computed = not all(p.is_leaf for p in self._tensors)
        return self._tensors

    def parts(self) -> list[Tensor]:
        """Return `tensors`, with this process's shard in place of a gathered parameter. A forward
        begins with it, since it looks for sharded modules."""
        types = list(map(type, self._modules))
        if types != self._types:
            self._types, self._sharded = types, sharded(self._modules)
        if not self._sharded:
            return self.tensors()
        shards = {id(whole): part for part, whole in parts_and_wholes(self._sharded)}
        return [shards.get(id(p), p) for p in self.tensors()]

    def wholes(self) -> list[Tensor]:
        """Return the tensors that the latest forward met, with the gathered parameter in place of
        this process's shard."""
        if not self._sharded:
            return self._tensors
        wholes = {id(part): whole for part, whole in parts_and_wholes(self._sharded)}
        return [wholes.get(id(p), p) for p in self.tensors()]

    def gathered(self) -> bool:
        """Return True if a backward gathers parameters from several processes."""
        return bool(self._sharded)

    def regime(self) -> tuple[Any, ...]:
        """Return a key of modules' modes, hooks that change the graph, and trained parameters."""
        saving = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        modes = [m.training for m in self._computed_modes]
        return facts(self._states, _MODES, self._tensors), saving, *modes

    def changed(self) -> bool:
        """Return True if modules, parameters' names, ties or options had changed since attach when
        `tensors` was last asked."""
        if self.altered or self._has_other_names:
            return True
        if not stand(self._children, self._first_children):
            return True
        now = self._tensors
        return any(own.get(key) is not now[place] for own, key, place in self._tied)

    def trainable(self) -> list[int]:
        """Return the places of the parameters that require a gradient."""
        return [place for place, p in enumerate(self.tensors()) if p.requires_grad]


def _values(tables: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(table.values()) for table in tables]


if NATIVE:
    from .._C import facts, stand
else:

    def facts(
        tables: Sequence[dict[str, Any]], keys: tuple[str, ...], tensors: Sequence[Tensor]
    ) -> bytes:
        """Return bytes: whether each table's keys are true, and each tensor requires a gradient."""
        own = [bool(table.get(key)) for table in tables for key in keys]
        return bytes([*own, *(t.requires_grad for t in tensors)])

    def stand(tables: Sequence[dict[str, Any]], before: Sequence[tuple[Any, ...]]) -> bool:
        """Return True if each dictionary's values, in order, are the same objects as before."""
        both = list(zip(_values(tables), before, strict=True))
        return all(len(now) == len(then) and all(map(is_, now, then)) for now, then in both)


def find_layers(
    model: nn.Module, parameters: Parameters, options: Mapping[str, Any]
) -> list[Layer]:
    """Return the layers of each module that owns parameters or normalises by batch statistics: one,
    but for attention (its projections) and recurrent modules (the module, then each weight). Raise
    CoverageError where backend="native" has no kernel for a module."""
    layers: list[Layer] = []
    uncovered = []
    for name, module in modules_in_order(model):
        names = own_names(module)
        if not names and not isinstance(module, _BatchNorm):
            continue
        prefix = f"{name}." if name else ""
        places = {key: parameters.place(prefix + key) for key in names}
        rule = rule_of(module)
        devices = {p.device for p in module.parameters(recurse=False)}
        on_cpu = all(device.type == "cpu" for device in devices)
        weights = recurrent_weights(module) if on_cpu else []
        native = bool(rule or weights) and options["backend"] != "vmap"
        native = native and all(map(ops.kernels_on, devices))
        kind, title = "vmap", type(module).__name__
        if native:
            kind = rule.name if rule else "recurrent"
        if rule and native and rule.parts:
            layers += [Layer(name, type_name=title, **part) for part in rule.parts(module, places)]
            continue
        layer = Layer(
            name=name,
            kind=kind,
            type_name=title,
            weight=places.get("weight", -1),
            bias=places.get("bias", -1),
            parameters=tuple(dict.fromkeys(places.values())),
            ruled=rule is not None and rule.make is not None,
            **(rule.describe(module) if rule and native else {}),
        )
        layers.append(layer)
        if native and weights and owns_backward(options):
            layers += [_recurrent_weight(module, name, places, *pair) for pair in weights]
        if options["backend"] == "native" and not native:
            uncovered += [prefix + key for key in names]
    if uncovered:
        raise refused_all("no_kernel", uncovered)
    return layers


def _recurrent_weight(
    module: nn.Module, name: str, places: Mapping[str, int], weight: str, bias: str | None
) -> Layer:
    """Return the Layer of one weight of a recurrent module: a Linear over all steps."""
    out_features, in_features = getattr(module, weight).shape
    pair = (places[weight], places[bias] if bias else -1)
    parameters = tuple(place for place in pair if place >= 0)
    title, sizes = type(module).__name__, {"in_features": in_features, "out_features": out_features}
    return Layer(name, "linear", title, *pair, parameters, inside=True, **sizes)


def owns_backward(options: Mapping[str, Any]) -> bool:
    """Return True if our backward may replace PyTorch's."""
    return options["fused"] or not options["weight_grad"]


def declared_layout(layer: Layer, options: Mapping[str, Any]) -> int:
    """Return the layout that the user declared for a module, by name or by pattern; -1: none."""
    layout = options["layout"] or {}
    if layer.name in layout:
        return LAYOUTS[layout[layer.name]]
    fits = (value for pattern, value in layout.items() if fnmatch.fnmatchcase(layer.name, pattern))
    return LAYOUTS.get(next(fits, ""), -1)
