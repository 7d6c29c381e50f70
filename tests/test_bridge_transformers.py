"""The callback in Hugging Face's Trainer: norms against a loop, training as without it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import close, close_named, fingerprint, loop, per_model
from torch import nn

import torchgradx

NEEDED = 'needs `pip install ".[bridges]"`'
transformers = pytest.importorskip("transformers", reason=NEEDED)
pytest.importorskip("accelerate", reason=NEEDED)

from model_zoo import ROWS  # noqa: E402

from torchgradx.bridges.transformers import GradNorms  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # on devices that are not there
SIZE, ACCUMULATED, STEPS, IGNORED = 2, 2, 3, -100
ROW = {row.name: row for row in ROWS}
gpt2 = ROW["gpt2"].build
TOTAL = SIZE * ACCUMULATED


class Classifier(nn.Module):
    """Not of the library: its loss is a mean, which the trainer divides by the micro-batches."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def vectors():
    return [{"x": torch.randn(4), "labels": torch.randint(0, 3, ())} for _ in range(TOTAL * STEPS)]


def texts():
    """Some longer than others: the trainer divides by the tokens of a step."""
    found = []
    for n in range(TOTAL * STEPS):
        ids = torch.randint(0, 11, (6,))
        labels = ids.where(torch.arange(6) < 2 + n % 5, torch.tensor(IGNORED))
        found.append({"input_ids": ids, "labels": labels})
    return found


def mean_loss(model, x, labels):
    return F.cross_entropy(model(x, labels)["logits"], labels)


def token_sum(model, ids, labels):
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.mT, labels[:, 1:], ignore_index=IGNORED, reduction="sum")


def trainer_of(model, data, folder, *callbacks, **options):
    options = {"logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.1, **options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=STEPS,
        per_device_train_batch_size=SIZE, gradient_accumulation_steps=ACCUMULATED, optim="sgd",
        learning_rate=0.1, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:SIZE], callbacks=list(callbacks)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Loops(transformers.TrainerCallback):
    """What the norms have to be, of the model as it is before each step; before GradNorms."""

    def __init__(self, model, loss):
        self.loss, self.batches, self.want = loss, [], []
        self.handle = model.register_forward_pre_hook(self.keep, with_kwargs=True)

    def keep(self, model, args, kwargs):
        if model.training:
            self.items = kwargs.get("num_items_in_batch")  # by which the trainer has it divide
            names = ("input_ids", "labels") if "input_ids" in kwargs else ("x", "labels")
            self.batches.append([kwargs[name] for name in names])

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        batches, self.batches = self.batches, []
        assert len(batches) == ACCUMULATED
        plain = copy.deepcopy(model)
        plain._forward_pre_hooks.clear()
        share = 1.0
        if self.loss is token_sum:
            share = TOTAL / float(self.items)
        found = [loop(plain, self.loss, *batch) for batch in batches]
        self.want.append({k: torch.cat([norms[k] for norms in found]) * share for k in found[0]})


CHECKPOINTED = {"gradient_checkpointing": True}
CASES = {
    "a classifier": (Classifier, vectors, mean_loss, {}),
    "GPT-2": (gpt2, texts, token_sum, {}),
    "GPT-NeoX, checkpointed": (ROW["gpt-neox"].build, texts, token_sum, CHECKPOINTED),
    "OPT": (ROW["opt"].build, texts, token_sum, {}),
    "LoRA on GPT-2": (ROW["lora on gpt2"].build, texts, token_sum, {}),
    "LoRA on GPT-2, checkpointed": (ROW["lora on gpt2"].build, texts, token_sum, CHECKPOINTED),
}


