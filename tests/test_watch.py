"""OutlierWatch against a list of all norms that went before."""

import math

import numpy as np
import pytest
import torch
from attach_oracle import mlp, square

import torchgradx
from torchgradx import OutlierWatch


class Written:
    """A SummaryWriter that remembers."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))


def spiky(steps, size=8):
    """Norms that drift, some of them far out."""
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
    written = Written()
    watch = OutlierWatch(window=8, warmup=2, writer=written, tag="g")
    watch.update(torch.tensor([1.0, 2.0]))
    assert written.scalars == [("g/mean", 1.5, 0), ("g/max", 2.0, 0), ("g/outliers", 0.0, 0)]
    watch.update({"fc": torch.tensor([4.0, 2.0])}, step=11)
    watch.update(torch.tensor([9.0]), step=12)
    assert ("g/fc/mean", 3.0, 11) in written.scalars
    assert ("g/outliers", 1.0, 12) in written.scalars
    assert ("g/threshold", watch.outliers[-1].threshold, 12) in written.scalars


def test_a_writer_may_be_a_function_of_a_dict_and_the_step():
    written = []
    watch = OutlierWatch(warmup=2, writer=lambda scalars, step: written.append((scalars, step)))
    watch.update(torch.tensor([1.0, 2.0]))
    watch.update({"fc": torch.tensor([4.0])}, step=7)
    assert written[0] == ({"grad_norm/mean": 1.5, "grad_norm/max": 2.0, "grad_norm/outliers": 0}, 0)
    assert written[1][0]["grad_norm/fc/max"] == 4.0
    assert written[1][1] == 7


def test_a_summary_writer_of_tensorboard_takes_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        watch = OutlierWatch(writer=writer, warmup=2)
        for norms in torch.rand(3, 4):
            watch.update(norms)
    assert any(tmp_path.iterdir())


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


def test_arguments_are_refused_by_name():
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
    want = 0.9 * norms / norms.sum() + 0.1 / 4
    torch.testing.assert_close(sampler.probabilities(), want)
