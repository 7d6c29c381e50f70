"""What a program can check of the house's rules."""

import re
from pathlib import Path

import torchgradx

ROOT = Path(torchgradx.__file__).parent
FORBIDDEN = (
    "dis", "__defaults__", "cell_contents", "f_locals", "gc.disable", "PyGC_Disable",
)  # fmt: skip
ENDINGS = {".py", ".cpp", ".cu", ".cuh", ".h"}


def sources():
    folders = (ROOT, ROOT.parent / "csrc")
    return [path for folder in folders for path in folder.rglob("*") if path.suffix in ENDINGS]


def test_nothing_of_the_users_is_disassembled_and_no_frame_is_read():
    words = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, FORBIDDEN))})(?!\w)")
    found = [
        f"{path.relative_to(ROOT.parent)}:{number}: {match[0]}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in words.finditer(line)
    ]
    assert sources()
    assert not found
