"""The site of each layer, and what the parts of a probe know of all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from ..extension import Recorder
from ..layers.rules import Layer, rule_named
from ..layers.table import Parameters
from .native import Context, NativeSite
from .recurrent import RecurrentSite, RecurrentWeight
from .rerun import FallbackSite

Site: TypeAlias = NativeSite | FallbackSite | RecurrentWeight


def site_of(module: nn.Module, layer: Layer, index: int, context: Context) -> Site:
    """Return a new site of a layer. index: of the layer in the probe's list."""
    kind: Any = NativeSite
    if layer.inside:
        kind = RecurrentWeight
    elif layer.kind == "recurrent":
        kind = RecurrentSite
    elif layer.kind == "vmap" or rule_named(layer.kind).make is None:
        kind = FallbackSite
    return kind(module, layer, index, context)


class ProbeParts(NamedTuple):
    """Objects that the parts of one probe share."""

    recorder: Recorder
    parameters: Parameters
    layers: Sequence[Layer]
    options: Mapping[str, Any]
    sites: Sequence[Site]  # by layer; empty before the probe is attached and after it is removed
    known: dict[str, dict[Any, Any]]  # see verdict.cache_of
