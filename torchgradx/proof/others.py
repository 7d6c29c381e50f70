"""Whether a model gives a sample what it would give it among others: where it did what cannot be
followed, its forward is done a few times more, by copies: as it was, which has to come out as it
did, and with one sample in the place of all, which has to come out as it did among them.

That sees what no graph and no operation by itself shows: rows that a sort over the batch chooses,
counts that happen to be alike, and numbers that go through Python or NumPy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..sharding import scattered
from ..sites.outcome import roundings
from ..sites.regime import Regime
from ..sites.stand_in import held_in, of_its_own, put, state_of_its_own
from ..sites.whole import Whole
from .arguments import begins, plain, sized, tensors_in
from .asked import unlike
from .memory import storage_of
from .operation import of_processes, real, tensors_of, written
from .sample_dims import GONE, Place

__all__ = ["Others"]

ALONE = 8  # samples, of all over the batch
SMALL = 1 << 24  # bytes of frozen weights, which a forward may write into
MOST, LOOKED, FAR = 1 << 20, 1 << 14, 8  # operations, elements, times


class _ElsewhereError(RuntimeError):
    """It would write into what is not its own, or talk to other processes."""


class _EndlessError(RuntimeError):
    """It does far more than the batch took, as a loop that waits for two samples of a kind."""


class _Apart(TorchDispatchMode):
    """What runs inside writes into what is its own alone, and calls no other process."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return "torch._dynamo" in sys.modules

    def __init__(self, own: Iterable[Tensor], most: int) -> None:
        super().__init__()
        self._own, self.steps, self._most = set(_memories(own)), 0, most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.steps += 1
        if self.steps > self._most:
            raise _EndlessError
        into = [*written(func, args, kwargs)]
        if "batch_norm" in func._schema.name:  # its schema does not say that it writes statistics
            into += [t for t in args[3:5] if isinstance(t, Tensor)]
        if of_processes(func) or not self._own.issuperset(_memories(into)):
            raise _ElsewhereError
        out = func(*args, **kwargs)
        given = set(_memories(t for _, t in tensors_of((args, kwargs))))
        self._own.update(set(_memories(t for _, t in tensors_of(out))) - given)  # a view is no new
        return out


def _memories(tensors: Iterable[Tensor]) -> Iterator[int]:
    return (s._cdata for s in map(storage_of, tensors) if s is not None)


