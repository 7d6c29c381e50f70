"""A pool of samples as score() reads it: by index, in batches, whatever the loader's sampler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..graph.arguments import map_leaves
from ..scoring import arguments_of

Split = Callable[[Any], tuple[Any, Any]]
Indices = NDArray[np.int64]

# What a loader of our own, over the same dataset, takes over.
COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
          "multiprocessing_context")  # fmt: skip


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
        # A dataset may be indexed by whole batches: batch_size=None, sampler=BatchSampler(...).
        self._whole = loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
        self._loader: Any = loader
        self._sampler: Any = loader.sampler if self._whole else loader.batch_sampler
        if self._sampler is None:
            raise ValueError(
                "loader must make batches of samples; got batch_size=None, under which one item "
                "of the dataset is no sample: say batch_size="
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def sample(self, index: int) -> Any:
        return self.dataset[[index]] if self._whole else self.dataset[index]

    def batches(self, wanted: NDArray[np.bool_]) -> list[Indices]:
        """Return the wanted indices, each in one batch.

        A batch sampler of the user's own keeps samples together that belong together, as those of
        one length: its batches, less what is not wanted or came before, and then the rest.
        """
        left, found, size = wanted.copy(), [], 1
        if type(self._sampler) is BatchSampler:
            size = self._sampler.batch_size
        else:
            drawn = 0
            for batch in self._sampler:
                unseen = [i for i in dict.fromkeys(map(int, batch)) if left[i]]
                fresh = np.array(unseen, dtype=np.int64)
                left[fresh] = False
                found += [fresh] if len(fresh) else []
                size, drawn = max(size, len(fresh)), drawn + len(batch)
                if drawn >= len(self):  # it may never end
                    break
        rest = np.flatnonzero(left)
        return found + [rest[start : start + size] for start in range(0, len(rest), size)]

    def read(self, batches: Sequence[Indices]) -> Iterator[tuple[Indices, Any]]:
        """Yield the indices of each batch, and what the loader makes of these samples."""
        options = {name: getattr(self._loader, name) for name in COPIED}
        lists = (batch.tolist() for batch in batches)
        if self._whole:
            loader = DataLoader(self.dataset, sampler=lists, batch_size=None, **options)
        else:
            loader = DataLoader(self.dataset, batch_sampler=lists, **options)
        return zip(batches, loader, strict=True)

    def generators(self) -> list[torch.Generator]:
        """Return those that reading may draw from, beside the global ones."""
        holders = (self._loader, self._sampler, getattr(self._sampler, "sampler", None))
        generators = (getattr(holder, "generator", None) for holder in holders)
        return [generator for generator in generators if isinstance(generator, torch.Generator)]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch, where the user does not say how.

    A dict: itself, and its "labels" if it has any. A sequence: its last element is the targets,
    what stands before it the inputs. A tensor, or one element alone: no targets.
    """
    if isinstance(batch, Mapping):
        return batch, batch.get("labels")
    parts, _ = arguments_of(batch)
    if len(parts) == 1:
        return parts[0], None
    *inputs, targets = parts
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
    """Return a batch with all its tensors on a device."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return map_leaves(one, batch)
