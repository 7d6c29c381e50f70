"""The benchmark suite where no clock is needed: verdicts, comparisons, the README's table."""

from __future__ import annotations

import copy
import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import compare  # noqa: E402
import readme  # noqa: E402
import timing  # noqa: E402
from fresh import rows_of  # noqa: E402
from rivals import RIVALS, judged  # noqa: E402
from timing import Budget, interleaved  # noqa: E402
from workloads import OURS, QUICK, WORKLOADS, Workload, by_loop, check, classifier, inner  # noqa: E402

RESULTS = json.loads(readme.RESULTS.read_text())


def verdict(rival: str, w: Workload) -> str:
    return judged(RIVALS[rival], w.copied(), by_loop(w.double())().detach())[1]


def small() -> Workload:
    """Of layers that all rivals know."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)]
    return classifier(nn.Sequential(*layers), torch.randn(5, 3, 6, 6))


def circular() -> Workload:
    torch.manual_seed(0)
    return inner(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), 5, 3, 6, 6)


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_is_right_where_it_knows_all_layers_or_not_installed(rival: str) -> None:
    seen = verdict(rival, small())
    needs_a_package = any(name in rival for name in ("Opacus", "BackPACK", "fastDP"))
    assert seen == "right" or (needs_a_package and seen == "not installed")


@pytest.mark.parametrize(
    ("rival", "package"), [("Opacus hooks", "opacus"), ("BackPACK", "backpack")]
)
def test_a_rival_that_ignores_the_padding_mode_is_shown_as_wrong(rival: str, package: str) -> None:
    pytest.importorskip(package)
    assert verdict(rival, circular()).startswith("wrong ")


def test_a_rival_without_a_rule_refuses_with_its_reason() -> None:
    assert verdict("bmm + norm", circular()) == "refuses: padding_mode='circular'"


def test_a_verdict_is_of_the_worst_norm() -> None:
    w = small()
    oracle = by_loop(w.double())().detach()

    def off(factor: float) -> Any:
        def norms() -> Tensor:
            return torch.cat([oracle[:1] * factor, oracle[1:]])

        return lambda w: norms

    assert judged(off(1.12), w, oracle) == (None, "wrong 12%")
    assert judged(off(float("nan")), w, oracle) == (None, "wrong nan%")
    assert judged(off(1.001), w, oracle)[1] == "right"
    assert judged(lambda w: lambda: oracle[:2], w, oracle) == (None, "wrong shape [2]")


@pytest.mark.parametrize("way", OURS)
def test_our_ways_are_the_oracles(way: str) -> None:
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
def test_a_stage_yields_its_rows(command: list[str], keys: set[str], tmp_path: Path) -> None:
    options = ["--oracles", str(tmp_path)] if command[0] == "steps.py" else []
    for row in rows_of(*command, *options, "--quick", heap="warm", threads=1):
        assert all(keys <= set(part) for part in (row if isinstance(row, list) else [row]))


# timing.py, under a clock that tells what it is told


class Clock:
    """Runs of steps, each a time that it takes; `ran` has their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, ""
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def step(self, name: str, *takes: float) -> timing.Step:
        """Of so many seconds, by turns."""
        times = cycle(takes)

        def run() -> None:
            self.ran += name
            self.now += next(times)

        return run

    def ratios(self, budget: Budget, plain: float = 1.0, **steps: tuple[float, ...]) -> Any:
        made = {name: self.step(name, *takes) for name, takes in steps.items()}
        return interleaved(self.step(".", plain), made, budget)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_each_way_stands_between_plain_steps_and_each_other_round_turns_back(clock: Clock) -> None:
    clock.ratios(Budget(3), a=(1.0,), b=(1.0,), c=(1.0,))
    assert clock.ran == "a.b.c.c.b.a.a.b.c."


def test_a_ratio_is_to_the_mean_of_the_plain_steps_before_and_after(clock: Clock) -> None:
    plain = clock.step(".", 1.0, 3.0)
    ratio = interleaved(plain, {"a": clock.step("a", 2.0, 4.0)}, Budget(2))["a"]
    assert (ratio.median, ratio.plain_milliseconds) == (2.0, 1500)  # the first has one neighbour


def test_a_machine_that_gets_slower_by_the_same_each_step_changes_no_ratio(clock: Clock) -> None:
    slower = [1 + 0.01 * k for k in range(40)]
    plain, same = clock.step(".", *slower[1::2]), clock.step("a", *slower[::2])
    ratio = interleaved(plain, {"a": same}, Budget(9))["a"]
    assert (ratio.median, ratio.high) == pytest.approx((1, 1), abs=1e-12)


