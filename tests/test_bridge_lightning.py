"""The Lightning callback in real fits: norms against a loop, the fit untouched, nothing left."""

import contextlib
import copy
import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import close, close_named, fingerprint, loop, per_model
from processes import python
from test_score import entropy
from torch import nn
from torch.utils.data import DataLoader

import torchgradx

lightning = pytest.importorskip("lightning", reason='needs `pip install ".[bridges]"`')

from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from torchgradx.bridges.lightning import GradNorms  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # on workers, loggers, devices not wanted
SIZE, ACCUMULATED, STEPS = 3, 2, 3


class Task(lightning.LightningModule):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch):
        x, y = batch
        with torch.inference_mode(False), torch.enable_grad():  # as a task that attacks its inputs
            kept = [p.grad for p in self.parameters()]
            self.zero_grad()
            F.cross_entropy(self(x.clone()), y.clone()).backward()
            for p, grad in zip(self.parameters(), kept, strict=True):
                p.grad = grad

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count=ACCUMULATED * STEPS, dtype=torch.float64, last=SIZE):
    sizes = [SIZE] * (count - 1) + [last]
    return [(torch.randn(n, 4, dtype=dtype), torch.randint(0, 3, (n,))) for n in sizes]


def fit(task, data, *callbacks, **options):
    options = {
        "accumulate_grad_batches": ACCUMULATED, "logger": False, "enable_checkpointing": False,
        "max_epochs": 1, **options,
    }  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    # The validation comes between the micro-batches of a step.
    trainer.fit(task, DataLoader(data, batch_size=None), DataLoader(data[:1], batch_size=None))
    return trainer


class Loops(lightning.Callback):
    """What the norms have to be, of the model as it is before each step; before GradNorms."""

    def __init__(self, module="model"):
        self.module, self.waiting, self.want = module, [], []

    def on_train_batch_start(self, trainer, task, batch, index):
        self.waiting.append(batch)

    def on_before_optimizer_step(self, trainer, task, optimizer):
        plain = copy.deepcopy(task.get_submodule(self.module))
        total, found = sum(len(y) for _, y in self.waiting), []
        for x, y in self.waiting:
            norms = loop(plain, entropy, x, y)
            share = total / (len(y) * ACCUMULATED)  # 1 where micro-batches are equal
            found.append({name: of * share for name, of in norms.items()})
        self.want.append({name: torch.cat([n[name] for n in found]) for name in found[0]})
        self.waiting = []


@pytest.mark.parametrize("last", [SIZE, 1], ids=["", "a smaller last batch"])
@pytest.mark.parametrize("module", [None, ""])
def test_norms_of_every_step_and_the_fit_is_as_without(module, last):
    task, data, read = Task(), batches(last=last), []
    twin, left = copy.deepcopy(task), fingerprint(task.model)
    loops = Loops()
    norms = GradNorms(module, per="parameter", on_norms=lambda norms, step: read.append(norms))
    fit(task, data, loops, norms, val_check_interval=1)
    assert len(read) == len(loops.want) == STEPS
    for got, want in zip(read, loops.want, strict=True):
        got = {name.removeprefix("model."): of for name, of in got.items()}
        close_named(got, want)
    assert norms.probe is None
    assert fingerprint(task.model) == left
    fit(twin, data, val_check_interval=1)
    torch.testing.assert_close(dict(task.named_parameters()), dict(twin.named_parameters()))


def test_a_grad_scaler_is_undone():
    task, read = Task(torch.float32), []
    loops = Loops()
    norms = GradNorms(on_norms=lambda norms, step: read.append(norms))
    # A growth at every step: the scale at which a step was taken is the one that counts.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(task, batches(dtype=torch.float32), loops, norms, plugins=[precision])
    assert scaler.get_scale() == 2.0 ** (10 + STEPS)
    assert len(read) == STEPS
    for got, want in zip(read, loops.want, strict=True):
        close(got, per_model(want), 64 * torch.finfo(torch.float16).eps)


def test_what_is_logged(tmp_path):
    task, read = Task(), []
    norms = GradNorms(per="module", on_norms=lambda norms, step: read.append((norms, step)))
    logger = CSVLogger(tmp_path)
    fit(task, batches(), norms, logger=logger, log_every_n_steps=1)
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["grad_norms/mean"]]
    assert [step for _, step in read] == list(range(STEPS))
    assert len(rows) == STEPS
    for row, (modules, _) in zip(rows, read, strict=True):
        whole = torch.stack(list(modules.values())).norm(dim=0)
        assert float(row["grad_norms/mean"]) == pytest.approx(float(whole.mean()))
        assert float(row["grad_norms/median"]) == pytest.approx(float(whole.median()))
        assert float(row["grad_norms/q90"]) == pytest.approx(float(whole.quantile(0.9)))
        assert float(row["grad_norms/max"]) == pytest.approx(float(whole.max()))
        assert float(row["grad_norms/mean/0"]) == pytest.approx(float(modules["0"].mean()))


