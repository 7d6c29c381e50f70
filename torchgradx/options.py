"""Checks of the arguments of attach(), before the model is touched."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from .extension import NATIVE
from .layers.modules import named_in_full
from .layers.table import Parameters
from .reference.chunks import accumulation_dtype
from .refusals import refused_all
from .sharding import has_flat_parameter

Scale = float | Tensor  # of a loss: a number, or a Tensor [N]
Model = Literal["model"]  # per= of which a result is one Tensor,
Parts = Literal["module", "parameter"]  # and of which it is a dict of them
Per = Literal["model", "module", "parameter"]
NonFinite = Literal["keep", "drop"]


def check_per(per: str) -> None:
    if per not in ("model", "module", "parameter"):
        raise ValueError(f'per must be "model", "module" or "parameter"; got {per!r}')


def check_loss(loss_fn: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable; got {type(loss_fn).__name__}")


def takes_call(scale: Callable[..., Scale]) -> bool:
    """Return True if a loss_scale is called with the (args, kwargs) of a forward."""
    return bool(inspect.signature(scale).parameters)


def check_scale(scale: Any, to_come: bool = False) -> None:
    """to_come: for passes to come, for which it may be a GradScaler or a callable."""
    if to_come and (callable(scale) or isinstance(scale, torch.amp.GradScaler)):
        return
    number = isinstance(scale, Real) and not isinstance(scale, bool)
    if not number and not isinstance(scale, Tensor):
        expected = "a number, a Tensor [N], a GradScaler or a callable"
        if not to_come:
            expected = "a number or a Tensor [N] (a GradScaler goes to attach or probe.loss_scale)"
        raise TypeError(f"loss_scale must be {expected}; got {scale!r}")
    several = isinstance(scale, Tensor) and scale.dim() > 1
    if several or (number and not (scale and isfinite(scale))):
        got = f"a Tensor {list(scale.shape)}" if several else scale
        raise ValueError(f"loss_scale must be finite and not 0, or a Tensor [N]; got {got}")


def place_directions(directions: Any, parameters: Parameters) -> list[Tensor | None]:
    """Return them by the parameters' places, in the dtype of sums; empty if there are none."""
    if not isinstance(directions, Mapping):
        got = type(directions).__name__
        raise TypeError(f"directions must be {{parameter name: Tensor}}; got {got}")
    tensors = parameters.tensors()
    found: list[Tensor | None] = [None] * len(tensors)
    for name, v in directions.items():
        try:
            place = parameters.place(name)
        except KeyError:
            known = ", ".join(parameters.names[:8])
            raise ValueError(
                f"directions[{name!r}] is not a parameter of the model: it has {known}, ..."
            ) from None
        p = tensors[place]
        if not isinstance(v, Tensor) or v.shape != p.shape or not v.is_floating_point():
            got = f"{v.dtype} {list(v.shape)}" if isinstance(v, Tensor) else repr(v)
            raise ValueError(
                f"directions[{name!r}] must be a floating Tensor {list(p.shape)}, as the "
                f"parameter is; got {got}"
            )
        if found[place] is not None:
            raise ValueError(f"directions[{name!r}] is given twice: the parameter has two names")
        found[place] = v.detach().to(p.device, accumulation_dtype(p.dtype), copy=True)
    return found if directions else []


def move_directions(
    directions: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the same beside parameters that were moved, or cast, since."""
    return [
        None if v is None else v.to(p.device, accumulation_dtype(p.dtype))
        for v, p in zip(directions, parameters, strict=True)
    ]


CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_reduction": ("mean", "sum"),
    "batch_dim": (0, 1),
    "algorithm": (None, "rank1", "gram", "direct"),
    "backend": ("auto", "native", "vmap"),
    "fused": (True, False),
    "weight_grad": (True, False),
    "clip": (True, False),
    "check": ("graph", "samples", "off"),
}


def check(model: Any, options: dict[str, Any]) -> None:
    """Raise where arguments of attach() are not as its docstring says."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    for name, choices in CHOICES.items():
        value = options[name]  # of 1, 1.0 and True, which are equal, one is meant
        if value not in choices or type(value) in {bool, int, float} - {type(choices[0])}:
            expected = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {expected}; got {value!r}")
    if options["backend"] == "native" and not NATIVE:
        raise RuntimeError(
            'backend="native" needs the compiled extension, which is not there: build it with '
            '`pip install .`, or say backend="auto"'
        )
    _check_samples(options)
    check_scale(options["loss_scale"], to_come=True)
    _check_layout(options["layout"] or {}, dict(model.named_modules()))
    _check_model(model)


def _check_samples(options: dict[str, Any]) -> None:
    ids, size = options["sample_ids"], options["batch_size"]
    if ids is not None and not callable(ids):
        raise TypeError(
            f"sample_ids must be a callable (args, kwargs) -> LongTensor; got {type(ids).__name__}"
        )
    if ids is not None and (options["layout"] or options["batch_dim"]):
        raise ValueError("sample_ids says where all samples are: leave layout and batch_dim out")
    if not (size is None or callable(size) or type(size) is int):
        raise TypeError(
            f"batch_size must be an int or a callable (args, kwargs) -> int; got {size!r}"
        )
    if isinstance(size, int) and size < 1:
        raise ValueError(f"batch_size must be 1 or more; got {size}")


def _check_layout(layout: Any, modules: Mapping[str, nn.Module]) -> None:
    if not isinstance(layout, Mapping):
        raise TypeError(f'layout must be {{module name: "batch" or "sequence"}}; got {layout!r}')
    for pattern, how in layout.items():
        if not isinstance(pattern, str):
            raise TypeError(f"layout must be of module names or patterns; got the key {pattern!r}")
        if how not in ("batch", "sequence"):
            raise ValueError(f'layout[{pattern!r}] must be "batch" or "sequence"; got {how!r}')
        if pattern not in modules and not fnmatch.filter(modules, pattern):
            known = ", ".join(filter(None, modules))
            raise ValueError(f"layout[{pattern!r}] fits no module of the model: it has {known}")


def _check_model(model: nn.Module) -> None:
    parameters, held = dict(model.named_parameters()), set(map(id, named_in_full(model).values()))
    if others := [name for name, p in parameters.items() if id(p) not in held]:
        raise ValueError(
            f"model lists a parameter that no module of it holds ({others[0]}): attach to the "
            "module that holds it"
        )
    lazy = [name for name, p in parameters.items() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ValueError(f"model has uninitialized parameters ({lazy[0]}): run a forward first")
    scripted = (isinstance(m, torch.jit.RecursiveScriptModule) for m in model.modules())
    if isinstance(model, torch.jit.ScriptModule) or any(scripted):
        raise refused_all("scripted", parameters)
    if has_flat_parameter(model):
        raise refused_all("flat_parameter", parameters)
