"""Text of Probe.explain(): a summary, and for each layer what serves it and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from .layers.rules import Layer, rule_named

if TYPE_CHECKING:
    from .layers.table import Parameters

__all__ = ["Explanation", "explanation"]

AGAIN = "run again by vmap or a replay"


class Explanation(str):
    """A text that notebooks show as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


def explanation(
    layers: Sequence[Layer], parameters: Parameters, verbose: bool = False
) -> Explanation:
    """Return a summary, and a line for each layer; or all that was weighed (verbose)."""
    trainable = set(parameters.trainable())
    lines: list[str] = []
    ways: Counter[str] = Counter()
    again: Counter[str] = Counter()  # by type, of those that run again
    for layer in layers:
        if (layer.role and not layer.plans) or (layer.kind == "recurrent" and not layer.notes):
            continue  # a way in which its module was not called; or its weights follow
        names = [parameters.names[place] for place in layer.parameters if place in trainable]
        part = f", {layer.role}" if layer.role else ""
        title = f"{layer.name or '(root)'}: {layer.type_name}{part}"
        title = f"{title}  [{', '.join(names) or 'frozen'}]"
        way = _way(layer) if names else "frozen"
        ways[way] += 1
        if way == AGAIN:
            again[layer.type_name] += 1
        if not names:
            lines.append(title)
        elif verbose:
            lines += [title, *(f"  {line}" for line in _how(layer).splitlines())]
        else:
            lines.append(f"{title}: {_brief(layer)}")
    return Explanation("\n".join([_summary(ways, again), *lines]))


def _summary(ways: Counter[str], again: Counter[str]) -> str:
    total = ways.total()
    text = ", ".join(f"{count} {way}" for way, count in ways.most_common())
    types = ", ".join(f"{count} {name}" for name, count in again.most_common())
    return f"{total} layer{'s' * (total != 1)}: {text}" + (f" ({types})" if types else "")


def _way(layer: Layer) -> str:
    """Return it in a word or two, to be counted."""
    if "lifted" in layer.notes:
        return "at the graph's nodes"
    if layer.kind in ("vmap", "recurrent"):
        return "through time" if set(layer.notes) == {"through time"} else AGAIN
    if layer.plans:
        return next(reversed(layer.plans.values())).algorithm
    return _how(layer).partition(":")[0]


def _brief(layer: Layer) -> str:
    if layer.plans and "lifted" not in layer.notes:
        return "; ".join(plan.brief() for plan in layer.plans.values())
    return _how(layer)


def _how(layer: Layer) -> str:
    if "lifted" in layer.notes:
        return (
            "lifted: its gradients by sample are taken at the graph's nodes, where samples come in"
        )
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
