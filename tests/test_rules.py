"""Adding a layer touches four places, and they agree: its rule, RULES, the tests' table, docs."""

import re
from pathlib import Path

import pytest
from test_attach_attention import BAGS, PAIRS, WAYS
from test_attach_layers import ELEMENTWISE_LAYERS, KERNEL_LAYERS

from torchgradx.layers.modules import RECURRENT
from torchgradx.layers.rules import RULES, rule_of

LAYERS = [make() for make, _ in (KERNEL_LAYERS | ELEMENTWISE_LAYERS).values()]
# Of more than one input: a part of a model
LAYERS += [WAYS["across"]().a, BAGS["max"]().bag, PAIRS["rows"][0]().pair]
PAGE = (Path(__file__).parent.parent / "docs" / "layers.md").read_text()


def title(kind):
    """nn.Linear, or the name of a class of another package."""
    return kind if isinstance(kind, str) else f"nn.{kind.__name__}"


@pytest.mark.parametrize("kind", RULES, ids=title)
def test_a_layer_with_a_rule_is_in_the_tests_table_and_on_the_page_of_layers(kind):
    assert isinstance(kind, str) or any(type(layer) is kind for layer in LAYERS)
    assert re.search(rf"^\| `{title(kind)}` \|", PAGE, re.MULTILINE)


def test_every_layer_that_the_page_gives_a_kernel_has_a_rule():
    named = re.findall(r"^\| `([\w.]+)` \| (?:C\+\+|closed form)", PAGE, re.MULTILINE)
    assert set(named) == {*map(title, RULES), *(f"nn.{kind.__name__}" for kind in RECURRENT)}


@pytest.mark.parametrize("path", [kind for kind in RULES if isinstance(kind, str)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_layer_of_another_package_has_its_rule_where_it_is_imported(path):
    name, _, kind = path.rpartition(".")
    layer = getattr(pytest.importorskip(name), kind)
    assert rule_of(layer(3, 2)) is RULES[f"{name}.{kind}"]

    class Doubled(layer):
        def forward(self, x):
            return 2 * super().forward(x)

    assert rule_of(Doubled(3, 2)) is None
