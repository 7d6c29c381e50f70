"""The scoring of a pool: one model after another, each attached once, batch after batch."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..kept import model_kept
from ..layers.table import Parameters
from ..probe import Probe
from ..scoring import grads_kept, norms_only
from ..sharding import sharded
from . import fingerprint
from .partial import Gathered, ResumeError
from .pool import Pool, Split, missed, moved, split_batch
from .progress import progress
from .quantities import Quantities
from .ranks import Ranks
from .segments import items_of


@dataclass
class Job:
    """One call of score(), on this rank."""

    pool: Pool
    quantity: Quantities
    wanted: NDArray[np.bool_]
    ranks: Ranks
    split: Split | None
    eval_mode: bool
    shows: bool
    path: Path | None  # of the partial result
    facts: Mapping[str, Any]
    resume: bool

    def __post_init__(self) -> None:
        self._mine = self.wanted & self.ranks.mine(len(self.pool))
        self._gathered: Gathered | None = None

    def run(self, models: nn.Module | Iterable[nn.Module]) -> None:
        if isinstance(models, nn.Module) or not isinstance(models, Iterable):
            models = [models]  # a Sequential is iterable, too
        count = 0
        for count, model in enumerate(models, 1):
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"model must be a torch.nn.Module, or several; got {type(model).__name__}"
                )
            columns, self._dtype = self._columns(model)
            gathered = self._begin(model, count, columns)
            if count == len(gathered.models):
                self._score(model, gathered)
        if self._gathered is None:
            raise ValueError("model must be a torch.nn.Module, or several; got none")
        if count != len(self._gathered.models):
            raise ResumeError(
                f"the partial result is of {len(self._gathered.models)} models; got {count}"
            )

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return {name: [N]}, of all ranks; with sample_ids the item and id of each entry too."""
        assert self._gathered is not None
        mine, mean = self._gathered.mean()
        counts = self.ranks.sum(torch.from_numpy(np.bincount(mine, minlength=len(self.pool))))
        items = np.repeat(np.arange(len(self.pool)), counts.numpy())
        whole = np.zeros((len(items), len(self._gathered.columns)))
        whole[self._mine[items]] = mean
        whole = self.ranks.sum(torch.from_numpy(whole)).numpy()
        named: dict[str, NDArray[Any]] = {}
        if self.quantity.by_sample:
            firsts = np.cumsum(counts.numpy()) - counts.numpy()
            named = {"item": items, "id": np.arange(len(items)) - firsts[items]}
        else:
            rows, whole = whole, np.full((len(self.pool), whole.shape[1]), np.nan)
            whole[items] = rows
        values = np.ascontiguousarray(whole.T.astype(self._dtype))
        return named | dict(zip(self._gathered.columns, values, strict=True))

    def close(self, remove: bool = False) -> None:
        if self._gathered is not None:
            self._gathered.close(remove)

    def _columns(self, model: nn.Module) -> tuple[list[str], np.dtype[Any]]:
        """Return the names of what is scored, in the parameters' order, and the scores' dtype."""
        table = Parameters(model)
        trainable = table.trainable()
        dtypes = {table.tensor(place).dtype for place in trainable or range(len(table.names))}
        names = [table.names[place] for place in trainable]
        if self.quantity.per == "model":
            names = list(self.quantity.kinds)
        elif self.quantity.per == "module":
            names = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        for name in {"item", "id"}.intersection(names) if self.quantity.by_sample else ():
            raise ValueError(f"{name!r} is the name of a column with sample_ids: rename the module")
        return names, np.dtype(np.float64 if torch.float64 in dtypes else np.float32)

    def _begin(self, model: nn.Module, count: int, columns: list[str]) -> Gathered:
        """Start gathering for `count` models at least; the last may have begun before."""
        if self._gathered is None:
            self._gathered = Gathered(len(self.pool), columns)
            if self.path is not None:
                self._gathered.keep(self.path, self.facts, self.resume)
        gathered = self._gathered
        if columns != gathered.columns:
            raise ValueError("models whose scores are averaged must have parameters alike")
        shared = self.ranks.world > 1 and not sharded(model.modules())
        mark = fingerprint.of_model(model, not self.eval_mode) if shared or self.path else ""
        if shared and not self.ranks.agree(mark):
            raise ValueError(
                "model must be the same on all ranks, and is not: load a checkpoint, make it from "
                "the same seed, or broadcast its buffers (DistributedDataParallel leaves them so)"
            )
        if count > len(gathered.models):
            gathered.begin(mark)
        elif gathered.models[count - 1] != mark:
            raise ResumeError(
                f"{self.path} holds scores of another model, or of other weights: write to "
                "another file, or say resume=False to begin anew"
            )
        return gathered

    def _score(self, model: nn.Module, gathered: Gathered) -> None:
        inner, prefix = model, ""
        if isinstance(model, DistributedDataParallel):  # which would wait for the other ranks
            inner, prefix = model.module, "module"
        first = next(itertools.chain(inner.parameters(), inner.buffers()), torch.Tensor())
        batches = self.pool.batches(self._mine & ~gathered.done)
        count = len(batches)
        if sharded(inner.modules()):  # a sharded model's forward needs all ranks
            again = batches[0] if batches else np.zeros(1, np.int64)
            batches += [again] * (self.ranks.largest(count) - count)
            self.quantity.forwards = self.ranks.largest(max(map(len, batches), default=0))
        total, before = int(self._mine.sum()), int((self._mine & gathered.done).sum())
        if before and self.shows:
            text = f"going on from {before:,} of {total:,} samples, in {gathered.path}"
            print(text, file=sys.stderr, flush=True)
        with (
            model_kept(inner, self.eval_mode),
            self._attached(inner) as probe,
            progress(total, before, self.shows) as advance,
        ):
            for place, (indices, batch) in enumerate(self.pool.read(batches)):
                inputs, targets = (self.split or split_batch)(moved(batch, first.device))
                lacking = self.split is None and self.quantity.loss_fn is not None
                n, order = len(indices), None
                if self.quantity.by_sample:
                    indices, order, n, grid = items_of(indices, inputs, self.quantity.options)
                    if grid and list(self.quantity.kinds) != ["norm"]:
                        raise ValueError('kind must be "norm" with sample_ids [B, T]')
                if not n:
                    advance(len(batches[place]))
                    continue
                with missed(targets, lacking and self.quantity.needs_loss), grads_kept(inputs):
                    found = self.quantity(inner, probe, inputs, targets)
                    rows = self._rows(found, prefix, gathered.columns)
                if len(rows) != n:
                    raise ValueError(
                        f"the loader made a batch of {len(rows)} of {n} samples, so that no one "
                        "knows which is which: its collate_fn must keep them all"
                    )
                if place < count:
                    gathered.add(indices, rows if order is None else rows[order])
                    advance(len(batches[place]))

    def _attached(self, model: nn.Module) -> contextlib.AbstractContextManager[Probe | None]:
        if not self.quantity.backwards:
            return contextlib.nullcontext()
        reduction = {"loss_reduction": self.quantity.loss_reduction}
        return norms_only(model, **{"check": "samples", **self.quantity.options, **reduction})

    def _rows(
        self, found: Mapping[str, Tensor], prefix: str, columns: list[str]
    ) -> NDArray[np.float64]:
        """[n, K]"""
        if prefix and self.quantity.per != "model":
            found = {f"{prefix}.{name}".rstrip("."): v for name, v in found.items()}
        device = found[columns[0]].device  # of a model on several, norms and losses are not on one
        return torch.stack([found[name].to(device).double() for name in columns], 1).cpu().numpy()
