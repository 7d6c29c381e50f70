"""Commands in processes of their own, and what they said."""

import os
import subprocess
import sys


def run(*command, cwd=None, timeout=600, **environment):
    """The ended process, with its stdout and stderr as text; `environment` is added to ours."""
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def python(*arguments, **options):
    return run(sys.executable, *arguments, **options)
