"""Backward of a module that runs again: from its outputs' gradients to gradients by sample.

A use (recorded in rerun.py) collects a backward's gradients until all have arrived. Then the pass
gets gradients by sample from a closed form, from expert products, or by running the module again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..extension import NATIVE, Pass
from ..gradients.by_sample import Gradients, along, deliver, size, sq_norms, total
from ..graph.layout import BATCH, NOWHERE, SEGMENTS, SEQUENCE, SHARED
from ..graph.sizes import row_dims
from ..graph.unpacking import restore_leaf, save_leaf, saves_through_hooks
from ..hooks.copies import untraced
from ..hooks.engine import at_the_end
from ..layers.modules import own_names, parameter_of
from ..layers.rules import Layer
from ..layers.table import declared_layout
from ..refusals import RefusedError, cause
from ..sharding import is_sharded
from .experts import ExpertUse
from .fallback import CLOSED_FORMS, Call, ClipCall, bias_term_size, per_sample_gradients
from .native import Context
from .regime import Outcome, Regime
from .several import without_inner_grads
from .stand_in import stand_in


@dataclass
class RerunUse:
    """One call of a module, without its graph."""

    run: Pass  # the pass
    number: int  # index among the uses of the pass; -1: in a recomputation
    parameters: dict[int, Tensor]  # trained ones, by place
    regime: Regime
    first_shape: torch.Size  # of the output whose layout is the use's
    samples: Tensor | None = None  # of each row of the first output, if it is packed
    drew: bool = False  # random numbers
    has_several_nodes: bool = False  # which made the outputs
    inner: set[int] = field(default_factory=set)  # outputs that others are computed from
    outcomes: Sequence[Outcome | None] = ()  # of a user's forward
    products: ExpertUse | None = None  # all uses of its parameters, if they are expert products
    arrivals: list[int] = field(default_factory=list)  # the backward, once for each node reached
    arguments: list[Any] = field(default_factory=list)  # saved; emptied when the use was served
    spec: Any = None  # of the arguments; None: they were not saved
    saves_through_hooks: bool = False

    def prepare(self, module: nn.Module, outputs: list[Tensor], eps: float) -> None:
        """Prepare for the gradients of these outputs. eps: the coarsest rounding unit of them."""
        self.module, self.eps = module, eps
        self.shapes = [t.shape for t in outputs]
        self.grads: list[Tensor | None] = [None] * len(outputs)

    def save(self, arguments: Any) -> None:
        """Save what running again needs."""
        leaves, self.spec = tree_flatten(arguments)
        self.arguments = [save_leaf(leaf) for leaf in leaves]
        self.drew = self.regime.drew
        self.saves_through_hooks = NATIVE and saves_through_hooks()  # see save_leaf

    @property
    def places(self) -> list[int]:
        return list(self.parameters)

    def take_grads(self) -> list[Tensor | None]:
        """Return the gradients that have arrived, by output, and forget them."""
        self.arrivals.clear()
        grads, self.grads = self.grads, [None] * len(self.grads)
        return grads


class Delivery:
    """Backward of a site whose module runs again."""

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        self.layer, self.declared = layer, declared_layout(layer, context.options)
        self._module, self._index = module, index
        self._recorder, self._audit = context.recorder, context.audit
        self._batch_dim = context.options["batch_dim"]
        prefix = f"{layer.name}." if layer.name else ""
        self._names: dict[int, str] = {}  # of its parameters, by place
        for name in own_names(module):
            self._names.setdefault(context.parameters.place(prefix + name), name)
        self._closed_form = CLOSED_FORMS.get(layer.kind)
        self._was_lifted = False  # the latest use was served at graph nodes, by shared/lift.py
        self._was_product = False  # it was served as expert products
        self.overwrites = False  # it has written into its arguments: it cannot run again

    @property
    def presumed(self) -> int:
        """Return the unproven layout: declared, the module's own, or by `batch_dim`."""
        if self.declared >= 0:
            return self.declared
        if self.fixed:
            return BATCH if self._module.batch_first else SEQUENCE
        return SEQUENCE if self._batch_dim else BATCH

    @property
    def fixed(self) -> bool:
        """Return True if the module itself says where its samples are."""
        return self.declared < 0 and isinstance(self._module, (nn.RNNBase, nn.MultiheadAttention))

    @untraced
    def _arrive(
        self, use: RerunUse, needed: list[int], ends: list[tuple[int, int]], incoming: Any
    ) -> None:
        """Take the gradients of a node that made outputs; settle the use once all have arrived.
        needed: places below the node. ends: (output of the module, output of the node)."""
        task = torch._C._current_graph_task_id()
        if use.arrivals and use.arrivals[-1] != task:  # that backward did not end
            use.take_grads()
        if not use.run.arrive(needed, True):
            return
        for k, number in ends:
            if (g := incoming[number]) is not None:
                use.grads[k] = g.to_dense().reshape(use.shapes[k])
        use.arrivals.append(task)
        if torch.is_grad_enabled():
            return  # create_graph: refused when norms are read
        if not use.has_several_nodes:
            self._settle(use)
        elif len(use.arrivals) == 1:  # other nodes may follow or not: wait for the end
            use.module = stand_in(self._module, weights=True)
            if any(map(use.run.waits, use.places)):  # combine them when norms are read
                use.run.keep = True
            at_the_end(partial(self._settle, use))

    @untraced
    def _settle(self, use: RerunUse) -> None:
        """Deliver a backward's gradients, or refuse them."""
        grads = use.take_grads()
        run = use.run
        is_used = not NATIVE or run.silent or run.reaches(use.places)
        if not is_used or all(g is None for g in grads):
            return  # this graph does not use the parameters
        arguments: Any = None
        if use.spec and len(use.arguments) < use.spec.num_leaves:  # cleared below
            self._recorder.refuse(self._index, "several_backwards")
            return
        try:
            if not self._is_served(use):
                rest = [restore_leaf(leaf) for leaf in use.arguments]
                arguments = tree_unflatten(rest, use.spec)
                self._deliver(use, grads, arguments)
        except Exception as error:  # must not fail the user's backward
            if use.saves_through_hooks and arguments is None:
                raise  # a checkpoint could not recompute: the user's backward fails as well
            sharded = is_sharded(use.module.parameters())
            self._refuse_error(RefusedError("sharded_apart") if sharded else error)
        if not run.retained:
            use.arguments.clear()

    def layout_of(self, use: RerunUse) -> int:
        """Return the layout of a use's rows, as it was proven or is presumed."""
        layouts = use.run.layouts
        is_proven = self.declared < 0 and 0 <= use.number < len(layouts)
        return int(layouts[use.number]) if is_proven else self.presumed

    def _is_served(self, use: RerunUse) -> bool:
        """Return True if a use is served at nodes: by shared/lift.py, or as expert products."""
        layout = self.layout_of(use)
        if layout == SHARED:
            # Later calls are saved late or never (`postpone`): not where that needs random state,
            # or makes graph nodes.
            self._was_lifted = NATIVE and not use.drew
        elif use.products and layout == self.presumed:
            use.products.begin()
            self._audit.deliver(use.places)
            self.layer.notes["products"] = None
            self._was_product = not use.drew
        else:
            return False
        return True

    def _deliver(self, use: RerunUse, grads: list[Tensor | None], arguments: Any) -> None:
        """Give the pass gradients by sample, from the first source that has them."""
        run, samples, layout = use.run, use.samples, self.layout_of(use)
        if layout >= SEGMENTS:
            samples, layout = run.segments[layout - SEGMENTS].owners, SEGMENTS
            if not all(g is None or row_dims(g, len(samples)) for g in grads):
                raise RefusedError(cause("segments_kind", kind="module with outputs of other rows"))
        if layout == NOWHERE:
            if any(g is not None and bool(g.any()) for g in grads):
                self._recorder.refuse(self._index, "no_output")
            return
        is_said = self.fixed or self.declared >= 0
        if use.number < 0 and len(use.shapes) > 1 and run.n > 1 and not is_said:
            shape = list(use.first_shape)
            why = cause("unproven", n=run.n, shape=shape, name=self.layer.name, more="reentrant")
            self._recorder.refuse(self._index, why)
            return
        if self.overwrites:
            raise RefusedError("overwrites")
        names = [self._names[place] for place in use.places]
        rest = layout, use.first_shape, use.regime, self._recorder, samples, use.outcomes
        call = Call(use.module, names, arguments, grads, run.n, *rest)
        if any(grads[k] is not None for k in use.inner):
            call = without_inner_grads(call, use.inner)
        by_name = self._closed_form(call) if self._closed_form and layout != SEGMENTS else None
        if by_name is None:
            self._deliver_chunks(use, call)
            return
        gradients = [by_name[name] for name in names]
        self._record_sums(use, call, gradients)
        for place, g in zip(use.places, gradients, strict=True):
            deliver(run, self._recorder, place, g)

    def _deliver_chunks(self, use: RerunUse, call: Call) -> None:
        """Run the module again, and give the pass the gradients of some samples at a time."""
        run, places = use.run, use.places
        if self._recorder.keeps_tape:
            run.keep_on_tape(ClipCall(call, places))
        waits = [run.waits(place) for place in places]
        directions = [run.directions[place] if run.directions else None for place in places]
        columns: list[list[Tensor]] = [[] for _ in places]  # gradients if it waits, else norms
        dots: list[Tensor] = []
        for _, gradients in per_sample_gradients(call, self.layer.notes):
            self._record_sums(use, call, gradients)
            products = [along(g, v).double() for g, v in zip(gradients, directions, strict=True)
                        if v is not None]  # fmt: skip
            dots += [torch.stack(products).sum(0)] if products else []
            for column, g, waiting in zip(columns, gradients, waits, strict=True):
                column.append(g if waiting else sq_norms(g))
        for place, waiting, column in zip(places, waits, columns, strict=True):
            whole = torch.cat(column) if len(column) > 1 else next(iter(column), torch.Tensor())
            (run.add if waiting else run.finish)(place, whole)
        if dots:
            run.add_dots(torch.cat(dots))

    def _record_sums(self, use: RerunUse, call: Call, gradients: Sequence[Gradients]) -> None:
        """Record sums over samples, with a bound of their rounding, for parameters whose received
        gradient is compared."""
        n, compared = use.run.n, list(map(self._audit.is_compared, use.places))
        if not any(compared):
            return
        norms = sum(float(sq_norms(g).sqrt().sum()) for g in gradients)
        terms = sum(map(size, gradients)) * n
        for k, (place, g) in enumerate(zip(use.places, gradients, strict=True)):
            if compared[k]:
                parameter = parameter_of(use.module, call.names[k])
                summed = total(g) if parameter is None else total(g).view_as(parameter)
                bias_terms = bias_term_size(call, call.names[k]) * len(g) / max(1, n)
                dtypes = {use.regime.autocast or summed.dtype}
                dtypes.update(g.dtype for g in call.grads if g is not None)
                rounding = (terms + bias_terms) * max(torch.finfo(dtype).eps for dtype in dtypes)
                rounding += norms * use.eps / 32  # of which the audit allows 64
                self._recorder.add_recorded(place, summed, rounding)

    def _refuse_error(self, error: Exception) -> None:
        why = cause("failed", error=f"{type(error).__name__}: {error}")
        self._recorder.refuse(self._index, getattr(error, "cause", why))
