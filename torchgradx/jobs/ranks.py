"""The processes that share a job, by torch.distributed alone; one process is the case of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


class Ranks:
    def __init__(self, distributed: bool) -> None:
        several = distributed and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if several else 0
        self.world = dist.get_world_size() if several else 1
        self._parted = False  # all ranks know that they do not go on

    def mine(self, size: int) -> NDArray[np.bool_]:
        """[N]: what a DistributedSampler(shuffle=False) gives this rank, less its padding."""
        return np.arange(size) % self.world == self.rank

    def beside(self, path: Path) -> Path:
        """This rank's partial result of what goes to `path`."""
        rank = f".rank{self.rank}" if self.world > 1 else ""
        return path.with_name(f"{path.name}{rank}.partial")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place where it can be."""
        if self.world > 1:
            there = values.to(_device())
            dist.all_reduce(there)
            values = there.to(values.device)
        return values

    def largest(self, count: int) -> int:
        return self._meet(count)[1]

    def agree(self, hexadecimal: str) -> bool:
        """Return True if all ranks say the same; otherwise none of them does."""
        least, most = self._meet(int(hexadecimal[:15], 16))
        self._parted = least != most
        return not self._parted

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks if one fails, at their next exchange: none waits in vain."""
        try:
            yield
        except Exception:
            if not self._parted:
                self._meet(failed=True)
            raise
        if self._meet() != (0, 0):  # another exchanges something else
            self._part()

    def _meet(self, number: int = 0, failed: bool = False) -> tuple[int, int]:
        """Return the least and the largest number of all ranks, of which none has failed."""
        if self.world == 1:
            return number, number
        there = torch.tensor([failed, -number, number], device=_device())
        dist.all_reduce(there, dist.ReduceOp.MAX)
        any_failed, least, most = there.tolist()
        if any_failed and not failed:
            self._part()
        return -least, most

    def _part(self) -> NoReturn:
        self._parted = True
        raise RuntimeError("it failed on another rank, whose error says why")


def _device() -> torch.device:
    """Return a device on which the process group can reduce."""
    kind = None if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    return torch.device(kind or "cpu")
