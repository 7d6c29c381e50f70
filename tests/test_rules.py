"""Adding a layer touches four places, and they agree: its rule, RULES, the tests' table, README."""

import re
from pathlib import Path

import pytest
import torch
from test_attach_layers import ELEMENTWISE_LAYERS, KERNEL_LAYERS
from torch import nn

from torchgradx.rules import RULES, rule_of

LAYERS = KERNEL_LAYERS | ELEMENTWISE_LAYERS
README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_layer_with_a_rule_is_in_the_tests_table_and_in_the_readme(kind):
    assert any(type(make()) is kind for make, _ in LAYERS.values())
    assert re.search(rf"^\| `nn\.{kind.__name__}` \|", README, re.MULTILINE)


def test_every_layer_that_the_readme_gives_a_kernel_has_a_rule():
    named = re.findall(r"^\| `nn\.(\w+)` \| C\+\+", README, re.MULTILINE)
    assert {getattr(nn, name) for name in named} == set(RULES)


@pytest.mark.parametrize("make", [make for make, _ in LAYERS.values()], ids=LAYERS)
def test_every_layer_of_the_tests_table_has_the_rule_of_its_type(make):
    layer = make()
    assert rule_of(layer) is RULES[type(layer)]


def test_a_subclass_that_computes_something_else_has_no_rule():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Padded(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, 2 * weight, bias)

    replaced = nn.Linear(3, 2)
    replaced.forward = lambda x: torch.zeros(len(x), 2)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    for module in (Scaled(3, 2), Padded(2, 2, 3), replaced, normed, nn.Embedding(3, 2, max_norm=1)):
        assert rule_of(module) is None
