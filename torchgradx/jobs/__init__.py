"""What people do with norms, each in a few lines."""

from .noise_scale import NoiseScale
from .partial import ResumeError
from .sampling import ImportanceSampler, IndexedDataset
from .score import score
from .tables import save_scores
from .watch import Outlier, OutlierWatch

__all__ = [
    "ImportanceSampler",
    "IndexedDataset",
    "NoiseScale",
    "Outlier",
    "OutlierWatch",
    "ResumeError",
    "save_scores",
    "score",
]
