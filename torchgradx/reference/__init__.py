"""Each operator of csrc/operators/ops.h in plain PyTorch: the specification, and what runs where
there are no kernels.

Some samples' gradients exist at a time, never all N of them: every function walks chunks of samples
whose intermediates fit in CHUNK elements. Shapes are as there; row 0 of every sq_norms is
the weight's, row 1 the bias's.
"""

from .affine import (
    affine_by_sample,
    affine_fused,
    affine_sq_norms,
    moments,
    prelu_fused,
    prelu_sq_norms,
    turned,
)
from .gather import gather_dots, gather_sq_norms
from .linear import (
    bias_sq_norms,
    conv2d_direct_sq_norms,
    conv2d_fused,
    conv2d_gram_sq_norms,
    conv2d_scaled,
    direct_sq_norms,
    gram_sq_norms,
    linear_fused,
    linear_scaled,
    rank1_sq_norms,
)

__all__ = [
    "affine_by_sample",
    "affine_fused",
    "affine_sq_norms",
    "bias_sq_norms",
    "conv2d_direct_sq_norms",
    "conv2d_fused",
    "conv2d_gram_sq_norms",
    "conv2d_scaled",
    "direct_sq_norms",
    "gather_dots",
    "gather_sq_norms",
    "gram_sq_norms",
    "linear_fused",
    "linear_scaled",
    "moments",
    "prelu_fused",
    "prelu_sq_norms",
    "rank1_sq_norms",
    "turned",
]
