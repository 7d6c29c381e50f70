"""The scores gathered so far, and the file that holds them against a kill.

The file only grows. A record is its kind, the length and checksum of its payload, and the payload;
by these one whose writing was cut off is noticed, and cut away. HEADER: JSON, what the scores are
of. MODEL: the fingerprint of the model that the VALUES after it are of. VALUES: count (int64),
indices (int64) and scores (float64, row by row). A batch is written at once, so that a kill loses
at most the batch in hand; it is on the disk, should the power fail, within SYNC seconds.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Gathered", "Partial", "ResumeError"]

MAGIC = b"torchgradx partial scores 1\n"
FRAME = struct.Struct("<cQI")  # kind, length, checksum
HEADER, MODEL, VALUES = b"H", b"M", b"V"
SYNC = 5.0  # seconds


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
    """What is gathered, written to a file as it comes. Of this process alone while it is open."""

    def __init__(self, path: Path, facts: Mapping[str, Any], gathered: Gathered, resume: bool):
        self.path, self._gathered = path, gathered
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  closed by close()
        self._synced = time.monotonic()
        try:
            self._lock()
            with path.open("rb") as file:
                if not MAGIC.startswith(file.read(len(MAGIC))):
                    raise ResumeError(
                        f"{path} is no partial result of torchgradx.score: move it out of the way, "
                        "or write to another file"
                    )
            end = self._replay(facts) if resume else 0
            self._file.truncate(end)
            if not end:
                self._file.write(MAGIC)
                self._write(HEADER, json.dumps(facts).encode())
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{self.path} is being written by another process") from None
        except OSError:
            pass  # a file system without locks

    def _replay(self, facts: Mapping[str, Any]) -> int:
        """Gather what the file holds; where that ends. What no scores follow binds nobody."""
        end, before, begun = 0, None, []
        with self.path.open("rb") as file:
            for kind, payload in _records(file):
                if kind == HEADER:
                    before = json.loads(payload)
                elif kind == MODEL:
                    begun.append(payload.decode())
                elif kind == VALUES:
                    if before is not None:
                        self._check(before, json.loads(json.dumps(facts)))
                    for model in begun:
                        self._gathered.begin(model)
                    self._gathered.add(*_unpacked(payload))
                    end, before, begun = file.tell(), None, []
        return end

    def _check(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**now, **before}:  # those of its columns come last
            if before.get(name) != now.get(name):
                raise ResumeError(
                    f"{self.path} holds scores of something else: {name} was "
                    f"{before.get(name)!r} and is {now.get(name)!r}. Go on with what it was, write "
                    "to another file, or say resume=False to begin anew"
                )

    def begin(self, model: str) -> None:
        self._gathered.begin(model)
        self._write(MODEL, model.encode())

    def add(self, indices: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._gathered.add(indices, values)
        self._write(VALUES, struct.pack("<q", len(indices)) + indices.tobytes() + values.tobytes())

    def _write(self, kind: bytes, payload: bytes) -> None:
        record = memoryview(FRAME.pack(kind, len(payload), zlib.crc32(payload)) + payload)
        while record:
            record = record[self._file.write(record) :]
        if time.monotonic() - self._synced > SYNC:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()


def _records(file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(kind, payload) of each record from the first on, as long as they are whole."""
    if file.read(len(MAGIC)) != MAGIC:
        return
    while len(frame := file.read(FRAME.size)) == FRAME.size:
        kind, length, checksum = FRAME.unpack(frame)
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield kind, payload


def _unpacked(payload: bytes) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    (count,) = struct.unpack_from("<q", payload)
    indices = np.frombuffer(payload, np.int64, count, 8)
    values = np.frombuffer(payload, np.float64, offset=8 + 8 * count)
    return indices, values.reshape(count, -1)
