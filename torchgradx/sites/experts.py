"""Products with the matrices of one parameter [E, *, *]: a mixture of experts.

x[rows] @ weight[e] + bias[e], once for each expert with rows; one grouped product of all; or one
with weight[ids]. A bias [E, *] is a product of its expert's rows with ones. The owners (samples) of
a product's rows follow from those of the module's output by the indices between them
(graph/owners.py). The first pass of a structure proves them like those of any output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..extension import Pass, Recorder
from ..gradients.by_sample import deliver, total
from ..gradients.grouped import GROUPED, Grouped, Pairs
from ..graph.nodes import Node, shape_of
from ..graph.unpacking import can_run_twice, is_hooked, keep_handles, saved_value
from ..hooks.copies import stock_of, untraced
from .several import End

# By node and by the operand that is the parameter: the operand with the rows, and the name under
# which the node saved them; empty: the node adds the parameter to its rows.
OPERANDS: dict[str, dict[int, tuple[int, str]]] = {
    "AddBackward0": {0: (1, ""), 1: (0, "")},
    "AddmmBackward0": {0: (1, ""), 2: (1, "mat1")},
    "BmmBackward0": {0: (1, "mat2"), 1: (0, "self")},
    GROUPED: {1: (0, "self")},
    "MmBackward0": {1: (0, "self")},
}
SINGLE = "AddmmBackward0", "MmBackward0"


class UnknownRowsError(Exception):
    """Raised where a graph does not show which samples the rows of products are of."""


@dataclass(eq=False)
class ExpertProduct:
    """One product of a call."""

    node: Node
    place: int  # of the parameter
    operand: int  # of the node, computed from the parameter
    edge: tuple[Node, int] | None  # into the parameter: the last node, and that node's operand
    matrix: int | Tensor  # the index of one matrix; of each row's; or where each one's rows end
    transposed: bool  # the parameter holds each matrix transposed
    rows_operand: int
    saved_name: str  # of the rows, see OPERANDS

    def fits(self, parameter: Tensor) -> bool:
        """Return True if the operand consists of such a parameter's whole matrices."""
        name, sizes, out = self.node.name(), tuple(parameter.shape[1:]), shape_of(self.node, 0)
        shape = shape_of(*self.node.next_functions[self.operand])
        is_one = isinstance(self.matrix, int)
        if any(getattr(self.node, f"_saved_{factor}", 1) != 1 for factor in ("alpha", "beta")):
            return False
        if not self.saved_name:  # a bias [O], or one for each row
            fits = out[1:] == sizes and shape == (sizes if is_one else out)
            return fits and len(sizes) == 1 and not self.transposed
        if is_hooked(getattr(self.node, f"_raw_saved_{self.saved_name}")):
            is_saved = can_run_twice(self.node)
        else:
            is_saved = saved_value(self.node, self.saved_name) is not None
        if not is_saved or is_one != (name in SINGLE):
            return False
        if self.transposed != (self.saved_name == "mat2"):
            sizes = sizes[::-1]
        count = () if is_one else (len(parameter) if name == GROUPED else out[0],)
        # In a batched product, each matrix must have one row, or column.
        has_one_row = name != "BmmBackward0" or out[2 - self.operand] == 1
        return len(sizes) == 2 and shape == (*count, *sizes) and has_one_row

    def matrices(self, count: int, device: torch.device) -> Tensor:
        """Return the matrix of each row [R]; `count`, the number of matrices, for a row of none."""
        rows = shape_of(self.node, 0)[0]
        if isinstance(self.matrix, int):
            return torch.full((rows,), self.matrix, device=device)
        if self.node.name() == GROUPED:
            return torch.bucketize(torch.arange(rows, device=device), self.matrix, right=True)
        return self.matrix % count

    def operands(self, node: Node, g: Tensor | None, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return (left, right), by row, whose outer products are the parameter's gradient. g: what
        the node receives; None: zeros."""
        if g is None:
            g = parameter.new_zeros(shape_of(node, 0))
        saved = self.saved_name
        with keep_handles(node):
            rows = getattr(node, f"_saved_{saved}") if saved else g.new_ones(len(g), 1)
        if saved == "mat2":  # a matrix @ columns
            g, rows = g.mT, rows.mT
        left, right = (t.detach().flatten(0, -2).to(parameter.dtype) for t in (rows, g))
        return (right, left) if self.transposed else (left, right)


class ExpertGroup(NamedTuple):
    """All products with one parameter's matrices."""

    products: list[ExpertProduct]
    pairs: Pairs  # of their rows, in this order


class Products(NamedTuple):
    """All uses of a module's parameters in one call; empty: they are not products alone."""

    groups: Mapping[int, ExpertGroup]  # by the parameter's place
    ends: list[End]  # of which a proof must confirm the rows
    # Nodes that move rows by values, within each sample; with the number of nodes that drop rows.
    by_row: Mapping[Node, int]


NO_PRODUCTS = Products({}, [], {})


class ExpertUse:
    """Products of one call, served at their nodes in one backward at a time. The nodes' hooks own
    it, so it owns no node: the garbage collector sees no cycle through a graph."""

    def __init__(
        self,
        run: Pass,
        recorder: Recorder,
        groups: Mapping[int, ExpertGroup],
        parameters: Mapping[int, Tensor],
        eps: float,
        refuse: Callable[[Exception], None],
    ) -> None:
        """groups, parameters: by place. eps: the coarsest rounding unit of gradients inside."""
        self.run, self.recorder, self.parameters = run, recorder, parameters
        self.eps, self.refuse = eps, refuse
        self._task = -1  # the backward that is served
        self._arrived: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # operands by product
        self._counts = {place: len(group.products) for place, group in groups.items()}
        self._pairs = {place: group.pairs for place, group in groups.items()}
        for place, group in groups.items():
            for k, product in enumerate(group.products):
                for_operands = replace(product, node=None, edge=None, matrix=0)
                arrive = partial(self._arrive, place, k, for_operands)
                product.node.register_prehook(arrive)

    def begin(self) -> None:
        """Serve the current backward. In others the module runs again, and edges are counted."""
        self._task, self._arrived = torch._C._current_graph_task_id(), {}

    @untraced
    def _arrive(
        self, place: int, k: int, product: ExpertProduct, incoming: Sequence[Tensor | None]
    ) -> None:
        if not self.run.arrive([place]) or self._task != torch._C._current_graph_task_id():
            return
        try:
            node = torch._C._current_autograd_node()
            arrived = self._arrived.setdefault(place, {})
            arrived[k] = product.operands(node, incoming[0], self.parameters[place])
            if len(arrived) == self._counts[place]:
                operands = [arrived[k] for k in range(len(arrived))]
                left, right = (torch.cat(column) for column in zip(*operands, strict=True))
                del self._arrived[place]
                self._deliver(place, Grouped(left, right, self._pairs[place]))
        except Exception as error:  # must not fail the user's backward
            self.refuse(error)

    def _deliver(self, place: int, grouped: Grouped) -> None:
        whole = grouped.of_biases() if self.parameters[place].dim() == 2 else grouped
        if self.recorder.auditing:
            rounding = grouped.size() * max(self.eps, torch.finfo(whole.dtype).eps)
            self.recorder.add_recorded(place, total(whole), rounding)
        deliver(self.run, self.recorder, place, whole)


def is_experts(module: nn.Module) -> bool:
    """Return True if a user's module has parameters of its own alone, [E, *, *] or, as biases,
    [E, *]."""
    own = [*module.parameters(recurse=False)]
    has_matrices = 3 in {p.dim() for p in own} <= {2, 3} and len({len(p) for p in own}) == 1
    is_users = not stock_of(type(module)).__module__.startswith("torch.nn.")  # as Conv1d's are
    return is_users and has_matrices and len(own) == len([*module.parameters()])


def may_route(module: nn.Module) -> bool:
    """Return True if a module may choose rows, for itself or its children: it may have experts."""
    children = [c for c in module.children() if type(c) is not nn.ModuleDict]
    has_list = any(isinstance(c, (nn.ModuleList, nn.ModuleDict)) for c in children)
    return has_list or any(map(is_experts, (module, *children)))
