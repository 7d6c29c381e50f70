"""Which kernel sees a module's parameters: RULES for layers that have one, else the fallback.

A rule is chosen by the identity of the forward function, never by type alone: a subclass with its
own forward computes something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import gt, mul
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from .. import ops
from .._check import DTYPES
from ..hooks.copies import stock_of
from ..plan.cost import AlgorithmPlan, plan
from ..plan.gpu import Gpu, Problem
from . import attention

if ops.NATIVE:
    from .. import _C

ALL_ROWS = (0, 0, 1)
MAX_PLANS = 2  # plans that explain() shows: lengths may never repeat


@dataclass
class Layer:
    """One module of an attached model: what is known of it before any data is seen."""

    name: str
    kind: str  # the name of its rule, or "recurrent", or "vmap"
    type_name: str
    weight: int = -1  # places in the probe's table of parameters; -1: none
    bias: int = -1
    parameters: tuple[int, ...] = ()
    ruled: bool = False  # a rule is of it, also where vmap serves: rows go through in order
    inside: bool = False  # one weight of a recurrent module, which has a Layer of its own before
    in_features: int = 0
    out_features: int = 0  # of one group, as in_features
    groups: int = 1
    kernel_size: tuple[int, ...] = ()  # () but for convolutions
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pre_pad: tuple[int, ...] = ()  # what `padding` cannot say, as for F.pad
    pad_mode: str = "constant"
    depth: tuple[int, ...] = ()  # of the first of three: kernel, stride, padding, dilation
    transposed: bool = False
    role: str = ""  # of one among several layers that a module is
    weight_rows: tuple[int, int, int] = ALL_ROWS  # those before, those after, and in how many parts
    bias_rows: tuple[int, int, int] = ALL_ROWS
    constants: dict[str, Any] = field(default_factory=dict)  # of other layers
    plans: dict[tuple[int, int], AlgorithmPlan] = field(
        default_factory=dict
    )  # the latest, by (N, T)
    notes: dict[str, str | None] = field(default_factory=dict)  # how it was served, and more of it

    def plan(
        self,
        n: int,
        t: int,
        itemsize: int,
        weight_grad: bool,
        forced: str | None,
        device: Gpu | None = None,
    ) -> AlgorithmPlan:
        problem = Problem(
            layer="conv2d" if self.kernel_size else "linear",
            n=n,
            t=t,
            i=self.in_features,
            o=self.out_features,
            groups=self.groups,
            itemsize=itemsize,
            weight_grad=weight_grad,
            device=device,
        )
        # direct, where the weight gradient is wanted too, is what fused does in one pass
        if forced == "direct" and weight_grad:
            forced = "fused"
        self.plans[n, t] = chosen = plan(problem, forced)
        while len(self.plans) > MAX_PLANS:
            self.plans.pop(next(iter(self.plans)), None)
        return chosen


@dataclass(frozen=True)
class Rule:
    name: str
    accepts: Callable[[Any], bool]
    describe: Callable[[Any], dict[str, Any]]  # fields of Layer
    make: Callable[[Layer], Any] = lambda layer: None  # its arithmetic in C++, csrc/layers
    leads: Callable[[Layer, int], int] = lambda layer, dims: 1  # of an input: that count rows
    swaps: bool = True  # its forward can be ours; else its output is tapped
    whole: bool = False  # then: that forward is one operator all the same
    served_by: str = ""  # where there is nothing to choose; else the cost model says
    argument: str = "input"
    closed: bool = False  # in place of `make`: from what the module was called with
    parts: Callable[..., Iterator[dict[str, Any]]] | None = None  # fields of several layers


# Linear


def _linear(module: nn.Linear) -> dict[str, Any]:
    return {"in_features": module.in_features, "out_features": module.out_features}


def _all_but_last(layer: Layer, dims: int) -> int:
    return dims - 1


def _conv1d(module: Any) -> dict[str, Any]:
    """That of GPT-2: a Linear whose weight is [I, O]."""
    return {"in_features": module.nx, "out_features": module.nf, "transposed": True}


# Convolutions; one dimension is two, of height 1, and three are two, of more channels


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> dict[str, Any]:
    zeros, dims = module.padding_mode == "zeros", len(module.kernel_size)
    if not zeros:
        sides = list(module._reversed_padding_repeated_twice)  # as for F.pad: last dimension first
    elif module.padding == "same":
        total = map(mul, _each(module.dilation, dims), (k - 1 for k in module.kernel_size))
        sides = [side for t in reversed(list(total)) for side in (t // 2, t - t // 2)]
    else:
        padded: Any = 0 if module.padding == "valid" else module.padding
        sides = [side for p in reversed(_each(padded, dims)) for side in (p, p)]
    symmetric = zeros and sides[::2] == sides[1::2]
    padding = sides[::-2] if symmetric else [0] * dims
    return {
        **_geometry(module, padding),
        "in_features": module.in_channels // module.groups * prod(module.kernel_size),
        "out_features": module.out_channels // module.groups,
        "pre_pad": () if symmetric else tuple(sides),
        "pad_mode": "constant" if module.padding_mode == "zeros" else module.padding_mode,
    }


def _transposed(module: Any) -> dict[str, Any]:
    """Return the convolution from its gradient to its input, see csrc/layers/convolution.cpp."""
    return {
        **_geometry(module, _each(module.padding, len(module.kernel_size))),
        "in_features": module.out_channels // module.groups * prod(module.kernel_size),
        "out_features": module.in_channels // module.groups,
        "transposed": True,
    }


def _geometry(module: Any, padding: Sequence[int]) -> dict[str, Any]:
    dims = len(module.kernel_size)
    stride, dilation = (_each(size, dims) for size in (module.stride, module.dilation))
    sizes, deep = (module.kernel_size, stride, padding, dilation), dims == 3
    return {
        "groups": module.groups,
        "kernel_size": _pair(module.kernel_size),
        "stride": _pair(stride),
        "padding": _pair(padding, 0),
        "dilation": _pair(dilation),
        "depth": tuple(size[0] for size in sizes) if deep else (),
    }


def _each(sizes: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return sizes by dimension: what was set on a module by hand need not say it so."""
    each = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return each * dims if len(each) == 1 else each


