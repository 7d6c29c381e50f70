"""Layers of nn.MultiheadAttention: its projections, each a Linear.

The input projections use the rows of in_proj_weight: in one part where query, key and value are one
tensor, in two where key and value are, else in three. There is a Layer for each part of each case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from ..hooks.copies import stock_of

# Roles of the layers, by the case
SELF, OUT = "query, key and value", "output"
TWO = ("query of two", "key and value")
THREE = ("query", "key", "value")
ALL_ROWS = (0, 0, 1)  # of a parameter: see Layer.weight_rows


def accepts(module: Any) -> bool:
    """Return True if a module's projections are the stock ones."""
    if not isinstance(module, nn.MultiheadAttention) or module.bias_k is not None:
        return False  # bias_k is one more row among the keys, which no Linear makes
    out = module.out_proj
    plain = stock_of(type(out)) is NonDynamicallyQuantizableLinear and "forward" not in out.__dict__
    hooks = out._forward_hooks or out._forward_pre_hooks or parametrize.is_parametrized(out)
    own = stock_of(type(module)).forward
    return plain and not hooks and own is nn.MultiheadAttention.forward


def parts(module: nn.MultiheadAttention, places: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the fields of a Layer for each projection. places: of the parameters, by name."""
    width, all_rows = module.embed_dim, 3 * module.embed_dim

    def linear(
        role: str, names: tuple[str, str], features: int, rows: slice = slice(0, 0), count: int = 1
    ) -> dict[str, Any]:
        """Return one projection's fields. rows: of in_proj_weight and in_proj_bias, split into
        `count` parts."""
        within = (rows.start, all_rows - rows.stop, count) if count > 1 else ALL_ROWS
        weight, bias = (places.get(name, -1) for name in names)
        return {
            "role": role,
            "kind": "linear",
            "weight": weight,
            "bias": bias,
            "parameters": tuple(place for place in (weight, bias) if place >= 0),
            "in_features": features,
            "out_features": rows.stop - rows.start or width,
            "weight_rows": within if names[0] == "in_proj_weight" else ALL_ROWS,
            "bias_rows": within,
        }

    thirds = [slice(k * width, (k + 1) * width) for k in range(3)]
    if module._qkv_same_embed_dim:
        packed = "in_proj_weight", "in_proj_bias"
        yield linear(SELF, packed, width, slice(0, all_rows))
        for role, rows in zip(TWO, (thirds[0], slice(width, all_rows)), strict=True):
            yield linear(role, packed, width, rows, 2)
        for role, rows in zip(THREE, thirds, strict=True):
            yield linear(role, packed, width, rows, 3)
    else:
        sizes = (width, module.kdim, module.vdim)
        for role, size, rows in zip(THREE, sizes, thirds, strict=True):
            names = f"{role[0]}_proj_weight", "in_proj_bias"
            yield linear(role, names, size, rows, 3)
    yield linear(OUT, ("out_proj.weight", "out_proj.bias"), width)