class Others:
    """Of one forward, that is yet to run: its model and arguments as they are now."""

    def __init__(
        self,
        n: int,
        model: nn.Module,
        whole: Whole,
        arguments: Any,
        places: Sequence[Place | None],
        batch_dim: int,
    ) -> None:
        self._n, self._whole, self._batch_dim, given = n, whole, batch_dim, sized(arguments)
        own: dict[int, Any] = {id(t): _leaf(t.clone(), t) for t in given}
        self._places = {id(own[id(t)]): at for t, at in zip(given, places, strict=True)}
        self._arguments = tree_map(lambda v: state_of_its_own(v, own), arguments)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        frozen = frozen if sum(p.nbytes for p in frozen) < SMALL else []
        self._model = of_its_own(model, weights=False)
        put(self._model, {id(p): _parameter(p.clone(), p) for p in frozen})
        self._frozen, self._saves, self._most = bool(frozen), False, MOST
        self._modes = [m.training for m in model.modules()]
        self._regime = Regime.current(model, True)

    @staticmethod
    def of(
        n: int,
        model: nn.Module,
        arguments: Any,
        places: Sequence[Place | None],
        batch_dim: int,
    ) -> Others | None:
        """None: what is large, compiled or shared does not run by itself."""
        parts = list(model.modules())
        compiled = any(
            vars(m).get("_compiled_call_impl") or "_orig_mod" in m._modules for m in parts
        )
        if compiled or scattered(model.parameters()):
            return None
        try:
            whole = None if begins(arguments) else Whole.of(model, tree_leaves(arguments))
            if whole is None:
                return None
            with torch.no_grad():  # the graph's nodes are counted
                return Others(n, model, whole, arguments, places, batch_dim)
        except Exception:  # it holds what does not even let itself be looked at
            return None

    def mix(self, outputs: Sequence[Tensor], places: Sequence[Place | None]) -> bool:
        """Whether others show in outputs of samples; `places` of these, as followed."""
        alone = len(outputs) == 1
        found = [at or self._place(t, alone) for t, at in zip(outputs, places, strict=True)]
        known = [(k, at) for k, at in enumerate(found) if at is not None and at != GONE]
        try:
            again, drew = self._again(outputs) if known else ([], True)
            if drew:  # numbers for each row, and rows may be elsewhere
                again, drew = self._run(None, still=True)
            for sample in {k * (self._n - 1) // (ALONE - 1) for k in range(0 if drew else ALONE)}:
                for_all, _ = self._run(sample, still=True)
                if any(self._strays(again[k], for_all[k], at, sample) for k, at in known):
                    return True
        except _EndlessError:
            return True
        except Exception:  # it may be a batch that the model does not take
            return False
        return False

    def _again(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """As it was; raises unless it comes out as it did."""
        for self._saves in (False, True):  # torch.func and autograd.grad need what is saved
            with contextlib.suppress(Exception):
                again, drew = self._run(None)
                if len(again) == len(outputs) and all(map(self._alike, again, outputs)):
                    return again, drew
        raise RuntimeError("it goes another way each time")

    def _place(self, t: Tensor, alone: bool) -> Place | None:
        """Where samples that were lost from sight have to be in an output, if anywhere."""
        fits = [dim for dim, size in enumerate(t.shape) if size == self._n]
        there = self._batch_dim in fits and (alone or len(fits) == 1)
        return Place(self._batch_dim) if t.requires_grad and there else None

    def _run(self, sample: int | None, still: bool = False) -> tuple[list[Tensor], bool]:
        """The outputs, and whether random numbers were drawn; `still`: none for dropout."""

        def other(t: Tensor) -> Tensor:
            at = self._places.get(id(t))
            if sample is None or at is None or not plain(t):
                return t.clone()
            return _of_one(t, at, sample, self._n)

        tensors = [t for t in tensors_in(self._arguments) if id(t) in self._places]
        seen: dict[int, Any] = {id(t): _leaf(other(t), t) for t in tensors}
        args, kwargs = tree_map(lambda v: state_of_its_own(v, seen), self._arguments)
        model = of_its_own(self._model, weights=False)
        weights = [p for p in model.parameters() if isinstance(p, nn.Parameter)]
        frozen = {id(p): p.clone() for p in weights if self._frozen and not p.requires_grad}
        put(model, {id(p): _parameter(frozen.get(id(p), p), p) for p in weights})
        for m, training in zip(model.modules(), self._modes, strict=True):
            m.training = training and not (still and isinstance(m, _DropoutNd))
        held = [*model.buffers(), *held_in(model), *seen.values(), *frozen.values()]
        own = [t for t in held if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        kept = contextlib.nullcontext() if self._saves else saved_tensors_hooks(_none, _none)
        apart = _Apart(own, self._most)
        with self._whole.kept(), self._regime.again(), torch.enable_grad(), kept, apart:
            torch.set_autocast_cache_enabled(False)  # as before at the end: it outlives the copies
            before = Regime.current(model, True)
            outputs = tensors_in(model._call_impl(*args, **kwargs))
            self._most = min(self._most, FAR * (apart.steps + FAR))
            return outputs, not before.same_numbers(Regime.current(model, True))

    def _alike(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and not bool(self._differs(a, b).any())

    def _strays(self, a: Tensor, b: Tensor, at: Place, sample: int) -> bool:
        """Whether the rows of this sample differ."""
        if a.dim() != b.dim() or a.shape[at.dim] != b.shape[at.dim] or not real(a):
            return False
        # Cut to the longest sample there is, it has less: from the first on, or to the last.
        ends = [_common(a, b, last) for last in ((False, True) if a.shape != b.shape else (False,))]
        return all(bool(self._differs(*pair).movedim(at.dim, 0)[self._rows(a, at, sample)].any())
                   for pair in ends)  # fmt: skip

    def _rows(self, t: Tensor, at: Place, sample: int) -> Tensor:
        rows = torch.arange(t.shape[at.dim], device=t.device)
        return rows // at.inner % self._n == sample

    def _differs(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.detach(), b.detach()
        if not real(a):
            return a != b
        eps = max(torch.finfo(kind).eps for kind in (a.dtype, self._regime.autocast or a.dtype))
        rounding, loud = roundings(eps) * eps, _loud(a)  # as a mask's constants are
        soft = unlike(a.masked_fill(loud, 0), b.masked_fill(loud, 0), 0, rounding)
        return soft | (loud & unlike(a, b, rounding, 0))


def _loud(t: Tensor) -> Tensor:
    """Numbers that would hide what becomes of the others."""
    sizes = t.abs()
    some = sizes.flatten()[:: 1 + t.numel() // LOOKED]
    some = some[some.isfinite() & (some > 0)]
    return sizes > FAR**4 * some.kthvalue(1 + len(some) // FAR).values if len(some) else sizes > 0


def _leaf(t: Tensor, like: Tensor) -> Tensor:
    return t.detach().requires_grad_(like.requires_grad)


def _parameter(t: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(t.detach(), like.requires_grad)


def _none(kept: Any) -> Any:
    """Of a graph for no backward."""


def _common(a: Tensor, b: Tensor, last: bool) -> tuple[Tensor, Tensor]:
    """What both have along each dimension."""
    for dim, sizes in enumerate(zip(a.shape, b.shape, strict=True)):
        size = min(sizes)
        a, b = (t.narrow(dim, t.shape[dim] - size if last else 0, size) for t in (a, b))
    return a, b


def _of_one(t: Tensor, place: Place, sample: int, n: int) -> Tensor:
    """With one sample in the place of each."""
    rows = torch.arange(t.shape[place.dim], device=t.device)
    return t.index_select(place.dim, rows + (sample - rows // place.inner % n) * place.inner)
