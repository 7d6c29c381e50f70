"""Sites of nn.MultiheadAttention: its projections are recorded as Linears, see layers/attention.py.

The stock forward runs, with our functions in place of the projections: a copy of the function has
globals in which other functions have these names. All projections get [T, N, *] here, whatever
batch_first is: the stock forward transposes before them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..extension import _C, Pass, Recorder
from ..graph.layout import SEQUENCE
from ..layers.attention import OUT, SELF, THREE, TWO
from ..refusals import cause


class Projection:
    """One projection of an attached module."""

    def __init__(self, site: Any, index: int, layer: Any, declared: int, fused: bool) -> None:
        self.site, self._index, self._declared, self._fused = site, index, declared, fused
        self.places = list(layer.parameters)

    def __call__(self, run: Pass | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if run is not None and self._declared == SEQUENCE and x.shape[1] != run.n:
            run.refuse(self._index, cause("attention_rows", rows=x.shape[1], n=run.n))
        out: Tensor | None = _C.call(self.site, x, weight, bias) if self._fused else None
        if out is None:
            out = F.linear(x, weight, bias)
            if not self._fused:
                _C.tap(self.site, x, weight, bias, out)
        return out


class _Call:
    """One call of a module."""

    def __init__(
        self, module: Any, projections: Mapping[str, Projection], recorder: Recorder
    ) -> None:
        self._module, self._projections, self._recorder = module, projections, recorder
        self._batch = -1  # of the input; -1: no projection of ours has run
        self._first = torch.autograd._get_sequence_nr()  # of the nodes that it makes

    def run(self, stock: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the stock class's forward with our projections."""
        own: dict[str, Any] = {"_in_projection_packed": self._project_packed}
        own.update(_in_projection=self._project_separate, linear=self._project_output)
        # A subclass of Tensor would otherwise have F's own function called again.
        own["has_torch_function"] = lambda tensors: False
        attention = _with_globals(F.multi_head_attention_forward, own)
        functional = {**vars(F), "multi_head_attention_forward": attention}
        forward = _with_globals(stock.forward, {"F": SimpleNamespace(**functional)})
        out = forward(self._module, *args, **kwargs)
        if self._batch < 0:  # one fused kernel ran, as in a checkpoint, which will run again
            m = self._module
            x = args[0] if args else kwargs["query"]
            x = x.transpose(0, 1) if m.batch_first else x
            _C.count(self._projections[SELF].site, x, m.in_proj_weight, m.in_proj_bias)
            _C.count(self._projections[OUT].site, x, m.out_proj.weight, m.out_proj.bias)
        return out

    def _project_packed(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Sequence[Tensor]:
        """Project by the rows of one weight, in as many parts as the stock function uses."""
        roles = THREE if k is not v else TWO if q is not k else (SELF,)
        return self._project("_in_projection_packed", roles, q, k, v, *rest)

    def _project_separate(self, *operands: Any) -> Sequence[Tensor]:
        """Project by three weights, given query, key, value and these."""
        return self._project("_in_projection", THREE, *operands)

    def _project(self, name: str, roles: Sequence[str], q: Tensor, *rest: Any) -> Sequence[Tensor]:
        """Project by a stock function of this name, and leave the nodes that split a parameter out
        of the count of its edges."""
        self._batch = q.shape[1]
        project = _with_globals(vars(F)[name], {"linear": self._linear(roles)})
        # Asked before: after a checkpoint's last recomputed use, there is no pass any more.
        run = self._recorder.current()
        out: Sequence[Tensor] = project(q, *rest)
        if run is not None and roles != (SELF,):
            run.enclose([p for role in roles for p in self._projections[role].places], self._first)
        return out

    def _linear(self, roles: Sequence[str]) -> Callable[..., Tensor]:
        """Return a linear function that applies the projection of the next role at each call."""
        turn = iter(roles)

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return self._projections[next(turn)](self._recorder.current(), x, weight, bias)

        return linear

    def _project_output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        steps = len(x) // max(1, self._batch)
        rows = x.unflatten(0, (steps, self._batch))
        return self._linear((OUT,))(rows, weight, bias).flatten(0, 1)


def _with_globals(function: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function that finds other objects under these global names."""
    scope = {**function.__globals__, **names}
    return FunctionType(function.__code__, scope, function.__name__, _defaults(function))


@cache
def _defaults(function: Callable[..., Any]) -> tuple[Any, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.default for p in parameters if p.default is not p.empty)


def attention_forward_of(
    recorder: Recorder, stock: Any, sites: dict[int, Any]
) -> Callable[..., Any]:
    """Return a forward for `make_subclass`. sites: projections by role, by the module's id."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        projections = sites.get(id(self))
        if projections is None or recorder.current() is None:
            return stock.forward(self, *args, **kwargs)
        return _Call(self, projections, recorder).run(stock, *args, **kwargs)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    return forward
