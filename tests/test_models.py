"""Models as users bring them: called by keyword, masked, tied, checkpointed, adapted."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from attach_modes import ANY, title
from attach_oracle import as_dtype, check, close, close_named, joined, loop, loop_model, loop_within
from attach_steps import exact_or_refused, exact_step
from model_zoo import ROUNDED, ROWS

import torchgradx

SCALE = 2.0**10
SUBNORMAL = {"convnext"}  # a layer scale of 1e-6: float16 has nothing else below it
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
every_mode = pytest.mark.parametrize("options", ANY, ids=title)


def without(model, names):
    """The model less what is refused, whose other parameters must be exact."""
    model = copy.deepcopy(model)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def trainable(row, dropout=0.0):
    model = row.build(dropout)
    return without(model, row.refusals(model))


def held(row, model, names, *batch, **options):
    """Exact; or, in a row that says so, refused by just those names, and exact without them."""
    if names:
        refusal = exact_or_refused(model, row.loss, *batch, **options)
        assert refusal is not None, f"exact now: {names}"
        assert set(refusal.parameters) == names, refusal
    check(without(model, names), row.loss, *batch, **options)


@every_mode
@pytest.mark.parametrize("equal", [False, True], ids=["", "T is N"])
@every_row
def test_a_step_is_exact(row, equal, options):
    n = (row.equal or row.samples[0]) if equal else row.samples[0]
    model = row.build()
    held(row, model, row.refusals(model), *row.batch(n, n if equal else 7), **options)


@pytest.mark.parametrize("row", ROWS + ROUNDED, ids=lambda row: row.name)
def test_no_module_runs_again(row):
    model = trainable(row)
    with torchgradx.attach(model) as probe:
        for n in (*row.samples, row.samples[0]):
            exact_step(probe, model, *row.batch(n), loss=row.loss, rtol=1e-6)
        lines = probe.explain().splitlines()[1:]
    assert not [line for line in lines if "run again" in line]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_row
def test_autocast_gives_what_each_sample_alone_would_have_under_it(row, dtype):
    """To the rounding of a few operations: batches and samples are summed by other kernels."""

    def loss(model, *batch):
        with torch.autocast("cpu", dtype):
            return SCALE * row.loss(model, *batch)

    model, batch = trainable(row).float(), [as_dtype(t, torch.float32) for t in row.batch(4)]
    want = loop_model(model, loss, *batch, dtype=torch.float32)
    with torchgradx.attach(model, loss_scale=SCALE) as probe:
        loss(model, *batch).backward()
        if row.name in SUBNORMAL and dtype == torch.float16:
            with contextlib.suppress(torchgradx.CoverageError):
                close(probe.norms(), want / SCALE, 16 * torch.finfo(dtype).eps)
        else:
            close(probe.norms(), want / SCALE, 16 * torch.finfo(dtype).eps)


@every_row
def test_active_dropout_gives_the_gradient_under_the_masks_of_that_forward(row):
    model, batch = trainable(row, dropout=0.3), row.batch(row.samples[0])
    torch.manual_seed(7)
    want = loop_within(model, row.losses, *batch)
    with torchgradx.attach(model) as probe:
        torch.manual_seed(7)
        row.loss(model, *batch).backward()
        close_named(probe.norms(per="parameter"), want)


CHECKPOINTED = {
    f"{row.name}, reentrant" if reentrant else row.name: (row, reentrant)
    for row in ROWS
    for reentrant in row.checkpoints
}


@every_mode
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_layers_are_exact(name, options):
    row, reentrant = CHECKPOINTED[name]
    model = row.build()
    if reentrant and row.adapter:
        model.enable_input_require_grads()  # else nothing reaches the adapters
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    batch = row.batch(row.samples[0])
    if reentrant and row.flat:  # exact where the layout is said: below
        assert exact_or_refused(model, row.loss, *batch, **options) is not None
        return
    held(row, model, row.refusals(model, reentrant), *batch, **options)


@pytest.mark.parametrize("name", [n for n, (row, how) in CHECKPOINTED.items() if how])
def test_reentrantly_checkpointed_layers_are_exact_where_the_layout_is_said(name):
    row, _ = CHECKPOINTED[name]
    model = trainable(row)
    if row.adapter:
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model = without(model, row.refusals(model, True))
    model = without(model, row.tables)  # what no layout describes
    check(model, row.loss, *row.batch(row.samples[0]), layout={"*": "batch"})


@every_row
def test_training_steps_of_changing_sizes_are_exact(row):
    """The first of each size is proven; what follows relies on that. Two batches to a step, one
    read: all samples in order."""
    model, (first, second) = trainable(row), row.samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = [(first, 7), (second, 5), (first, 7), (second, 7), (second, 4), (first, 4)]
    with torchgradx.attach(model) as probe:
        for pair in zip(sizes[::2], sizes[1::2], strict=True):
            batches = [row.batch(n, t) for n, t in pair]
            want = joined([loop(model, row.loss, *batch) for batch in batches])
            optimizer.zero_grad()
            for batch in batches:
                row.loss(model, *batch).backward()
            optimizer.step()
            close_named(probe.norms(per="parameter"), want)


@every_mode
@pytest.mark.parametrize("positions", [7, 4])
@pytest.mark.parametrize("row", [r for r in ROWS if r.kind == "text"], ids=lambda row: row.name)
def test_the_models_own_loss_of_the_labels_is_exact(row, positions, options):
    """DeBERTa's takes the logits of those that have one, in float32."""

    def loss(model, ids, mask, labels):
        return model(**row.keywords(ids, mask), labels=labels).loss.double()

    check(trainable(row), loss, *row.batch(4, positions), rtol=1e-7, **options)


@pytest.mark.parametrize("row", [r for r in ROWS if r.kind == "next"], ids=lambda row: row.name)
def test_what_is_generated_between_forward_and_backward_leaves_nothing(row):
    model, batch = trainable(row), row.batch(row.samples[0])
    want = loop(model, row.loss, *batch)
    with torchgradx.attach(model) as probe:
        loss = row.loss(model, *batch)
        model.generate(**row.keywords(*batch[:2]), max_new_tokens=2, do_sample=False)
        loss.backward()
        close_named(probe.norms(per="parameter"), want)
