"""The benchmark suite where no clock is needed: verdicts, comparisons, the README's table."""

import copy
import json
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import compare  # noqa: E402
import readme  # noqa: E402
import timing  # noqa: E402
from fresh import rows_of  # noqa: E402
from rivals import RIVALS, judged  # noqa: E402
from timing import Budget, interleaved  # noqa: E402
from workloads import OURS, QUICK, WORKLOADS, by_loop, check, classifier  # noqa: E402

RESULTS = json.loads(readme.RESULTS.read_text())


def verdict(rival, w):
    return judged(RIVALS[rival], w.copied(), by_loop(w.double())().detach())[1]


def small():
    """Of layers that all rivals know."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)]
    return classifier(nn.Sequential(*layers), torch.randn(5, 3, 6, 6))


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_is_right_where_it_knows_all_layers_or_not_installed(rival):
    seen = verdict(rival, small())
    needs_a_package = any(name in rival for name in ("Opacus", "BackPACK", "fastDP"))
    assert seen == "right" or (needs_a_package and seen == "not installed")


@pytest.mark.parametrize("way", OURS)
def test_our_ways_are_the_oracles(way):
    w = small()
    check(way, OURS[way](w.copied())(), by_loop(w.double())().detach())
    with pytest.raises(AssertionError, match="off the float64 loop's norms"):
        check(way, 1.001 * OURS[way](w.copied())(), by_loop(w.double())().detach())


# The stages, each tried once on what takes milliseconds
@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (["steps.py", "--ways", "fused"], {"workload", "plain_ms", "ratios"}),
        (["memory.py", "--workload", QUICK[0]], {"workload", "way", "peak_mib", "later_mib"}),
        (["kernels.py", "grid"], {"layer", "algorithm", "flop", "median"}),
        (["hooks.py"], {"layer", "plain_us", "extra_us"}),
    ],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_stage_yields_its_rows(command, keys, tmp_path):
    options = ["--oracles", str(tmp_path)] if command[0] == "steps.py" else []
    for row in rows_of(*command, *options, "--quick", heap="warm", threads=1):
        assert all(keys <= set(part) for part in (row if isinstance(row, list) else [row]))


# timing.py, under a clock that tells what it is told
class Clock:
    """Runs of steps, each a time that it takes; `ran` has their names."""

    def __init__(self, monkeypatch):
        self.now, self.ran = 0.0, ""
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def step(self, name, *takes):
        times = cycle(takes)

        def run():
            self.ran += name
            self.now += next(times)

        return run


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_ratio_is_to_the_mean_of_the_plain_steps_before_and_after(clock):
    plain = clock.step(".", 1.0, 3.0)
    ratio = interleaved(plain, {"a": clock.step("a", 2.0, 4.0)}, Budget(2))["a"]
    assert (ratio.median, ratio.plain_milliseconds) == (2.0, 1500)  # the first has one neighbour


# compare.py
def results(**changes):
    figures = {"median": 1.0, "p20": 0.98, "p80": 1.02, "rounds": 16}
    ways = {way: {**figures, **changes.get(way, {})} for way in ("fused", "scoring")}
    kernel = {"layer": "linear", "n": 8, "t": 4, "i": 2, "o": 3, "groups": 1, "algorithm": "gram"}
    return {
        "machine": {"cpu": "any"},
        "commit": "0123456789",
        "rows": [{"workload": "MLP", "heap": "warm", "threads": 1, "ratios": ways}],
        "kernels": [{**kernel, **figures, **changes.get("gram", {})}],
        "memory": [{"workload": "MLP", "way": "fused", "ratio": 1.01, **changes.get("memory", {})}],
    }


SLOWER = {"median": 1.1, "p20": 1.05, "p80": 1.2}
COMPARED = [
    ({}, []),
    ({"fused": SLOWER}, ["MLP, warm heap, 1 threads: fused"]),
    ({"fused": {"median": 1.1, "p20": 1.01, "p80": 1.2}}, []),  # within the spread
    ({"fused": {**SLOWER, "rounds": 3}}, []),  # within three standard errors
    ({"fused": {**SLOWER, "rounds": 1}}, []),  # whose spread nobody knows
    ({"gram": SLOWER}, ["linear N=8 T=4 I=2 O=3: gram / GEMM"]),
    ({"memory": {"ratio": 1.04}}, ["MLP: fused, memory"]),
]


@pytest.mark.parametrize(("changes", "worse"), COMPARED)
def test_compare_fails_where_a_median_is_slower_beyond_the_spread(changes, worse, tmp_path, capsys):
    files = tmp_path / "old.json", tmp_path / "new.json"
    for file, content in zip(files, (results(), results(**changes)), strict=True):
        file.write_text(json.dumps(content))
    assert compare.main(*map(str, files)) == bool(worse)
    shown = capsys.readouterr().out
    assert all(name in shown for name in worse)
    assert shown.splitlines()[-1].startswith(f"{len(worse)} of 3 times and 1 peaks")


# The committed results and what is made of them
def test_the_readme_says_what_the_results_say():
    text = readme.README.read_text()
    assert readme.rewritten(text, RESULTS) == text, "run benchmarks/readme.py"
    better = copy.deepcopy(RESULTS)
    better["rows"][0]["ratios"]["fused"]["median"] -= 0.1
    assert readme.rewritten(text, better) != text


def test_the_results_have_every_workload_and_rival_and_where_they_come_from():
    assert {"date", "commit", "torch", "rivals_versions", "machine", "regret"} <= set(RESULTS)
    cells = {(row["workload"], row["rival"]) for row in RESULTS["rivals"]}
    assert cells == {(name, rival) for name in WORKLOADS for rival in RIVALS}
    for heap in ("warm", "default"):
        for threads in (1, 2):
            rows = [r for r in RESULTS["rows"] if (r["heap"], r["threads"]) == (heap, threads)]
            assert [row["workload"] for row in rows] == list(WORKLOADS)


def test_the_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    import plots

    assert all(file.stat().st_size > 10_000 for file in plots.draw(RESULTS, tmp_path))
