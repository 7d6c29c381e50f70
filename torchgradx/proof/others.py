"""Whether a model gives a sample what it would give it among others: where it did what cannot be
followed, its forward is done a few times more, without gradients: as it was, which has to come out
as it did, and with one sample in the place of all, which has to come out as it did among them.

That sees what no graph and no operation by itself shows: rows that a sort over the batch chooses,
counts that happen to be alike, and numbers that go through Python or NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..sharding import scattered
from ..sites.outcome import roundings
from ..sites.regime import Regime
from ..sites.stand_in import copies_whole, held_in, of_its_own, put, state_of_its_own
from .arguments import plain, sized, tensors_in
from .asked import unlike
from .memory import storage_of
from .operation import of_processes, real, tensors_of, written
from .sample_dims import GONE, Place

__all__ = ["Others"]

ALONE = 4  # samples, of all over the batch


class _ElsewhereError(RuntimeError):
    """It would write into what is not its own, or talk to other processes."""


class _Apart(TorchDispatchMode):
    """What runs inside writes into what is its own alone, and calls no other process."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return "torch._dynamo" in sys.modules

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._own = set(_memories(own))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        arguments: Any,
        places: Sequence[Place | None],
        batch_dim: int,
    ) -> None:
        self._n, self._batch_dim, given = n, batch_dim, sized(arguments)
        own: dict[int, Any] = {id(t): t.detach().clone() for t in given}
        self._places = {id(own[id(t)]): at for t, at in zip(given, places, strict=True)}
        self._arguments = tree_map(lambda v: state_of_its_own(v, own), arguments)
        self._model = of_its_own(model, weights=False)
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
            whole = copies_whole(model, tree_leaves(arguments))
            return Others(n, model, arguments, places, batch_dim) if whole else None
        except Exception:  # it holds what does not even let itself be looked at
            return None

    def mix(self, outputs: Sequence[Tensor], places: Sequence[Place | None]) -> bool:
        """Whether others show in outputs of samples; `places` of these, as followed."""
        known = [(k, at) for k, at in enumerate(places) if at is not None and at != GONE]
        if not known and len(outputs) == 1 and outputs[0].requires_grad and places[0] is None:
            along = outputs[0].shape[self._batch_dim :][:1]  # where it has to be, if anywhere
            known = [(0, Place(self._batch_dim))] if along == (self._n,) else []
        try:
            again, drew = self._run(None) if known else ([], True)
            if len(again) != len(outputs) or not all(map(self._alike, again, outputs)):
                return False  # it goes another way each time
            if drew:  # numbers for each row, and rows may be elsewhere
                again, drew = self._run(None, still=True)
            for sample in {k * (self._n - 1) // (ALONE - 1) for k in range(0 if drew else ALONE)}:
                found, _ = self._run(sample, still=True)
                looked = [(again[k], found[k], at) for k, at in known]
                if any(self._strays(*pair, sample) for pair in looked):
                    return True
        except Exception:  # it may be a batch that the model does not take
            return False
        return False

    def _run(self, sample: int | None, still: bool = False) -> tuple[list[Tensor], bool]:
        """The outputs, and whether random numbers were drawn; `still`: none for dropout."""

        def other(t: Tensor) -> Tensor:
            at = self._places.get(id(t))
            if sample is None or at is None or not plain(t):
                return t.clone()
            return _of_one(t, at, sample, self._n)

        tensors = [t for t in tensors_in(self._arguments) if id(t) in self._places]
        seen: dict[int, Any] = {id(t): other(t) for t in tensors}
        args, kwargs = tree_map(lambda v: state_of_its_own(v, seen), self._arguments)
        model = of_its_own(self._model, weights=False)
        weights = [p for p in model.parameters() if isinstance(p, nn.Parameter)]
        # Of its own, should it be given other numbers; with numbers that it may not write into.
        put(model, {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in weights})
        for m in model.modules() if still else ():
            m.training = m.training and not isinstance(m, _DropoutNd)
        held = [*model.buffers(), *held_in(model), *seen.values()]
        own = [t for t in held if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        with torch.no_grad(), self._regime.again(), _Apart(own):
            before = Regime.current(model, True)
            outputs = tensors_in(model._call_impl(*args, **kwargs))
            return outputs, not before.same_numbers(Regime.current(model, True))

    def _alike(self, a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and not bool(self._differs(a, b.detach()).any())

    def _strays(self, a: Tensor, b: Tensor, at: Place, sample: int) -> bool:
        """Whether the rows of this sample differ."""
        if a.shape != b.shape or not real(a):
            return False
        differs = self._differs(a, b)
        rows = differs.movedim(at.dim, 0).flatten(1).any(1) if a.dim() > 1 else differs
        own = torch.arange(len(rows), device=rows.device) // at.inner % self._n == sample
        return bool((rows & own).any())

    def _differs(self, a: Tensor, b: Tensor) -> Tensor:
        if not real(a):
            return a != b
        eps = max(torch.finfo(kind).eps for kind in (a.dtype, self._regime.autocast or a.dtype))
        return unlike(a, b, 0, roundings(eps) * eps)


def _of_one(t: Tensor, place: Place, sample: int, n: int) -> Tensor:
    """With one sample in the place of each."""
    rows = torch.arange(t.shape[place.dim], device=t.device)
    return t.index_select(place.dim, rows + (sample - rows // place.inner % n) * place.inner)
