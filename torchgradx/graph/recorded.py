"""Calls of an analysis on tensors, recorded to be made again on those of another graph.

What a graph's nodes are and how they are connected decides what an analysis calls; the values of
saved indices decide its results. So for a graph of the same look the calls are made again, without
what chose them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .nodes import Node, is_leaf
from .unpacking import saved_value

SAVED_INDICES = ("index", "indices", "offs")  # under which nodes save the tensors that are read
_scalars: dict[type, list[str]] = {}  # by kind of node: the numbers that it saves
# Functions that tell of a tensor's shape, dtype or place, and nothing of its values.
DESCRIBING = {"__get__", "__len__", "dim", "numel", "size", "stride"}


class Made(NamedTuple):
    """A tensor of a program, by its number: one that is given, or made on the way."""

    number: int


class Program(NamedTuple):
    """Recorded calls: (function, arguments, keyword arguments, what is returned)."""

    steps: Sequence[tuple[Any, Sequence[Any], Mapping[str, Any], Any]]
    outputs: Sequence[Made]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for these inputs."""
        tensors: dict[Made, Any] = {Made(k): t for k, t in enumerate(inputs)}
        for function, args, named, made in self.steps:
            out = function(*[_filled(arg, tensors) for arg in args], **named)
            if type(made) is Made:
                tensors[made] = out
            else:
                tensors.update(zip(made, out, strict=True))
        return [tensors[slot] for slot in self.outputs]


class Recording(TorchFunctionMode):
    """Records what is called on tensors inside."""

    def __init__(self, inputs: Sequence[Tensor], constants: Collection[Tensor] = ()) -> None:
        """constants: tensors that every run may share."""
        super().__init__()
        self._tensors = [*inputs]  # by slot; kept, so that no other gets their ids
        self._slots = {id(t): Made(k) for k, t in enumerate(self._tensors)}
        self._constants = {id(t): t for t in constants}
        self._steps: list[Any] = []
        self._is_whole = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.__name__ in DESCRIBING:
            return func(*args, **named)
        given = [type(arg)(map(self._slot_of, arg)) if type(arg) in (list, tuple) else
                 self._slot_of(arg) for arg in args]  # fmt: skip
        out = func(*args, **named)
        made = [out] if isinstance(out, Tensor) else out
        is_known = isinstance(made, (list, tuple)) and all(isinstance(t, Tensor) for t in made)
        if not is_known or any(isinstance(t, Tensor) for t in named.values()):
            self._is_whole = False  # it may have read values
            return out
        slots = []
        for t in made:
            slots.append(self._slots.setdefault(id(t), Made(len(self._tensors))))
            self._tensors.append(t)
        self._steps.append((func, given, named, slots[0] if made[0] is out else slots))
        return out

    def _slot_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in self._constants:
            return value
        self._is_whole &= id(value) in self._slots
        return self._slots.get(id(value))

    def program(self, outputs: Sequence[Tensor]) -> Program | None:
        """Return what was recorded; None if it read values, or used tensors from elsewhere."""
        slots = [self._slots[id(t)] for t in outputs if id(t) in self._slots]
        is_whole = self._is_whole and len(slots) == len(outputs)
        return Program(self._steps, slots) if is_whole else None


def look_between(nodes: Sequence[Node], places: Mapping[int, int]) -> tuple[Any, list[Tensor]]:
    """Return a key that graphs of the same look share, and the indices that their nodes saved.
    places: of parameters, by the tensor's id."""
    numbers: dict[Any, int] = {node: k for k, node in enumerate(nodes)}
    facts: list[Any] = []
    indices: list[Tensor] = []
    for node in nodes:
        facts.append(node.name())
        facts += [tuple(kind.shape) for kind in node._input_metadata]
        for child, number in node.next_functions:
            if child is None or is_leaf(child):
                facts.append(None if child is None else (places.get(id(child.variable), -1),))
            elif child in numbers and numbers[child] < len(nodes):
                facts.append((numbers[child], number))
            else:
                shape = tuple(child._input_metadata[number].shape)
                facts.append((numbers.setdefault(child, len(numbers)), number, shape))
        for name in _scalars_of(node):
            value = getattr(node, name)
            facts.append(tuple(value) if isinstance(value, list) else value)
        for name in SAVED_INDICES:
            raw = getattr(node, f"_raw_saved_{name}", None)
            if raw is not None:
                found = saved_value(node, name)
                for t in found if isinstance(found, (list, tuple)) else (found,):
                    facts.append(t if t is None else (t.shape, t.dtype, t.stride()))
                    indices += [] if t is None else [t]
    firsts: dict[int, int] = {}  # where one tensor is in two places, its calls are of both
    facts += [firsts.setdefault(id(t), k) for k, t in enumerate(indices)]
    return tuple(facts), indices


def _scalars_of(node: Node) -> list[str]:
    kind = type(node)
    if kind not in _scalars:
        names = set(dir(kind))
        saved = (name for name in names if name.startswith("_saved_"))
        _scalars[kind] = sorted(name for name in saved if f"_raw{name}" not in names)
    return _scalars[kind]


def _filled(arg: Any, tensors: Mapping[Made, Any]) -> Any:
    """Return an argument with tensors in place of slots."""
    if type(arg) is Made:
        return tensors[arg]
    if type(arg) is list or type(arg) is tuple:
        return type(arg)([tensors[a] if type(a) is Made else a for a in arg])
    return arg
