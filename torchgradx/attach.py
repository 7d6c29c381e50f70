"""attach(): the probe of a model, and which probe a model has."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .attachment import attachments
from .options import Scale
from .probe import Probe
from .record.tokens import DEFAULT_REDUCTION, DEFAULT_SCALE


def attach(
    model: nn.Module,
    *,
    loss_reduction: str = DEFAULT_REDUCTION,
    loss_scale: Scale | torch.amp.GradScaler | Callable[..., Scale] = DEFAULT_SCALE,
    batch_dim: int = 0,
    batch_size: int | Callable[[tuple[Any, ...], dict[str, Any]], int] | None = None,
    layout: Mapping[str, str] | None = None,
    fused: bool = True,
    weight_grad: bool = True,
    clip: bool = False,
    directions: Mapping[str, Tensor] | None = None,
    algorithm: str | None = None,
    backend: str = "auto",
    check: str = "graph",
    sample_ids: Callable[[tuple[Any, ...], dict[str, Any]], Tensor] | None = None,
) -> Probe:
    """Attach to a model: its next training steps leave the norm of each sample's gradient.

    Equivalent to, but for speed and memory::

        for n in range(N):
            model.zero_grad()
            loss_fn(model(x[n:n+1]), y[n:n+1]).backward()
            norms[n] = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()

    Args:
        model: any module; it is used as it is, and given back as it was by `Probe.remove`.
        loss_reduction: how the loss combines its samples: "mean" (the 1/N is undone, so that
            norms are those of each sample's own loss) or "sum".
        loss_scale: what the loss is multiplied by before `backward()`: a number, a Tensor [N], a
            GradScaler, or a callable (args, kwargs) or () that returns a number or a Tensor [N]
            for each forward; norms come back divided by it, and are 0 where it is 0.
            `probe.loss_scale = ...` sets it for the passes to come. For token means see
            `torchgradx.token_weights`.
        batch_dim: where the samples are in inputs and activations: 0, or 1 (sequence first).
        batch_size: N, or a callable (args, kwargs) -> N, where the model's first tensor argument
            does not show it.
        layout: {module name or pattern: "batch" or "sequence"} for modules fed rows `n*T+t` or
            `t*N+n`. A name counts before patterns, of which the first that fits does.
        fused: weight gradient and norms from one pass where a kernel has it.
        weight_grad: False computes norms only, and leaves `.grad` as it is. A parameter's
            `register_hook` still sees its gradient; post-accumulate hooks are not called.
        clip: keep what `clip_grad_norm_` needs: inputs and output gradients of the layers, until it
            is called or the next record begins, those too that a checkpoint let go. With
            weight_grad=False backward makes norms only, and `clip_grad_norm_` adds the clipped
            gradients to `.grad`: one weight gradient for each layer in place of two.
        directions: {parameter name: tensor of its shape} for `dot`.
        algorithm: None lets the cost model choose; "rank1", "gram" or "direct" forces.
        backend: "auto", "native" (kernels or an error) or "vmap" (the pure-Python fallback).
        check: how the place of the samples is proven. "graph": by the graph of the forward, once
            per structure. "samples": two samples are also run through the model alone and their
            norms compared, once per structure. "off": `batch_dim`, `layout` and sizes are believed.
        sample_ids: for rows that are not one per sample, a callable (args, kwargs) -> LongTensor
            [rows] (nodes of batched graphs, items of bags: the sample of each row of the inputs)
            or [B, T] (packed documents: that of each position; negative is padding). N is then the
            highest id + 1, or `batch_size`.

    Returns:
        The probe. `norms()` after `loss.backward()` gives a Tensor [N].

    Raises:
        ValueError, TypeError: an argument is not as above; the text names it.
        RuntimeError: the model, or a module of it, is attached already.
        CoverageError: backend="native" and a module with no kernel.
    """
    return Probe(**locals())


def attached(model: nn.Module) -> Probe | None:
    """Return the probe that is attached to a model, or None."""
    on = (probe for probe in list(attachments) if probe._standing.on)  # and does not stand aside
    return next((probe for probe in on if probe._model() is model), None)


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Let another probe attach to a model, or to modules of it, that has one; for that time.

    What runs inside leaves nothing in the record of the probe that stands aside, whose passes in
    flight are as if it had not run.
    """
    modules = set(model.modules())
    with contextlib.ExitStack() as stack:
        for probe in list(attachments):
            other = probe._model()
            if other is not None and not modules.isdisjoint(other.modules()):
                stack.enter_context(probe._aside())
        yield


def _unattached() -> Probe:
    """Make the copy or pickle of a probe, as of a trainer that holds one: attached to nothing."""
    probe = attach(nn.Module())
    probe.remove()
    return probe


copyreg.pickle(Probe, lambda probe: (_unattached, ()))
