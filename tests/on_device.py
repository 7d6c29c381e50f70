"""Has tests make all their tensors on one device: modules, batches, what a forward adds.

torch.set_default_device would reach into torchgradx too, whose own temporaries a user's program
leaves on the CPU. So a tensor that torchgradx makes stays where it is without a default device.
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils._device import DeviceContext

import torchgradx

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(torchgradx.__file__).parent) + os.sep


def make_all_tensors_on(device):
    """Set the default device, for the whole process, for everything but torchgradx."""
    torch.set_default_device(device)
    with_device = DeviceContext.__torch_function__

    # Not by a subclass: torch.compile ignores this type of mode alone.
    def by_caller(self, func, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling() and called_by_torchgradx():
            return func(*args, **(kwargs or {}))
        return with_device(self, func, types, args, kwargs)

    DeviceContext.__torch_function__ = by_caller


def called_by_torchgradx():
    """Return True if the innermost caller outside torch is torchgradx."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OURS)
