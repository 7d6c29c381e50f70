"""Site of a module without a kernel: it records each call, and the module runs again in backward.

Here is the forward: which calls are uses, what they save, and the prehooks at the nodes of their
outputs. delivery.py is the backward, fallback.py runs the module again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ..extension import _C, NATIVE, Pass
from ..graph.arguments import tensors_in
from ..graph.nodes import coarsest_eps
from ..graph.sizes import look_of
from ..graph.unpacking import saves_through_hooks
from ..hooks.copies import Hooks, stock_of
from ..layers.modules import CONTAINERS, parameter_of
from ..layers.rules import Layer
from ..refusals import cause
from .delivery import Delivery, RerunUse
from .expert_products import Rows, find_products
from .experts import NO_PRODUCTS, ExpertGroup, ExpertUse, is_experts
from .fallback import CHANNELS_FIRST
from .native import MAY_MIX, Context, why_mixed
from .packed import samples_of
from .regime import Outcome, Regime, may_draw
from .several import end_of, ends_at, ends_of_module, inner_outputs, needed_by
from .stand_in import has_users_forward, makes_weight

Ends = dict[Any, list[tuple[int, int]]]  # by node: (output of the module, output of the node)


class _CallOfThread(threading.local):
    """Conditions of the call that runs on this thread."""

    regime: Regime | None  # None: it draws nothing, so that the regime after it is the same
    versions: Mapping[int, int] = {}  # of the arguments before the forward, by a tensor's id
    first = 0  # sequence number of the first node that it makes


class FallbackSite(Delivery):
    """Site of a module that runs again in backward."""

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        super().__init__(module, layer, index, context)
        self._eps: dict[Any, float] = {}  # of gradients inside, by autocast and outputs' dtypes
        self._call = _CallOfThread()
        self._may_mix = isinstance(module, MAY_MIX)
        self._has_owners = context.options["sample_ids"] is not None
        has_kernels = NATIVE and context.options["backend"] == "auto" and not self._has_owners
        self._may_have_products = has_kernels and is_experts(module)
        self._had_products = False  # some call was served by expert products
        # Names and places for `called`, which knows a module's own parameters only.
        in_containers = any("." in name for name in self._names.values())
        names_and_places = tuple(self._names.values()), tuple(self._names)
        self._slots = None if in_containers or self._may_mix else names_and_places
        self._hooks = Hooks(module, context.hooks)
        # A user's hook computes the weight before the forward: its nodes are the call's too.
        self._has_maker = any(map(makes_weight, module._forward_pre_hooks.values()))
        if self._has_maker:
            self._hooks.add(module.register_forward_pre_hook, self._note_first_node, prepend=True)
        self._attach(context)

    def _attach(self, context: Context) -> None:
        add, module = self._hooks.add, self._module
        add(module.register_forward_pre_hook, self._before_forward, with_kwargs=True)
        add(module.register_forward_hook, self._after_forward, prepend=True, with_kwargs=True)

    def leads(self, dims: int) -> int:
        """Return how many leading dimensions of an output count rows: [N, ...] or [T, N, ...]."""
        return 1 if isinstance(self._module, CHANNELS_FIRST) else min(2, max(1, dims - 1))

    @property
    def by_nodes(self) -> bool:
        """Return True if gradients may be taken at graph nodes: if the forward is the user's."""
        attends = isinstance(self._module, nn.MultiheadAttention)
        if self.declared >= 0 or self._had_products or attends:
            return False
        if self._has_owners:
            return True
        children = (c for c in self._module.children() if not isinstance(c, CONTAINERS))
        return has_users_forward(self._module) or self._has_maker or any(children)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._call
        if not self._has_maker:
            self._note_first_node()
        call.versions, call.regime = {}, None
        is_served = self._was_lifted or self._was_product
        if is_served or not (trained := self._trained(module)):
            return  # nothing is saved
        if not torch._C._are_functorch_transforms_active():
            given = tensors_in((args, kwargs))
            call.versions = {id(t): t._version for t in given if not t.is_inference()}
        call.regime = Regime.current(next(iter(trained.values())).device, may_draw(module))

    def _note_first_node(self, *_: Any) -> None:
        self._call.first = torch.autograd._get_sequence_nr()

    def _trained(self, module: nn.Module) -> dict[int, Tensor]:
        """Return the parameters that require a gradient, by place. Of functional_call there are
        none: the graph shows what its tensors were computed from."""
        named = ((place, parameter_of(module, name)) for place, name in self._names.items())
        found = {place: p for place, p in named if p is not None and p.requires_grad}
        return found if all(p.is_leaf for p in found.values()) else {}

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Record the call. Return what replaces the module's output; None: nothing."""
        if module is not self._module:  # one that holds a copy of our hook
            return None
        if self._was_lifted and self._slots and not kwargs:
            site = self._recorder, self._index, module, *self._slots, self._call.first
            known = _C.called(*site, args, out)  # records the use; None: C++ cannot
            if known is not None:  # likely served at graph nodes again, which needs nothing saved
                listen = partial(self._listen_late, args, out, known)
                self._audit.forwards.postpone(known[1], listen)
                return None
        run, parameters = self._recorder.current(), self._trained(module)
        if run is None or torch._C._are_functorch_transforms_active():
            return None
        samples = samples_of(out, run.n)
        why_not = self._why_not((args, kwargs), parameters, samples is not None, run.n)
        if why_not:
            run.refuse(self._index, why_not)
        if why_not or not parameters:
            return None
        changed = copy_shared_outputs(module, out) if torch.is_grad_enabled() else None
        outputs = tensors_in(changed or out)
        if any(t.is_nested for t in outputs):
            run.refuse(self._index, "nested")
            return None
        if outputs:  # else there is no use; a gradient of its parameters is refused when read
            self._record_use(run, parameters, (args, kwargs), outputs, samples)
        return changed

    def _why_not(
        self, arguments: Any, parameters: dict[int, Tensor], packs: bool, n: int
    ) -> str | None:
        """Return the cause for which this call has no gradients by sample, or cannot run again.
        packs: its first output is a packed sequence."""
        args, kwargs = arguments
        mixes = why_mixed(self._module, [*args, *kwargs.values()], n) if self._may_mix else None
        if mixes or not parameters:  # batch statistics mix the gradients of layers above too
            return mixes if parameters or mixes == "batch_statistics" else None
        if any(p.is_complex() for p in parameters.values()):
            return "complex"
        leaves = tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
        is_packed = any(isinstance(leaf, PackedSequence) for leaf in leaves)
        return cause("packed", n=n) if is_packed and not packs else None

    def _record_use(
        self,
        run: Pass,
        parameters: dict[int, Tensor],
        arguments: Any,
        outputs: list[Tensor],
        samples: Tensor | None,
    ) -> None:
        """Record a use, and listen to its outputs' gradients. samples: see RerunUse."""
        operands, single = tensors_in(arguments), len(outputs) == 1
        known = ((t, self._call.versions.get(id(t))) for t in operands)
        self.overwrites |= any(v is not None and v != t._version for t, v in known)
        live = [t for t in outputs if t.requires_grad]
        first = next((t for t in live if t.dim()), (live or outputs)[0])
        recorded, forwards = bool(self._recorder.depth()), self._audit.forwards
        if recorded:
            forwards.note_call(self._index, *operands)
        number = run.call(self._index, list(parameters.items()), first.shape, operands)
        for t in () if single else outputs:
            run.note(hash(look_of(t.shape, run.n)))
        if not torch.is_grad_enabled() or not live:
            return
        # Not the base of one of several outputs: another output may be computed from it.
        end, is_hooked = end_of(first) if single else first, saves_through_hooks()
        products = NO_PRODUCTS
        if self._may_have_products and single and recorded:
            leads = first.shape[: self.leads(first.dim())]
            of_output = Rows(tuple(leads), run.n, self.presumed)
            with contextlib.suppress(Exception):  # the module runs again instead
                first_node = self._call.first
                products = find_products(end, of_output, operands, parameters, first_node)
        if products.groups:
            self._had_products = True
            forwards.note_ends(self._index, first, products.ends)
            forwards.note_routes(number, products.by_row, operands, first)
        else:  # edges inside are not counted; of products, each edge is
            run.enclose(list(parameters), self._call.first)
            forwards.note_outputs(self._index, outputs)
        run.watch(number, end)
        if not single and run.n > 1 and recorded:
            rows = self.leads, run.n, samples
            others = ends_of_module(self._module, outputs, first, operands, *rows)
            forwards.note_ends(self._index, first, others)
        regime = self._call.regime or Regime.current(first.device, draws=False)
        use = RerunUse(run, number, parameters, regime, first.shape, samples)
        ends: Ends = {}
        for (node, output_nr), k in ends_at([end] if single else outputs).items():
            ends.setdefault(node, []).append((k, output_nr))
        versions = [t._version for t in outputs]
        listen = partial(self._listen, use, arguments, outputs, ends, versions, products.groups)
        may_wait = self._was_product if products.groups else self._was_lifted
        if may_wait and recorded and not is_hooked:
            forwards.postpone(number, partial(listen, is_proven=True))
        else:
            listen()

    def _listen_late(self, args: Any, out: Tensor, known: tuple[Any, ...]) -> None:
        """Listen to a call that `called` recorded, if it is not served at graph nodes this time."""
        run, number, node, output_nr, version, autocast = known
        regime = Regime(out.device, autocast, None)
        use = RerunUse(run, number, self._trained(self._module), regime, out.shape)
        self._listen(use, (args, {}), [out], {node: [(0, output_nr)]}, [version])

    def _listen(
        self,
        use: RerunUse,
        arguments: Any,
        outputs: list[Tensor],
        ends: Ends,
        versions: list[int],
        groups: Mapping[int, ExpertGroup] = NO_PRODUCTS.groups,
        is_proven: bool = False,
    ) -> None:
        """Save what the backward of a use needs, and register prehooks at its ends. versions: of
        the outputs, when the module returned. groups: its expert products. is_proven: the forward
        has ended, and the pass has its layouts."""
        dtypes = use.regime.autocast, *(t.dtype for t in outputs)
        if dtypes not in self._eps:
            self._eps[dtypes] = coarsest_eps(ends, tensors_in(arguments))
        self._was_lifted = self._was_product = False
        use.prepare(self._module, outputs, self._eps[dtypes])
        if not (is_proven and groups and self.layout_of(use) == self.presumed):
            use.save(arguments)
            if has_users_forward(self._module):
                pairs = zip(outputs, versions, strict=True)  # None: written into since
                use.outcomes = [
                    Outcome.of(t, use.eps) if t._version == version else None
                    for t, version in pairs
                ]
        leaves = tree_leaves(arguments)
        if len(ends) > 1:
            use.has_several_nodes, use.inner = True, inner_outputs(outputs, leaves)
            self._audit.defer(use.places)
        for node, numbers in ends.items():
            needed = use.places if NATIVE else needed_by(node, use.parameters, leaves)
            prehook = partial(self._arrive, use, needed, numbers)
            node.register_prehook(prehook)
            if use.saves_through_hooks:  # a checkpoint's recomputation must save the same again
                self._recorder.hold()
                weakref.finalize(prehook, self._recorder.release)
        if groups:  # after the prehook that begins it, since an end may be a product's node
            rest = groups, use.parameters, use.eps, self._refuse_error
            use.products = ExpertUse(use.run, self._recorder, *rest)


def copy_shared_outputs(module: nn.Module, out: Any) -> Any:
    """Return a stock module's outputs, with copies of those that share a node or memory; or None.
    An LSTMCell computes its h from its c: a copy of c gets the loss's gradient alone. An in-place
    operation on a view replaces its base's node, but not that of a copy. Outputs of a user's module
    are not copied, since it may keep them: see without_inner_grads."""
    stock = stock_of(type(module))
    if stock is nn.LSTMCell:
        return out[0], out[1].clone()
    views = stock in (nn.LSTM, nn.MultiheadAttention) and isinstance(out[0], Tensor)
    return (out[0].clone(), *out[1:]) if views and out[0]._base is not None else None
