"""What the examples share: how they look (colours that colour-blind eyes tell apart, one headline),
and scikit-learn's digits in two parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor

BLUE, ORANGE, GREEN, GREY, PALE = "#0072B2", "#D55E00", "#009E73", "#767676", "#C8C8C8"
HEADING = {"size": 12, "weight": "bold"}
STYLE = {
    "font.size": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "lines.linewidth": 2,
}  # fmt: skip


@contextlib.contextmanager
def picture(
    path: Path, headline: str, below: str, size: tuple[float, float] = (14, 7.6)
) -> Iterator[plt.Figure]:
    """A figure with a headline; what is drawn inside goes below 0.84 of its height."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=size)
        figure.text(0.03, 0.92, headline, size=25, weight="bold")
        figure.text(0.03, 0.865, below, size=15, color=GREY)
        yield figure
        figure.savefig(path, dpi=150)
        plt.close(figure)


def heading(axes: plt.Axes, text: str) -> None:
    axes.set_title(text, HEADING, loc="left", pad=12)


def name_lines(axes: plt.Axes, names: dict[str, tuple[float, float, str]]) -> None:
    """A name at the end of each line, in its colour, none over another: {name: (x, y, colour)}."""
    axes.get_ylim()  # has matplotlib choose them now
    scale, top = 72 / axes.figure.dpi, -1e9  # points
    for name, (x, y, colour) in sorted(names.items(), key=lambda item: item[1][1]):
        here = scale * axes.transData.transform((x, y))[1]
        top = max(here, top + 15)
        axes.annotate(
            name, (x, y), xytext=(8, top - here), textcoords="offset points", color=colour,
            weight="bold", va="center", annotation_clip=False,
        )  # fmt: skip


Part = tuple[Tensor, Tensor]  # images [N, 64], labels [N]


def digits_split(seed: int) -> tuple[Part, Part]:
    """1,437 of scikit-learn's digits to learn from, 360 to test with; the seed deals them out."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.3
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order.split([1437, 360])
    return tuple((images[part], labels[part]) for part in parts)  # type: ignore[return-value]
