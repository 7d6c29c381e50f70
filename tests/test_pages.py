"""Every ```python block of README.md and docs/ runs; a block may use the names of earlier ones of
its page. The pages agree with the code where they name it."""

import re
from pathlib import Path

import pytest
import torch

import torchgradx
from torchgradx.refusals import SECTIONS, first_words

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXTRAS = {
    "lightning", "transformers", "accelerate", "opacus", "sklearn", "tensorboard", "cleanlab",
    "datasets", "pandas",
}  # fmt: skip


def blocks(page):
    text = page.read_text()
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in FENCE.finditer(text)]


BLOCKS = {page: blocks(page) for page in PAGES}
CASES = [(page, index) for page in PAGES for index in range(len(BLOCKS[page]))]
names, done = {page: {} for page in PAGES}, set()  # what the blocks run so far have defined


def run(page, index):
    line, code = BLOCKS[page][index]
    namespace = {"__name__": page.stem, **names[page]}
    try:
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in EXTRAS:
            pytest.skip(f"{error.name} is not installed: `pip install .[bridges,test]`")
        raise
    names[page].update(namespace)
    done.add((page, index))


def test_every_page_is_there():
    assert BLOCKS[PAGES[0]], "the README shows no code"
    listed = set(re.findall(r"^ +- [^:]+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {page.name for page in PAGES[1:]}


@pytest.mark.parametrize(
    ("page", "index"), CASES, ids=lambda value: value.name if isinstance(value, Path) else value
)
@pytest.mark.filterwarnings("ignore")  # of the trainers, on devices and workers
def test_a_block_runs(page, index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for earlier in range(index + 1):
        if (page, earlier) not in done:
            run(page, earlier)


def test_the_api_page_has_all_that_is_public():
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: torchgradx\.(?:[\w.]+\.)?(\w+)$", text, re.MULTILINE))
    assert shown - {"GradNorms", "register"} == set(torchgradx.__all__)


def listed():
    """Rows of docs/errors.md: each section of refusals by the first words of its texts."""
    return [
        f"| {title} | {' · '.join(f'`{first_words(key)}`' for key in section)} |"
        for title, section in SECTIONS.items()
    ]


def test_the_page_of_errors_lists_the_first_words_of_each_refusal():
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    start = lines.index("## What refusals begin with")
    rows = [line for line in lines[start:] if line.startswith("| ")][1:]
    assert rows == listed(), "its rows should be:\n" + "\n".join(listed())


def test_pages_that_are_read_first_are_short():
    lengths = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert lengths["README.md"] < 170
    assert lengths["limits.md"] <= 140
    columns = [line.count("|") - 1 for line in PAGES[0].read_text().splitlines() if line[:1] == "|"]
    assert columns
    assert max(columns) <= 6


def test_links_between_pages_lead_somewhere():
    """Of the README and the pages, into the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
