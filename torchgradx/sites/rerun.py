"""Where a probe touches a module that has no kernel: it runs again in backward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import ops
from ..layers.modules import CONTAINERS, own_names, parameter_of, same_parameters
from ..layers.rules import Layer, rule_named
from ..layers.table import Context, declared_layout
from ..proof.arguments import tensors_in
from ..proof.layout import BATCH, NOWHERE, SEGMENTS, SEQUENCE, SHARED
from ..proof.several import end_of, ends_of_module, made_from_others, needed_by, of_the_loss
from ..record.backwards import at_the_end
from ..record.unpacking import saved, unpacked
from ..refusals import RefusedError, cause
from ..sharding import scattered
from ..shared.frontier import coarsest
from ..shared.gradients import BySample, Gradients, along, size, sq_norms, to_add, total
from ..shared.sizes import look_of
from .copies import stock_of, untraced
from .experts import NONE, Served, is_experts, products_of
from .fallback import CHANNELS_FIRST, Call, Kept, per_sample_gradients, terms_of_bias
from .native import MIXED, Hooks, why_mixed
from .packed import counts_rows, samples_of, why_not
from .regime import Regime, may_draw
from .stand_in import as_it_is_now, makes_weight, of_the_user
from .use import Called, Use, apart, by_node

if ops.NATIVE:
    from .._C import called


class _OfThread(threading.local):
    regime: Regime | None  # None: as after the call; it draws no random numbers
    first = 0  # of the nodes that a call makes
    picks = False  # see Forwards.picks


class FallbackSite:
    """A module whose parameters no kernel sees: run again in backward, see fallback.py."""

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        self.layer, self.declared = layer, declared_layout(layer, context.options)
        self._module, self._index = module, index
        self._recorder, self._audit = context.recorder, context.audit
        self._batch_dim = context.options["batch_dim"]
        prefix = f"{layer.name}." if layer.name else ""
        self._own: dict[int, str] = {}
        self._eps: dict[Any, float] = {}  # see Use
        for key in own_names(module):
            self._own.setdefault(context.parameters.place(prefix + key), key)
        known = layer.kind not in ("vmap", "recurrent")
        self._closed = rule_named(layer.kind).closed if known else None
        self._call = _OfThread()
        self._lifted = False  # its latest use was served at the graph's nodes
        self._mixes = isinstance(module, MIXED)
        # [experts, *, *] each: products with their matrices may be all that it does with them
        self._experts = ops.NATIVE and context.options["backend"] == "auto" and is_experts(module)
        self._by_products = False  # some call was
        beside = any("." in name for name in self._own.values())  # of a container within it
        plain = not beside and not self._mixes
        self._slots = (tuple(self._own.values()), tuple(self._own)) if plain else None
        self._hooks = Hooks(module)
        self._made_first = any(map(makes_weight, module._forward_pre_hooks.values()))
        if self._made_first:
            self._hooks.add(module.register_forward_pre_hook, self._opened, prepend=True)
        self._attend(context)

    def _attend(self, context: Context) -> None:
        add, module = self._hooks.add, self._module
        add(module.register_forward_pre_hook, self._before)
        add(module.register_forward_hook, self._after, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        self._hooks.remove()

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

    def leads(self, dims: int) -> int:
        """How many leading dimensions of its output count rows: [N, ...] or [T, N, ...]."""
        return 1 if isinstance(self._module, CHANNELS_FIRST) else min(2, max(1, dims - 1))

    @property
    def by_nodes(self) -> bool:
        """Return True if gradients may be taken at graph nodes: of a module of the user's."""
        attends = isinstance(self._module, nn.MultiheadAttention)
        if self.declared >= 0 or self._by_products or attends:
            return False
        children = (c for c in self._module.children() if not isinstance(c, CONTAINERS))
        own = not stock_of(type(self._module)).__module__.startswith("torch.nn.")
        return own or self._made_first or any(children)

    def _before(self, module: nn.Module, args: Any) -> None:
        call, held = self._call, None
        if not self._lifted:
            held = next(iter(self._held(module).values()), None)
        call.regime = held if held is None else Regime.current(held.device, may_draw(module))
        call.picks = self._audit.forwards.picks
        if not self._made_first:
            call.first = torch.autograd._get_sequence_nr()

    def _held(self, module: nn.Module) -> dict[int, Tensor]:
        """Return the parameters that are trained, by their places."""
        return {
            place: p
            for place, name in self._own.items()
            if (p := parameter_of(module, name)) is not None and p.requires_grad
        }

    def _opened(self, *_: Any) -> None:
        """Before its first use of its parameters: that may be by a hook which makes its weight."""
        self._call.first = torch.autograd._get_sequence_nr()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Return what the module gives in place of its output, if anything."""
        if self._lifted and self._slots and not kwargs and module is self._module:
            at = self._recorder, self._index, module, *self._slots, self._call.first
            known = called(*at, args, out)
            if known is not None:  # it will hardly be listened to
                self._audit.forwards.postpone(known[1], partial(self._late, args, out, *known))
                return None
        if module is not self._module:  # a replica, perhaps in a thread of its own
            names = self._own.values() if self._recorder.depth() else ()
            if not same_parameters(module, self._module, names):
                return None
        run, held = self._recorder.current(), self._held(module)
        if run is None or torch._C._are_functorch_transforms_active():
            return None
        mixes = why_mixed(module, [*args, *kwargs.values()], run.n) if self._mixes else None
        if mixes and (held or mixes == "batch_statistics"):  # these mix what is above them too
            run.refuse(self._index, mixes)
        if mixes or not held:
            return None
        given, samples = tensors_in((args, kwargs)), samples_of(out, run.n)
        leaves = all(p.is_leaf for p in held.values())
        told = (args, kwargs), samples is not None, run.n
        unsaid = why_not(held.values(), *told) if leaves else "computed"
        if unsaid:
            run.refuse(self._index, unsaid)
            return None
        changed = apart(module, out) if torch.is_grad_enabled() else None
        outputs = tensors_in(changed or out)
        if not outputs:
            return None  # what it gives is not seen: where gradients come of it, they are refused
        live = [t for t in outputs if t.requires_grad]
        if any(t.is_nested for t in outputs):
            run.refuse(self._index, "nested")
            return None
        first = next((t for t in live if t.dim()), (live or outputs)[0])
        heard = self._audit.forwards.watching or torch._C._len_torch_dispatch_stack()
        if heard and self._recorder.depth():
            self._audit.forwards.meet(self._index, given)
        use = run.call(self._index, list(held.items()), first.shape, given)
        for t in outputs if len(outputs) > 1 else ():
            run.note(hash(look_of(t.shape, run.n)))
        if not torch.is_grad_enabled() or not live:
            return None
        # The base of one of several may be what another is made from.
        made = [end_of(first)] if len(outputs) == 1 else outputs
        wrapped = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        products = NONE
        if self._experts and len(outputs) == 1 and self._recorder.depth() and not wrapped:
            leads = first.shape[: self.leads(first.dim())]
            with contextlib.suppress(Exception):  # else it runs again
                how = run.n, self.presumed, self._call.first
                products = products_of(made[0], leads, given, held, *how)
        if products.of:
            self._by_products = True
            self._audit.forwards.several(self._index, first, products.ends)
            self._audit.forwards.routed(use, products.by_row, self._call.picks)
        else:  # of products, each edge is counted
            run.enclose(list(held), self._call.first)
        run.watch(use, made[0] if len(outputs) == 1 else first)
        if len(outputs) > 1 and run.n > 1 and self._recorder.depth():
            others = ends_of_module(module, outputs, first, given, self.leads, run.n, samples)
            self._audit.forwards.several(self._index, first, others)
        regime = self._call.regime or Regime.current(first.device, draws=False)
        versions = [t._version for t in outputs]
        whole = outputs, made, by_node(made), first, samples, versions, products.of
        listen = partial(self._listen, run, use, held, Called(regime, (args, kwargs), *whole))
        if self._lifted and len(outputs) == 1 and self._recorder.depth() and not wrapped:
            self._audit.forwards.postpone(use, listen)  # it will hardly be needed
        else:
            listen()
        return changed

    def _late(
        self,
        args: Any,
        out: Tensor,
        run: Any,
        use: int,
        node: Any,
        number: int,
        version: int,
        autocast: torch.dtype | None,
    ) -> None:
        """Listen after all to a call, as csrc/nodes/called.cpp noted it, that is not served at the
        graph's nodes this time."""
        regime, ends = Regime(out.device.type, autocast, None), {node: [(0, number)]}
        call = Called(regime, (args, {}), [out], [out], ends, out, None, [version], {})
        self._listen(run, use, self._held(self._module), call)

    def _listen(self, run: Any, number: int, held: dict[int, Tensor], called: Called) -> None:
        regime, arguments, outputs, made, ends, first, samples, _, products = called
        leaves, spec = tree_flatten(arguments)
        kinds = regime.autocast, *(t.dtype for t in outputs)
        if kinds not in self._eps:
            self._eps[kinds] = coarsest(made, tensors_in(arguments))
        own = any(map(of_the_user, self._module.modules()))
        self._lifted = False
        use = Use(
            run=run,
            number=number,
            places=list(held),
            arguments=([saved(leaf) for leaf in leaves], spec),
            regime=regime,
            drew=regime.drew,
            samples=samples,
            eps=self._eps[kinds],
            module=self._module,
            first=first.shape,
            shapes=[t.shape for t in outputs],
            grads=[None] * len(outputs),
            hooked=torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
            several=len(ends) > 1,
            inner=made_from_others(made, leaves) if len(ends) > 1 else set(),
            gave=called.gave(self._eps[kinds]) if own else [],
        )
        if use.several:
            self._audit.defer(use.places)
        for node, pairs in ends.items():
            met = use.places if ops.NATIVE else needed_by(node, held, leaves)
            prehook = partial(self._arrive, use, met, pairs)
            node.register_prehook(prehook)
            if use.hooked:  # a checkpoint: what runs again must save as much again
                self._recorder.hold()
                weakref.finalize(prehook, self._recorder.release)
        if products:  # after the hook that begins it: an end may be a product
            use.products = Served(run, self._recorder, products, held, use.eps, self._failed)

    @untraced
    def _arrive(self, use: Use, met: list[int], ends: list[tuple[int, int]], incoming: Any) -> None:
        task = torch._C._current_graph_task_id()
        if use.arrived and use.arrived[-1] != task:  # of a backward that did not end
            use.forget()
        if not use.run.arrive(met, True):
            return
        for k, number in ends:
            g = incoming[number]
            use.grads[k] = None if g is None else g.reshape(use.shapes[k])
        use.arrived.append(task)
        if torch.is_grad_enabled():
            return  # create_graph: refused when read
        if not use.several:
            self._settle(use)
        elif len(use.arrived) == 1:  # the others may come, or not: wait for the end
            use.module = as_it_is_now(self._module)
            if any(map(use.run.waits, use.places)):  # all uses have arrived before any is in
                use.run.keep = True
            at_the_end(partial(self._settle, use))

    @untraced
    def _settle(self, use: Use) -> None:
        grads = use.forget()
        if all(g is None for g in grads):
            return
        arguments: Any = None
        leaves, spec = use.arguments
        if len(leaves) < spec.num_leaves:
            self._recorder.refuse(self._index, "several_backwards")
            return
        try:
            arguments = tree_unflatten([unpacked(leaf) for leaf in leaves], spec)
            self._deliver(use, grads, arguments)
        except Exception as error:  # never from inside backward()
            if use.hooked and arguments is None:
                raise  # but as without us, where a checkpoint cannot run its layers again
            if ops.NATIVE and not use.run.reaches(use.places):
                return  # it has parameters that it does not use
            sharded = scattered(use.module.parameters())
            self._failed(RefusedError("sharded_apart") if sharded else error)
        if not use.run.retained:
            use.arguments[0].clear()
        if use.several:  # after all that is queued already
            at_the_end(partial(self._audit.compare_deferred, use.places))

    def _deliver(self, use: Use, grads: list[Tensor | None], arguments: Any) -> None:
        run, places = use.run, use.places
        proven = self.declared < 0 and 0 <= use.number < len(run.layouts)
        layout = run.layouts[use.number] if proven else self.presumed
        if layout == SHARED:
            self._lifted = ops.NATIVE and not use.drew  # else listening makes nodes, and is missed
            return  # lift.py brings its gradients by sample
        samples = use.samples
        if layout >= SEGMENTS:  # replayed, whatever the module does with rows
            samples, layout = run.segments[layout - SEGMENTS].owners, SEGMENTS
            if not all(g is None or counts_rows(g, len(samples)) for g in grads):
                raise RefusedError(cause("segments_kind", kind="module of outputs of other rows"))
        if layout == NOWHERE:
            if any(g is not None and bool(g.any()) for g in grads):
                self._recorder.refuse(self._index, "no_output")
            return
        if use.products and layout == self.presumed:
            use.products.begin()
            self._audit.deliver(places)
            self.layer.notes["products"] = None
            return
        names = [self._own[place] for place in places]
        how = layout, use.first, use.regime, samples, use.gave
        call = Call(use.module, names, arguments, grads, run.n, *how)
        said = self.fixed or self.declared >= 0
        if use.number < 0 and len(grads) > 1 and run.n > 1 and not said:  # nothing proved them
            where = {"n": run.n, "shape": list(use.first), "name": self.layer.name}
            self._recorder.refuse(self._index, cause("unproven", **where, more="reentrant"))
            return
        if any(grads[k] is not None for k in use.inner):
            call = of_the_loss(call, use.inner, self._silent)
        found = self._closed(call) if self._closed else None
        if found is not None:
            self._file(use, call, [[found[name] for name in names]], bool(self._recorder.books))
            return
        if self._recorder.books:
            run.book(Kept(call, places, self._silent))
        chunks = per_sample_gradients(call, self._silent, self.layer.notes)
        self._file(use, call, (gradients for _, gradients in chunks), False)

    def _file(
        self, use: Use, call: Call, chunks: Iterable[Sequence[Gradients]], books: bool
    ) -> None:
        """Give a pass the gradients of its samples, one for each parameter, chunk by chunk."""
        run, places = use.run, use.places
        waits = [run.waits(place) for place in places]
        directions = [run.directions[place] if run.directions else None for place in places]
        compared = [self._recorder.auditing or place in self._audit.always for place in places]
        kept: list[list[Gradients]] = [[] for _ in places]
        dots: list[Tensor] = []
        for found in chunks:
            if any(compared):
                alone = sum(float(sq_norms(g).sqrt().sum()) for g in found)
                every = sum(map(size, found)) * run.n
            each = [along(g, v).double() for g, v in zip(found, directions, strict=True)
                    if v is not None]  # fmt: skip
            dots += [torch.stack(each).sum(0)] if each else []
            for k, (place, g) in enumerate(zip(places, found, strict=True)):
                if compared[k]:
                    held = parameter_of(use.module, call.names[k])
                    summed = total(g) if held is None else total(g).view_as(held)
                    terms = every + terms_of_bias(call, call.names[k]) * len(g) / run.n
                    rounding = use.rounding(call.grads, summed, terms, alone)
                    self._recorder.add_recorded(place, summed, rounding)
                if books:
                    run.book(BySample(place, g))
                kept[k].append(g if waits[k] else sq_norms(g))
        for place, waiting, column in zip(places, waits, kept, strict=True):
            joined = column[0] if column else torch.zeros(0)
            if len(column) > 1:
                joined = torch.cat(column)  # type: ignore[arg-type]
            if waiting:
                run.add(place, *to_add(joined))
            else:
                run.finish(place, joined)
        if dots:
            run.add_dots(torch.cat(dots))

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
