"""setuptools' own build backend, except that the build sees the torch it will run with.

An isolated build cannot see the environment it builds for. Naming torch in `requires` would fetch
another one, gigabytes large, and the extension would not load in the torch that is there: the C++
interface differs between versions. So the installed torch is lent to the build, and only where
there is none is one asked for.
"""

import importlib.util
import os
import subprocess
import sys

from setuptools.build_meta import *  # noqa: F403  the hooks that need no change

_ASK = """
import importlib.util, sys
if importlib.util.find_spec("torch"):
    print(*filter(None, sys.path), sep="\\n")
"""


def _lend_torch() -> bool:
    """Make the target environment's torch importable here. False if it has none."""
    if importlib.util.find_spec("torch"):
        return True  # --no-build-isolation
    # pip isolates through PYTHONPATH; the same interpreter without it (-E) is the target, with
    # whatever .pth files, user site or system site it has.
    here = os.path.dirname(sys.executable)  # as the current directory: nothing to import in it
    asked = subprocess.run([sys.executable, "-E", "-c", _ASK], cwd=here, stdout=subprocess.PIPE)
    lent = asked.stdout.decode().splitlines()
    sys.path += [path for path in lent if path not in sys.path]  # behind the build's own packages
    return bool(lent)


_HAVE_TORCH = _lend_torch()


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    without = os.environ.get("TORCHGRADX_NO_EXTENSION") == "1"
    return [] if _HAVE_TORCH or without else ["torch"]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None) -> list[str]:
    return []
