"""What torch.distributed has made of a model, as far as it changes what a probe may do.

torch.distributed.fsdp and .tensor are never imported here: where nobody has, nothing is sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

FSDP, TENSOR = "torch.distributed.fsdp", "torch.distributed.tensor"


def _known(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module, if it was imported."""
    if module not in sys.modules:
        return ()
    known = vars(sys.modules[module])
    return tuple(known[name] for name in names if name in known)


def sharded(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the sharded modules among these. A backward of theirs communicates: on one rank alone
    it would hang."""
    kinds = _known(FSDP, "FSDPModule", "FullyShardedDataParallel")
    return [module for module in modules if isinstance(module, kinds)] if kinds else []


def has_flat_parameter(model: nn.Module) -> bool:
    """Return True if FullyShardedDataParallel has made one flat parameter of many."""
    kinds = _known(FSDP, "FullyShardedDataParallel")
    return any(isinstance(module, kinds) for module in model.modules())


def why_not_recorded(model: nn.Module, parameters: Sequence[Tensor]) -> str | None:
    """Return the cause for which a forward cannot be recorded, if there is one."""
    if _split(model, parameters):
        return "tensor_parallel"
    if vars(model).get("_is_replica"):
        return "data_parallel"
    return None


def _split(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Return True if layers compute with DTensors that fully_shard does not gather before."""
    kinds = _known(TENSOR, "DTensor")
    if not kinds or kinds[0] not in set(map(type, tensors)):
        return False
    modules = sharded(model.modules())
    return not modules or any(p.is_dtensor for module in modules for p in _gathered_by(module))


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return True if only a part of any of them is here now."""
    kinds = _known(TENSOR, "DTensor")
    return any(isinstance(p, kinds) for p in parameters)


def local_part(p: Tensor) -> Tensor:
    """Return what is here of a parameter, from which fully_shard brings the whole together."""
    part: Tensor = getattr(p, "_local_tensor", p)
    return part


def parts_and_wholes(modules: Sequence[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """Return (part, whole) of what fully_shard puts into one place in turn. modules: sharded."""
    for module in modules:
        for p in _gathered_by(module):
            if "_unsharded_param" in vars(p):
                yield p.sharded_param, p._unsharded_param


def is_fsdp_node(node: Any) -> bool:
    """Return True for a node of fully_shard's, which sends gradients and frees parameters."""
    return bool(node.name() == "RegisterPostBackwardFunctionBackward")


def data_parallel(module: nn.Module) -> Any:
    """Return the DistributedDataParallel that a forward of this module runs in, or None."""
    for kind in _known("torch.nn.parallel.distributed", "DistributedDataParallel"):
        return module if isinstance(module, kind) else vars(kind)["_active_ddp_module"]
    return None


def skip_reduction(ddp: Any, covered: Sequence[Tensor]) -> None:
    """Let the current backward reduce nothing, unless it trains other parameters too: it would
    average .grad. Under join() other processes wait for it."""
    rest = {p for p in ddp.parameters() if p.requires_grad}.difference(covered)
    if not rest and not ddp._join_config.enable:
        ddp.reducer._reset_state()  # no_sync() would have to begin before the forward


def mean_over(ddp: Any, gradients: Sequence[Tensor]) -> None:
    """Average gradients as it does: in place, over its processes."""
    if not ddp.require_backward_grad_sync:  # under no_sync() it does not
        return
    group = ddp.process_group
    flat = torch.cat([g.flatten() for g in gradients])
    torch.distributed.all_reduce(flat, group=group)
    parts = (flat / group.size()).split([g.numel() for g in gradients])
    for g, part in zip(gradients, parts, strict=True):
        g.copy_(part.view_as(g))


def _gathered_by(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        yield from group.fsdp_params if group else ()
