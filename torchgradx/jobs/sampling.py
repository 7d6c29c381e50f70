"""Importance sampling: samples are drawn by their last known norm, and weighted against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .arguments import indices_of, norms_of


class IndexedDataset(Dataset[Any]):
    """(index, dataset[index]) for each sample, so that a training loop knows which it has."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __repr__(self) -> str:
        return f"IndexedDataset({self.dataset!r})"


class ImportanceSampler(Sampler[int]):
    """Draws sample i with probability p_i = (1 - smoothing) norm_i / sum(norms) + smoothing / N.

    Weights of 1 / (N p_i) keep training unbiased; its variance is least where p follows the norms
    (Alain et al. 2015, arXiv:1511.06481; Katharopoulos and Fleuret 2018, arXiv:1803.00942).
    `smoothing` bounds the weights by 1 / smoothing. Norms given to `update` take effect when the
    next iteration begins. A sample that was not drawn yet counts as the mean of the others.

    Equivalent to, for one iteration::

        p = (1 - smoothing) * norms / norms.sum() + smoothing / N
        indices = torch.multinomial(p, num_samples, replacement=True)
        weights = 1 / (N * p[indices])

    Example::

        sampler = ImportanceSampler(len(dataset))
        loader = DataLoader(IndexedDataset(dataset), batch_size=32, sampler=sampler)
        for index, (x, y) in loader:  # with probe = attach(model)
            weights = sampler.weights(index)
            loss = (weights * F.cross_entropy(model(x), y, reduction="none")).mean()
            loss.backward()
            sampler.update(index, probe.norms(loss_scale=weights))

    Args:
        size: N, of the dataset (or the dataset itself).
        num_samples: drawn in one iteration, after which new norms take effect; None: N.
        batch_size: of the loader, if that says drop_last=True: what would fill no batch is not
            drawn, so that each draw is used, and a restored state begins no iteration of none.
        smoothing: the part drawn evenly, above 0 and up to 1.
        seed: of the sampler's generator. Under DDP give each rank another one: ranks draw alone,
            each from what it has seen, and each is unbiased.
    """

    def __init__(
        self,
        size: int | Sized,
        *,
        num_samples: int | None = None,
        batch_size: int = 1,
        smoothing: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.size = size if isinstance(size, int) else len(size)
        self.num_samples = self.size if num_samples is None else num_samples
        sizes = {"size": self.size, "num_samples": self.num_samples, "batch_size": batch_size}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int, 1 or more; got {value!r}")
        if batch_size > self.num_samples:
            raise ValueError(
                f"batch_size must be at most num_samples = {self.num_samples}; got {batch_size!r}"
            )
        self.num_samples -= self.num_samples % batch_size
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing must be above 0 and up to 1; got {smoothing!r}")
        self.smoothing = smoothing
        self._norms = torch.full((self.size,), torch.nan, dtype=torch.float64, device="cpu")
        self._generator = torch.Generator().manual_seed(seed)
        self._resumed: int | None = None  # draws of this iteration that a restored state has seen
        self._begin()
        self._updated: int | None = None  # by update(), of this iteration; None before the first

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        skipped, self._resumed = self._resumed, None
        if skipped is not None and skipped >= self.num_samples:  # it had come to its end
            self._norms.new_empty(self.num_samples).uniform_(generator=self._generator)
            skipped = None
        if skipped is None:
            self._begin()
        # cumsum and searchsorted: torch.multinomial knows 2^24 categories at most
        edges = self._p.cumsum(0)
        places = self._norms.new_empty(self.num_samples).uniform_(generator=self._generator)
        drawn = torch.searchsorted(edges, places * edges[-1], right=True)
        yield from drawn.clamp_(max=self.size - 1)[skipped or 0 :].tolist()

    def _begin(self) -> None:
        self._start = self._generator.get_state()
        self._updated = 0
        norms = torch.where(self._norms.isfinite(), self._norms, self._norms.nanmean())
        total = norms.sum()  # nan where no norm is known
        even = torch.full_like(norms, 1 / self.size)
        self._p = torch.lerp(norms / total, even, self.smoothing) if total > 0 else even

    def __repr__(self) -> str:
        known = int(self._norms.isfinite().sum())
        return f"ImportanceSampler(size={self.size}, known={known}, smoothing={self.smoothing})"

    def probabilities(self) -> Tensor:
        """[N] float64: of the draws of the iteration that goes on (before the first: its own)."""
        return self._p.clone()

    def weights(self, indices: Any) -> Tensor:
        """[B] float32, on the device of `indices`: 1 / (N p), for samples that were drawn.

        mean(weights * losses) over a batch has the mean loss over the dataset as its expectation.
        """
        where = torch.from_numpy(indices_of(indices, self.size))
        weights = (1 / (self.size * self._p[where])).float()
        return weights.to(indices.device) if isinstance(indices, Tensor) else weights

    def update(self, indices: Any, norms: Any) -> None:
        """Note the norms [B] of a batch's own gradients, once a batch: state_dict counts by them.

        `norms` may be the probe, if `probe.loss_scale` is set to the weights before the forward.
        A norm that is not finite leaves what was known of its sample.
        """
        where = torch.from_numpy(indices_of(indices, self.size))
        values = norms_of(norms).to("cpu", torch.float64)
        if values.shape != where.shape:
            raise ValueError(
                f"norms must be [{len(where)}], as many as indices; got {list(values.shape)}"
            )
        if bool((values < 0).any()):
            raise ValueError("norms must not be negative")
        good = values.isfinite()
        for place, value in zip(where[good].tolist(), values[good].tolist(), strict=True):
            self._norms[place] = value  # in order, which an indexed assignment does not promise
        if self._updated is not None:
            self._updated += len(where)

    def state_dict(self) -> dict[str, Any]:
        """Restored, the iteration goes on after the samples that `update` was called with."""
        return {
            "norms": self._norms.clone(),
            "probabilities": self._p.clone(),
            "generator": self._start.clone(),
            "seen": self._updated,
            "num_samples": self.num_samples,
            "smoothing": self.smoothing,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, of a sampler of the same size."""
        if len(state["norms"]) != self.size:
            raise ValueError(f"the state is of {len(state['norms'])} samples, not {self.size}")
        self._norms, self._p = state["norms"].clone(), state["probabilities"].clone()
        self.num_samples, self.smoothing = state["num_samples"], state["smoothing"]
        self._start, self._updated = state["generator"].clone(), state["seen"]
        self._generator.set_state(self._start)
        self._resumed = self._updated
