"""What the sites of one probe share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..layers.table import Parameters
from .standing import StandIns
from .trace import Trace


@dataclass(frozen=True)
class Context:
    """What the sites of one probe share."""

    recorder: Any
    audit: Any  # proof.audit.Audit, which sites must not import
    parameters: Parameters
    options: Mapping[str, Any]
    trace: Trace
    standing: StandIns
    # By a recurrent module's id: the C++ site of each of its weights, in order.
    weight_sites: dict[int, list[Any]] = field(default_factory=dict)
