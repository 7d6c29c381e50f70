"""The scores gathered so far, and the SQLite file that holds them against a kill.

Each batch is a transaction of its own, in a write-ahead log: a kill loses the batch in hand. The
file belongs to one process while it is open.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Gathered", "Partial", "ResumeError"]

SETTINGS = ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL")
TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS facts (json TEXT);  -- what the scores are of
CREATE TABLE IF NOT EXISTS models (number INTEGER, mark TEXT);
CREATE TABLE IF NOT EXISTS scores (model INTEGER, indices BLOB, float64 BLOB, checksum INTEGER);
COMMIT;
"""


class ResumeError(ValueError):
    """A partial result is of another model, dataset or options than those given now."""


class Gathered:
    """Scores [N, K] of one model after another, and their sum over those that are done."""

    def __init__(self, size: int, columns: int) -> None:
        self.models: list[str] = []  # fingerprints
        self.values = np.full((size, columns), np.nan)
        self.done = np.zeros(size, bool)  # by the last of the models
        self._sums: NDArray[np.float64] | None = None

    def begin(self, model: str) -> None:
        if self.models:
            self._sums = self.values.copy() if self._sums is None else self._sums + self.values
        self.models.append(model)
        self.done[:] = False
        self.values[:] = np.nan

    def add(self, indices: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self.values[indices] = values
        self.done[indices] = True

    def mean(self) -> NDArray[np.float64]:
        """[N, K], NaN where nothing was scored"""
        if self._sums is None:
            return self.values
        return (self._sums + self.values) / len(self.models)


class Partial:
    """What is gathered, written to a file as it comes."""

    def __init__(self, path: Path, facts: Mapping[str, Any], gathered: Gathered, resume: bool):
        self.path, self._gathered = path, gathered
        if not path.exists():
            open(path, "ab").close()  # says what is wrong with a path, as SQLite does not
        self._db = self._open()
        try:
            if not (resume and self._replay(json.loads(json.dumps(facts)))):
                for table in ("facts", "models", "scores"):
                    self._db.execute(f"DELETE FROM {table}")
                self._db.execute("INSERT INTO facts VALUES (?)", [json.dumps(facts)])
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            for setting in SETTINGS:
                db.execute(f"PRAGMA {setting}")
            db.executescript(TABLES)
            if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("malformed")
        except sqlite3.OperationalError as error:
            db.close()
            if "locked" not in str(error):
                raise OSError(f"{self.path} cannot be written: {error}") from error
            raise BlockingIOError(f"{self.path} is being written by another process") from None
        except sqlite3.DatabaseError as error:
            db.close()
            if "malformed" in str(error):  # nothing of it can be relied on
                self.path.unlink()
                return self._open()
            raise ResumeError(
                f"{self.path} is no partial result of torchgradx.score: move it out of the way, "
                "or write to another file"
            ) from error
        return db

    def _replay(self, facts: dict[str, Any]) -> bool:
        """Gather what the file holds; False if that is nothing, which binds nobody."""
        marks = [mark for (mark,) in self._db.execute("SELECT mark FROM models ORDER BY number")]
        found = False
        for row, model, *blobs, checksum in self._db.execute(
            "SELECT rowid, * FROM scores ORDER BY rowid"
        ).fetchall():
            if zlib.crc32(b"".join(blobs)) != checksum:
                self._db.execute("DELETE FROM scores WHERE rowid >= ?", [row])
                break
            if not found:
                (before,) = self._db.execute("SELECT json FROM facts").fetchone()
                self._check(json.loads(before), facts)
            while len(self._gathered.models) <= model:
                self._gathered.begin(marks[len(self._gathered.models)])
            indices, values = np.frombuffer(blobs[0], np.int64), np.frombuffer(blobs[1])
            self._gathered.add(indices, values.reshape(len(indices), -1))
            found = True
        self._db.execute("DELETE FROM models WHERE number >= ?", [len(self._gathered.models)])
        return found

    def _check(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**now, **before}:  # those of its columns come last
            if before.get(name) != now.get(name):
                raise ResumeError(
                    f"{self.path} holds scores of something else: {name} was "
                    f"{before.get(name)!r} and is {now.get(name)!r}. Go on with what it was, write "
                    "to another file, or say resume=False to begin anew"
                )

    def begin(self, model: str) -> None:
        number = len(self._gathered.models)
        self._gathered.begin(model)
        self._db.execute("INSERT INTO models VALUES (?, ?)", [number, model])

    def add(self, indices: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._gathered.add(indices, values)
        row = len(self._gathered.models) - 1, indices.tobytes(), values.tobytes()
        checksum = zlib.crc32(row[1] + row[2])
        self._db.execute("INSERT INTO scores VALUES (?, ?, ?, ?)", [*row, checksum])

    def close(self) -> None:
        self._db.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
