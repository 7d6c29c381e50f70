"""Hugging Face: `with GradNorms(trainer): trainer.train()`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback

from .steps import StepNorms, scale_of

__all__ = ["GradNorms"]


class GradNorms(StepNorms, TrainerCallback):
    """Logs the norms of each sample's gradient, whenever the trainer logs its loss.

    A trainer does not notify its callbacks of an exception: inside `with`, the model is left as it
    was after one too. `trainer.add_callback(GradNorms(trainer))` does without.

    `norms` holds those of the latest step, in the order of its micro-batches; a norm is that of the
    sample's share in the step's gradient, times the number of samples. Where the trainer divides by
    the tokens of a step, a long sample weighs more than a short one; where it takes means over
    equal micro-batches, and divides by their number, it is the norm of the sample's own gradient
    (it leaves that division to models that take any keyword, as BERT). `probe` is there while
    training runs.

    Args:
        trainer: the one to listen to, and to log through.
        per: "model"; "module" or "parameter" make `norms` a dict, and log their means too.
        prefix: of the names logged: `<prefix>/mean`, `/median`, `/q90`, `/max`; "grad_norms".
        on_norms: called with (norms, global step) at each step.
        noise_scale: count each step into a `NoiseScale`, which the attribute of this name holds,
            and log it. Needs `max_grad_norm=0`: the trainer clips before it calls back.
        outliers: feed an `OutlierWatch`, which the attribute of this name holds, and log how many
            samples of the step it flags.
        options: of `attach`, but for those that the trainer decides.
    """

    def __init__(self, trainer: Trainer | None = None, **options: Any) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                "GradNorms needs the trainer that it logs through, which callbacks=[...] does not "
                "give it: trainer.add_callback(GradNorms(trainer)), or with GradNorms(trainer): "
                f"trainer.train(). Got {type(trainer).__name__}"
            )
        super().__init__(**options)
        self._trainer = trainer
        self._waiting: dict[str, Tensor] = {}

    def __enter__(self) -> GradNorms:
        if self not in self._trainer.callback_handler.callbacks:
            self._trainer.add_callback(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._trainer.remove_callback(self)
        self.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()  # of a training that ended in an exception
        if self.noise_scale is not None and args.max_grad_norm:
            raise ValueError(
                "noise_scale=True needs TrainingArguments(max_grad_norm=0): the trainer clips "
                f".grad before its callbacks see it; got {args.max_grad_norm}"
            )
        self.begin(kwargs["model"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        self._waiting = self.read(scale_of(scaler), state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._waiting and "loss" in kwargs.get("logs", {}):
            waiting, self._waiting = self._waiting, {}
            self._trainer.log({name: float(value) for name, value in waiting.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()
