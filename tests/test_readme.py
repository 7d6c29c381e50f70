"""Every ```python block of README.md runs, in order; a block may use the names of earlier ones."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks():
    text = README.read_text() if README.exists() else ""
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in FENCE.finditer(text)]


BLOCKS = blocks()
names, done = {}, []  # what the blocks run so far have defined


def run(block):
    line, code = block
    namespace = {"__name__": "readme", **names}
    exec(compile("\n" * line + code, str(README), "exec"), namespace)
    names.update(namespace)
    done.append(block)


def test_the_readme_shows_code():
    assert BLOCKS, f"no ```python block in {README}"


@pytest.mark.parametrize("index", range(len(BLOCKS)), ids=lambda i: f"line {BLOCKS[i][0] + 1}")
def test_a_block_of_the_readme_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for block in BLOCKS[: index + 1]:
        if block not in done:
            run(block)
    assert BLOCKS[index] in done
