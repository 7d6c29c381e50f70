"""What can be read off an operation and what it is given, before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["Step", "argument_of", "indices_of", "name_of", "numbers", "of_processes",
           "of_sizes_only", "real", "signed", "tensors_of", "written"]  # fmt: skip


class Step(NamedTuple):
    """An operation of a forward."""

    func: Any
    args: Any
    kwargs: Any
    operands: Sequence[Tensor]
    verdicts: Sequence[bool | None]  # of each: False where samples entered it, None: nobody knows

    @property
    def fed(self) -> list[Tensor]:
        return self._with(False)

    @property
    def unknown(self) -> list[Tensor]:
        return self._with(None)

    def _with(self, verdict: bool | None) -> list[Tensor]:
        told = zip(self.operands, self.verdicts, strict=True)
        return [t for t, clean in told if clean is verdict]


def name_of(func: Any) -> str:
    """Without its namespace, and whether it works in place."""
    name: str = func._schema.name
    return name.partition("::")[2].rstrip("_")


def argument_of(func: Any, args: Sequence[Any], kwargs: Any, name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            given = args[place] if place < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def numbers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from value


def indices_of(func: Any, args: Sequence[Any]) -> Iterator[tuple[Tensor, list[Any]]]:
    """What is indexed, and by dimension with what."""
    if isinstance(args[1], (list, tuple)):
        yield args[0], list(args[1])
    elif isinstance(args[1], int) and len(args) > 2:  # index_select, index_copy, index_add
        dim = args[1] % max(1, args[0].dim())
        yield args[0], [None] * dim + [args[2]]


def of_sizes_only(func: Any) -> bool:
    """zeros_like(x), x.new_ones(...), bernoulli(x, 0.1): nothing of the operand's values."""
    named = name_of(func).endswith("_like") or name_of(func).startswith("new_")
    named = named or func._schema.name + func._schema.overload_name == "aten::bernoullip"
    return bool(func.namespace == "aten" and named)


def of_processes(func: Any) -> bool:
    """What they do together: none does it by itself."""
    return any(x in func.namespace for x in ("c10d", "symm_mem"))


def real(t: Tensor) -> bool:
    """Whether gradients may come to its numbers: they are no indices, counts or flags."""
    return t.is_floating_point() or t.is_complex()


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What it works on in place."""
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))


def signed(number: int) -> int:
    """Of a dimension, which graph nodes show as unsigned."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def tensors_of(out: Any) -> list[tuple[int, Tensor]]:
    """Its results, by their places among all."""
    return [(k, t) for k, t in enumerate(tree_leaves(out)) if isinstance(t, Tensor)]
