"""The item of the dataset that each sample of a batch is from, where `sample_ids` names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..graph.arguments import sample_rows
from ..scoring import arguments_of
from .pool import Indices


def items_of(
    items: Indices, inputs: Any, options: Mapping[str, Any]
) -> tuple[Indices, Indices, int, bool]:
    """Return the item of each sample, which sample it is, N, and whether ids are [B, T].

    items: those of the batch. A sample without rows is left out, unless each item is a sample.
    """
    rows = sample_rows({"batch_size": None, **options}, *arguments_of(inputs))
    assert rows is not None
    ids, n, each = rows[0].cpu(), rows[1], np.arange(rows[1])
    grid = ids.dim() == 2
    by_row = grid and len(ids) == len(items)  # an item is a row
    if not n or (len(items) == n and not by_row):  # nothing but padding; or an item is a sample
        return items[:n], each, n, grid
    row = torch.arange(len(items), device="cpu")[:, None] if by_row else 0
    keys = (row * n + ids)[ids >= 0].unique().numpy()  # by row, then by id
    places, samples = keys // n, keys % n
    in_one_row = len(np.unique(samples)) == len(samples)
    either = len(items) == n and not np.array_equal(keys, each * (n + 1))  # by row, or by sample
    if not (by_row or len(items) == 1) or not in_one_row or either:
        raise ValueError(
            f"sample_ids(args, kwargs) has {n} samples in a batch of {len(items)} items, and does "
            "not show which item each is of: have the collate_fn make a row of ids [B, T] of each "
            "item, numbered row by row, or one sample of each item, or set the loader's "
            "batch_size to 1"
        )
    return items[places], samples, n, grid