def _pair(sizes: Sequence[int], first: int = 1) -> tuple[int, ...]:
    return (first, *sizes)[-2:]


def _convolution_layer(layer: Layer) -> Any:
    return _C.convolution_layer(
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        transposed=layer.transposed,
        one_dimensional=layer.kind.endswith("1d"),
        depth=layer.depth,
        pre_pad=layer.pre_pad,
        pad_mode=layer.pad_mode,
    )


def _fits(module: Any) -> bool:
    """Return True if a transposed convolution has the sizes of a convolution turned round."""
    dims = len(module.kernel_size)
    return all(map(gt, *(_each(size, dims) for size in (module.stride, module.output_padding))))


# Tables, normalisations and what else acts element by element: constants for csrc/layers


def _constants(*names: str, **renamed: str) -> Callable[[Any], dict[str, Any]]:
    """{constant: attribute of the module}; None is -1."""
    pairs = {**{name: name for name in names}, **renamed}

    def describe(module: Any) -> dict[str, Any]:
        found = {constant: getattr(module, name) for constant, name in pairs.items()}
        return {"constants": {k: -1 if v is None else v for k, v in found.items()}}

    return describe


def _made_of(name: str) -> Callable[[Layer], Any]:
    return lambda layer: getattr(_C, name)(**layer.constants)


def _all(layer: Layer, dims: int) -> int:
    return dims


def _all_but_shape(layer: Layer, dims: int) -> int:
    return dims - len(layer.constants["shape"])


GATHER = "gather: rows of equal ids are added up, then squared"
BAGS = "closed form: every row of a bag has the bag's gradient, rows of equal ids are added up"
PAIRS = "closed form: outer products of the inputs, or Gram matrices, whichever is less"
SWEEP = "fused: in the sweep that makes its gradients"
BESIDE = "direct: in a sweep beside the framework's own"


def _unscaled(module: nn.Embedding | nn.EmbeddingBag) -> bool:
    return not module.scale_grad_by_freq  # by counts of the whole batch


def _plain_bags(module: nn.EmbeddingBag) -> bool:
    return module.max_norm is None and _unscaled(module)


def _own_statistics(module: Any) -> bool:
    return module.running_mean is None


def _stock(kind: Any, *methods: str) -> Callable[[Any], bool]:
    """Return True if a module computes what the stock class does, of its own parameters."""
    names = ("forward", "__getattr__", "__getattribute__", "weight", "bias", *methods)

    def accepts(module: Any) -> bool:
        own = stock_of(type(module))  # another probe may have the model, and stand aside
        same = all(getattr(own, n, None) is getattr(kind, n, None) for n in names)
        return same and isinstance(module, kind) and _only_weight_and_bias(module)

    return accepts


