"""Scores as a file: .npz, CSV or Parquet, there whole or not at all."""

from __future__ import annotations

import csv
import importlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scores", "checked_path", "save_scores"]

Scores = NDArray[np.floating[Any]] | Mapping[str, NDArray[np.floating[Any]]]


def save_scores(path: str | os.PathLike[str], scores: Scores, *, name: str = "norm") -> None:
    """Write scores as the ending of `path` says; a file that is there is replaced at once.

    .npz: an array [N] by name. .csv and .parquet: a column "index", 0 to N - 1, and one by name.

    Args:
        path: ends in .npz, .csv or .parquet (which needs pyarrow).
        scores: [N], or a dict of them by name, as `score` returns.
        name: of the column, where `scores` is one array.

    Raises:
        ValueError: another ending, or arrays of different lengths.
        ImportError: .parquet without pyarrow.
    """
    path = checked_path(path)
    columns = dict(scores) if isinstance(scores, Mapping) else {name: scores}
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ValueError(f"scores must be of one length; got {sorted(lengths)}")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            WRITERS[path.suffix](file, columns)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that scores can be written to, found out before there are any."""
    path = Path(path)
    if path.suffix not in WRITERS:
        raise ValueError(f"out must end in {', '.join(WRITERS)}; got {str(path)!r}")
    if path.is_dir():
        raise ValueError(f"out must be a file; {str(path)!r} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"out must be in a folder that exists; got {str(path)!r}")
    if path.suffix == ".parquet":
        _pyarrow("pyarrow")
    return path


def _npz(file: IO[bytes], columns: Mapping[str, NDArray[Any]]) -> None:
    # Not savez(**columns): a parameter may be called "file".
    with zipfile.ZipFile(file, mode="w") as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(column), allow_pickle=False)


def _csv(file: IO[bytes], columns: Mapping[str, NDArray[Any]]) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", *columns])
    # str of a numpy number: as few digits as tell it from its neighbours
    writer.writerows(
        [i, *map(str, row)] for i, row in enumerate(zip(*columns.values(), strict=True))
    )
    text.detach()


def _parquet(file: IO[bytes], columns: Mapping[str, NDArray[Any]]) -> None:
    size = len(next(iter(columns.values()), ()))
    table = _pyarrow("pyarrow").table({"index": np.arange(size), **columns})
    _pyarrow("pyarrow.parquet").write_table(table, file)


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "a .parquet file needs pyarrow: pip install pyarrow, or write .npz or .csv"
        ) from error


WRITERS = {".npz": _npz, ".csv": _csv, ".parquet": _parquet}
