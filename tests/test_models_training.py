"""Other people's training loops: a probe that a callback attaches, and reads before each update."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import close_named, loop
from model_zoo import IGNORED, ROWS, transformers
from torch.utils.data import DataLoader

import torchgradx

ROW = {row.name: row for row in ROWS}
SIZE, ACCUMULATED, STEPS = 2, 2, 3  # samples of a batch, batches of a step, steps
NEEDED = 'needs `pip install ".[models]"`'


def samples(row, labels):
    """One dict a sample, for a Trainer's collator."""
    *inputs, _ = batch = row.batch(SIZE * ACCUMULATED * STEPS)
    columns = row.keywords(*inputs) | {"labels": labels(batch)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def close_parameters(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-9), f"{name} went elsewhere with the probe"


# Hugging Face: the loss is the sum over the tokens of all batches of a step, over their number.


def token_labels(batch):
    """The first label counts in no loss, but for some models in the number of tokens."""
    ids, mask, _ = batch
    return ids.where((mask > 0) & (torch.arange(ids.shape[1]) > 0), torch.tensor(IGNORED))


def token_sum(model, ids, mask, labels):
    logits = model(input_ids=ids, attention_mask=mask).logits.float()  # as the library does
    return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], ignore_index=IGNORED, reduction="sum")


class ReadBeforeUpdate(transformers.TrainerCallback):
    def __init__(self):
        self.batches, self.steps = [], 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.probe = torchgradx.attach(model, loss_reduction="sum")
        self.watch = model.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, model, args, kwargs):
        if model.training:
            names = ("input_ids", "attention_mask", "labels")
            self.batches.append([kwargs[name] for name in names])

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        batches, self.batches = self.batches, []
        assert len(batches) == ACCUMULATED
        tokens = sum(int((labels[:, 1:] != IGNORED).sum()) for *_, labels in batches)
        plain = copy.deepcopy(model)  # of an attached model, not attached
        plain._forward_pre_hooks.clear()
        loops = [loop(plain, token_sum, *batch) for batch in batches]
        want = {name: torch.cat([norms[name] for norms in loops]) for name in loops[0]}
        norms = self.probe.norms(per="parameter", loss_scale=1 / tokens)
        close_named(norms, want, 8 * torch.finfo(torch.float32).eps)
        self.steps += 1

    def on_train_end(self, args, state, control, **kwargs):
        self.probe.remove()
        self.watch.remove()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", ["gpt-neox", "opt", "lora on gpt2"])
def test_a_hugging_face_trainer(name, checkpointing, tmp_path):
    pytest.importorskip("accelerate", reason=NEEDED)
    data = samples(ROW[name], token_labels)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", eval_strategy="steps", eval_steps=1,
        per_device_train_batch_size=SIZE, gradient_accumulation_steps=ACCUMULATED,
        max_steps=STEPS, optim="sgd", learning_rate=0.1, gradient_checkpointing=checkpointing,
    )  # fmt: skip

    def trained(*callbacks):
        model = ROW[name].build()
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2],
                                       callbacks=list(callbacks))  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return model

    reader = ReadBeforeUpdate()
    close_parameters(trained(reader), trained())
    assert reader.steps == STEPS


# Lightning: each batch's loss is divided by the batches of a step.


@pytest.mark.parametrize("name", ["vit", "roberta"])
@pytest.mark.filterwarnings("ignore")  # on workers, loggers and devices that are not wanted
def test_a_lightning_trainer(name):
    lightning = pytest.importorskip("lightning", reason=NEEDED)
    row = ROW[name]

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = row.build()

        def training_step(self, batch):
            return row.loss(self.model, *batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class ReadBeforeUpdate(lightning.Callback):
        def __init__(self):
            self.batches, self.steps = [], 0

        def on_fit_start(self, trainer, task):
            self.probe = torchgradx.attach(task.model, loss_scale=1 / ACCUMULATED)

        def on_train_batch_start(self, trainer, task, batch, index):
            self.batches.append(batch)

        def on_before_optimizer_step(self, trainer, task, optimizer):
            loops = [loop(task.model, row.loss, *batch) for batch in self.batches]
            want = {name: torch.cat([norms[name] for norms in loops]) for name in loops[0]}
            close_named(self.probe.norms(per="parameter"), want)
            self.batches, self.steps = [], self.steps + 1

        def on_fit_end(self, trainer, task):
            self.probe.remove()

    columns = row.batch(SIZE * ACCUMULATED * STEPS)
    data = list(zip(*columns, strict=True))

    def trained(*callbacks):
        task = Task()
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=ACCUMULATED,
            callbacks=list(callbacks), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(task, DataLoader(data, batch_size=SIZE))
        return task.model

    reader = ReadBeforeUpdate()
    close_parameters(trained(reader), trained())
    assert reader.steps == STEPS
