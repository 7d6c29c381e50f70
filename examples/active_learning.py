"""Choose what to label by expected gradient length, against the margin and labels chosen at random.

A network begins with a few labelled digits. In each round it scores the unlabelled ones by the
length that their gradient would have on average over the labels it thinks possible, no label being
known; those that would teach it most are labelled, and it is trained anew. The margin between the
two likeliest labels costs a forward alone and is the baseline to beat.

    python examples/active_learning.py [--rounds 12] [--out out] [--quick]

Writes active_learning.png and active_learning.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.ticker import FuncFormatter
from plotting import BLUE, GREEN, GREY, HEADING, ORANGE, digits_split, heading, name_lines, picture
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchgradx

FIRST, MORE = 20, 20  # labels to begin with, and labels of each round
BY_NORM, BY_MARGIN, RANDOM = "expected gradient length", "margin", "random"
COLOURS = {RANDOM: ORANGE, BY_MARGIN: GREEN, BY_NORM: BLUE}


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-3)
    for _ in range(120):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def run(way: str, rounds: int, seed: int, bar: tqdm) -> tuple[Tensor, Tensor]:
    """The accuracy on the test digits after each round; which digits were chosen, in order."""
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = digits_split(seed)
    order = torch.randperm(len(labels))
    labelled, accuracy = order[:FIRST], []
    for _ in range(rounds + 1):
        model = trained(images[labelled], labels[labelled])
        with torch.no_grad():
            right = model(test_images).argmax(1) == test_labels
        accuracy.append(right.float().mean().item())
        rest = order[~torch.isin(order, labelled)]
        if way != RANDOM:
            pool = DataLoader(TensorDataset(images[rest]), batch_size=512)
            kind = "egl" if way == BY_NORM else "margin"
            scores = torch.tensor(torchgradx.score(model, None, pool, kind=kind, progress=False))
            rest = rest[scores.argsort(descending=way == BY_NORM)]  # a small margin is uncertain
        labelled = torch.cat([labelled, rest[:MORE]])
        bar.update()
    return torch.tensor(accuracy), labelled


def draw(path: Path, found: dict[str, Tensor], chosen: Tensor) -> None:  # [seeds, rounds + 1] each
    middles = {way: accuracy.quantile(0.5, 0) for way, accuracy in found.items()}
    labels = FIRST + MORE * torch.arange(len(middles[RANDOM]))
    goal = middles[RANDOM][-1]
    best = max((BY_NORM, BY_MARGIN), key=lambda way: float(middles[way].mean()))
    as_good = labels[middles[best] >= goal].tolist()
    headline = "Random labels teach as much here"
    if as_good:
        headline = f"{as_good[0]} labels by {best} teach as much as {int(labels[-1])} random ones"
    below = (
        f"accuracy on 360 test digits; median and 10-90% of {len(found[RANDOM])} runs, "
        f"{MORE} labels more in each round"
    )
    with picture(path, headline, below) as figure:
        axes, ends = figure.add_axes((0.07, 0.1, 0.5, 0.67)), {}
        for way, colour in COLOURS.items():
            low, high = found[way].quantile(torch.tensor([0.1, 0.9]), 0)
            axes.fill_between(labels, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(labels, middles[way], color=colour, marker="o", markersize=5)
            ends[way] = (float(labels[-1]), float(middles[way][-1]), colour)
        if as_good:
            axes.hlines(goal, as_good[0], int(labels[-1]), color=GREY, linestyle=":", lw=1.5)
        axes.set(xlabel="labelled digits", ylabel="accuracy", xlim=(0, int(labels[-1]) + 5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        name_lines(axes, ends)
        heading(axes, "Test digits read correctly")

        (images, _), _ = digits_split(0)
        figure.text(0.8, 0.79, "The length's first choices", **HEADING)
        grid = figure.add_gridspec(8, 4, left=0.8, right=0.97, top=0.77, bottom=0.1, hspace=0.12)
        for index, cell in zip(chosen[FIRST : FIRST + 32].tolist(), grid, strict=True):
            axes = figure.add_subplot(cell, xticks=[], yticks=[])
            axes.imshow(images[index].view(8, 8), cmap="gray_r")
            axes.spines[:].set(visible=True, color=BLUE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="of labelling (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="two runs of 5 rounds, not seven")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    rounds, seeds = (5, 2) if options.quick else (options.rounds, 7)
    with tqdm(total=len(COLOURS) * seeds * (rounds + 1), desc="labelling", unit="round") as bar:
        runs = {way: [run(way, rounds, seed, bar) for seed in range(seeds)] for way in COLOURS}
    found = {way: torch.stack([accuracy for accuracy, _ in of]) for way, of in runs.items()}
    with (options.out / "active_learning.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["chosen by", "run", "labels", "accuracy"])
        for way, of in found.items():
            for number, accuracy in enumerate(of.tolist()):
                for k, value in enumerate(accuracy):
                    writer.writerow([way, number, FIRST + MORE * k, f"{value:.4f}"])
    draw(options.out / "active_learning.png", found, runs[BY_NORM][0][1])
    last = {way: of[:, -1].median().item() for way, of in found.items()}
    count = FIRST + MORE * rounds
    print(f"accuracy with {count} labels: " + ", ".join(f"{v:.1%} {k}" for k, v in last.items()))


if __name__ == "__main__":
    main()
