"""Where a probe touches a module that has no kernel: it runs again in backward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import ops
from ..graph.arguments import tensors_in
from ..graph.nodes import coarsest_eps
from ..graph.sizes import look_of
from ..graph.unpacking import saves_through_hooks
from ..hooks.copies import stock_of
from ..layers.modules import CONTAINERS, parameter_of, same_parameters
from ..layers.rules import Layer
from .context import Context
from .delivery import Delivery, RerunUse
from .experts import NO_PRODUCTS, ExpertGroup, Served, is_experts, products_of
from .fallback import CHANNELS_FIRST
from .native import MAY_MIX, Hooks, why_mixed
from .packed import samples_of, why_not_rerun
from .regime import Regime, may_draw, outcomes_of
from .several import end_of, ends_at, ends_of_module, made_from_others, needed_by
from .stand_in import has_users_forward, makes_weight

if ops.NATIVE:
    from .._C import called


Ends = dict[Any, list[tuple[int, int]]]  # by node: output of the module, and of the node


def ends_by_node(outputs: Sequence[Tensor]) -> Ends:
    """Return where these are made."""
    ends: Ends = {}
    for (node, number), k in ends_at(outputs).items():
        ends.setdefault(node, []).append((k, number))
    return ends


class _OfThread(threading.local):
    regime: Regime | None  # None: as after the call; it draws no random numbers
    first = 0  # of the nodes that a call makes
    picks = False  # see Forwards.picks


class FallbackSite(Delivery):
    """A module whose parameters no kernel sees: run again in backward, see fallback.py."""

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        super().__init__(module, layer, index, context)
        self._eps: dict[Any, float] = {}  # see RerunUse
        self._call = _OfThread()
        self._mixes = isinstance(module, MAY_MIX)
        # [experts, *, *] each: products with their matrices may be all that it does with them
        self._has_experts = (
            ops.NATIVE and context.options["backend"] == "auto" and is_experts(module)
        )
        self._by_products = False  # some call was
        beside = any("." in name for name in self._own.values())  # of a container within it
        plain = not beside and not self._mixes
        self._slots = (tuple(self._own.values()), tuple(self._own)) if plain else None
        self._hooks = Hooks(module)
        self._made_first = any(map(makes_weight, module._forward_pre_hooks.values()))
        if self._made_first:
            self._hooks.add(module.register_forward_pre_hook, self._opened, prepend=True)
        self._attach(context)

    def _attach(self, context: Context) -> None:
        add, module = self._hooks.add, self._module
        add(module.register_forward_pre_hook, self._before_forward)
        add(module.register_forward_hook, self._after_forward, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        self._hooks.remove()

    def leads(self, dims: int) -> int:
        """Return how many leading dimensions of its output count rows: [N, ...] or [T, N, ...]."""
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

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        call, first = self._call, None
        if not self._lifted:
            first = next(iter(self._trained(module).values()), None)
        draws = first is not None and may_draw(module)
        call.regime = None if first is None else Regime.current(first.device, draws)
        call.picks = self._audit.forwards.picks
        if not self._made_first:
            call.first = torch.autograd._get_sequence_nr()

    def _opened(self, *_: Any) -> None:
        """Note the start of its first use of parameters, maybe by a hook which makes its weight."""
        self._call.first = torch.autograd._get_sequence_nr()

    def _trained(self, module: nn.Module) -> dict[int, Tensor]:
        """Return the parameters that are trained, by their places."""
        return {
            place: p
            for place, name in self._own.items()
            if (p := parameter_of(module, name)) is not None and p.requires_grad
        }

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Return what the module gives in place of its output, if anything."""
        if self._lifted and self._slots and not kwargs and module is self._module:
            at = self._recorder, self._index, module, *self._slots, self._call.first
            known = called(*at, args, out)
            if known is not None:  # it will hardly be listened to
                listen = partial(self._listen_late, args, out, known)
                self._audit.forwards.postpone(known[1], listen)
                return None
        if not self._computes_the_same(module):
            return None
        run, parameters = self._recorder.current(), self._trained(module)
        if run is None or torch._C._are_functorch_transforms_active():
            return None
        samples = samples_of(out, run.n)
        why_not_rerun = self._why_not((args, kwargs), parameters, samples is not None, run.n)
        if why_not_rerun:
            run.refuse(self._index, why_not_rerun)
        if why_not_rerun or not parameters:
            return None
        changed = copy_shared_outputs(module, out) if torch.is_grad_enabled() else None
        outputs = tensors_in(changed or out)
        if any(t.is_nested for t in outputs):
            run.refuse(self._index, "nested")
            return None
        if outputs:  # else it shows nothing: where gradients come of it, they are refused
            self._note(run, parameters, (args, kwargs), outputs, samples)
        return changed

    def _computes_the_same(self, module: nn.Module) -> bool:
        """Return True for the site's module, and for a replica of it, perhaps in another thread."""
        if module is self._module:
            return True
        names = self._own.values() if self._recorder.depth() else ()
        return same_parameters(module, self._module, names)

    def _why_not(
        self, arguments: Any, parameters: dict[int, Tensor], packs: bool, n: int
    ) -> str | None:
        """Return the cause for which this call has no gradients by sample, or cannot run again."""
        args, kwargs = arguments
        mixes = why_mixed(self._module, [*args, *kwargs.values()], n) if self._mixes else None
        if mixes or not parameters:  # batch statistics mix what is above them too
            return mixes if parameters or mixes == "batch_statistics" else None
        if not all(p.is_leaf for p in parameters.values()):
            return "computed"
        return why_not_rerun(parameters.values(), arguments, packs, n)

    def _note(
        self,
        run: Any,
        parameters: dict[int, Tensor],
        arguments: Any,
        outputs: list[Tensor],
        samples: Tensor | None,
    ) -> None:
        """Record a use, and have its outputs listened to."""
        operands, single = tensors_in(arguments), len(outputs) == 1
        live = [t for t in outputs if t.requires_grad]
        first = next((t for t in live if t.dim()), (live or outputs)[0])
        recorded, forwards = bool(self._recorder.depth()), self._audit.forwards
        if recorded and (forwards.watching or torch._C._len_torch_dispatch_stack()):
            forwards.note_call(self._index, operands)
        number = run.call(self._index, list(parameters.items()), first.shape, operands)
        for t in () if single else outputs:
            run.note(hash(look_of(t.shape, run.n)))
        if not torch.is_grad_enabled() or not live:
            return
        # The base of one of several may be what another is made from.
        end, wrapped = end_of(first) if single else first, saves_through_hooks()
        products = NO_PRODUCTS
        if self._has_experts and single and recorded and not wrapped:
            leads = first.shape[: self.leads(first.dim())]
            how = run.n, self.presumed, self._call.first
            with contextlib.suppress(Exception):  # else it runs again
                products = products_of(end, leads, operands, parameters, *how)
        if products.of:
            self._by_products = True
            forwards.note_ends(self._index, first, products.ends)
            forwards.note_routes(number, products.by_row, self._call.picks)
        else:  # of products, each edge is counted
            run.enclose(list(parameters), self._call.first)
        run.watch(number, end)
        if not single and run.n > 1 and recorded:
            others = ends_of_module(
                self._module, outputs, first, operands, self.leads, run.n, samples
            )
            forwards.note_ends(self._index, first, others)
        regime = self._call.regime or Regime.current(first.device, draws=False)
        use = RerunUse(run, number, parameters, regime, first.shape, samples)
        ends, versions = ends_by_node([end] if single else outputs), [t._version for t in outputs]
        listen = partial(self._listen, use, arguments, outputs, ends, versions, products.of)
        if self._lifted and single and recorded and not wrapped:
            forwards.postpone(number, listen)  # it will hardly be needed
        else:
            listen()

    def _listen_late(self, args: Any, out: Tensor, known: tuple[Any, ...]) -> None:
        """Listen after all to a call, as csrc/nodes/called.cpp knows it, that is not served at the
        graph's nodes this time."""
        run, number, node, output_nr, version, autocast = known
        regime = Regime(out.device.type, autocast, None)
        use = RerunUse(run, number, self._trained(self._module), regime, out.shape)
        self._listen(use, (args, {}), [out], {node: [(0, output_nr)]}, [version])

    def _listen(
        self,
        use: RerunUse,
        arguments: Any,
        outputs: list[Tensor],
        ends: Ends,
        versions: list[int],
        products: Mapping[int, ExpertGroup] = NO_PRODUCTS.of,
    ) -> None:
        """Save what the backward of a call needs, and register for what arrives at its ends."""
        kinds = use.regime.autocast, *(t.dtype for t in outputs)
        if kinds not in self._eps:
            self._eps[kinds] = coarsest_eps(ends, tensors_in(arguments))
        self._lifted = False
        use.save(self._module, arguments, outputs, self._eps[kinds])
        if has_users_forward(self._module):
            use.outcomes = outcomes_of(outputs, versions, use.eps)
        leaves = tree_leaves(arguments)
        if len(ends) > 1:
            use.several, use.inner = True, made_from_others(outputs, leaves)
            self._audit.defer(use.places)
        for node, pairs in ends.items():
            needed = use.places if ops.NATIVE else needed_by(node, use.parameters, leaves)
            prehook = partial(self._arrive, use, needed, pairs)
            node.register_prehook(prehook)
            if use.hooked:  # a checkpoint: what runs again must save as much again
                self._recorder.hold()
                weakref.finalize(prehook, self._recorder.release)
        if products:  # after the hook that begins it: an end may be a product
            shared = products, use.parameters, use.eps, self._failed
            use.products = Served(use.run, self._recorder, *shared)


def copy_shared_outputs(module: nn.Module, out: Any) -> Any:
    """Return a stock module's outputs with copies of those that share a node or memory; or None.

    An LSTMCell makes its h from its c: to a copy of c no gradient comes but the loss's. What is
    written over a view puts another node in its node's place, but for a copy. A user's module may
    keep its outputs, or have them share memory: it is run once more, see without_inner_grads.
    """
    stock = stock_of(type(module))
    if stock is nn.LSTMCell:
        return out[0], out[1].clone()
    views = stock in (nn.LSTM, nn.MultiheadAttention) and isinstance(out[0], Tensor)
    return (out[0].clone(), *out[1:]) if views and out[0]._base is not None else None
