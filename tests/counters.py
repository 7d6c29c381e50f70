"""Counts of the operations that torch dispatches."""

import collections

from torch.utils._python_dispatch import TorchDispatchMode


class Counter(TorchDispatchMode):
    """Counts operations by what `name(func, args)` calls them, and not those that it does not."""

    def __init__(self, name):
        super().__init__()
        self.name, self.counts = name, collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if name := self.name(func, args):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
