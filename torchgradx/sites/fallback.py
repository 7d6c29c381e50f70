"""Gradients by sample of a module without a kernel: by vmap, by a replay, or in closed form.

vmap and the replay run the module's forward again on its inputs, and pull back its outputs'
gradients. vmap maps one sample's gradient over the batch. Where it has no rule (recurrent layers,
custom Functions, dropout), the whole batch is replayed once with its random state, and one
vector-Jacobian product is taken for each sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..gradients.by_sample import GRADIENT_ELEMENTS, Gradients, weighted
from ..gradients.outer import LookedUp, Outer
from ..graph.arguments import tensors_in
from ..graph.layout import BATCH, SEGMENTS, SEQUENCE
from ..graph.nodes import nodes_below
from ..graph.sizes import as_rows
from ..kept import Versions
from ..layers.modules import named_in_full
from ..reference.chunks import accumulation_dtype, chunks
from ..refusals import RefusedError, cause
from .regime import OtherOutputsError, Outcome, Regime, require_same
from .stand_in import copy_state, stand_in, swap_tensors

Chunks = Iterator[tuple[slice, list[Tensor]]]  # samples, and gradients [n, *shape] by parameter

CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)
TABLES = ("EmbeddingBackward0", "EmbeddingBagBackward0")


@dataclass(frozen=True)
class Call:
    """One call of a module, and the gradients of its outputs."""

    module: nn.Module
    names: Sequence[str]  # of the parameters, within the module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    grads: Sequence[Tensor | None]  # by output
    n: int
    layout: int
    first_shape: Sequence[int]  # of the output that has this layout
    regime: Regime
    recorder: Any  # of the probe
    samples: Tensor | None = None  # of each row of the first output, if it is packed
    outcomes: Sequence[Outcome | None] = ()  # of the forward, by output; empty: not compared

    @property
    def lead(self) -> int:
        """Return the dimension of the samples in the first output: 0, or 1 of [T, N, ...]."""
        if isinstance(self.module, CHANNELS_FIRST):
            return 0  # in rows t*N+n, since the second dimension is of channels
        shape = self.first_shape
        return int(self.layout == SEQUENCE and len(shape) > 2 and shape[1] == self.n)

    @contextlib.contextmanager
    def again(self) -> Iterator[Call]:
        """Yield a copy to run: a stand-in for the module, and arguments but for tensors. What is
        inside runs as the forward ran, and records nothing, on this thread."""
        copies: dict[int, Any] = {}
        copy_leaf = lambda v: v if isinstance(v, Tensor) else copy_state(v, copies)  # noqa: E731
        self.recorder.push(None)
        try:
            with self.regime.again():
                arguments = tree_map(copy_leaf, self.arguments)
                yield replace(self, module=stand_in(self.module), arguments=arguments)
        finally:
            self.recorder.pop()


class _Forward(nn.Module):
    """A stand-in's forward, after its hooks that compute a weight (torch.nn.utils.weight_norm)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self.module._forward_pre_hooks.values():
            hook(self.module, args)
        return self.module.forward(*args, **kwargs)


def per_sample_gradients(call: Call, notes: dict[str, Any]) -> Chunks:
    """Yield gradients by vmap, else by a replay. notes: get "vmap" or "replay"."""
    done = 0
    try:
        if call.samples is not None:
            raise ValueError("rows that have owners have no dimension of samples")
        with call.again() as twin:
            for chunk, gradients in _run_vmap(twin):
                notes["vmap"] = None
                yield chunk, gradients
                done = chunk.stop
        return
    except Exception as error:
        if isinstance(error, OtherOutputsError) and error.gross:
            raise  # samples depend on each other; after other errors a replay may succeed
    notes["replay"] = None
    with call.again() as twin:
        for chunk, gradients in _run_replay(twin):
            if chunk.start >= done:
                yield chunk, gradients