def test_a_steady_way_stops_at_the_least_rounds_and_the_others_go_on(clock: Clock) -> None:
    ratios = clock.ratios(Budget(5, 100), steady=(1.1,), shaky=(0.5, 1.5))
    assert ratios["steady"].rounds == 5 < ratios["shaky"].rounds


def test_rounds_go_on_until_the_error_is_small(clock: Clock) -> None:
    r = clock.ratios(Budget(5, 500, error=0.02), a=(0.9, 1.0, 1.1, 1.2))["a"]
    assert timing.error(r.low, r.high, r.rounds) <= 0.02 * r.median
    assert r.rounds > 5


@pytest.mark.parametrize("seconds", [0, 10, 100])
def test_no_round_begins_after_the_time_of_all_ways(clock: Clock, seconds: float) -> None:
    budget = Budget(3, seconds, error=0)
    ratios = clock.ratios(budget, a=(0.5, 1.5), b=(1.5, 0.5))
    rounds = ratios["a"].rounds
    assert rounds == ratios["b"].rounds >= 3
    assert 4 * (rounds - 1) < 2 * seconds <= 4 * rounds or rounds == 3


@pytest.mark.parametrize(("rounds", "run"), [(1, 1), (2, 2), (9, 2)])
@pytest.mark.parametrize("spent", [False, True])
def test_few_rounds_do_for_what_is_far_from_plain(
    clock: Clock, rounds: int, run: int, spent: bool
) -> None:
    budget = Budget(rounds, 0 if spent else 100, error=0.2, far=2)
    ratios = clock.ratios(budget, near=(1.9,), far=(2.1, 6.0))
    assert ratios["far"].rounds == (run if spent else timing.FEW)
    assert ratios["near"].rounds == (rounds if spent else max(rounds, 2))


def test_one_round_tells_no_error() -> None:
    assert timing.error(1.0, 1.0, 1) == float("inf")


# compare.py


def results(**changes: dict[str, float]) -> dict[str, Any]:
    """One workload, two ways, one kernel, one peak; `changes` by way."""
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
    ({"fused": {"median": 0.9, "p20": 0.8, "p80": 0.95}}, []),  # faster
    ({"fused": {"median": 1.019, "p20": 1.0201, "p80": 1.03}}, []),  # too little to matter
    ({"gram": SLOWER}, ["linear N=8 T=4 I=2 O=3: gram / GEMM"]),
    ({"memory": {"ratio": 1.04}}, ["MLP: fused, memory"]),
    ({"memory": {"ratio": 1.02}}, []),
]


@pytest.mark.parametrize(("changes", "worse"), COMPARED)
def test_compare_fails_where_a_median_got_slower_beyond_the_spread(
    changes: dict[str, dict[str, float]],
    worse: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = tmp_path / "old.json", tmp_path / "new.json"
    for file, content in zip(files, (results(), results(**changes)), strict=True):
        file.write_text(json.dumps(content))
    assert compare.main(*map(str, files)) == bool(worse)
    shown = capsys.readouterr().out
    assert all(name in shown for name in worse)
    assert shown.splitlines()[-1].startswith(f"{len(worse)} of 3 times and 1 peaks")


def test_compare_names_what_is_missing() -> None:
    new = results()
    del new["rows"][0]["ratios"]["scoring"]
    assert compare.compared(results(), new) == ([], ["MLP, warm heap, 1 threads: scoring"])


# The committed results and what is made of them


def test_the_readme_says_what_the_results_say() -> None:
    text = readme.README.read_text()
    assert readme.rewritten(text, RESULTS) == text, "run benchmarks/readme.py"
    better = copy.deepcopy(RESULTS)
    better["rows"][0]["ratios"]["fused"]["median"] -= 0.1
    assert readme.rewritten(text, better) != text


def test_the_results_have_every_workload_and_rival_and_where_they_come_from() -> None:
    assert {"date", "commit", "torch", "rivals_versions", "machine", "regret"} <= set(RESULTS)
    cells = {(row["workload"], row["rival"]) for row in RESULTS["rivals"]}
    assert cells == {(name, rival) for name in WORKLOADS for rival in RIVALS}
    for heap in ("warm", "default"):
        for threads in (1, 2):
            rows = [r for r in RESULTS["rows"] if (r["heap"], r["threads"]) == (heap, threads)]
            assert [row["workload"] for row in rows] == list(WORKLOADS)


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plots

    assert all(file.stat().st_size > 10_000 for file in plots.draw(RESULTS, tmp_path))


def test_the_cost_models_regret_is_small() -> None:
    regret = RESULTS["regret"]
    assert regret["median"] <= 1.10, regret
    assert regret["worst"] <= 1.5, regret