def _only_weight_and_bias(module: nn.Module) -> bool:
    own = {name for name, p in module._parameters.items() if p is not None}
    return "weight" in own and own <= {"weight", "bias"}


def _elsewhere(module: str, name: str) -> Callable[[Any], bool]:
    """Return what _stock does, of a class of a package that is never imported here."""

    def accepts(candidate: Any) -> bool:
        kind = getattr(sys.modules.get(module), name, None)
        return kind is not None and _stock(kind)(candidate)

    return accepts


def _row(
    kind: Any,
    describe: Callable[[Any], dict[str, Any]],
    make: Callable[[Layer], Any] = Rule.make,
    leads: Callable[[Layer, int], int] = Rule.leads,
    *,
    methods: Sequence[str] = (),
    when: Callable[[Any], bool] = lambda module: True,
    **more: Any,
) -> tuple[type[nn.Module], Rule]:
    stock = _stock(kind, *methods)

    def accepts(module: Any) -> bool:
        return stock(module) and when(module)

    return kind, Rule(kind.__name__.lower(), accepts, describe, make, leads, **more)


def _rules() -> Iterator[tuple[type[nn.Module] | str, Rule]]:
    kind: Any
    yield _row(nn.Linear, _linear, lambda layer: _C.linear_layer(), _all_but_last)
    conv1d = "transformers.pytorch_utils", "Conv1D"
    yield ".".join(conv1d), Rule(
        "transposed linear", _elsewhere(*conv1d), _conv1d,
        lambda layer: _C.linear_layer(transposed=True), _all_but_last, argument="x"
    )  # fmt: skip
    geometric = "torch_geometric.nn.dense.linear", "Linear"
    sizes = _constants(in_features="in_channels", out_features="out_channels")
    yield ".".join(geometric), Rule(
        "geometric linear", _elsewhere(*geometric), lambda module: sizes(module)["constants"],
        lambda layer: _C.linear_layer(), _all_but_last, argument="x"
    )  # fmt: skip
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        yield _row(kind, _convolution, _convolution_layer, methods=("_conv_forward",))
    for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        # its forward takes an output_size besides, and stays the framework's own
        yield _row(kind, _transposed, _convolution_layer, when=_fits, swaps=False)
    rows = _constants("padding_idx", "sparse", "max_norm", rows="num_embeddings")
    table = _made_of("embedding_layer")
    tables: dict[str, Any] = {"swaps": False, "whole": True, "served_by": GATHER}
    yield _row(nn.Embedding, rows, table, _all, when=_unscaled, **tables)
    bags: dict[str, Any] = {"closed": True, "served_by": BAGS}
    yield _row(nn.EmbeddingBag, _constants(), when=_plain_bags, **bags)
    yield _row(nn.Bilinear, _constants(), closed=True, served_by=PAIRS)
    yield (
        nn.MultiheadAttention,
        Rule("multiheadattention", attention.accepts, _constants(), parts=attention.parts),
    )
    shape = _constants("eps", shape="normalized_shape")
    yield _row(nn.LayerNorm, shape, _made_of("layer_norm_layer"), _all_but_shape, served_by=SWEEP)
    rms = _made_of("rms_norm_layer")
    yield _row(nn.RMSNorm, shape, rms, _all_but_shape, argument="x", served_by=SWEEP)
    groups = _constants("eps", groups="num_groups")
    yield _row(nn.GroupNorm, groups, _made_of("group_norm_layer"), served_by=SWEEP)
    slopes = _constants(slopes="num_parameters")
    yield _row(nn.PReLU, slopes, _made_of("prelu_layer"), served_by=SWEEP)
    tapped: dict[str, Any] = {"swaps": False, "served_by": BESIDE}
    eps = _constants("eps")
    for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
        instances = _made_of("instance_norm_layer")
        yield _row(kind, eps, instances, when=_own_statistics, **tapped)
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        yield _row(kind, eps, _made_of("batch_norm_layer"), **tapped)


RULES: dict[type[nn.Module] | str, Rule] = dict(_rules())


def rule_of(module: nn.Module) -> Rule | None:
    plain = "forward" not in module.__dict__ and "_conv_forward" not in module.__dict__
    if not plain or parametrize.is_parametrized(module):
        return None
    if any(p is not None and p.dtype not in DTYPES for p in module._parameters.values()):
        return None
    return next((rule for rule in RULES.values() if rule.accepts(module)), None)


def rule_named(name: str) -> Rule:
    return next(rule for rule in RULES.values() if rule.name == name)
