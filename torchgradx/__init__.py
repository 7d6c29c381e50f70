"""Per-sample gradient norms of existing PyTorch models, without per-sample gradients."""

from importlib.metadata import version as _version

from . import ops
from .attach import attach, attached
from .errors import CoverageError, VerificationError
from .jobs import (
    ImportanceSampler,
    IndexedDataset,
    NoiseScale,
    Outlier,
    OutlierWatch,
    ResumeError,
    save_scores,
    score,
)
from .probe import Probe
from .record.tokens import token_weights
from .scoring import grad_norms
from .verify import Report, verify

__version__ = _version("torchgradx")

__all__ = [
    "CoverageError",
    "ImportanceSampler",
    "IndexedDataset",
    "NoiseScale",
    "Outlier",
    "OutlierWatch",
    "Probe",
    "Report",
    "ResumeError",
    "VerificationError",
    "attach",
    "attached",
    "grad_norms",
    "ops",
    "save_scores",
    "score",
    "token_weights",
    "verify",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
