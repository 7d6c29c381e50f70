"""One bit per tensor of a forward: is it the same for any batch, computed from parameters and
constants alone?

A gradient that mixes samples may be that of a table that all samples share (positions, relative
biases), or of something computed from several samples, which has no gradient by sample. The graph
does not distinguish these, since data needs no gradient. So the operators of one forward are
observed, as by a profiler (csrc/record/watch.cpp): no number changes for it. Nothing is constant by
default: arguments, data hidden in objects, and what comes from NumPy are not. Without the compiled
extension a dispatch mode does the same, under which autocast may round a few operators otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from .. import ops
from ..hooks.copies import untraced
from .layout import BATCH, SEQUENCE

if ops.NATIVE:
    from .. import _C


class Watch:
    """Watches the operators of this thread, from here to `stop`."""

    def __init__(
        self, constants: Iterable[Tensor], arguments: Sequence[Tensor], n: int, batch_dim: int
    ) -> None:
        """constants: parameters and buffers."""
        # By site and the place among its calls: 1 if it is given constants alone; the layout of the
        # samples in what it is given. None: that does not show.
        self.inputs: dict[tuple[int, int], int | None] = {}
        self.anchored: dict[tuple[int, int], int | None] = {}
        self._calls: Counter[int] = Counter()
        whole = (t for t in arguments if t.shape[batch_dim : batch_dim + 1] == (n,))
        first = next(whole, None)
        shared = [t for t in arguments if first is not None and _is_shared(t, first, n, batch_dim)]
        # Data comes after them: one of it may be a view of what holds samples.
        data = [t for t in arguments if all(t is not other for other in shared)]
        # picks: data decided how many rows there are (x[mask]) and no node shows it;
        # is_constant(node, number): this output of it is known to be the same for any batch.
        self.observer = (_C.Watch if ops.NATIVE else WatchMode)(
            [*constants, *shared], data, n, batch_dim
        )

    def note_call(self, site: int, inputs: Sequence[Tensor]) -> None:
        """Note what a site is called with."""
        call = site, self._calls[site]
        self._calls[site] += 1
        self.inputs[call] = 1 if all(map(self.observer.knows_constant, inputs)) else None
        dim = self.observer.holds(inputs[0]) if inputs else -1
        self.anchored[call] = (BATCH, SEQUENCE, None)[dim]


class WatchMode(TorchDispatchMode):
    """The same as csrc/record/watch.cpp, where there is no compiled extension."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports the whole compiler, 70 MiB and two seconds

    def __init__(
        self, constants: Iterable[Tensor], data: Iterable[Tensor], n: int, batch_dim: int
    ) -> None:
        super().__init__()
        self._on, self.picks, self._n, self._batch_dim = True, False, n, batch_dim
        # By storage, which views and in-place writes share: is it constant, and the elements from
        # one sample to the next, 0 where that is not known. A weak reference keeps its address.
        self._known: dict[int, tuple[StorageWeakRef, bool, int]] = {}
        self._bits: dict[tuple[Any, int], bool] = {}  # as consumed, by node and output
        for t in constants:
            self._mark(t, True)
        for t in data:
            self._mark(t, False, self._stride(t, batch_dim))
        self.__enter__()

    def stop(self) -> None:
        """Leave. Beneath modes that an interrupt left it stays, and does nothing."""
        self._on, self._known = False, {}
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def is_constant(self, node: Any, number: int) -> bool:
        return self._bits.get((node, number), False)

    def stands(self, t: Tensor) -> bool:
        """Return True for views and elementwise results of an argument, samples in place."""
        return self._known_stride(t) > 0 and self._known_stride(t) == self._stride(
            t, self._batch_dim
        )

    def holds(self, t: Tensor) -> int:
        """Return which of the first two dimensions it is seen to have them in; -1: neither."""
        known = self._known_stride(t)
        return next((dim for dim in (0, 1) if known > 0 and known == self._stride(t, dim)), -1)

    def _known_stride(self, t: Tensor) -> int:
        storage = _storage_of(t)
        known = None if storage is None else self._known.get(storage._cdata)
        return 0 if known is None else known[2]

    def _stride(self, t: Tensor, d: int) -> int:
        """Return the elements from one sample to the next, if they are in this dimension, n*T+t."""
        if t.dim() <= d or t.layout is not torch.strided or t.shape[d] % self._n:
            return 0
        return t.stride(d) * (t.shape[d] // self._n)

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        bits = [self.knows_constant(t) for t in operands]  # before it runs: it may work in place
        for t, constant in zip(operands, bits, strict=True):
            for one in (t, t._base):  # of a view that was written into, the graph has the base
                if one is not None and one.grad_fn is not None:
                    key = one.grad_fn, one.output_nr
                    self._bits[key] = self._bits.get(key, True) and constant
        stand = [self.stands(t) for t in operands]
        pointwise = torch.Tag.pointwise in getattr(func, "tags", ())
        pointwise = pointwise and all(a or b for a, b in zip(stand, bits, strict=True))
        shapes = [
            t.shape for t, stands in zip(operands, stand, strict=True) if pointwise and stands
        ]
        with torch._C._DisableAutocast():  # it has done its part, above
            out = func(*args, **kwargs)
        constant = all(bits)
        if not constant and torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
            self.picks = self.picks or _picks(func, operands)
        for t in () if constant else _written(func, args, kwargs):
            self._mark(t, False)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                alike = bool(shapes) and not t.is_nested and t.shape in shapes
                stride = self._stride(t, self._batch_dim) if alike else self._known_stride(t)
                self._mark(t, constant or _is_of_sizes(func), stride)
        return out

    def knows_constant(self, t: Tensor) -> bool:
        storage = _storage_of(t)
        if storage is None:
            return False
        known = self._known.get(storage._cdata)
        if known is not None:
            return known[1]
        # A number that Python made; and parameters that fully_shard brings together.
        return not t.dim() or (t.is_leaf and t.requires_grad)

    def _mark(self, t: Tensor, constant: bool, stride: int = 0) -> None:
        storage = _storage_of(t)
        if storage is not None:
            self._known[storage._cdata] = StorageWeakRef(storage), constant, stride


def _storage_of(t: Tensor) -> torch.UntypedStorage | None:
    try:
        return t.untyped_storage()
    except Exception:  # sparse and nested tensors have none
        return None


def _is_of_sizes(func: Any) -> bool:
    """Return True for zeros_like(x), x.new_ones(...), bernoulli(x, 0.1): no value of x is read."""
    schema = getattr(func, "_schema", None)
    name = "" if schema is None else schema.name.removeprefix("aten::")
    return bool(
        name.endswith("_like")
        or name.startswith("new_")
        or (schema is not None and name == "bernoulli" and schema.overload_name == "p")
    )


def _picks(func: Any, operands: Sequence[Tensor]) -> bool:
    """Return whether it takes rows of data; what has a gradient is seen in the graph."""
    name = func._schema.name.removeprefix("aten::")
    return not name.startswith("nonzero") and not any(t.requires_grad for t in operands)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the operands that an operation works on in place."""
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.is_mutable:
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _is_shared(t: Tensor, first: Tensor, n: int, batch_dim: int) -> bool:
    """Return True for ids and masks that all samples share, as positions [T] or [1, T]."""
    shape, like = list(t.shape), list(first.shape)
    if t.is_floating_point() or t.is_complex() or not shape:
        return False
    if first.is_floating_point() and first.dim() < 3:
        return False
    one = [*like[:batch_dim], 1, *like[batch_dim + 1 :]]
    if n in shape:
        return shape == one  # T = N
    rows = [like[:batch_dim] + like[batch_dim + 1 :]]
    if len(shape) > max(1, batch_dim):
        rows.append(one)
    return any(shape == row[: len(shape)] for row in rows)
