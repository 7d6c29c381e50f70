"""Which tensors of a forward are the same for any batch: computed from parameters and constants.

A gradient that mixes samples may be that of a position table, which all samples share, or of
something computed from several of them, which has no gradient by sample. The graph cannot tell
these apart, since data needs no gradient. So every operation of a forward is watched once. Nothing
is clean by default: arguments, data hidden in objects and what comes from NumPy are not. Nor does
everything else hold samples: only what the arguments entered does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from .order import disorders

__all__ = ["Taint", "watching"]


class Taint(TorchDispatchMode):
    """Watches the operations of this thread, from here to `stop`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import the whole compiler, 70 MiB and two seconds

    def __init__(self, n: int, held: Iterable[Tensor], arguments: Iterable[Tensor]) -> None:
        super().__init__()
        self._n = n
        # By storage, which views and in-place writes share; a weak reference keeps its address.
        self._known: dict[int, tuple[StorageWeakRef, bool | None]] = {}
        self._seen: dict[tuple[Any, int], bool] = {}  # clean, as consumed; by node and output
        self.fed: dict[int, bool] = {}  # by site: whether samples entered all that it was given
        self.orderly = True  # nothing moved or mixed the samples
        self._on = True
        for t in held:
            self._mark(t, True)
        for t in arguments:
            self._mark(t, False)
        self.__enter__()

    def stop(self) -> None:
        self._on = False
        self._known = {}
        if _get_current_dispatch_mode() is self:  # else an interrupt left others above: stay, idle
            self.__exit__(None, None, None)

    def clean(self, node: Any, number: int) -> bool:
        """Whether this output of a graph node is known to be computed from no sample."""
        return self._seen.get((node, number), False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        verdicts = [self._is_clean(t) for t in operands]  # before it runs: it may work in place
        for t, clean in zip(operands, verdicts, strict=True):
            if t.grad_fn is not None:
                key = t.grad_fn, t.output_nr
                self._seen[key] = self._seen.get(key, True) and clean is True
        fed = [t for t, clean in zip(operands, verdicts, strict=True) if clean is False]
        if fed and self.orderly:
            try:
                self.orderly = not disorders(func, args, kwargs, self._n, fed)
            except Exception:  # what it was given has no values, or is none of torch's
                self.orderly = False
        out = func(*args, **kwargs)
        clean = False if False in verdicts else None if None in verdicts else True
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._mark(t, True if _of_sizes_only(func) else clean)
        for t in _written(func, args, kwargs) if not clean else ():
            self._mark(t, clean)
        return out

    def met(self, site: int, given: Iterable[Tensor]) -> None:
        """A use of a site."""
        if self._on:
            fed = any(self._is_clean(t) is False for t in given)
            self.fed[site] = self.fed.get(site, True) and fed

    def _is_clean(self, t: Tensor) -> bool | None:
        """False: samples entered it. None: nobody knows."""
        try:
            known = self._known.get(t.untyped_storage()._cdata)
        except Exception:  # sparse tensors have no storage
            return None
        return known[1] if known else True if t.dim() == 0 else None  # a number that Python made

    def _mark(self, t: Tensor, clean: bool | None) -> None:
        try:
            storage = t.untyped_storage()
        except Exception:
            return
        self._known[storage._cdata] = StorageWeakRef(storage), clean


class _Untraced(Taint):
    """Where the compiler is there already, it must not trace what watches."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = Taint.__torch_dispatch__


def watching(n: int, held: Iterable[Tensor], arguments: Iterable[Tensor]) -> Taint:
    """The operations from here to `stop`: `held` is clean, samples enter by the arguments."""
    return (_Untraced if "torch._dynamo" in sys.modules else Taint)(n, held, arguments)


def _of_sizes_only(func: Any) -> bool:
    """zeros_like(x), x.new_ones(...): nothing of the operand's values."""
    name: str = func._schema.name.partition("::")[2]
    return name.endswith("_like") or name.startswith("new_")


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))