def dim_of(call: Call, t: Tensor) -> int:
    """Return the dimension of the samples in an argument or in an output's gradient."""
    args, kwargs = call.arguments
    data = args[0] if args else kwargs.get("input")
    if isinstance(call.module, nn.RNNBase) and t is not data and t is not call.grads[0]:
        return t.dim() - 2  # a state [layers, N, H], whatever batch_first is
    attends = isinstance(call.module, nn.MultiheadAttention)
    if attends and (t.dim() == 2 or any(t is g for g in call.grads[1:])):
        return 0  # attention weights [N, ...] and a mask [N, S], whatever batch_first is
    first = call.first_shape
    dim = call.lead if t.dim() > 2 or list(t.shape[:2]) == list(first[:2]) else 0
    differs = t.dim() > 2 and first[call.lead] == call.n != t.shape[dim]
    is_state = differs and t.shape[1 - dim] == call.n and any(t is g for g in call.grads)
    return 1 - dim if is_state else dim  # [1, N, H] beside an output [N, T, H]


def _split_samples(call: Call, t: Any) -> Tensor | None:
    """Return an argument or gradient as [N, *shape for one sample]; None: all samples share it."""
    if not isinstance(t, Tensor) or t.dim() <= dim_of(call, t):
        return None
    dim, count = dim_of(call, t), call.first_shape[call.lead]
    if dim == 1:
        return t.movedim(1, 0).unsqueeze(2) if t.shape[1] == call.n else None
    if t.shape[0] != count:
        return None
    if count == call.n:
        return t.unsqueeze(1)
    if call.layout == BATCH:
        return t.unflatten(0, (call.n, -1))
    return t.unflatten(0, (-1, call.n)).transpose(0, 1)


