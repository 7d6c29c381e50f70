"""RULES: how each layer class with a kernel is served. A module without a rule runs again by vmap.

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

from .._check import DTYPES
from ..extension import _C
from ..hooks.copies import stock_of
from ..plan.cost import AlgorithmPlan, plan
from ..plan.gpu import Gpu, Problem
from . import attention
from .attention import ALL_ROWS

MAX_PLANS = 2  # that a layer keeps for explain(): sequence lengths may never repeat


@dataclass
class Layer:
    """One module of an attached model, or a part of it, before any data."""

    name: str  # of the module
    kind: str  # the name of its rule, "recurrent" or "vmap"
    type_name: str
    weight: int = -1  # place in the table of parameters; -1: none
    bias: int = -1
    parameters: tuple[int, ...] = ()  # places
    ruled: bool = False  # its class has a rule, perhaps not in use: its rows keep their order
    inside: bool = False  # one weight of a recurrent module, whose own Layer comes before
    in_features: int = 0  # of one group; of a convolution, times the kernel's area
    out_features: int = 0  # of one group
    groups: int = 1
    kernel_size: tuple[int, ...] = ()  # empty: no convolution
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pre_pad: tuple[int, ...] = ()  # for F.pad, where the two sides of `padding` differ
    pad_mode: str = "constant"
    depth: tuple[int, ...] = ()  # kernel, stride, padding, dilation of the first of 3 dimensions
    transposed: bool = False
    role: str = ""  # which projection of nn.MultiheadAttention
    # Rows of the parameter before and after those in use, and how many parts the module uses.
    weight_rows: tuple[int, int, int] = ALL_ROWS
    bias_rows: tuple[int, int, int] = ALL_ROWS
    constants: dict[str, Any] = field(default_factory=dict)  # of layers other than products
    plans: dict[tuple[int, int], AlgorithmPlan] = field(default_factory=dict)  # latest, by (N, T)
    notes: dict[str, str | None] = field(default_factory=dict)  # how it was served, for explain()

    def plan(
        self,
        n: int,
        t: int,
        itemsize: int,
        weight_grad: bool,
        forced: str | None,
        device: Gpu | None = None,
    ) -> AlgorithmPlan:
        """Return the algorithm for N samples of T rows, and keep it for explain(). weight_grad: it
        makes the weight gradient too. forced: the user's `algorithm`."""
        sizes = n, t, self.in_features, self.out_features, self.groups
        kind: Any = "conv2d" if self.kernel_size else "linear"
        problem = Problem(kind, *sizes, itemsize, weight_grad, device)
        # with a weight gradient, "fused" does in one pass what "direct" does
        if forced == "direct" and weight_grad:
            forced = "fused"
        self.plans[n, t] = chosen = plan(problem, forced)
        while len(self.plans) > MAX_PLANS:
            self.plans.pop(next(iter(self.plans)), None)
        return chosen


@dataclass(frozen=True)
class Rule:
    """Description of how one class of layers is served."""

    name: str
    accepts: Callable[[Any], bool]  # whether it serves a module
    describe: Callable[[Any], dict[str, Any]]  # module -> fields of its Layer
    # -> its arithmetic, a Layer of csrc/layers; None: its parts have one, or a closed form serves
    make: Any = None
    # (layer, dimensions of its input) -> how many of them, from the first, count rows
    leads: Callable[[Layer, int], int] = lambda layer, dims: 1
    swaps: bool = True  # our forward replaces the stock one; False: we tap its output
    whole: bool = False  # the stock forward is one operator, which C++ calls; then `swaps` is False
    served_by: str = ""  # for explain(); empty: the cost model chooses an algorithm
    argument: str = "input"  # name of the forward's first argument
    # (module, places by name) -> fields of several layers, in place of `describe`
    parts: Callable[..., Iterator[dict[str, Any]]] | None = None


# Linear


def _features(inputs: str, outputs: str) -> Callable[[Any], dict[str, Any]]:
    """Return a `describe` that reads I and O off these attributes of a module."""
    names = {"in_features": inputs, "out_features": outputs}
    return lambda module: {key: getattr(module, name) for key, name in names.items()}


def _all_but_last(layer: Layer, dims: int) -> int:
    return dims - 1


# Convolutions. Conv1d is a Conv2d of height 1; Conv3d is a Conv2d of depth x channels.


