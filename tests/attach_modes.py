"""The options of attach() that tests run under; what runs natively here."""

import functools

import pytest
import torch
from attach_models import square
from torch import nn

import torchgradx

ANY = [{}, {"fused": False}, {"weight_grad": False}]
NATIVE = [{"backend": "native", **more} for more in ANY]
VMAP = [{"backend": "vmap"}, {"backend": "vmap", "weight_grad": False}]


def title(options):
    return ",".join(f"{key}={value}" for key, value in options.items()) or "default"


def each_of(modes):
    """Parametrise a test over options of attach(); with other parameters they are a grid."""
    parametrize = pytest.mark.parametrize("options", modes, ids=title)
    needs = pytest.mark.usefixtures("_native_where_it_is_asked_for")
    return lambda test: pytest.mark.grid(needs(parametrize(test)))


every_mode = each_of(ANY + VMAP + NATIVE)
fallback_mode = each_of(ANY + VMAP)
a_few_modes = each_of(ANY + VMAP[:1])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@functools.cache
def native_missing():
    """Why backend="native" cannot run here, or None."""
    layer = nn.Linear(2, 2)
    try:
        with torchgradx.attach(layer, backend="native") as probe:
            square(layer, torch.randn(3, 2)).backward()
            probe.norms()
    except Exception as error:  # the reason is shown as the skip's
        return f"backend='native' does not run here: {error}"
    return None


def need_native(options):
    if options.get("backend") == "native" and native_missing():
        pytest.skip(native_missing())