@pytest.mark.parametrize("name", CASES)
def test_norms_of_every_step_and_training_is_as_without(name, tmp_path):
    build, samples, loss, options = CASES[name]
    options = options | {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "epoch"}
    model, data, read = build(), samples(), []
    twin = copy.deepcopy(model)
    loops = Loops(model, loss)
    trainer = trainer_of(model, data, tmp_path, loops, **options)
    keep = {"per": "parameter", "on_norms": lambda norms, step: read.append(norms)}
    with GradNorms(trainer, **keep) as norms:
        trainer.train()
        assert norms.probe is None
    loops.handle.remove()
    assert norms not in trainer.callback_handler.callbacks
    assert len(read) == len(loops.want) == STEPS
    files = [path for path in (tmp_path / f"checkpoint-{STEPS}").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not any(b"torchgradx" in path.read_bytes() for path in files)
    for got, want in zip(read, loops.want, strict=True):
        close_named(got, want, 64 * torch.finfo(torch.float32).eps)
    trainer_of(twin, data, tmp_path, **options).train()
    assert fingerprint(model) == fingerprint(twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_grad_scaler_is_undone(tmp_path):
    model, read = Classifier(), []
    loops = Loops(model, mean_loss)
    trainer = trainer_of(model, vectors(), tmp_path, loops)
    # What fp16=True makes where there is a GPU; a new scale after every step.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    with GradNorms(trainer, on_norms=lambda norms, step: read.append(norms)):
        trainer.train()
    assert trainer.accelerator.scaler.get_scale() > 1024
    for got, want in zip(read, loops.want, strict=True):
        close(got, per_model(want), 64 * torch.finfo(torch.float32).eps)


def test_what_is_logged(tmp_path):
    model, read = Classifier(), []
    trainer = trainer_of(model, vectors(), tmp_path, logging_steps=2)
    trainer.add_callback(GradNorms(trainer, per="module", on_norms=lambda *got: read.append(got)))
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norms/mean" in entry]
    assert [entry["step"] for entry in logged] == [2]
    assert [step for _, step in read] == list(range(STEPS))
    modules, _ = read[1]
    whole = torch.stack(list(modules.values())).norm(dim=0)
    assert logged[0]["grad_norms/max"] == pytest.approx(float(whole.max()))
    assert logged[0]["grad_norms/mean/net.0"] == pytest.approx(float(modules["net.0"].mean()))
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in losses] == [2], "the trainer's own entries are as ever"


def test_after_an_exception_nothing_is_left(tmp_path):
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise ArithmeticError

    model, plain = Classifier(), Classifier()
    with pytest.raises(ArithmeticError):
        trainer_of(plain, vectors(), tmp_path, Fails()).train()
    trainer = trainer_of(model, vectors(), tmp_path, Fails())
    norms = GradNorms(trainer)

    def train():
        with norms:
            trainer.train()

    with pytest.raises(ArithmeticError):
        train()
    assert norms.probe is None
    assert norms.norms is not None
    assert fingerprint(model) == fingerprint(plain)
    # Without `with`, the next training finds the model attached, and takes it over.
    trainer.add_callback(norms)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            trainer.train()
    norms.end()
    torchgradx.attach(model).remove()


# ---- What it is told -----------------------------------------------------------------------------
@pytest.mark.parametrize("trainer", [(), (None,), (3,)])
def test_without_a_trainer_it_says_how_to_give_it_one(trainer):
    with pytest.raises(TypeError, match=r"trainer\.add_callback\(GradNorms\(trainer\)\)"):
        GradNorms(*trainer)


def test_noise_scale_and_outliers_are_logged(tmp_path):
    model, own = Classifier(), torchgradx.NoiseScale()
    plain, seen = copy.deepcopy(model), []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append((kwargs["x"], kwargs["labels"])), with_kwargs=True
    )
    trainer = trainer_of(model, vectors(), tmp_path, max_grad_norm=0)
    with GradNorms(trainer, noise_scale=True, outliers=True) as norms:
        trainer.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with torchgradx.attach(plain, loss_scale=1 / ACCUMULATED) as probe:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.1 * (STEPS - step) / STEPS  # the trainer's decay
            for x, labels in seen[step * ACCUMULATED : (step + 1) * ACCUMULATED]:
                (mean_loss(plain, x, labels) / ACCUMULATED).backward()
            own.update(probe)
            optimizer.step()
            optimizer.zero_grad()
    assert norms.noise_scale.steps == STEPS
    assert norms.noise_scale.noise_scale == pytest.approx(own.noise_scale, rel=1e-3)
    assert norms.outliers.steps == STEPS
    logged = [entry for entry in trainer.state.log_history if "grad_norms/noise_scale" in entry]
    assert len(logged) == STEPS
    assert logged[-1]["grad_norms/noise_scale"] == pytest.approx(own.noise_scale, rel=1e-3)
    assert logged[-1]["grad_norms/outliers"] == 0
    trainer.args.max_grad_norm = 0.1
    with norms, pytest.raises(ValueError, match=r"max_grad_norm=0.*got 0\.1"):
        trainer.train()


def test_a_models_own_loss_is_exact_beside_its_logits():
    model, ids = gpt2(), torch.randint(0, 11, (3, 6))
    labels = ids.clone()
    labels[1, 3:] = labels[2, 5:] = IGNORED
    own = lambda model, ids, labels: model(input_ids=ids, labels=labels).loss  # noqa: E731
    want = per_model(loop(model, own, ids, labels))
    with torchgradx.attach(model, loss_reduction="sum") as probe:
        probe.loss_scale = torchgradx.token_weights(labels[:, 1:])
        own(model, ids, labels).backward()
        close(probe.norms(), want, 1e-4)
    with torchgradx.attach(model) as probe:
        own(model, ids, labels).backward()
        with pytest.warns(UserWarning, match="token_weights"):
            probe.norms()