class Failing(Task):
    def training_step(self, batch):
        super().training_step(batch)
        if self.global_step:
            raise ArithmeticError("in the second step")
        return super().training_step(batch)


@pytest.mark.parametrize("where", ["training", "validation"])
def test_after_an_exception_nothing_is_left(where):
    task = Failing() if where == "training" else Task()
    if where == "validation":
        task.validation_step = lambda batch: 1 / 0
    left, norms = fingerprint(task.model), GradNorms()
    with pytest.raises(ArithmeticError):
        fit(task, batches(), norms)
    assert norms.probe is None
    task.train()
    assert fingerprint(task.model) == left
    torchgradx.attach(task.model).remove()  # nothing holds it


def test_under_ddp_each_rank_has_the_norms_of_its_own_samples():
    done = python(Path(__file__).with_name("two_trainers.py"), timeout=300, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank}: 4 norms") == 4, done.stdout


def test_a_step_that_is_skipped_has_no_norms():
    class Skipping(Task):
        def training_step(self, batch):
            return None if self.trainer.fit_loop.batch_idx == 1 else super().training_step(batch)

    read = []
    norms = GradNorms(on_norms=lambda norms, step: read.append(len(norms)))
    fit(Skipping(), batches(3), norms, accumulate_grad_batches=1)
    assert read == [SIZE, SIZE]


class Parts(Task):
    """Several children, called as `way` has it."""

    def __init__(self, way, classes=5):
        super().__init__()
        self.way, self.model = way, None
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.decoder = nn.Linear(2, classes).double()

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.cross_entropy(self.way(self, x), y), "x": x}


WAYS = {
    "its parts": lambda task, x: task.decoder(task.encoder(x)),
    "its forward": lambda task, x: task.forward(x),
    "itself": lambda task, x: task(x),
    "itself twice": lambda task, x: task(x) + task(2 * x),
}


class Own(Parts):
    def __init__(self):
        super().__init__(WAYS["itself"])
        self.shift = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return super().forward(x) + self.shift


TASKS = {
    **{name: lambda way=way: Parts(way) for name, way in WAYS.items()},
    # What the task returns shows where samples are; of its parts there is a loss alone.
    "itself, as many samples as classes": lambda: Parts(WAYS["itself"], SIZE),
    "its parts, as many samples as classes": lambda: Parts(WAYS["its parts"], SIZE),
    "a parameter of its own": Own,
}


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_of_several_children_the_whole_step_counts(make):
    class Copies(lightning.Callback):
        def on_train_batch_end(self, trainer, task, *rest):
            self.one = copy.deepcopy(task)

    task, data, read, copies = make(), batches(2), [], Copies()
    twin = copy.deepcopy(task)
    norms = GradNorms(per="parameter", on_norms=lambda norms, step: read.append(norms))
    trainer = fit(task, data, norms, copies)
    assert not copies.one._forward_hooks
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    want = loop(twin, lambda task, x, y: F.cross_entropy(task.way(task, x), y), x, y)
    close_named(read[0], want)
    assert "training_step" not in vars(trainer.strategy)
    fit(twin, data)
    torch.testing.assert_close(dict(task.named_parameters()), dict(twin.named_parameters()))
    assert fingerprint(task) == fingerprint(twin)


class Adversaries(Task):
    def __init__(self, toggles):
        super().__init__()
        self.automatic_optimization, self.toggles = False, toggles
        self.critic = nn.Linear(3, 1).double()

    def training_step(self, batch):
        fake = self.model(batch[0])
        parts = (torch.ones_like(fake), fake.detach()), (fake,)
        for optimizer, given in zip(self.optimizers(), parts, strict=True):
            with optimizer.toggle_model() if self.toggles else contextlib.nullcontext():
                optimizer.zero_grad()
                self.manual_backward(sum(self.critic(x).square().mean() for x in given))
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.critic, self.model)]


@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize(("module", "count"), [("model", SIZE), ("critic", 2 * SIZE)])
def test_a_step_of_another_networks_optimizer_is_left_out(module, count, toggles):
    read = []
    norms = GradNorms(module, on_norms=lambda norms, step: read.append(len(norms)))
    fit(Adversaries(toggles), batches(3), norms, accumulate_grad_batches=1, limit_val_batches=0)
    assert read == [count] * 3


def test_what_cannot_be_is_refused_with_a_hint():
    with pytest.raises(torchgradx.CoverageError, match=r"module=\) names the module"):
        fit(Parts(WAYS["its parts"]), batches(), GradNorms(""))
    fit(Parts(WAYS["its parts"]), batches(), GradNorms("encoder"))
    with pytest.raises(TypeError, match="loss_scale is the trainer's"):
        GradNorms(loss_scale=2.0)
    with pytest.raises(ValueError, match="per must be"):
        GradNorms(per="sample")
