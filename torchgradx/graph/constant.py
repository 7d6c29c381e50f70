"""Finds the tensors of a forward that are the same for any batch: constants.

A gradient that mixes samples may belong to a table that all samples share (positions, relative
biases), or to something computed from several samples, which has no gradient by sample. The graph
does not distinguish these, since data needs no gradient. So the operators of one forward are
observed, as by a profiler (csrc/record/watch.cpp), which changes no number. A tensor is constant if
it is computed from parameters, buffers and constants alone. Arguments, data hidden in objects, and
arrays from NumPy are not. Without the compiled extension a dispatch mode observes them. Under that
mode autocast may round a few operators differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from ..extension import _C, NATIVE
from ..hooks.copies import untraced
from .layout import BATCH, SEQUENCE


class Watch:
    """Observes the operators of this thread, until `observer.stop()`."""

    def __init__(
        self, constants: Iterable[Tensor], arguments: Sequence[Tensor], n: int, batch_dim: int
    ) -> None:
        """Start to observe. constants: parameters and buffers."""
        # By (site, number of the call of this site). inputs: 1 if all inputs are constants.
        # anchored: the layout of the samples in the first input. None: not known.
        self.inputs: dict[tuple[int, int], int | None] = {}
        self.anchored: dict[tuple[int, int], int | None] = {}
        self._calls: Counter[int] = Counter()
        first = next((t for t in arguments if t.shape[batch_dim : batch_dim + 1] == (n,)), None)
        shared = [t for t in arguments if first is not None and _is_shared(t, first, n, batch_dim)]
        # Data is marked after the constants: a data tensor may share memory with one of them.
        data = [t for t in arguments if all(t is not other for other in shared)]
        self.picked: dict[int, bool] = {}  # by site: True if data decided a count of rows there
        # observer.is_constant(node, number): this output of a node is constant.
        # observer.is_picked(t): data decided a count of rows, as in x[mask], and no node shows it.
        observe = _C.Watch if NATIVE else WatchMode
        self.observer = observe([*constants, *shared], data, n, batch_dim)

    def note_call(self, site: int, inputs: Sequence[Tensor]) -> None:
        """Note the inputs of a call of a site."""
        call = site, self._calls[site]
        self._calls[site] += 1
        self.inputs[call] = 1 if all(map(self.observer.knows_constant, inputs)) else None
        self.note_rows(site, inputs)
        dim = self.observer.holds(inputs[0]) if inputs else -1
        self.anchored[call] = (BATCH, SEQUENCE, None)[dim]

    def note_rows(self, site: int, tensors: Sequence[Tensor]) -> None:
        """Note whether data decided the count of rows of inputs or outputs of a site."""
        picked = any(map(self.observer.is_picked, tensors))
        self.picked[site] = self.picked.get(site, False) or picked


# Operators that take rows of their first operand at places that the others give.
TAKES = {"embedding", "gather", "index_select", "take"}
PUTS = {"index_add", "index_copy", "scatter", "scatter_add"}  # along the dimension args[1]


class _Memory(NamedTuple):
    """Facts about one storage, which views and in-place writes share."""

    ref: StorageWeakRef  # keeps the address, which is our key, from being used again
    is_constant: bool
    is_picked: bool
    stride: int  # elements from one sample to the next; 0: not known


class WatchMode(TorchDispatchMode):
    """Observer in plain Python, in place of csrc/record/watch.cpp, with the same methods."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports the whole compiler: 70 MiB and two seconds

    def __init__(
        self, constants: Iterable[Tensor], data: Iterable[Tensor], n: int, batch_dim: int
    ) -> None:
        super().__init__()
        self._is_on, self.picks, self._n, self._batch_dim = True, False, n, batch_dim
        self._memories: dict[int, _Memory] = {}  # by the address of the storage
        self._bits: dict[tuple[Any, int], bool] = {}  # by node and output, when it was consumed
        for t in constants:
            self._mark(t, True, False)
        for t in data:
            self._mark(t, False, False, self._stride(t, batch_dim))
        self.__enter__()

    def stop(self) -> None:
        """Leave the mode. Below modes that an interrupt left behind it stays, and does nothing."""
        self._is_on, self._memories = False, {}
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def is_constant(self, node: Any, number: int) -> bool:
        return self._bits.get((node, number), False)

    def knows_constant(self, t: Tensor) -> bool:
        if (memory := self._find(t)) is not None:
            return memory.is_constant
        # A scalar that Python made, or a parameter that fully_shard gathered.
        return not t.dim() or (t.is_leaf and t.requires_grad)

    def is_picked(self, t: Tensor) -> bool:
        if (memory := self._find(t)) is not None:
            return memory.is_picked
        return self.picks and t.dim() > 0 and not (t.is_leaf and t.requires_grad)  # of NumPy

    def unpick(self, t: Tensor) -> None:
        if (memory := self._find(t)) is not None:
            self._mark(t, memory.is_constant, False, memory.stride)

    def holds(self, t: Tensor) -> int:
        """Return which of the first two dimensions holds the samples; -1: neither is known to."""
        stride = self._known_stride(t)
        return next((dim for dim in (0, 1) if stride > 0 and stride == self._stride(t, dim)), -1)

    def _find(self, t: Tensor) -> _Memory | None:
        storage = _storage_of(t)
        return None if storage is None else self._memories.get(storage._cdata)

    def _known_stride(self, t: Tensor) -> int:
        return 0 if (memory := self._find(t)) is None else memory.stride

    def _stride(self, t: Tensor, d: int) -> int:
        """Return the elements from one sample to the next if dimension d has rows n*T+t, else 0."""
        if t.dim() <= d or t.layout is not torch.strided or t.shape[d] % self._n:
            return 0
        return t.stride(d) * (t.shape[d] // self._n)

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_on:
            return func(*args, **kwargs)
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        bits = [self.knows_constant(t) for t in operands]  # before the operator writes in place
        for t, bit in zip(operands, bits, strict=True):
            for consumed in (t, t._base):  # after a write into a view the graph shows its base
                if consumed is not None and consumed.grad_fn is not None:
                    key = consumed.grad_fn, consumed.output_nr
                    self._bits[key] = self._bits.get(key, True) and bit
        # True: `batch_dim` holds the samples of a view, or of an elementwise result.
        in_place = [0 < self._known_stride(t) == self._stride(t, self._batch_dim) for t in operands]
        tags = getattr(func, "tags", ())
        others = (bit for bit, ok in zip(bits, in_place, strict=True) if not ok)
        keeps = torch.Tag.pointwise in tags and all(others)  # samples stay in place
        shapes = [t.shape for t, ok in zip(operands, in_place, strict=True) if keeps and ok]
        with torch._C._DisableAutocast():  # above this mode, autocast has done its casts
            out = func(*args, **kwargs)
        constant, picked = all(bits), any(map(self.is_picked, operands))
        if not constant:
            name = _name_of(func)
            takes = torch.Tag.dynamic_output_shape in tags or (name in TAKES and not bits[0])
            writes = name.rstrip("_") in PUTS and args[1] in (0, self._batch_dim)
            takes = takes or (writes and not all(bits[1:]))
            if takes and not name.startswith("nonzero"):
                # It takes rows of data. Where a gradient flows, the graph shows it.
                picks = not any(t.requires_grad for t in operands)
                picked, self.picks = picked or picks, self.picks or picks
            for t in _written(func, args, kwargs):
                self._mark(t, False, picked)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                alike = not t.is_nested and t.shape in shapes
                stride = self._stride(t, self._batch_dim) if alike else self._known_stride(t)
                self._mark(t, constant or _reads_sizes_only(func), picked, stride)
        return out

    def _mark(self, t: Tensor, constant: bool, picked: bool, stride: int = 0) -> None:
        storage = _storage_of(t)
        if storage is not None:
            memory = _Memory(StorageWeakRef(storage), constant, picked, stride)
            self._memories[storage._cdata] = memory


def _storage_of(t: Tensor) -> torch.UntypedStorage | None:
    try:
        return t.untyped_storage()
    except Exception:  # sparse and nested tensors have none
        return None


def _name_of(func: Any) -> str:
    """Return an operator's name; "" of one of higher order."""
    return getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")


def _reads_sizes_only(func: Any) -> bool:
    """Return True if an operator reads no value: zeros_like, new_ones, bernoulli(x, 0.1)."""
    name = _name_of(func)
    if name == "bernoulli":
        return bool(func._schema.overload_name == "p")
    return name.endswith("_like") or name.startswith("new_")


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the operands that an operator writes into."""
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.is_mutable:
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def _is_shared(t: Tensor, first: Tensor, n: int, batch_dim: int) -> bool:
    """Return True for one number (a time step), and for ids and masks that all samples share, such
    as positions [T] or [1, T]. first: the first argument that has the samples in `batch_dim`."""
    shape, sizes = list(t.shape), list(first.shape)
    if t.numel() == 1 < n:
        return True
    if t.is_floating_point() or t.is_complex():
        return False
    if first.is_floating_point() and first.dim() < 3:
        return False
    before, after = sizes[:batch_dim], sizes[batch_dim + 1 :]
    single = [*before, 1, *after]
    if n in shape:
        return shape == single  # T = N
    rows = [before + after]
    if len(shape) > max(1, batch_dim):
        rows.append(single)
    return any(shape == row[: len(shape)] for row in rows)
