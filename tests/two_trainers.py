"""Run by test_bridge_lightning.py: a fit on two processes, each of which checks its own norms."""

from __future__ import annotations

import copy
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchgradx.bridges.lightning import GradNorms

warnings.simplefilter("ignore")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Parts(Task):
    """Whose training step calls its children, each by itself."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(3, 3)

    def forward(self, x):
        return self.decoder(self.model(x))

    def training_step(self, batch):
        return F.cross_entropy(self.decoder(self.model(batch[0])), batch[1])


class Check(lightning.Callback):
    def on_train_batch_start(self, trainer, task, batch, index):
        model, self.want = copy.deepcopy(task), []
        for x, y in zip(*(part.split(1) for part in batch), strict=True):
            gradient = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            self.want.append(torch.cat([g.flatten() for g in gradient]).norm())

    def on_train_batch_end(self, trainer, task, *rest):
        norms = next(callback for callback in trainer.callbacks if isinstance(callback, GradNorms))
        torch.testing.assert_close(norms.norms, torch.stack(self.want), rtol=1e-5, atol=1e-5)
        print(f"rank {trainer.global_rank}: {len(norms.norms)} norms", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    for task in (Task(), Parts()):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp_spawn", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Check(), GradNorms()],
        )  # fmt: skip
        trainer.fit(task, DataLoader(data, batch_size=4))
