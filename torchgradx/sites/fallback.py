"""Per-sample gradients of a module that has no kernel: vmap over its own gradient, a replay, or a
closed form.

The first two run the module's forward again on its inputs, and pull back the gradient of its
outputs. Where vmap has no rule (recurrent layers, custom Functions, dropout), the whole batch is
replayed once with its random state, and each sample's gradient is one vector-Jacobian product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from ..hooks.versions import Versions
from ..reference.chunks import accumulation_dtype, chunks
from ..refusals import RefusedError, cause
from .packed import as_rows
from .regime import OtherOutputsError, Outcome, Regime, require_same
from .stand_in import copy_state, stand_in, swap_tensors

Silent = Callable[[], contextlib.AbstractContextManager[None]]
Chunks = Iterator[tuple[slice, list[Tensor]]]

CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)
TABLES = ("EmbeddingBackward0", "EmbeddingBagBackward0")


@dataclass(frozen=True)
class Call:
    """One call of a module, as its backward finds it."""

    module: nn.Module
    names: Sequence[str]  # of the parameters, within the module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    grads: Sequence[Tensor | None]  # by output tensor
    n: int
    layout: int
    first: Sequence[int]  # sizes of its first output
    regime: Regime
    samples: Tensor | None = None  # of each row of the first output, where it is packed
    outcomes: Sequence[Outcome | None] = ()  # of its forward, by output tensor

    @property
    def lead(self) -> int:
        """Return the dimension of the samples in the first output: 0, or 1 of [T, N, ...]."""
        if isinstance(self.module, CHANNELS_FIRST):
            return 0  # rows t*N+n: the second dimension is of channels
        return int(self.layout == SEQUENCE and len(self.first) > 2 and self.first[1] == self.n)


Form = Callable[[Call], dict[str, Gradients] | None]  # by parameter


class _Forward(nn.Module):
    """The module's forward, after the hooks that make its weight (weight_norm of old)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self.module._forward_pre_hooks.values():
            hook(self.module, args)
        return self.module.forward(*args, **kwargs)


def per_sample_gradients(call: Call, silent: Silent, notes: dict[str, str | None]) -> Chunks:
    """Yield gradients [n, *shape], one a parameter, for so many samples at a time.

    `silent` keeps what runs again from being recorded. `notes` get "vmap" or "replay".
    """
    done = 0
    try:
        with silent(), call.regime.again():
            for chunk, found in _by_vmap(copy_to_run(call)):
                notes["vmap"] = None
                yield chunk, found
                done = chunk.stop
        return
    except Exception as error:  # of any kind, or it rounds otherwise
        if isinstance(error, OtherOutputsError) and error.gross:
            raise  # else the replay's error is the one to show
    notes["replay"] = None
    with silent(), call.regime.again():
        for chunk, found in _by_replay(copy_to_run(call)):
            if chunk.start >= done:
                yield chunk, found


def dim_of(call: Call, t: Tensor) -> int:
    """Return the dimension of the samples in an argument or an output."""
    args, kwargs = call.arguments
    data = args[0] if args else kwargs.get("input")
    if isinstance(call.module, nn.RNNBase) and t is not data and t is not call.grads[0]:
        return t.dim() - 2  # a state [layers, N, H], whatever batch_first says
    attends = isinstance(call.module, nn.MultiheadAttention)
    if attends and (t.dim() == 2 or any(t is g for g in call.grads[1:])):
        return 0  # weights [N, ...] and a mask [N, S], whatever batch_first says
    dim = call.lead if t.dim() > 2 or list(t.shape[:2]) == list(call.first[:2]) else 0
    whole = t.dim() > 2 and call.first[call.lead] == call.n != t.shape[dim]
    elsewhere = whole and t.shape[1 - dim] == call.n and any(t is g for g in call.grads)
    return 1 - dim if elsewhere else dim  # a state [1, N, H] beside [N, T, H]


def _pieces(call: Call, t: Tensor) -> Tensor | None:
    """[N, *a valid input of the module], or None for a tensor that all samples share."""
    if not isinstance(t, Tensor) or t.dim() <= dim_of(call, t):
        return None
    dim, count = dim_of(call, t), call.first[call.lead]
    if dim == 1:
        return t.movedim(1, 0).unsqueeze(2) if t.shape[1] == call.n else None
    if t.shape[0] != count:
        return None
    if count == call.n:
        return t.unsqueeze(1)
    if call.layout == BATCH:
        return t.unflatten(0, (call.n, -1))
    return t.unflatten(0, (-1, call.n)).transpose(0, 1)


