"""A pool of samples as score() reads it: by index, in batches, whatever the loader's sampler."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

__all__ = ["Pool", "Split", "missed", "moved", "random_state_kept", "split_batch"]

Split = Callable[[Any], tuple[Any, Any]]

# What a loader of our own, over the same dataset, takes over.
COPIED = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    "multiprocessing_context",
)


class Batches:
    """Indices in batches: some made by a sampler of the user's own, then the rest in order.

    A Python int takes four times the memory of one in an array, so that the rest stays in one.
    """

    def __init__(self, made: list[list[int]], rest: NDArray[np.intp], size: int) -> None:
        self._made, self._rest, self._size = made, rest, size
        self.repeated = 0  # how often the first comes again at the end

    def __len__(self) -> int:
        """Less those that are repeated."""
        return len(self._made) - (-len(self._rest) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._made
        for start in range(0, len(self._rest), self._size):
            yield self._rest[start : start + self._size].tolist()
        if self.repeated:
            first = self._made[0] if self._made else self._rest[: self._size].tolist()
            yield from itertools.repeat(first or [0], self.repeated)


class Pool:
    """The samples dataset[0], ..., dataset[N - 1] of a loader, each of which is read once."""

    def __init__(self, loader: Any) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(
                f"loader must be a torch.utils.data.DataLoader; got {type(loader).__name__}"
            )
        self.dataset: Any = loader.dataset
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__len__"):
            raise TypeError(
                "loader must be over a dataset of known length, whose scores have an order; got "
                f"{type(self.dataset).__name__}, an iterable one: use a map-style dataset, or "
                "grad_norms batch by batch"
            )
        sampler = loader.batch_sampler
        # The dataset is indexed by whole batches: batch_size=None beside sampler=BatchSampler(...).
        self._whole = sampler is None and isinstance(loader.sampler, BatchSampler)
        if self._whole:
            sampler = loader.sampler
        if sampler is None:
            raise ValueError(
                "loader must make batches of samples; got batch_size=None, under which one item "
                "of the dataset is no sample: say batch_size="
            )
        self._loader, self._sampler = loader, sampler

    def __len__(self) -> int:
        return len(self.dataset)

    def sample(self, index: int) -> Any:
        return self.dataset[[index]] if self._whole else self.dataset[index]

    def batches(self, wanted: NDArray[np.bool_]) -> Batches:
        """Return the wanted indices, each in one batch.

        A batch sampler of the user's own keeps samples together that belong together, as those of
        one length: its batches, less what is not wanted or came before, and then the rest.
        """
        if type(self._sampler) is BatchSampler:
            return Batches([], np.flatnonzero(wanted), self._sampler.batch_size)
        left = wanted.copy()
        found = self._grouped(left)
        return Batches(found, np.flatnonzero(left), max(map(len, found), default=1))

    def _grouped(self, wanted: NDArray[np.bool_]) -> list[list[int]]:
        """Return the sampler's batches of what is wanted, which then is wanted no more."""
        found, drawn = [], 0
        for batch in self._sampler:
            fresh = []
            for index in batch:
                if wanted[index]:
                    wanted[index] = False
                    fresh.append(int(index))
            if fresh:
                found.append(fresh)
            drawn += len(batch)
            if drawn >= len(self):  # it may never end
                break
        return found

    def read(self, batches: Iterable[list[int]]) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """(indices [n], what the loader makes of these samples)"""
        options = {name: getattr(self._loader, name) for name in COPIED}
        options |= {"sampler": batches, "batch_size": None} if self._whole else {
            "batch_sampler": batches
        }  # fmt: skip
        loader = DataLoader(self.dataset, **options)
        for indices, batch in zip(batches, loader, strict=True):
            yield np.asarray(indices, dtype=np.int64), batch

    def generators(self) -> list[torch.Generator]:
        """Those that reading may draw from, beside the global ones."""
        holders = (self._loader, self._sampler, getattr(self._sampler, "sampler", None))
        held = (getattr(holder, "generator", None) for holder in holders)
        return [generator for generator in held if isinstance(generator, torch.Generator)]


@contextlib.contextmanager
def random_state_kept(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Whatever is drawn inside, of torch, numpy or Python, is drawn again after it."""
    python, numpy = random.getstate(), np.random.get_state()
    states = [generator.get_state() for generator in generators]
    try:
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a batch, where the user does not say how.

    A dict: itself, and its "labels" if it has any. A sequence: its last element is the targets,
    what stands before it the inputs. A tensor, or one element alone: no targets.
    """
    if isinstance(batch, Mapping):
        return batch, batch.get("labels")
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if not batch:
        raise ValueError("the loader gave an empty batch: say split=")
    if len(batch) == 1:
        return batch[0], None
    *inputs, targets = batch
    return inputs[0] if len(inputs) == 1 else tuple(inputs), targets


@contextlib.contextmanager
def missed(targets: Any, wanted: bool) -> Iterator[None]:
    """Add what to do to the error of a loss that was given no targets."""
    try:
        yield
    except TypeError as error:
        if targets is not None or not wanted:
            raise
        raise TypeError(
            f'{error}. No targets were found, which are the last of a sequence or "labels" of '
            "a dict: say split=, batch -> (inputs, targets)"
        ) from error


def moved(batch: Any, device: torch.device) -> Any:
    """Return all tensors of a batch on a device."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return tree_map(one, batch)
