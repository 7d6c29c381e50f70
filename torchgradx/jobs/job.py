"""The scoring of a pool: one model after another, each attached once, batch after batch."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..attach import attach, set_aside
from ..probe import Probe
from ..scoring import gradients_put_by
from ..sharding import gathers
from ..table import Parameters
from . import fingerprint
from .partial import Gathered, Partial, ResumeError
from .pool import Pool, Split, missed, moved, split_batch
from .progress import bar
from .quantities import Quantities
from .ranks import Ranks

__all__ = ["Job"]


class Job:
    split: Split | None = None
    eval_mode = True
    shown = True

    def __init__(
        self,
        pool: Pool,
        quantity: Quantities,
        wanted: NDArray[np.bool_],
        ranks: Ranks,
        options: Mapping[str, Any],
    ) -> None:
        self._pool, self._quantity, self._ranks = pool, quantity, ranks
        self._wanted, self._mine = wanted, wanted & ranks.mine(len(pool))
        self._options = {
            "weight_grad": False,
            "check": "samples",
            **options,
            "loss_reduction": quantity.loss_reduction,
        }
        self._batch_dim: int = options.get("batch_dim", 0)
        self._names: list[str] = []
        self._dtype: Any = np.float32
        self._gathered: Gathered | None = None
        self._file: Partial | None = None
        self._keep: tuple[Path, Mapping[str, Any], bool] | None = None

    def keep(self, path: Path, facts: Mapping[str, Any], resume: bool) -> None:
        """Write what is gathered to a file, too."""
        self._keep = path, facts, resume

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def forget(self) -> None:
        assert self._file is not None
        self._file.remove()

    def run(self, models: nn.Module | Iterable[nn.Module]) -> None:
        count = 0
        if isinstance(models, nn.Module):
            models = [models]  # a Sequential is iterable, too
        elif not isinstance(models, Iterable):
            _refuse_model(models)
        for count, model in enumerate(models, 1):
            if not isinstance(model, nn.Module):
                _refuse_model(model)
            gathered = self._begin(model, count)
            if count == len(gathered.models):
                self._score(model, gathered)
        if not count or self._gathered is None:
            raise ValueError("model must be a torch.nn.Module, or several; got none")
        if count != len(self._gathered.models):
            raise ResumeError(
                f"the partial result is of {len(self._gathered.models)} models; got {count}"
            )

    def columns(self) -> dict[str, NDArray[Any]]:
        """{name: [N]}, of all ranks"""
        assert self._gathered is not None
        whole = self._ranks.whole(self._gathered.mean(), self._mine)
        whole[~self._wanted] = np.nan
        columns = np.ascontiguousarray(whole.T.astype(self._dtype))
        return dict(zip(self._names, columns, strict=True))

    def _begin(self, model: nn.Module, count: int) -> Gathered:
        """Start gathering for `count` models at least; the last may have begun before."""
        names, dtype = self._columns_of(model)
        if self._gathered is None:
            self._names, self._dtype = names, dtype
            self._gathered = Gathered(len(self._pool), len(names))
            if self._keep is not None:
                path, facts, resume = self._keep
                facts = {**facts, "columns": names}
                self._file = Partial(path, facts, self._gathered, resume)
        if names != self._names:
            raise ValueError("models whose scores are averaged must have parameters alike")
        kept = self._file is not None
        shared = self._ranks.world > 1 and not gathers(model.modules())
        mark = fingerprint.of_model(model, not self.eval_mode) if kept or shared else ""
        if shared and not self._ranks.agree(mark):
            raise ValueError(
                "model must be the same on all ranks, and is not: load a checkpoint, or make it "
                "from the same seed"
            )
        if count > len(self._gathered.models):
            (self._file or self._gathered).begin(mark)
        elif self._gathered.models[count - 1] != mark:
            assert self._file is not None
            raise ResumeError(
                f"{self._file.path} holds scores of another model, or of other weights: write to "
                "another file, or say resume=False to begin anew"
            )
        return self._gathered

    def _columns_of(self, model: nn.Module) -> tuple[list[str], Any]:
        """The names of what is scored, in the order of the parameters, and the scores' dtype."""
        table = Parameters(model)
        trainable = table.trainable()
        wide = any(table.tensor(place).dtype == torch.float64 for place in trainable)
        names = [table.names[place] for place in trainable]
        if self._quantity.per == "model":
            names = list(self._quantity.kinds)
        elif self._quantity.per == "module":
            names = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        return names, np.float64 if wide else np.float32

    def _score(self, model: nn.Module, gathered: Gathered) -> None:
        inner, prefix = model, ""
        if isinstance(model, DistributedDataParallel):  # which would wait for the other ranks
            inner, prefix = model.module, "module"
        first = next(itertools.chain(inner.parameters(), inner.buffers()), torch.empty(0))
        todo = self._mine & ~gathered.done
        batches = self._pool.batches(todo)
        if gathers(inner.modules()):  # a sharded model's forward needs all ranks
            batches.repeated = self._ranks.largest(len(batches)) - len(batches)
        with _untouched(inner, self.eval_mode), self._attached(inner) as probe:
            total = int(self._mine.sum())
            before = total - int(todo.sum())
            if before and self._file is not None and self.shown:
                said = f"going on from {before:,} of {total:,} samples, in {self._file.path}"
                print(said, file=sys.stderr, flush=True)
            shown = bar(total, before, self.shown)
            try:
                for place, (indices, batch) in enumerate(self._pool.read(batches)):
                    inputs, targets = (self.split or split_batch)(moved(batch, first.device))
                    with missed(targets, self.split is None and self._quantity.needs_targets):
                        found = self._quantity(inner, probe, inputs, targets, self._batch_dim)
                        rows = self._rows(found, prefix)
                    if len(rows) != len(indices):
                        raise ValueError(
                            f"the loader made a batch of {len(rows)} of {len(indices)} samples, so "
                            "that no one knows which is which: its collate_fn must keep them all"
                        )
                    if place < len(batches):
                        (self._file or gathered).add(indices, rows)
                        shown.update(len(indices))
            finally:
                shown.close()

    @contextlib.contextmanager
    def _attached(self, model: nn.Module) -> Iterator[Probe | None]:
        if not self._quantity.needs_probe:
            yield None
            return
        with (
            set_aside(model),
            gradients_put_by(model),
            torch.inference_mode(False),
            torch.enable_grad(),
            attach(model, **self._options) as probe,
        ):
            yield probe

    def _rows(self, found: Mapping[str, Tensor], prefix: str) -> NDArray[np.float64]:
        """[n, K]"""
        if prefix and self._quantity.per != "model":
            found = {f"{prefix}.{name}".rstrip("."): v for name, v in found.items()}
        if not self._names:
            return np.zeros((0, 0))
        return torch.stack([found[name].double() for name in self._names], 1).cpu().numpy()


def _refuse_model(model: Any) -> NoReturn:
    raise TypeError(f"model must be a torch.nn.Module, or several; got {type(model).__name__}")


@contextlib.contextmanager
def _untouched(model: nn.Module, eval_mode: bool) -> Iterator[None]:
    """In eval mode, if so told; afterwards its modes and buffers are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    if eval_mode:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
