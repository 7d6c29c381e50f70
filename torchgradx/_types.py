"""The extension's classes, for annotations; record/plain.py has the same in plain Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._C import Pass as Pass
    from ._C import Recorder as Recorder
else:
    Pass = Recorder = Any
