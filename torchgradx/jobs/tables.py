"""Scores as a file: .npz, CSV or Parquet, there whole or not at all."""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Scores = NDArray[np.floating[Any]] | Tensor | Mapping[str, Any]


def save_scores(path: str | os.PathLike[str], scores: Scores, *, name: str = "norm") -> None:
    """Write scores as the ending of `path` says; a file that is there is replaced at once.

    .npz: an array [N] by name. .csv and .parquet: a column "index", 0 to N - 1 (unless there are
    columns "item" and "id", as of `score(sample_ids=)`), and one by name.

    Args:
        path: ends in .npz, .csv or .parquet (which needs pyarrow).
        scores: an array or a Tensor [N], or a dict of them by name, as `score` and `norms` return.
        name: of the column, where `scores` is one array.

    Raises:
        ValueError: another ending, or arrays of different lengths.
        ImportError: .parquet without pyarrow.
    """
    path = checked_path(path)
    held = scores if isinstance(scores, Mapping) else {name: scores}
    arrays = (v.detach().cpu() if isinstance(v, Tensor) else v for v in held.values())
    columns = dict(zip(held, map(np.asarray, arrays), strict=True))
    shapes = {column.shape for column in columns.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise ValueError(f"scores must be [N], of one length; got {sorted(map(list, shapes))}")
    index = {"index": np.arange(max(shapes, default=(0,))[0])}
    indexed = columns if {"item", "id"} <= columns.keys() else {**index, **columns}
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            if path.suffix == ".npz":
                np.savez(file, **columns)  # type: ignore[arg-type]
            elif path.suffix == ".parquet":
                _pyarrow("pyarrow.parquet").write_table(_pyarrow("pyarrow").table(indexed), file)
        if path.suffix == ".csv":
            with beside.open("w", newline="") as text:
                writer = csv.writer(text, lineterminator="\n")
                writer.writerow(indexed)
                # str of a numpy number: as few digits as tell it from its neighbours
                writer.writerows(map(str, row) for row in zip(*indexed.values(), strict=True))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that scores can be written to, or raise before there are any."""
    path = Path(path)
    if path.suffix not in (".npz", ".csv", ".parquet"):
        raise ValueError(f"out must end in .npz, .csv, .parquet; got {str(path)!r}")
    if path.is_dir():
        raise ValueError(f"out must be a file; {str(path)!r} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"out must be in a folder that exists; got {str(path)!r}")
    if path.suffix == ".parquet":
        _pyarrow("pyarrow")
    return path


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "a .parquet file needs pyarrow: pip install pyarrow, or write .npz or .csv"
        ) from error
