"""Probe: everything that a user can ask of an attachment.

Readers check that the record can be read (`_ready`), and then ask it (record/record.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

from torch import Tensor
from torch.amp import GradScaler

from .attachment import Attachment, attachments
from .errors import CoverageError
from .explain import Explanation, explanation
from .options import Model, NonFinite, Parts, Per, Scale, check_per, check_scale, place_directions
from .proof.accounts import refusal_of
from .record.checkpoints import inside_checkpoint


class Probe(Attachment):
    """The handle of an attachment; see `attach`. Also a context manager that removes itself."""

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    @overload
    def norms(self, per: Model = "model", loss_scale: Scale | None = None) -> Tensor: ...

    @overload
    def norms(self, per: Parts, loss_scale: Scale | None = None) -> dict[str, Tensor]: ...

    @overload
    def norms(
        self, per: Per | str, loss_scale: Scale | None = None
    ) -> Tensor | dict[str, Tensor]: ...

    def norms(
        self, per: str = "model", loss_scale: float | Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Norms of the gradient of each sample's own loss, for all samples of the record.

        Args:
            per: "model" for one Tensor [N]; "module" or "parameter" for a dict of them, by name.
            loss_scale: overrides that of `attach`: a number, or a Tensor [N].

        Returns:
            float32 (float64 for float64 models), samples in the order of their forwards.

        Raises:
            CoverageError: some parameters' gradients are not accounted for sample by sample.
        """
        if loss_scale is not None:
            check_scale(loss_scale)
            self._tokens.on = False
        self._ready(per)
        return self._record.norms(per, loss_scale)

    def dot(self) -> Tensor:
        """[N]: the product of each sample's gradient with `directions`, in the order of `norms`.

        Equivalent to::

            for n in range(N):
                loss_fn(model(x[n:n+1]), y[n:n+1]).backward()
                dots[n] = sum((p.grad * directions[name]).sum() for name, p in named_parameters)

        <sum_t b_t a_t^T, V> = sum_t b_t . (V a_t): a forward with V in the weight's place.

        Raises:
            RuntimeError: no directions were given before the forward.
            CoverageError: as for `norms`.
        """
        if self._directions:
            self._ready()
        if not (self._directions and all(run.directions for run, _ in self._record.runs)):
            raise RuntimeError(
                "dot() needs directions: attach(..., directions={parameter name: tensor}), or set "
                "probe.directions before the forward"
            )
        return self._record.dots()

    @property
    def shares(self) -> Tensor:
        """[N] float64: how much of each sample's own gradient the backwards have put into .grad.

        1 / N under a mean, times the loss scale; in the order of `norms`.

        Raises:
            RuntimeError: `.grad` is unscaled or clipped already, and no longer their sum.
            CoverageError: as for `norms`.
        """
        self._ready()
        return self._record.shares()

    def gradients(self, per: str = "model") -> dict[str, list[Tensor]]:
        """`.grad` of what the record's norms are of, by their names ("" for per="model").

        Raises:
            RuntimeError: from the second call on: it held something before the record's first
                backward, and is not of its samples alone.
            CoverageError: as for `norms`.
        """
        self._ready(per)
        return self._record.gradients(per)

    @property
    def loss_scale(self) -> Any:
        """Scale of the loss: a number, a Tensor [N], a GradScaler or a callable; see `attach`.

        Setting it holds for the passes to come and for all that reads them: `norms`, `dot`,
        `clip_grad_norm_`, `NoiseScale`, `OutlierWatch`. After a GradScaler, set here or by
        `attach`, other values are multiplied by its scale.
        """
        return self._record.scale

    @loss_scale.setter
    def loss_scale(self, scale: Scale | GradScaler | Callable[..., Scale]) -> None:
        check_scale(scale, to_come=True)
        self._tokens.on = False
        self._record.scale = scale

    @property
    def directions(self) -> dict[str, Tensor]:
        """{parameter name: tensor of its shape}, for the passes to come."""
        return dict(self._directions)

    @directions.setter
    def directions(self, directions: Mapping[str, Tensor]) -> None:
        self._directed = place_directions(directions, self._parameters)
        self._directions = dict(directions)

    @overload
    def clip_grad_norm_(
        self,
        max_norm: float | Tensor | None = None,
        per: Model = "model",
        *,
        factors: Callable[[Tensor], Tensor] | None = None,
        nonfinite: NonFinite = "keep",
    ) -> Tensor: ...

    @overload
    def clip_grad_norm_(
        self,
        max_norm: float | Tensor | None = None,
        per: Parts = ...,  # never left out, which is the first overload
        *,
        factors: Callable[[Tensor], Tensor] | None = None,
        nonfinite: NonFinite = "keep",
    ) -> dict[str, Tensor]: ...

    def clip_grad_norm_(
        self,
        max_norm: float | Tensor | None = None,
        per: str = "model",
        *,
        factors: Callable[[Tensor], Tensor] | None = None,
        nonfinite: str = "keep",
    ) -> Tensor | dict[str, Tensor]:
        """Multiply each sample's contribution to `.grad` by min(1, max_norm / its norm).

        Equivalent to, for per="model" and a mean over the samples::

            for n in range(N):
                gradients = torch.autograd.grad(loss_fn(model(x[n:n+1]), y[n:n+1]), parameters)
                norm = torch.cat([g.flatten() for g in gradients]).norm()
                for p, g in zip(parameters, gradients):
                    p.grad += g * min(1, max_norm / norm) / N

        To be called once a step, after its backwards (and the scaler's `unscale_`, of all
        optimizers), before `step()`. Clips all passes of the record; what else is in `.grad`
        stays. No second backward is run: the weight gradients are made from what the first one had
        (book-keeping, Bu et al. 2023). With attach(..., weight_grad=False) backward has left none
        in `.grad`, and the clipped sum is added to it. Under DistributedDataParallel the result is
        averaged over its processes.

        Args:
            max_norm: a number, or a Tensor [N].
            per: "model", "module" or "parameter": what each norm is of.
            factors: norms [N] -> factors [N], in place of min(1, max_norm / norm). A sample whose
                factor is exactly 0 is left out, whatever its numbers.
            nonfinite: what a sample whose norm is not finite does: "keep", it spoils `.grad`, as
                without a probe; "drop", it is left out.

        Returns:
            What `norms(per=per)` returns: the norms before clipping. A gradient of norm 0 is left
            alone.

        Raises:
            RuntimeError: without attach(..., clip=True), a second time, or before `unscale_`.
            ValueError, TypeError: an argument is not as above.
            CoverageError: as for `norms`; sharded gradients (FSDP); what the forward computed with
                was changed since. `.grad` is as it was.
        """
        if (max_norm is None) == (factors is None):
            raise TypeError("give max_norm or factors: clip_grad_norm_(1.0), or (factors=function)")
        if factors is not None and not callable(factors):
            raise TypeError(f"factors must be a function of the norms [N]; got {factors!r}")
        is_number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
        if max_norm is not None and not is_number and not isinstance(max_norm, Tensor):
            raise TypeError(f"max_norm must be a number or a Tensor [N]; got {max_norm!r}")
        if nonfinite not in ("keep", "drop"):
            raise ValueError(f'nonfinite must be "keep" or "drop"; got {nonfinite!r}')
        self._ready(per)
        return self._record.clip(per, max_norm, factors, nonfinite == "drop")

    def __repr__(self) -> str:
        model = self._model()
        state = type(model).__name__ if model is not None else "of a model that is gone"
        if self not in attachments:
            return f"Probe({state}, removed)"
        count, n = len(self._parameters.names), sum(run.n for run, _ in self._record.runs)
        return f"Probe({state}, {count} parameters, {n} samples recorded)"

    def __dir__(self) -> list[str]:
        """Return the public names."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    def explain(self, verbose: bool = False) -> str:
        """Return a summary; each layer's shapes, algorithm and cost; what norms() refuses and why.

        verbose: with the cost of each algorithm that was weighed.
        """
        self._settle()
        lines = [explanation(self._layers, self._parameters, verbose)]
        if self._backwards.is_idle() and (refusal := self._refusal()):
            lines.append(str(refusal))
        return Explanation("\n".join([*lines, *self._samples.notes, *self._segments.notes]))

    def reset(self) -> None:
        """Begin a new record at once."""
        self._settle()
        self._record.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside.

        Raises:
            RuntimeError: within what a checkpoint runs, of which all is recorded or nothing.
        """
        if inside_checkpoint("_checkpoint_hook"):
            raise RuntimeError(
                "paused() was called within what torch.utils.checkpoint runs, and will run again: "
                "pause around the checkpoint"
            )
        self._paused += 1
        self._trace.on = False
        try:
            yield
        finally:
            self._paused -= 1
            self._trace.on = self._standing.on and not self._paused

    @contextlib.contextmanager
    def same_samples(self) -> Iterator[None]:
        """Add up gradients before the norm: all forwards inside are of the same samples."""
        before, self._joint = self._joint, []
        try:
            yield
        finally:
            self._joint = before

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Let another probe have the model inside; see `set_aside`."""
        with self.paused():
            self._asides += 1
            self._standing.on = False
            try:
                yield
            finally:
                self._asides -= 1
                self._standing.on = self in attachments and not self._asides
                if self not in attachments:  # it was removed inside
                    self._drained()

    def _ready(self, per: str = "model") -> None:
        """Raise unless the record can be read."""
        check_per(per)
        self._unwind()
        self._settle()
        self._record.require(self in attachments, self._backwards.is_under_way())
        if refusal := self._refusal():
            raise refusal
        if self._tokens.on:
            self._tokens.warn()

    def _refusal(self) -> CoverageError | None:
        return refusal_of(self._record, self._recorder, self._parameters, self._layers)