def _run_vmap(call: Call) -> Chunks:
    """Map the gradient of one sample over the batch, and compare the outputs."""
    module = _Forward(call.module)
    leaves, spec = tree_flatten(call.arguments)
    pieces = [_split_samples(call, leaf) for leaf in leaves]
    arrived = {k: _split_samples(call, g) for k, g in enumerate(call.grads) if g is not None}
    grads = [g for g in arrived.values() if g is not None]
    if len(grads) < len(arrived):
        raise ValueError("an output's samples are elsewhere than in the first")
    names = [f"module.{name}" for name in call.names]
    by_name = named_in_full(module)
    parameters = {name: by_name[name].detach() for name in names}

    def objective(
        parameters: dict[str, Tensor], leaves: list[Any], grads: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return a number whose gradient is what one sample's `grads` pull back to; outputs."""
        args, kwargs = tree_unflatten(leaves, spec)
        every = tensors_in(functional_call(module, parameters, args, kwargs))
        outputs, number = [every[k] for k in arrived], torch.zeros((), device="cpu")
        for out, g in zip(outputs, grads, strict=True):
            if out.shape != g.shape:
                raise ValueError(f"a sample's output is {out.shape}, its gradient {g.shape}")
            wide = torch.promote_types(out.dtype, torch.float32)
            number = number + (out.to(wide) * g.to(wide)).sum()
        return number, outputs if call.outcomes else []

    dims = [None if piece is None else 0 for piece in pieces]
    mapped = vmap(grad(objective, has_aux=True), in_dims=(None, dims, 0), randomness="error")
    # The outputs, filled chunk by chunk: nan, which is not compared, until a sample has run.
    compared = [g if call.outcomes else None for g in call.grads]
    wholes = [None if g is None else torch.full_like(g, torch.nan) for g in compared]
    within = replace(call, grads=wholes)  # dim_of knows gradients by identity
    views: list[Any] = [_split_samples(within, t) for t in wholes if t is not None]
    for chunk in chunks(call.n, sum(p.numel() for p in parameters.values()), GRADIENT_ELEMENTS):
        here = [leaf if piece is None else piece[chunk]
                for leaf, piece in zip(leaves, pieces, strict=True)]  # fmt: skip
        gradients, outputs = mapped(parameters, here, [g[chunk] for g in grads])
        for view, out in zip(views, outputs, strict=False):
            view[chunk] = out
        require_same(call.outcomes, wholes)
        yield chunk, [gradients[name] for name in names]


def bias_term_size(call: Call, name: str) -> float:
    """Return the size of the terms that a stock module's bias gradient sums; 0.0: not a bias. Below
    a normalisation they cancel, and the rounding is far larger than that of the sum."""
    if name != "bias" or not type(call.module).__module__.startswith("torch.nn.modules."):
        return 0.0
    bias: Any = call.module.bias

    def size(g: Tensor) -> float:
        # PyTorch may add one term after the other: rounding grows with their number.
        length = max(1.0, g.numel() / max(1, bias.numel()) / 1024)
        return float(g.double().norm()) * g.numel() ** 0.5 * length

    return sum(size(g) for g in call.grads if g is not None)


def _samples_of(call: Call, t: Tensor) -> Tensor:
    """Return the sample of each row of an output's gradient, broadcastable to it; -1: of none."""
    if call.samples is not None and (t is call.grads[0] or call.layout == SEGMENTS):
        return as_rows(call.samples, t)
    if call.n == 1:
        return torch.zeros([1] * t.dim(), dtype=torch.long, device=t.device)
    if not t.dim():
        raise RefusedError("one_number")
    dim = dim_of(call, t)
    each, rest = divmod(t.shape[dim], call.n)
    if rest:
        raise RefusedError(cause("not_found", shape=list(t.shape), n=call.n))
    samples = torch.arange(call.n, device=t.device)
    in_turns = each > 1 and call.layout != BATCH  # rows t*N+n
    rows = samples.repeat(each) if in_turns else samples.repeat_interleave(each)
    return rows.view([-1 if d == dim else 1 for d in range(t.dim())])


class ClipCall(Versions):
    """A call that clipping runs once more."""

    runs_again = True

    def __init__(self, call: Call, places: list[int]) -> None:
        # Gradients of one sample may become .grad, and a sparse .grad has their memory.
        may_share = call.n == 1 or getattr(call.module, "sparse", False)
        grads = [g if g is None else g.clone() for g in call.grads] if may_share else call.grads
        module = stand_in(call.module, weights=False)
        self.parameters, self._call = places, replace(call, module=module, grads=grads)
        leaves = [*tree_leaves(call.arguments), *call.module.parameters(), *grads]
        super().__init__(t for t in leaves if isinstance(t, Tensor))

    def weighted(self, factors: Tensor, places: list[int]) -> list[Tensor]:
        """Return sums over samples, each times its factor [N], for the parameters at `places`."""
        by_name = named_in_full(self._call.module)
        sums = [torch.zeros_like(by_name[name], requires_grad=False) for name in self._call.names]
        for chunk, gradients in per_sample_gradients(self._call, {}):
            terms = (weighted(g, factors[chunk]).view_as(g[0]) for g in gradients)
            sums = list(map(torch.add, sums, terms))
        return [g for place, g in zip(self.parameters, sums, strict=True) if place in places]


def run_again(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Run a stand-in in a new graph; return its outputs, and its parameters, leaves of that graph.
    Raise OtherOutputsError if an output with a gradient is not the forward's."""
    args, kwargs = call.arguments
    by_name = named_in_full(call.module)
    parameters = [by_name[name].detach().requires_grad_() for name in call.names]
    swaps = {id(by_name[name]): p for name, p in zip(call.names, parameters, strict=True)}
    swap_tensors(call.module, swaps)
    with torch.enable_grad():
        outputs = tensors_in(_Forward(call.module)(*args, **kwargs))
    pairs = zip(outputs, call.grads, strict=False)
    require_same(call.outcomes, [t if g is not None else None for t, g in pairs])
    return outputs, parameters


def _run_replay(call: Call) -> Chunks:
    """Run the whole batch again, and take one vector-Jacobian product for each sample."""
    outputs, parameters = run_again(call)
    starts = [t.grad_fn for t in outputs if t.grad_fn is not None and call.n > 1]
    for node in nodes_below(starts):
        if node.name() in TABLES and node._saved_scale_grad_by_freq:
            raise RefusedError("scale_grad_by_freq")  # alone, a sample has other counts
    both = zip(outputs, call.grads, strict=True)  # an output of others' parameters has no graph
    pairs = [(out, g) for out, g in both if g is not None and out.requires_grad]
    ends, samples = [out for out, _ in pairs], [_samples_of(call, g) for _, g in pairs]
    vjp = partial(torch.autograd.grad, retain_graph=True, allow_unused=True, materialize_grads=True)
    for chunk in chunks(call.n, sum(p.numel() for p in parameters), GRADIENT_ELEMENTS):
        rows = []
        for n in range(chunk.start, chunk.stop):
            masked = [g.where(of == n, 0) for (_, g), of in zip(pairs, samples, strict=True)]
            gradients = vjp(ends, parameters, masked)
            rows.append([g.to_dense() for g in gradients])
        yield chunk, [torch.stack(column) for column in zip(*rows, strict=True)]


# Closed forms: gradients by the parameter's name. None: this call has none, and runs again.


def embedding_bag(call: Call) -> dict[str, Gradients] | None:
    """Return the rows that each sample looks up, if each sample is one bag."""
    g, module = call.grads[0], cast(nn.EmbeddingBag, call.module)
    if g is None or len(g) != call.n:
        return None
    arguments = _arguments(call, "input", "offsets", "per_sample_weights")
    return {"weight": rows_of_bags(module, g, *arguments)}


def bilinear(call: Call) -> dict[str, Gradients] | None:
    """Return the operands of a Linear whose input features are all products of the two inputs."""
    operands = call.grads[0], *_arguments(call, "input1", "input2")
    pieces = [_split_samples(call, t) for t in operands]
    if any(piece is None for piece in pieces):
        return None
    g, x, y = (piece.flatten(1, -2) for piece in pieces if piece is not None)  # [N, T, F] each
    products = (x.unsqueeze(3) * y.unsqueeze(2)).flatten(2)
    return {"weight": Outer(g, products.to(g.dtype)), "bias": g.sum(1)}


def _arguments(call: Call, *names: str) -> list[Any]:
    args, kwargs = call.arguments
    return [*args, *map(kwargs.get, names[len(args) :])]


@torch.no_grad()
def rows_of_bags(
    module: nn.EmbeddingBag,
    g: Tensor,  # [B, D], of the output
    ids: Tensor,  # [B, L], or all bags' one after another [L]
    offsets: Tensor | None = None,  # [B], or [B + 1]: where the bags begin, for ids [L]
    weights: Tensor | None = None,  # as ids; of mode "sum" only
) -> LookedUp:
    """Return a gradient for each id of a bag: the bag's, times the id's weight."""
    wide = accumulation_dtype(g.dtype)
    weights = torch.ones_like(ids, dtype=wide) if weights is None else weights.to(wide)
    if module.padding_idx is not None:
        weights = weights.where(ids != module.padding_idx, 0)
    if offsets is not None:
        ends = [*offsets.tolist(), len(ids)][1 : len(g) + 1]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        bags = (t[: ends[-1]].split(sizes) for t in (ids, weights))
        ids, weights = (pad_sequence(bag, batch_first=True) for bag in bags)
    rows = weights.unsqueeze(2)
    if module.mode == "mean":
        rows = rows / rows.count_nonzero(1).clamp(min=1).unsqueeze(1)
    elif module.mode == "max":  # each feature's gradient goes to one id
        values = module.weight[ids].masked_fill(rows == 0, -torch.inf)
        largest = torch.zeros_like(values).scatter_(1, values.argmax(1, keepdim=True), 1)
        rows = largest.to(wide) * rows
    return LookedUp(ids, (rows * g.unsqueeze(1)).to(g.dtype), len(module.weight))


CLOSED_FORMS = {"embeddingbag": embedding_bag, "bilinear": bilinear}  # by kind of layer
