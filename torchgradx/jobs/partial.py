"""Scores gathered so far, and the SQLite file that keeps them through a kill.

Each batch is a transaction in a write-ahead log: a kill loses the batch in hand. The file belongs
to one process while it is open.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

OPENING = (
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "BEGIN IMMEDIATE",
    "CREATE TABLE IF NOT EXISTS facts (json TEXT)",  # what the scores are of
    "CREATE TABLE IF NOT EXISTS scores (model INTEGER, mark TEXT, indices BLOB, float64 BLOB)",
    "COMMIT",
)


class ResumeError(ValueError):
    """A partial result is of another model, dataset or options than those given now."""


class Gathered:
    """Scores of one model after another, in memory and, given a path, in a file.

    A row of K scores is of an item of the dataset, or of one of the samples in it.
    """

    def __init__(self, size: int, columns: list[str]) -> None:
        self.columns = columns
        self.models: list[str] = []  # fingerprints
        self.done = np.zeros(size, bool)  # by the last of the models
        self.path: Path | None = None
        self._batches = [(np.zeros(0, np.int64), np.zeros((0, len(columns))))]  # of the last model
        self._sums: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None  # of those before
        self._db: sqlite3.Connection | None = None

    def keep(self, path: Path, facts: Mapping[str, Any], resume: bool) -> None:
        """Write all that comes to a file, after gathering what it holds already."""
        now = json.loads(json.dumps({**facts, "columns": self.columns}))
        if not path.exists():
            open(path, "ab").close()  # says what is wrong with a path, as SQLite does not
        db = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            for statement in OPENING:
                db.execute(statement)
            if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("malformed")
            rows = db.execute("SELECT * FROM scores ORDER BY rowid").fetchall() if resume else []
            if rows:  # a file without scores binds nobody
                _check(path, json.loads(db.execute("SELECT json FROM facts").fetchone()[0]), now)
            else:
                db.execute("DELETE FROM facts")
                db.execute("DELETE FROM scores")
                db.execute("INSERT INTO facts VALUES (?)", [json.dumps(now)])
        except sqlite3.DatabaseError as error:
            db.close()
            if "locked" in str(error):
                raise BlockingIOError(f"{path} is being written by another process") from None
            raise ResumeError(
                f"{path} is no partial result of torchgradx.score, or a damaged one ({error}): "
                "delete it, or write to another file"
            ) from error
        except BaseException:
            db.close()
            raise
        for model, mark, indices, values in rows:
            if model == len(self.models):
                self.begin(mark)
            found = np.frombuffer(indices, np.int64)
            self.add(found, np.frombuffer(values).reshape(len(found), len(self.columns)))
        self._db, self.path = db, path

    def begin(self, model: str) -> None:
        if self.models:
            self._sums = self._summed()
            del self._batches[1:]
        self.models.append(model)
        self.done[:] = False

    def add(self, indices: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._batches.append((indices, values))
        self.done[indices] = True
        if self._db is not None:
            row = len(self.models) - 1, self.models[-1], indices.tobytes(), values.tobytes()
            self._db.execute("INSERT INTO scores VALUES (?, ?, ?, ?)", row)

    def mean(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the item of each row, in ascending order, and the rows [R, K]."""
        items, sums = self._summed()
        return items, sums / len(self.models)

    def _summed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        indices, values = map(np.concatenate, zip(*self._batches, strict=True))
        order = indices.argsort(kind="stable")
        items, rows = indices[order], values[order]
        if self._sums is None:
            return items, rows
        if not np.array_equal(items, self._sums[0]):
            raise ValueError("sample_ids must name the same samples for each of several models")
        return items, self._sums[1] + rows

    def close(self, remove: bool = False) -> None:
        if self._db is not None:
            self._db.close()
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)


def _check(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            raise ResumeError(
                f"{path} holds scores of something else: {name} was {before.get(name)!r} and is "
                f"{now.get(name)!r}. Go on with what it was, write to another file, or say "
                "resume=False to begin anew"
            )
