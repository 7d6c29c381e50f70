"""Lightning: `Trainer(callbacks=[GradNorms()])`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..errors import CoverageError
from .steps import StepNorms, scale_of

__all__ = ["GradNorms"]


class _Step(nn.Module):
    """A task whose forward is its training step."""

    def __init__(self, task: LightningModule, run: Callable[..., Any]) -> None:
        super().__init__()
        self._modules = task._modules  # by the same names
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class GradNorms(StepNorms, Callback):
    """Logs the norms of each sample's gradient, at every optimizer step of a fit.

    `norms` holds those of the latest step, in the order of its micro-batches; a norm is that of the
    sample's share in the step's gradient, times the number of samples, and so that of its own
    gradient where a step's micro-batches are equally large. `probe` is there while a fit runs.

    Args:
        module: the name of the module to attach to, which `training_step` has to call; "" for the
            LightningModule itself. None: its only child that has parameters, or, of several, the
            training step as a whole, whatever of them it calls. (Itself where it has parameters of
            its own, or optimizes by hand.)
        per: "model"; "module" or "parameter" make `norms` a dict, and log their means too.
        prefix: of the names logged: `<prefix>/mean`, `/median`, `/q90`, `/max`; "grad_norms".
        on_norms: called with (norms, global step) at each step.
        noise_scale: count each step into a `NoiseScale`, which the attribute of this name holds,
            and log it.
        outliers: feed an `OutlierWatch`, which the attribute of this name holds, and log how many
            samples of the step it flags.
        options: of `attach`, but for those that the trainer decides.
    """

    def __init__(self, module: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._module = module
        self._unread = False  # a backward has come since the last read
        self._whole, self._undo = False, ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end()
        self.begin(self._model(trainer, pl_module))

    def _model(self, trainer: Trainer, task: LightningModule) -> nn.Module:
        if self._module is not None:
            return task.get_submodule(self._module)
        owners = [child for child in task.children() if any(True for _ in child.parameters())]
        bare = not any(True for _ in task.parameters(recurse=False))
        if bare and len(owners) == 1:
            return owners[0]
        if not bare or not task.automatic_optimization:
            return task
        step = trainer.strategy.training_step = _Step(task, trainer.strategy.training_step)
        self._undo.callback(delattr, trainer.strategy, "training_step")
        self._whole = True
        return step

    def end(self) -> None:
        super().end()
        self._undo.close()
        self._whole = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._unread = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        assert self.probe is not None
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if len(trainer.optimizers) > 1 and stepped.isdisjoint(self.probe._parameters.tensors()):
            with suppress(CoverageError):  # of a GAN's other network
                self.probe.norms()  # the module's own step begins a new record
            return
        if not self._unread:  # a step that training_step skipped
            return
        self._unread = False
        try:
            scale = scale_of(getattr(trainer.precision_plugin, "scaler", None))
            logged = self.read(scale, trainer.global_step)
        except CoverageError as error:
            if self._whole:
                raise
            hint = "GradNorms(module=) names the module that training_step calls"
            raise CoverageError(f"{error}. {hint}", error.parameters) from error
        pl_module.log_dict(logged, on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.resume()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        self.end()
