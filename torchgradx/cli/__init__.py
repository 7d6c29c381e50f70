"""The command line: `torchgradx score`, `torchgradx verify`, `torchgradx info`."""

from .commands import main

__all__ = ["main"]
