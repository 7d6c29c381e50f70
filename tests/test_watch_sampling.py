"""OutlierWatch against a list of all norms that went before. ImportanceSampler: drawn as said,
weighted without bias, resumed where it was."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attach_models import mlp, square
from torch.utils.data import DataLoader

import torchgradx
from torchgradx import ImportanceSampler, IndexedDataset, OutlierWatch


def spiky(steps, size=8):
    norms = torch.rand(steps, size, dtype=torch.float64) * torch.linspace(1, 3, steps)[:, None] + 1
    norms[torch.rand(steps, size) < 0.03] *= 20
    return norms


@pytest.mark.parametrize("window", [20, 64, 1000])
def test_flagged_is_what_is_above_the_quantile_of_those_before(window):
    watch = OutlierWatch(quantile=0.9, factor=2.0, window=window, warmup=16)
    before, flagged = [], 0
    for step, norms in enumerate(spiky(60)):
        threshold = 2 * np.quantile(before[-window:], 0.9) if len(before) >= 16 else math.nan
        assert watch.threshold == pytest.approx(threshold, rel=1e-12, nan_ok=True)
        want = [(step, n, norms[n].item()) for n in range(8) if norms[n] > threshold]
        assert [(o.step, o.index, o.norm) for o in watch.update(norms)] == want
        before += norms.tolist()
        flagged += len(want)
    assert flagged > 5
    assert len(watch.outliers) == flagged


def test_norms_that_are_not_finite_are_flagged_and_do_not_enter():
    watch = OutlierWatch(window=4, warmup=2, quantile=1.0, factor=1.0)
    got = watch.update(torch.tensor([1.0, float("inf"), float("nan")]), indices=[7, 8, 9], step=40)
    assert [(o.step, o.index) for o in got] == [(40, 8), (40, 9)]
    assert math.isinf(got[0].norm)
    assert math.isnan(got[1].threshold)
    watch.update(torch.tensor([2.0]))
    assert watch.threshold == 2.0


def test_scalars_go_to_the_writer():
    written = []
    writer = SimpleNamespace(add_scalar=lambda *tag_value_step: written.append(tag_value_step))
    watch = OutlierWatch(window=8, warmup=2, writer=writer, tag="g")
    watch.update(torch.tensor([1.0, 2.0]))
    assert written == [("g/mean", 1.5, 0), ("g/max", 2.0, 0), ("g/outliers", 0.0, 0)]
    watch.update({"fc": torch.tensor([4.0, 2.0])}, step=11)
    watch.update(torch.tensor([9.0]), step=12)
    assert ("g/fc/mean", 3.0, 11) in written
    assert ("g/outliers", 1.0, 12) in written
    assert ("g/threshold", watch.outliers[-1].threshold, 12) in written
    given = []  # a function of a dict and the step does too
    watch = OutlierWatch(warmup=2, writer=lambda scalars, step: given.append((scalars, step)))
    watch.update({"fc": torch.tensor([1.0, 2.0])}, step=7)
    scalars = {"mean": 1.5, "max": 2.0, "outliers": 0}
    assert given == [({f"grad_norm/fc/{name}": x for name, x in scalars.items()}, 7)]


def test_a_state_goes_on_as_if_nothing_had_happened():
    one, two = (OutlierWatch(quantile=0.8, factor=1.5, window=21, warmup=10) for _ in range(2))
    norms = spiky(20)
    for batch in norms[:10]:
        one.update(batch)
    two.load_state_dict(one.state_dict())
    for batch in norms[10:]:
        assert one.threshold == two.threshold
        assert one.update(batch) == two.update(batch)
    assert one.state_dict() == two.state_dict()


def test_arguments_of_a_watch_are_refused_by_name():
    for words, options in (
        ("quantile", {"quantile": 1.5}), ("factor", {"factor": 0.0}), ("warmup", {"warmup": 0}),
        ("warmup", {"warmup": 10, "window": 5})
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            OutlierWatch(**options)
    watch = OutlierWatch()
    with pytest.raises(ValueError, match=r"\[3\]"):
        watch.update(torch.rand(3), indices=[1, 2])
    with pytest.raises(ValueError, match=r"norms must be \[N\]"):
        watch.update(torch.rand(3, 2))
    assert watch.update({}) == []


def test_watch_and_sampler_read_a_probe():
    model, x = mlp().double(), torch.randn(4, 3).double()
    watch, sampler = OutlierWatch(warmup=2), torchgradx.ImportanceSampler(4)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        watch.update(probe)
        sampler.update(range(4), probe)
        norms = probe.norms()
    assert watch.threshold == pytest.approx(3 * norms.quantile(0.99).item())
    iter(sampler).__next__()
    torch.testing.assert_close(sampler.probabilities(), 0.9 * norms / norms.sum() + 0.1 / 4)


N = 12
NORMS = torch.tensor([0.0, 0.01, 0.1, 0.5, 1, 1, 1, 2, 3, 5, 8, 20], dtype=torch.float64)


def told(smoothing=0.1, num_samples=N, seed=0):
    sampler = ImportanceSampler(N, num_samples=num_samples, smoothing=smoothing, seed=seed)
    sampler.update(range(N), NORMS)
    return sampler


def expected(smoothing):
    return (1 - smoothing) * NORMS / NORMS.sum() + smoothing / N


# Of a mean of independent draws, six standard deviations: for any of a hundred numbers compared,
# less than one in ten million seeds goes beyond.
SIGMAS = 6.0
DRAWS = 200_000


@pytest.mark.parametrize("smoothing", [0.05, 0.5, 1.0])
def test_samples_are_drawn_by_their_smoothed_norms(smoothing):
    sampler = told(smoothing, DRAWS)
    counts = torch.bincount(torch.tensor(list(sampler)), minlength=N)
    p = expected(smoothing)
    torch.testing.assert_close(sampler.probabilities(), p)
    assert counts.sum() == len(sampler) == DRAWS
    assert bool(((counts - DRAWS * p).abs() <= SIGMAS * (DRAWS * p * (1 - p)).sqrt() + 1e-9).all())


def test_weights_are_bounded_and_of_the_drawn_distribution():
    sampler = told(0.1)
    iterator = iter(sampler)
    next(iterator)
    before = sampler.weights(range(N))
    torch.testing.assert_close(before, (1 / (N * expected(0.1))).float())
    assert before.max() <= 1 / 0.1 * (1 + 1e-6)
    sampler.update([0], [1000.0])
    assert torch.equal(sampler.weights(range(N)), before), "until the next iteration begins"
    list(iterator)
    next(iter(sampler))
    assert sampler.probabilities().argmax() == 0


def test_what_is_not_known_counts_as_the_mean():
    sampler = ImportanceSampler(4, smoothing=0.2)
    assert sampler.probabilities().tolist() == [0.25] * 4
    sampler.update([0, 1, 2, 2], [1.0, 3.0, float("nan"), float("inf")])
    next(iter(sampler))
    torch.testing.assert_close(
        sampler.probabilities(), 0.8 * torch.tensor([1.0, 3, 2, 2], dtype=torch.float64) / 8 + 0.05
    )
    sampler.update([2, 2, 3], [9.0, 0.0, 0.0])  # of one twice in a batch the last
    sampler.update(torch.tensor([0, 1]), torch.zeros(2))
    next(iter(sampler))
    assert sampler.probabilities().tolist() == [0.25] * 4, "nothing but zeros"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_what_is_dropped_at_the_end_of_an_epoch_is_no_epoch(drop_last, workers):
    """Saved anywhere, also after the last whole batch of 5 of 12, and before the first."""
    whole = {"batch_size": 5} if drop_last else {}

    def epoch(sampler):
        dataset = IndexedDataset(torch.arange(N))
        loader = DataLoader(dataset, 5, sampler=sampler, drop_last=drop_last, num_workers=workers)
        for index, _ in loader:
            weights = sampler.weights(index).tolist()
            sampler.update(index, NORMS[index])
            yield index.tolist(), weights

    sampler, drawn = ImportanceSampler(N, **whole), []
    sampler.update(range(7 * workers), NORMS[: 7 * workers])
    states = [(0, sampler.state_dict())]
    assert len(sampler) == (10 if drop_last else N)
    for _ in range(2):
        for batch in epoch(sampler):
            drawn.append(batch)
            states.append((len(drawn), sampler.state_dict()))
        states.append((len(drawn), sampler.state_dict()))
    for done, state in states:
        restored = ImportanceSampler(N, **whole)
        restored.load_state_dict(state)
        got = [list(epoch(restored)) for _ in range(2)]
        assert [] not in got
        want = drawn[done:]
        assert list(itertools.chain(*got))[: len(want)] == want
    with pytest.raises(ValueError, match="12 samples, not 5"):
        ImportanceSampler(5).load_state_dict(states[0][1])


def test_arguments_of_a_sampler_are_refused_by_name():
    sampler = ImportanceSampler(4)
    for kind, words, call in (
        (ValueError, "size", lambda: ImportanceSampler(0)),
        (ValueError, "num_samples", lambda: ImportanceSampler(3, num_samples=0)),
        (ValueError, "num_samples = 3", lambda: ImportanceSampler(3, batch_size=4)),
        (ValueError, "smoothing", lambda: ImportanceSampler(3, smoothing=0.0)),
        (ValueError, "as many as indices", lambda: sampler.update([1, 2], [1.0])),
        (ValueError, "negative", lambda: sampler.update([1], [-1.0])),
        (ValueError, "0 to 3", lambda: sampler.update([4], [1.0])),
        (TypeError, "integers", lambda: sampler.weights(torch.rand(3))),
    ):
        with pytest.raises(kind, match=words):
            call()
