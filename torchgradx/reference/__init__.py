"""Each operator of csrc/operators/ops.h in plain PyTorch: the specification, and what runs where
there are no kernels.

Some samples' gradients exist at a time, never all N of them: every function walks chunks of samples
whose intermediates fit in CHUNK elements. Shapes are as there; row 0 of every sq_norms is
the weight's, row 1 the bias's.
"""

from . import affine, gather, linear
from .affine import *  # noqa: F403
from .gather import *  # noqa: F403
from .linear import *  # noqa: F403

__all__ = [*affine.__all__, *gather.__all__, *linear.__all__]
