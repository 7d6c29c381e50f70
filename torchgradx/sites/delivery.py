"""Gradients by sample of a module that runs again, from what its backward brings to its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import ops
from ..gradients.by_sample import Gradients, along, deliver, size, sq_norms, total
from ..graph.layout import BATCH, NOWHERE, SEGMENTS, SEQUENCE, SHARED
from ..graph.unpacking import restore_leaf, save_leaf, saves_through_hooks
from ..hooks.copies import untraced
from ..hooks.engine import at_the_end
from ..layers.modules import own_names, parameter_of
from ..layers.rules import Layer
from ..layers.table import declared_layout
from ..refusals import RefusedError, cause
from ..sharding import is_sharded
from .context import Context
from .experts import Served
from .fallback import CLOSED, Call, Kept, per_sample_gradients, terms_of_bias
from .packed import row_dims
from .regime import Outcome, Regime
from .several import without_inner_grads
from .stand_in import stand_in


@dataclass
class RerunUse:
    """A call of a module, without its graph."""

    run: Any
    number: int  # among the uses of the run
    parameters: dict[int, Tensor]  # that are trained, by place
    regime: Regime
    first: torch.Size  # of the output whose rows are proven
    samples: Tensor | None = None  # of each row of the first output, where it is packed
    drew: bool = False  # random numbers
    several: bool = False  # nodes that the outputs are of
    inner: set[int] = field(default_factory=set)  # outputs that others are made from
    outcomes: Sequence[Outcome | None] = ()  # of the forward, where it is a user's
    products: Served | None = None  # by which its parameters are all used, see experts.py
    arrivals: list[int] = field(default_factory=list)  # the backward, once a node that has been

    def save(self, module: nn.Module, arguments: Any, outputs: list[Tensor], eps: float) -> None:
        """Save what runs again. eps: of the coarsest gradient inside."""
        leaves, spec = tree_flatten(arguments)
        self.module, self.eps = module, eps
        self.arguments, self.spec = [save_leaf(leaf) for leaf in leaves], spec
        self.drew = self.regime.drew
        self.hooked = saves_through_hooks()
        self.shapes = [t.shape for t in outputs]
        self.grads: list[Tensor | None] = [None] * len(outputs)

    @property
    def places(self) -> list[int]:
        return list(self.parameters)

    def take_grads(self) -> list[Tensor | None]:
        """Return what has arrived, and forget it."""
        self.arrivals.clear()
        grads, self.grads = self.grads, [None] * len(self.grads)
        return grads


class Delivery:
    """The backward of a site whose module runs again, see rerun.py."""

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        self.layer, self.declared = layer, declared_layout(layer, context.options)
        self._module, self._index = module, index
        self._recorder, self._audit = context.recorder, context.audit
        self._batch_dim = context.options["batch_dim"]
        prefix = f"{layer.name}." if layer.name else ""
        self._own: dict[int, str] = {}
        for key in own_names(module):
            self._own.setdefault(context.parameters.place(prefix + key), key)
        self._closed_form = CLOSED.get(layer.kind)
        self._lifted = False  # its latest use was served at the graph's nodes

    @property
    def presumed(self) -> int:
        """Return the unproven layout: declared, as the module says, or `batch_dim`."""
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
        task = torch._C._current_graph_task_id()
        if use.arrivals and use.arrivals[-1] != task:  # of a backward that did not end
            use.take_grads()
        if not use.run.arrive(needed, True):
            return
        for k, number in ends:
            g = incoming[number]
            use.grads[k] = None if g is None else g.reshape(use.shapes[k])
        use.arrivals.append(task)
        if torch.is_grad_enabled():
            return  # create_graph: refused when read
        if not use.several:
            self._settle(use)
        elif len(use.arrivals) == 1:  # the others may come, or not: wait for the end
            use.module = stand_in(self._module, weights=True)
            if any(map(use.run.waits, use.places)):  # all uses have arrived before any is in
                use.run.keep = True
            at_the_end(partial(self._settle, use))

    @untraced
    def _settle(self, use: RerunUse) -> None:
        """Deliver what a backward brought, or refuse."""
        grads = use.take_grads()
        if all(g is None for g in grads):
            return
        arguments: Any = None
        if len(use.arguments) < use.spec.num_leaves:
            self._recorder.refuse(self._index, "several_backwards")
            return
        try:
            arguments = tree_unflatten([restore_leaf(leaf) for leaf in use.arguments], use.spec)
            self._deliver(use, grads, arguments)
        except Exception as error:  # never from inside backward()
            if use.hooked and arguments is None:
                raise  # but as without us, where a checkpoint cannot run its layers again
            if ops.NATIVE and not use.run.reaches(use.places):
                return  # it has parameters that it does not use
            sharded = is_sharded(use.module.parameters())
            self._failed(RefusedError("sharded_apart") if sharded else error)
        if not use.run.retained:
            use.arguments.clear()
        if use.several:  # after all that is queued already
            at_the_end(partial(self._audit.compare_deferred, use.places))

    def _deliver(self, use: RerunUse, grads: list[Tensor | None], arguments: Any) -> None:
        """Give the pass the gradients by sample, from whatever has them."""
        run, layout, samples = use.run, self._layout_of(use), use.samples
        if layout == SHARED:
            self._lifted = ops.NATIVE and not use.drew  # else listening makes nodes, and is missed
            return  # lift.py brings its gradients by sample
        if layout >= SEGMENTS:  # replayed, whatever the module does with rows
            samples, layout = run.segments[layout - SEGMENTS].owners, SEGMENTS
            if not all(g is None or row_dims(g, len(samples)) for g in grads):
                raise RefusedError(cause("segments_kind", kind="module of outputs of other rows"))
        if layout == NOWHERE:
            if any(g is not None and bool(g.any()) for g in grads):
                self._recorder.refuse(self._index, "no_output")
            return
        if use.products and layout == self.presumed:
            use.products.begin()
            self._audit.deliver(use.places)
            self.layer.notes["products"] = None
            return
        if self._is_unproven(use):
            where = {"n": run.n, "shape": list(use.first), "name": self.layer.name}
            self._recorder.refuse(self._index, cause("unproven", **where, more="reentrant"))
            return
        names = [self._own[place] for place in use.places]
        how = layout, use.first, use.regime, samples, use.outcomes
        call = Call(use.module, names, arguments, grads, run.n, *how)
        if any(grads[k] is not None for k in use.inner):
            call = without_inner_grads(call, use.inner, self._silent)
        by_name = self._closed_form(call) if self._closed_form else None
        if by_name is None:
            self._deliver_chunks(use, call)
            return
        gradients = [by_name[name] for name in names]
        self._compare(use, call, gradients)
        for place, g in zip(use.places, gradients, strict=True):
            deliver(run, self._recorder, place, g)

    def _layout_of(self, use: RerunUse) -> int:
        proven = self.declared < 0 and 0 <= use.number < len(use.run.layouts)
        return use.run.layouts[use.number] if proven else self.presumed

    def _is_unproven(self, use: RerunUse) -> bool:
        """Return True for several outputs of which nothing proved where their samples are."""
        is_said = self.fixed or self.declared >= 0
        return use.number < 0 and len(use.shapes) > 1 and use.run.n > 1 and not is_said

    def _deliver_chunks(self, use: RerunUse, call: Call) -> None:
        """Run the module again, and give the pass the gradients of so many samples at a time."""
        run, places = use.run, use.places
        if self._recorder.books:
            run.book(Kept(call, places, self._silent))
        waits = [run.waits(place) for place in places]
        directions = [run.directions[place] if run.directions else None for place in places]
        columns: list[list[Tensor]] = [[] for _ in places]
        dots: list[Tensor] = []
        for _, gradients in per_sample_gradients(call, self._silent, self.layer.notes):
            self._compare(use, call, gradients)
            products = [along(g, v).double() for g, v in zip(gradients, directions, strict=True)
                        if v is not None]  # fmt: skip
            dots += [torch.stack(products).sum(0)] if products else []
            for column, g, waiting in zip(columns, gradients, waits, strict=True):
                column.append(g if waiting else sq_norms(g))
        for place, waiting, column in zip(places, waits, columns, strict=True):
            whole = torch.cat(column) if len(column) > 1 else next(iter(column), torch.zeros(0))
            if waiting:
                run.add(place, whole)
            else:
                run.finish(place, whole)
        if dots:
            run.add_dots(torch.cat(dots))

    def _compare(self, use: RerunUse, call: Call, gradients: Sequence[Gradients]) -> None:
        """Add sums over samples to what is compared with the gradients received, if it is."""
        always, auditing, n = self._audit.always, self._recorder.auditing, use.run.n
        compared = [auditing or place in always for place in use.places]
        if not any(compared):
            return
        alone = sum(float(sq_norms(g).sqrt().sum()) for g in gradients)
        every = sum(map(size, gradients)) * n
        for k, (place, g) in enumerate(zip(use.places, gradients, strict=True)):
            if compared[k]:
                parameter = parameter_of(use.module, call.names[k])
                summed = total(g) if parameter is None else total(g).view_as(parameter)
                terms = every + terms_of_bias(call, call.names[k]) * len(g) / n
                kinds = {use.regime.autocast or summed.dtype}
                kinds.update(g.dtype for g in call.grads if g is not None)
                rounding = terms * max(torch.finfo(kind).eps for kind in kinds)
                rounding += alone * use.eps / 32  # of 64
                self._recorder.add_recorded(place, summed, rounding)

    def _failed(self, error: Exception) -> None:
        why = cause("failed", error=f"{type(error).__name__}: {error}")
        self._recorder.refuse(self._index, getattr(error, "cause", why))  # a RefusedError's

    @contextlib.contextmanager
    def _silent(self) -> Iterator[None]:
        self._recorder.push(None)
        try:
            yield
        finally:
            self._recorder.pop()
