"""Views that a type checker and a notebook see of the public names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import mlp, square

import torchgradx

ROOT = Path(__file__).parent.parent
TYPES = """
import numpy as np
import torch
from numpy.typing import NDArray
from typing import Any, assert_type
import torchgradx

model = torch.nn.Linear(3, 2)
probe = torchgradx.attach(model, clip=True)
assert_type(probe.norms(), torch.Tensor)
assert_type(probe.norms(loss_scale=2.0), torch.Tensor)
assert_type(probe.norms(per="module"), dict[str, torch.Tensor])
assert_type(probe.norms("parameter"), dict[str, torch.Tensor])
assert_type(probe.clip_grad_norm_(1.0), torch.Tensor)
assert_type(probe.clip_grad_norm_(1.0, "parameter"), dict[str, torch.Tensor])
assert_type(probe.clip_grad_norm_(factors=lambda n: 1 / n, per="module"), dict[str, torch.Tensor])
loss = torch.nn.functional.cross_entropy
x = y = torch.ones(2)
assert_type(torchgradx.grad_norms(model, loss, x, y), torch.Tensor)
assert_type(torchgradx.grad_norms(model, loss, x, y, per="module"), dict[str, torch.Tensor])
assert_type(torchgradx.score(model, loss, [], kind="egl"), NDArray[Any])
assert_type(torchgradx.score(model, loss, [], per="parameter"), dict[str, NDArray[Any]])
assert_type(torchgradx.score(model, loss, [], kind=["norm", "loss"]), dict[str, NDArray[Any]])
ids = lambda args, kwargs: args[1]
assert_type(torchgradx.score(model, loss, [], sample_ids=ids), dict[str, NDArray[Any]])
probe.loss_scale = torchgradx.token_weights(y)
torchgradx.NoiseScale().update(probe)
"""
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


# torch's own backward is untyped, and pages that annotated their functions would not read better.
UNTYPED = ["--disable-error-code=no-untyped-call", "--disable-error-code=no-untyped-def"]


def test_results_have_the_types_that_their_arguments_ask_for_and_the_readme_is_typed(tmp_path):
    pytest.importorskip("mypy")
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    ours = [block for block in blocks if "bridges" not in block]  # two callbacks of one name
    assert ours
    (tmp_path / "results.py").write_text(TYPES)
    (tmp_path / "readme.py").write_text("\n".join(ours))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--config-file=",
        *UNTYPED,
    ]
    done = subprocess.run(
        [*command, "results.py", "readme.py"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


# ---- What is shown -------------------------------------------------------------------------------
def recorded():
    model = mlp()
    probe = torchgradx.attach(model)
    square(model, torch.randn(4, 3)).backward()
    return model, probe


def test_a_probe_shows_what_it_holds():
    model, probe = recorded()
    assert repr(probe) == "Probe(Sequential, 4 parameters, 4 samples recorded)"
    probe.remove()
    assert repr(probe) == "Probe(Sequential, removed)"
    assert model is not None


def test_explain_is_a_string_that_notebooks_show_as_it_is():
    _, probe = recorded()
    text = probe.explain()
    assert isinstance(text, str)
    assert text._repr_html_().startswith("<pre>2 layers: 2 ")
    probe.remove()


def test_a_report_shows_a_table():
    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    report = torchgradx.verify(mlp(), F.cross_entropy, x, y)
    assert repr(report).startswith("Report(agrees: 4 parameters, largest error ")
    html = report._repr_html_()
    assert html.count("<tr>") == 5
    assert "<td>0.weight</td>" in html
    wrong = torchgradx.Report({"<w>": torch.ones(2)}, {"<w>": torch.full((2,), 2.0)}, 1e-3)
    assert repr(wrong).startswith("Report(differs")
    assert "<td>&lt;w&gt;</td><td>5.00e-01 differs</td>" in wrong._repr_html_()


def test_only_public_names_are_listed():
    assert set(dir(torchgradx)) == {*torchgradx.__all__, "__version__"}
    _, probe = recorded()
    assert not [name for name in dir(probe) if name.startswith("_")]
    assert {"norms", "clip_grad_norm_", "loss_scale", "explain"} <= set(dir(probe))
    probe.remove()
