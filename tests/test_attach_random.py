"""Models drawn at random, in many steps on one probe: N and T change, and what an early step has
proven is used in the later ones, whose graphs are made of other nodes."""

import random

import pytest
import torch
from attach_oracle import ANY, VMAP, close_named, loop, title
from random_models import LONGEST, I, Outputs, Shared
from torch.utils._pytree import tree_leaves

import torchgradx

STEPS, SEEDS = 8, 24
SIZES = [(4, 5), (5, 5), (3, 6), (1, 4), (6, 3), (2, 4), (4, 4), (4, LONGEST), (3, 3)]


def loss(model, x):
    """Every output counts, and each by another factor."""
    outputs = tree_leaves(model(x))
    return sum(k * y.sin().square().flatten(1).mean(1) for k, y in enumerate(outputs, 1)).mean()


@pytest.mark.parametrize("options", ANY + VMAP[:1], ids=title)
@pytest.mark.parametrize("kind", [Shared, Outputs])
def test_every_step_is_exact_or_refused(kind, options):
    refusals, graphs = [], []  # graphs kept alive: no node takes the place of another's
    for seed in range(SEEDS):
        rng = random.Random(f"{seed} {title(options)}")
        torch.manual_seed(seed)
        model = kind(rng).double()
        with torchgradx.attach(model, **options) as probe:
            for step in range(STEPS):
                x = torch.randn(*rng.choice(SIZES), I, dtype=torch.float64)
                graphs.append(loss(model, x))
                model.zero_grad()
                graphs[-1].backward()
                try:
                    got = probe.norms(per="parameter")
                except torchgradx.CoverageError as error:
                    refusals.append(f"seed {seed}, step {step}: {error}")
                else:
                    close_named(got, loop(model, loss, x))
    assert len(refusals) <= STEPS * SEEDS // 20, "\n".join(refusals)
