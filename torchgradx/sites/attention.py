"""nn.MultiheadAttention as the Linears that it is made of.

Its forward is the framework's own, in which the projections alone are ours. They use rows of
in_proj_weight: all of them at once where query, key and value are the same tensor, else in two or
three parts, each used once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..graph.layout import SEQUENCE
from ..layers.attention import OUT, SELF, THREE, TWO
from ..refusals import cause

if ops.NATIVE:
    from .. import _C


class Part:
    """One of them, in a module of an attached model."""

    def __init__(self, site: Any, index: int, layer: Any, declared: int, fused: bool) -> None:
        self._site, self._index, self._declared, self._fused = site, index, declared, fused
        self.places = list(layer.parameters)

    def __call__(self, run: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if run is not None and self._declared == SEQUENCE and x.shape[1] != run.n:
            run.refuse(self._index, cause("attention_rows", rows=x.shape[1], n=run.n))
        out: Tensor | None = _C.call(self._site, x, weight, bias) if self._fused else None
        if out is None:
            out = F.linear(x, weight, bias)
            if not self._fused:
                _C.tap(self._site, x, weight, bias, out)
        return out

    def count(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Count a use whose forward was not recorded: it will run again."""
        _C.count(self._site, x, weight, bias)


class _Forward:
    """One call of a module. All projections see [T, N, *], whatever batch_first says."""

    def __init__(self, module: Any, roles: Mapping[str, Part], recorder: Any) -> None:
        self._module, self._roles, self._recorder = module, roles, recorder
        self._batch = -1
        own: dict[str, Any] = {"_in_projection_packed": self._packed, "_in_projection": self._apart}
        own.update(linear=self._output, has_torch_function=lambda tensors: False)
        self._attention = _with(F.multi_head_attention_forward, own)

    def __call__(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        functional = {**vars(F), "multi_head_attention_forward": self._attention}
        forward = _with(stock.forward, {"F": SimpleNamespace(**functional)})
        found = forward(self._module, *args, **kwargs)
        if self._batch < 0:  # in one kernel, as where no gradient is wanted
            x = args[0] if args else kwargs["query"]
            m = self._module
            x = x.transpose(0, 1) if m.batch_first else x
            self._roles[SELF].count(x, m.in_proj_weight, m.in_proj_bias)
            self._roles[OUT].count(x, m.out_proj.weight, m.out_proj.bias)
        return found

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor | None = None
    ) -> Sequence[Tensor]:
        roles = THREE if k is not v else TWO if q is not k else (SELF,)
        turn = iter(roles)
        linear = self._linear(lambda: next(turn))
        project = _with(vars(F)["_in_projection_packed"], {"linear": linear})
        return self._enclosed(roles, q, partial(project, q, k, v, w, b))

    def _apart(self, *operands: Any) -> Sequence[Tensor]:
        inputs, weights = operands[:3], operands[3:6]
        bias = self._module.in_proj_bias
        turn = iter(THREE)
        linear = self._linear(lambda: next(turn))

        def project() -> list[Tensor]:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            return list(map(linear, inputs, weights, biases))

        return self._enclosed(THREE, inputs[0], project)

    def _enclosed(
        self, roles: Sequence[str], q: Tensor, project: Callable[[], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """Enclose the nodes of a use that split off parts of a parameter, which nothing counts."""
        self._batch = q.shape[1]
        if roles == (SELF,):
            return project()
        # Asked first: once a checkpoint's calls have all come again, no pass is left to find.
        run, first = self._recorder.current(), torch.autograd._get_sequence_nr()
        found = project()
        if run is not None:
            run.enclose([place for role in roles for place in self._roles[role].places], first)
        return found

    def _linear(self, role: Callable[[], str]) -> Callable[..., Tensor]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return self._roles[role()](self._recorder.current(), x, weight, bias)

        return linear

    def _output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        steps = len(x) // max(1, self._batch)
        rows = x.unflatten(0, (steps, self._batch))
        return self._roles[OUT](self._recorder.current(), rows, weight, bias).flatten(0, 1)


def _with(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of the framework's that finds other things under these names."""
    scope = {**function.__globals__, **names}
    return FunctionType(function.__code__, scope, function.__name__, _defaults(function))


@cache
def _defaults(function: Callable[..., Any]) -> tuple[Any, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.default for p in parameters if p.default is not p.empty)


def attending(recorder: Any) -> Callable[..., Callable[..., Any]]:
    def forward_of(stock: Any, sites: dict[int, Any]) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            roles = sites.get(id(self))
            if roles is None or recorder.current() is None:
                return stock.forward(self, *args, **kwargs)
            return _Forward(self, roles, recorder)(stock, *args, **kwargs)

        forward._torchdynamo_disable = True  # type: ignore[attr-defined]
        return forward

    return forward_of
