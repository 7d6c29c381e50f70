"""What Probe.explain() prints: layer by layer what serves it, its cost, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .rules import Layer, rule_named

if TYPE_CHECKING:
    from .table import Parameters

__all__ = ["Explanation", "explanation"]


class Explanation(str):
    """A text that notebooks show as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


def explanation(layers: Sequence[Layer], parameters: Parameters) -> Explanation:
    trainable = set(parameters.trainable())
    lines = []
    for layer in layers:
        if (layer.role and not layer.plans) or (layer.kind == "recurrent" and not layer.notes):
            continue  # a way in which its module was not called; or its weights follow
        names = [parameters.names[place] for place in layer.parameters if place in trainable]
        part = f", {layer.role}" if layer.role else ""
        title = f"{layer.name or '(root)'}: {layer.type_name}{part}"
        lines.append(f"{title}  [{', '.join(names) or 'frozen'}]")
        if names:
            lines += [f"  {line}" for line in _how(layer).splitlines()]
    return Explanation("\n".join(lines))


def _how(layer: Layer) -> str:
    if "lifted" in layer.notes:
        return "lifted: its gradients by sample are taken at the graph's nodes, where samples come in"
    if layer.kind in ("vmap", "recurrent"):
        ways = " and ".join(layer.notes) or "vmap"
        beside = "through time" in layer.notes
        why = "the framework's gradients stay" if beside else f"no kernel for {layer.type_name}"
        return f"{ways}: {why}; its own forward is run again in backward"
    way = rule_named(layer.kind).way
    if way:
        return way
    if not layer.plans:
        return f"{layer.kind}: no single use seen; several uses of a parameter are combined"
    return "\n".join(repr(plan) for plan in layer.plans.values())
