"""Autocast as it is on a GPU, where it widens what a CPU's leaves as it is."""

from functools import partial

import pytest
import torch
from attach_oracle import a_few_modes
from test_attach_precision import MODELS, exact_under_autocast, halves
from torch.utils._pytree import tree_map_only

WIDENED = ("layer_norm", "native_layer_norm", "group_norm", "_softmax", "tanh")


@pytest.fixture
def as_on_a_gpu():
    """A GPU's autocast computes some operators in float32, which the CPU's leaves as they are."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")

    def wide(t):
        return t.float() if t.is_floating_point() else t

    def widened(stock, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return stock(*tree_map_only(torch.Tensor, wide, args), **kwargs)

    for name in WIDENED:
        library.impl(name, partial(widened, getattr(torch.ops.aten, name).default))
    yield
    library._destroy()


@a_few_modes
@halves
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_exact_where_it_widens_normalisations(name, dtype, options, as_on_a_gpu):
    exact_under_autocast(name, dtype, options)
