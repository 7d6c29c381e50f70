"""Run by test_bridge_lightning.py: a fit on two processes, each of which checks its own norms."""

import copy
import warnings
from multiprocessing.util import Finalize

import lightning
import torch
import torch.nn.functional as F
from test_bridge_lightning import Parts, Task
from torch.utils.data import DataLoader, TensorDataset

from torchgradx.bridges.lightning import GradNorms

warnings.simplefilter("ignore")


def children(task, x):
    """Each called by itself; a lambda would not reach the processes."""
    return task.decoder(task.encoder(x))


class Check(lightning.Callback):
    def on_fit_end(self, trainer, task):  # else gloo's threads may end after what they work with
        Finalize(None, torch.distributed.destroy_process_group, exitpriority=0)

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
    for task in (Task(torch.float32), Parts(children).float()):
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Check(), GradNorms()],
        )  # fmt: skip
        trainer.fit(task, DataLoader(data, batch_size=4))