def _by_vmap(call: Call) -> Chunks:
    """Map the gradient of one sample over the batch, and compare the outputs."""
    if call.samples is not None:
        raise ValueError("a packed sequence has no dimension of samples")
    module = _Forward(call.module)
    leaves, spec = tree_flatten(call.arguments)
    pieces = [_pieces(call, leaf) for leaf in leaves]
    arrived = {k: _pieces(call, g) for k, g in enumerate(call.grads) if g is not None}
    grads = [g for g in arrived.values() if g is not None]
    if len(grads) < len(arrived):
        raise ValueError("an output's samples are elsewhere than in the first")
    names = [f"module.{name}" for name in call.names]
    by_name = dict(module.named_parameters(remove_duplicate=False))
    parameters = {name: by_name[name].detach() for name in names}

    def objective(
        parameters: dict[str, Tensor], leaves: list[Any], grads: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        args, kwargs = tree_unflatten(leaves, spec)
        outputs = tensors_in(functional_call(module, parameters, args, kwargs))
        outputs = [outputs[k] for k in arrived]
        return _pulled_back(outputs, grads), outputs if call.outcomes else []

    dims = [None if piece is None else 0 for piece in pieces]
    mapped = vmap(grad(objective, has_aux=True), in_dims=(None, dims, 0), randomness="error")
    compared = [g if call.outcomes else None for g in call.grads]
    wholes = [None if g is None else torch.full_like(g, torch.nan) for g in compared]
    within = replace(call, grads=wholes)
    shares: list[Any] = [_pieces(within, t) for t in wholes if t is not None]
    for chunk in chunks(call.n, sum(p.numel() for p in parameters.values()), GRADIENT_ELEMENTS):
        here = [leaf if piece is None else piece[chunk]
                for leaf, piece in zip(leaves, pieces, strict=True)]  # fmt: skip
        found, outputs = mapped(parameters, here, [g[chunk] for g in grads])
        for share, out in zip(shares, outputs, strict=False):
            share[chunk] = out
        require_same(call.outcomes, wholes)
        yield chunk, [found[name] for name in names]


def _pulled_back(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
    """Return a number whose gradient is what these gradients of the outputs pull back to."""
    total = torch.zeros(())
    for out, g in zip(outputs, grads, strict=True):
        if out.shape != g.shape:
            raise ValueError(f"a sample's output is {out.shape}, its gradient {g.shape}")
        wide = torch.promote_types(out.dtype, torch.float32)
        total = total + (out.to(wide) * g.to(wide)).sum()
    return total


def terms_of_bias(call: Call, name: str) -> float:
    """Return the size of the terms that a bias's gradient sums: a normalisation's cancel."""
    if name != "bias" or not type(call.module).__module__.startswith("torch.nn.modules."):
        return 0.0
    bias: Any = call.module.bias

    def size(g: Tensor) -> float:
        """The framework may add one term after the other: rounding grows with their number."""
        length = max(1.0, g.numel() / max(1, bias.numel()) / 1024)
        return float(g.double().norm()) * g.numel() ** 0.5 * length

    return sum(size(g) for g in call.grads if g is not None)


def _owners(call: Call, t: Tensor, packed: bool) -> Tensor:
    """Return the sample of each row of an argument or an output, as a tensor beside it; -1 for rows
    of none. `packed`: it has the rows of a packed sequence, if there is one."""
    if call.samples is not None and (packed or call.layout == SEGMENTS):
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
    minor = each > 1 and call.layout != BATCH
    rows = samples.repeat(each) if minor else samples.repeat_interleave(each)
    return rows.view([-1 if d == dim else 1 for d in range(t.dim())])


class Kept:
    """A call kept for clipping: it runs once more."""

    runs_again = True

    def __init__(self, call: Call, places: list[int], silent: Silent) -> None:
        self.parameters, self._call, self._silent = places, copy_to_keep(call), silent
        kept = [*tree_leaves(call.arguments), *call.module.parameters(), *self._call.grads]
        self._versions = Versions(t for t in kept if isinstance(t, Tensor))

    @property
    def intact(self) -> bool:
        return self._versions.stand()

    def weighted(self, factors: Tensor, places: list[int]) -> list[Tensor]:
        by_name = dict(self._call.module.named_parameters(remove_duplicate=False))
        sums = [torch.zeros_like(by_name[name], requires_grad=False) for name in self._call.names]
        for chunk, gradients in per_sample_gradients(self._call, self._silent, {}):
            terms = (weighted(g, factors[chunk]).view_as(g[0]) for g in gradients)
            sums = list(map(torch.add, sums, terms))
        return [g for place, g in zip(self.parameters, sums, strict=True) if place in places]


def run_again(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of a stand-in, in a new graph, and the parameters that they end in."""
    args, kwargs = call.arguments
    by_name = dict(call.module.named_parameters(remove_duplicate=False))
    parameters = [by_name[name].detach().requires_grad_() for name in call.names]
    swap_tensors(
        call.module, {id(by_name[n]): p for n, p in zip(call.names, parameters, strict=True)}
    )
    with torch.enable_grad():
        outputs = tensors_in(_Forward(call.module)(*args, **kwargs))
    both = zip(outputs, call.grads, strict=False)
    require_same(call.outcomes, [t if g is not None else None for t, g in both])
    return outputs, parameters


def _by_replay(call: Call) -> Chunks:
    outputs, parameters = run_again(call)
    if call.n > 1:
        _same_alone(outputs)
    both = zip(outputs, call.grads, strict=True)  # of others' parameters, an output has no graph
    pairs = [(out, g) for out, g in both if g is not None and out.requires_grad]
    owners = [_owners(call, g, g is call.grads[0]) for _, g in pairs]
    for chunk in chunks(call.n, sum(p.numel() for p in parameters), GRADIENT_ELEMENTS):
        found = []
        for sample in range(chunk.start, chunk.stop):
            masked = [g.where(of == sample, 0) for (_, g), of in zip(pairs, owners, strict=True)]
            gradients = torch.autograd.grad(
                [out for out, _ in pairs],
                parameters,
                masked,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            found.append([g.to_dense() if g.is_sparse else g for g in gradients])
        yield chunk, [torch.stack(column) for column in zip(*found, strict=True)]


def _same_alone(outputs: Sequence[Tensor]) -> None:
    """Raise where a sample's part in the batch's gradient is not what it would be alone."""
    for node in nodes_below(t.grad_fn for t in outputs if t.grad_fn is not None):
        if node.name() in TABLES and node._saved_scale_grad_by_freq:
            raise RefusedError("scale_grad_by_freq")


def copy_to_keep(call: Call) -> Call:
    """Copy a call to run later: its state, and gradients of one sample, which .grad may share."""
    grads = [g if g is None else g.clone() for g in call.grads] if call.n == 1 else call.grads
    return replace(call, module=stand_in(call.module, weights=False), grads=grads)


def copy_to_run(call: Call) -> Call:
    """Copy a call to run now."""
    copies: dict[int, Any] = {}
    leaf = lambda v: v if isinstance(v, Tensor) else copy_state(v, copies)  # noqa: E731
    arguments = tree_map(leaf, call.arguments)
    return replace(call, module=stand_in(call.module), arguments=arguments)


# Closed forms, of modules that have no kernel. None: a call that has none, and runs again.


def embedding_bag(call: Call) -> dict[str, Gradients] | None:
    """Return the rows that each sample looks up, for samples of one bag each."""
    g, module = call.grads[0], cast(nn.EmbeddingBag, call.module)
    if g is None or len(g) != call.n:
        return None
    return {
        "weight": rows_of_bags(module, g, *_named(call, "input", "offsets", "per_sample_weights"))
    }


def bilinear(call: Call) -> dict[str, Gradients] | None:
    """Return a Linear's operands, whose input are all products of the two inputs."""
    operands = call.grads[0], *_named(call, "input1", "input2")
    pieces = [_pieces(call, t) for t in operands]
    if any(piece is None for piece in pieces):
        return None
    g, x, y = (piece.flatten(1, -2) for piece in pieces if piece is not None)  # [N, T, F] each
    pairs = (x.unsqueeze(3) * y.unsqueeze(2)).flatten(2)
    return {"weight": Outer(g, pairs.to(g.dtype)), "bias": g.sum(1)}


def _named(call: Call, *names: str) -> list[Any]:
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
        parts = (t[: ends[-1]].split(sizes) for t in (ids, weights))
        ids, weights = (pad_sequence(part, batch_first=True) for part in parts)
    rows = weights.unsqueeze(2)
    if module.mode == "mean":
        rows = rows / rows.count_nonzero(1).clamp(min=1).unsqueeze(1)
    elif module.mode == "max":  # each feature's gradient goes to one id
        values = module.weight[ids].masked_fill(rows == 0, -torch.inf)
        largest = torch.zeros_like(values).scatter_(1, values.argmax(1, keepdim=True), 1)
        rows = largest.to(wide) * rows
    return LookedUp(ids, (rows * g.unsqueeze(1)).to(g.dtype), module.num_embeddings)


CLOSED: dict[str, Form] = {"embeddingbag": embedding_bag, "bilinear": bilinear}  # by kind of layer