def _describe_convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> dict[str, Any]:
    zeros, dims = module.padding_mode == "zeros", len(module.kernel_size)
    if not zeros:
        sides = list(module._reversed_padding_repeated_twice)  # as for F.pad: last dimension first
    elif module.padding == "same":
        total = map(mul, _each(module.dilation, dims), (k - 1 for k in module.kernel_size))
        sides = [side for t in reversed(list(total)) for side in (t // 2, t - t // 2)]
    else:
        padded: Any = 0 if module.padding == "valid" else module.padding
        sides = [side for p in reversed(_each(padded, dims)) for side in (p, p)]
    padding = sides[-2::-2] if zeros else [0] * dims  # of two sides the smaller, as torch has it
    uneven = [side - padding[-1 - k // 2] for k, side in enumerate(sides)]
    return {
        **_geometry(module, padding),
        "in_features": module.in_channels // module.groups * prod(module.kernel_size),
        "out_features": module.out_channels // module.groups,
        "pre_pad": tuple(uneven) if any(uneven) else (),
        "pad_mode": "constant" if zeros else module.padding_mode,
    }


def _describe_transposed(module: Any) -> dict[str, Any]:
    """Return the fields of the convolution back from a ConvTranspose's output to its input."""
    return {
        **_geometry(module, _each(module.padding, len(module.kernel_size))),
        "in_features": module.out_channels // module.groups * prod(module.kernel_size),
        "out_features": module.in_channels // module.groups,
        "transposed": True,
    }


def _geometry(module: Any, padding: Sequence[int]) -> dict[str, Any]:
    dims = len(module.kernel_size)
    stride, dilation = (_each(size, dims) for size in (module.stride, module.dilation))
    sizes = (module.kernel_size, stride, padding, dilation)
    return {
        "groups": module.groups,
        "kernel_size": _pair(module.kernel_size),
        "stride": _pair(stride),
        "padding": _pair(padding, 0),
        "dilation": _pair(dilation),
        "depth": tuple(size[0] for size in sizes) if dims == 3 else (),
    }


def _each(sizes: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return one size for each dimension; users may set a single number on a module."""
    each = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return each * dims if len(each) == 1 else each


def _pair(sizes: Sequence[int], first: int = 1) -> tuple[int, ...]:
    return (first, *sizes)[-2:]


def _make_convolution(layer: Layer) -> Any:
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
    """Return True if the convolution back from a ConvTranspose's output gives its input's size."""
    dims = len(module.kernel_size)
    return all(map(gt, *(_each(size, dims) for size in (module.stride, module.output_padding))))


# Tables, normalisations and elementwise layers: constants for csrc/layers


def _constants(*names: str, **renamed: str) -> Callable[[Any], dict[str, Any]]:
    """Return a `describe` that reads constants off a module's attributes; None becomes -1. renamed:
    attributes by the constant's name, where the two differ."""
    pairs = {**{name: name for name in names}, **renamed}

    def describe(module: Any) -> dict[str, Any]:
        found = {constant: getattr(module, name) for constant, name in pairs.items()}
        return {"constants": {k: -1 if v is None else v for k, v in found.items()}}

    return describe


def _describe_table(module: nn.Embedding) -> dict[str, Any]:
    found = _constants("padding_idx", "sparse", "max_norm")(module)
    found["constants"]["rows"] = len(module.weight)  # num_embeddings may be another tied table's
    return found


def _make(name: str) -> Callable[[Layer], Any]:
    return lambda layer: getattr(_C, name)(**layer.constants)


def _all_but_shape(layer: Layer, dims: int) -> int:
    return dims - len(layer.constants["shape"])


GATHER = "gather: rows of equal ids are added up, then squared"
BAGS = "closed form: every row of a bag has the bag's gradient, rows of equal ids are added up"
PAIRS = "closed form: outer products of the inputs, or Gram matrices, whichever is less"
SWEEP = "fused: in the sweep that makes its gradients"
BESIDE = "direct: in a sweep beside the framework's own"


def _is_unscaled(module: nn.Embedding | nn.EmbeddingBag) -> bool:
    return not module.scale_grad_by_freq  # which divides by counts of the whole batch


def _is_stock(module: Any, kind: Any, *methods: str) -> bool:
    """Return True if a module has the forward and these methods of `kind`, and no parameters but a
    weight and a bias."""
    own = stock_of(type(module))  # another probe may be attached, and paused
    names = ("forward", "__getattr__", "__getattribute__", "weight", "bias", *methods)
    same = all(getattr(own, n, None) is getattr(kind, n, None) for n in names)
    parameters = {name for name, p in module._parameters.items() if p is not None}
    plain = "weight" in parameters and parameters <= {"weight", "bias"}
    return same and plain and isinstance(module, kind)


def _is_of_package(package: str, name: str) -> Callable[[Any], bool]:
    """Return an `accepts` for a class of a package that is not imported here."""

    def accepts(module: Any) -> bool:
        kind = getattr(sys.modules.get(package), name, None)
        return kind is not None and _is_stock(module, kind)

    return accepts


def _row(
    kind: Any,
    describe: Callable[[Any], dict[str, Any]],
    make: Callable[[Layer], Any] | None = None,
    leads: Callable[[Layer, int], int] = Rule.leads,
    *,
    methods: Sequence[str] = (),
    when: Callable[[Any], bool] = lambda module: True,
    **fields: Any,
) -> tuple[type[nn.Module], Rule]:
    """Return the row of RULES for a class of torch.nn. methods: others that must be the stock ones.
    when: one more condition on a module. fields: of Rule."""

    def accepts(module: Any) -> bool:
        return _is_stock(module, kind, *methods) and when(module)

    return kind, Rule(kind.__name__.lower(), accepts, describe, make, leads, **fields)


def _rules() -> Iterator[tuple[type[nn.Module] | str, Rule]]:
    kind: Any
    linear = _features("in_features", "out_features")
    yield _row(nn.Linear, linear, lambda layer: _C.linear_layer(), _all_but_last)
    conv1d, gpt2 = ("transformers.pytorch_utils", "Conv1D"), _features("nx", "nf")
    yield ".".join(conv1d), Rule(
        "transposed linear", _is_of_package(*conv1d),
        lambda module: {**gpt2(module), "transposed": True},
        lambda layer: _C.linear_layer(transposed=True), _all_but_last, argument="x"
    )  # fmt: skip
    geometric = "torch_geometric.nn.dense.linear", "Linear"
    yield ".".join(geometric), Rule(
        "geometric linear", _is_of_package(*geometric), _features("in_channels", "out_channels"),
        lambda layer: _C.linear_layer(), _all_but_last, argument="x"
    )  # fmt: skip
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        yield _row(kind, _describe_convolution, _make_convolution, methods=("_conv_forward",))
    for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        # the stock forward stays: it takes an output_size besides its input
        yield _row(kind, _describe_transposed, _make_convolution, when=_fits, swaps=False)
    table = _make("embedding_layer")
    tables: dict[str, Any] = {"swaps": False, "whole": True, "served_by": GATHER}
    yield _row(
        nn.Embedding, _describe_table, table, lambda layer, dims: dims, when=_is_unscaled, **tables
    )
    plain = lambda module: module.max_norm is None and _is_unscaled(module)  # noqa: E731
    yield _row(nn.EmbeddingBag, _constants(), when=plain, served_by=BAGS)
    yield _row(nn.Bilinear, _constants(), served_by=PAIRS)
    attends = Rule("multiheadattention", attention.accepts, _constants(), parts=attention.parts)
    yield nn.MultiheadAttention, attends
    sweep: dict[str, Any] = {"served_by": SWEEP}
    shape = _constants("eps", shape="normalized_shape")
    yield _row(nn.LayerNorm, shape, _make("layer_norm_layer"), _all_but_shape, **sweep)
    yield _row(nn.RMSNorm, shape, _make("rms_norm_layer"), _all_but_shape, argument="x", **sweep)
    groups = _constants("eps", groups="num_groups")
    yield _row(nn.GroupNorm, groups, _make("group_norm_layer"), **sweep)
    slopes = _constants(slopes="num_parameters")
    yield _row(nn.PReLU, slopes, _make("prelu_layer"), **sweep)
    beside: dict[str, Any] = {"swaps": False, "served_by": BESIDE}
    eps = _constants("eps")
    tracks_nothing = lambda module: module.running_mean is None  # noqa: E731
    for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
        yield _row(kind, eps, _make("instance_norm_layer"), when=tracks_nothing, **beside)
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        yield _row(kind, eps, _make("batch_norm_layer"), **beside)


# By the class, or by the full name of a class of another package.
RULES: dict[type[nn.Module] | str, Rule] = dict(_rules())


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule that serves a module; None: it runs again."""
    plain = "forward" not in module.__dict__ and "_conv_forward" not in module.__dict__
    if not plain or parametrize.is_parametrized(module):
        return None
    if any(p is not None and p.dtype not in DTYPES for p in module._parameters.values()):
        return None
    return next((rule for rule in RULES.values() if rule.accepts(module)), None)


def rule_named(name: str) -> Rule:
    """Return a rule by its name, which is the `kind` of its layers."""
    return next(rule for rule in RULES.values() if rule.name == name)
