"""The benchmark suite where no clock is needed: verdicts, the README's table."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import readme  # noqa: E402
from rivals import RIVALS, judged  # noqa: E402
from workloads import OURS, by_loop, check, classifier  # noqa: E402

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


# The committed results and what is made of them
def test_the_readme_says_what_the_results_say():
    text = readme.README.read_text()
    assert readme.rewritten(text, RESULTS) == text, "run benchmarks/readme.py"
    better = copy.deepcopy(RESULTS)
    better["rows"][0]["ratios"]["fused"]["median"] -= 0.1
    assert readme.rewritten(text, better) != text
