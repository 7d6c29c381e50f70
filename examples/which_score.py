"""Measure which score finds mislabelled digits: gradient norms beside the baselines that cost less.

A tenth of the labels of scikit-learn's 1,797 digits is flipped, and a small CNN is trained on them.
After some of the epochs every digit is scored in one pass of `torchgradx.score` over the pool: by
its gradient norm, by its loss, by the error of its probabilities (EL2N), by its margin and entropy,
and by the norm of the last layer's gradient alone. Those that stand first are looked at.

    python examples/which_score.py [--seeds 5] [--out out] [--quick]

Writes which_score.png and which_score.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path
from statistics import median

import torch
from matplotlib.ticker import FixedLocator, NullLocator
from plotting import BLUE, GREEN, GREY, ORANGE, heading, name_lines, picture
from rank_digits import Digits, flipped_digits, small_cnn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchgradx

EPOCHS = (1, 2, 3, 5, 8, 12)  # after which the digits are scored
KINDS = ["norm", "loss", "el2n", "margin", "entropy"]
LAST = "last layer's norm"
COLOURS = {"norm": BLUE, LAST: GREEN, "loss": ORANGE, "el2n": "#CC79A7", "margin": GREY}
COLOURS["entropy"] = "#56B4E9"


def found_by(model: nn.Module, digits: Digits) -> dict[str, int]:
    """How many flipped labels stand among the first k, of k in all, by each score."""
    loader = DataLoader(TensorDataset(digits.images, digits.given), batch_size=256)
    scores = torchgradx.score(model, F.cross_entropy, loader, kind=KINDS, progress=False)
    parts = torchgradx.score(model, F.cross_entropy, loader, per="module", progress=False)
    scores[LAST] = list(parts.values())[-1]
    scores["margin"] = -scores["margin"]  # a small one is uncertain
    k = int(digits.flipped.sum())
    return {
        name: int(digits.flipped[torch.tensor(column).argsort(descending=True)[:k]].sum())
        for name, column in scores.items()
    }


def run(seed: int, bar: tqdm) -> list[tuple[int, dict[str, int]]]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    digits, model = flipped_digits(generator), small_cnn()
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for epoch in range(1, max(EPOCHS) + 1):
        for batch in torch.randperm(len(digits.given), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(digits.images[batch]), digits.given[batch]).backward()
            optimizer.step()
        if epoch in EPOCHS:
            found.append((epoch, found_by(model, digits)))
        bar.update()
    return found


def draw(path: Path, middles: dict[str, list[float]], k: int, seeds: int) -> None:
    best = {name: max(values) for name, values in middles.items()}
    winner = max(best, key=lambda name: best[name])
    headline = f"Best at flipped labels: {winner}, {best[winner]:.0f} of {k}"
    below = f"flipped labels among the first {k} of 1,797 digits; median of {seeds} runs"
    with picture(path, headline, below) as figure:
        axes, ends = figure.add_axes((0.07, 0.1, 0.72, 0.67)), {}
        for name, values in middles.items():
            axes.plot(EPOCHS, values, color=COLOURS[name], marker="o", markersize=5)
        for name, values in middles.items():
            ends[name] = (EPOCHS[-1], values[-1], COLOURS[name])
        axes.set(xscale="log", xlabel="epochs of training", ylabel="flipped labels found")
        axes.xaxis.set_major_locator(FixedLocator(EPOCHS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
        axes.axhline(0.1 * k, color=GREY, linestyle=":", linewidth=1.5)
        axes.text(EPOCHS[0], 0.1 * k, "by chance", va="top", color=GREY)
        name_lines(axes, ends)
        heading(axes, f"Of {k} flipped labels, found among the first {k}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    seeds = 1 if options.quick else options.seeds
    with tqdm(total=seeds * max(EPOCHS), desc="training", unit="epoch") as bar:
        runs = [run(seed, bar) for seed in range(seeds)]
    with (options.out / "which_score.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "epochs", "score", "found"])
        for number, looks in enumerate(runs):
            for epoch, found in looks:
                writer.writerows((number, epoch, name, count) for name, count in found.items())
    names = list(runs[0][0][1])
    middles = {
        name: [median(looks[k][1][name] for looks in runs) for k in range(len(EPOCHS))]
        for name in names
    }
    draw(options.out / "which_score.png", middles, 180, seeds)
    for name, values in middles.items():
        print(f"{name:<20}" + "".join(f"{value:6.0f}" for value in values))
    print("found of 180 after " + ", ".join(map(str, EPOCHS)) + f" epochs; median of {seeds} runs")


if __name__ == "__main__":
    main()
