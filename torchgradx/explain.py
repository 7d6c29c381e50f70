"""Text of Probe.explain(): a summary, and for each layer what serves it and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from .layers.rules import Layer, rule_named
from .layers.table import Parameters
from .shared.lift import EACH

AGAIN = "run again by vmap or a replay"


class Explanation(str):
    """A text that notebooks show as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


def explanation(layers: Sequence[Layer], parameters: Parameters, verbose: bool = False) -> str:
    """Return a summary, and a line for each layer; or all that was weighed (verbose)."""
    trainable = set(parameters.trainable())
    lines: list[str] = []
    words: Counter[str] = Counter()
    again: Counter[str] = Counter()  # by type, of those that run again
    for layer in layers:
        if (layer.role and not layer.plans) or (layer.kind == "recurrent" and not layer.notes):
            continue  # a part that its module did not call; or its weights follow
        names = [parameters.names[place] for place in layer.parameters if place in trainable]
        part = f", {layer.role}" if layer.role else ""
        used = ", ".join(names) or "frozen"
        title = f"{layer.name or '(root)'}: {layer.type_name}{part}  [{used}]"
        if not names:
            words["frozen"] += 1
            lines.append(title)
            continue
        word, text = _served(layer, verbose)
        words[word] += 1
        again[layer.type_name] += word == AGAIN
        if verbose:
            lines += [title, *(f"  {line}" for line in text.splitlines())]
        else:
            lines.append(f"{title}: {text}")
    return "\n".join([_summary(words, again), *lines])


def _summary(words: Counter[str], again: Counter[str]) -> str:
    total = words.total()
    text = ", ".join(f"{count} {word}" for word, count in words.most_common())
    types = ", ".join(f"{count} {name}" for name, count in again.most_common() if count)
    return f"{total} layer{'s' * (total != 1)}: {text}" + (f" ({types})" if types else "")


def _served(layer: Layer, verbose: bool) -> tuple[str, str]:
    """Return what serves it: in a word, to be counted; in a line, or all that was weighed."""
    if "lifted" in layer.notes:
        text = "lifted: its gradients by sample are taken at the graph's nodes, where samples"
        text += f" come in{layer.notes['lifted'] or ''}"
        return "asked once for each sample" if EACH in text else "at the graph's nodes", text
    if layer.notes.keys() == {"products"}:
        text = "products: one for each expert, their rows' samples by the indices between"
        return "at the graph's nodes", text
    if layer.kind in ("vmap", "recurrent"):
        if not layer.notes:
            return "not seen", f"no use seen; no kernel for {layer.type_name}"
        words = " and ".join(layer.notes)
        beside = "through time" in layer.notes
        why = "the framework's gradients stay" if beside else f"no kernel for {layer.type_name}"
        text = f"{words}: {why}; its own forward is run again in backward"
        return "through time" if words == "through time" else AGAIN, text
    if layer.plans:
        plans = list(layer.plans.values())
        text = "\n".join(map(repr, plans)) if verbose else "; ".join(p.brief() for p in plans)
        return plans[-1].algorithm, text
    unseen = f"{layer.kind}: no single use seen; several uses of a parameter are combined"
    text = rule_named(layer.kind).served_by or unseen
    return text.partition(":")[0], text
