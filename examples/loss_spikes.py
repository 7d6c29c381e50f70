"""Catch the samples that make the loss spike, as they arrive: by norm, and by loss beside it.

While a network learns digits a sensor begins to fail: now and then an image comes with its halves
exchanged, and far too bright. OutlierWatch compares each sample's gradient norm with a running
quantile of those before it, and names what stands out: the samples behind each spike of the loss.
The free baseline is the same rule on each sample's loss.

    python examples/loss_spikes.py [--epochs 8] [--seeds 5] [--out out] [--quick]

Writes loss_spikes.png and loss_spikes.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from plotting import BLUE, GREY, ORANGE, PALE, digits_split, heading, picture
from torch import Tensor, nn
from tqdm import tqdm

import torchgradx

BATCH = 32
DAMAGED = 12  # images, from the second epoch on
BRIGHT = 10  # times as bright as they should be
LEAST = 0.01  # norms below it are drawn here


class Step(NamedTuple):
    loss: float
    norms: Tensor  # [N]
    indices: Tensor  # [N], into the digits
    threshold: float
    damaged: set[int]
    named: set[int]
    by_loss: set[int]  # named by the same rule on losses


def train(epochs: int, seed: int) -> list[Step]:
    torch.manual_seed(seed)
    (images, labels), _ = digits_split(seed)
    damaged = torch.randperm(len(labels))[:DAMAGED]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, loss_watch = (torchgradx.OutlierWatch(quantile=0.99, factor=3.0) for _ in range(2))
    steps = []
    with torchgradx.attach(model) as probe:
        for epoch in range(epochs):
            if epoch == 1:
                images[damaged] = BRIGHT * images[damaged].roll(32, dims=1)
            for batch in torch.randperm(len(labels)).split(BATCH):
                losses = F.cross_entropy(model(images[batch]), labels[batch], reduction="none")
                losses.mean().backward()
                norms, threshold = probe.norms(), watch.threshold
                named = {outlier.index for outlier in watch.update(norms, indices=batch)}
                by_loss = {o.index for o in loss_watch.update(losses, indices=batch)}
                if not named:  # else the step is left out
                    optimizer.step()
                optimizer.zero_grad()
                there = set(damaged[torch.isin(damaged, batch)].tolist()) if epoch else set()
                loss = losses.mean().item()
                steps.append(Step(loss, norms, batch, threshold, there, named, by_loss))
    return steps


def counts(steps: list[Step]) -> tuple[int, int, int, int, int]:
    """Count broken images: that arrived, that norm and loss named; and sound ones named."""
    return (
        sum(len(step.damaged) for step in steps),
        sum(len(step.damaged & step.named) for step in steps),
        sum(len(step.damaged & step.by_loss) for step in steps),
        sum(len(step.named - step.damaged) for step in steps),
        sum(len(step.by_loss - step.damaged) for step in steps),
    )


def draw(path: Path, steps: list[Step], summary: str) -> None:
    end, (arrived, found, by_loss, *_) = len(steps), counts(steps)
    headline = f"{found} of {arrived} broken images are named as they arrive; by loss {by_loss}"
    with picture(path, headline, summary) as figure:
        axes = figure.add_axes((0.07, 0.42, 0.9, 0.35))
        points = {"sound": [], "named": [], "missed": []}
        for n, step in enumerate(steps):
            for index, norm in zip(step.indices.tolist(), step.norms.tolist(), strict=True):
                broken = "named" if index in step.named else "missed"
                points[broken if index in step.damaged else "sound"].append((n, max(norm, LEAST)))
        marks = {"sound": (PALE, 2, "o"), "named": (ORANGE, 36, "o"), "missed": ("black", 46, "x")}
        for name, (colour, size, mark) in marks.items():
            label = f"{len(points[name]):,} {'broken images ' * (name != 'sound')}{name}"
            places = zip(*points[name], strict=True) if points[name] else ((), ())
            axes.scatter(*places, s=size, color=colour, marker=mark, label=label, rasterized=True)
        axes.plot([step.threshold for step in steps], color=BLUE, label="threshold")
        axes.set(yscale="log", xlim=(0, end), ylabel="gradient norm")
        axes.tick_params(labelbottom=False)
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=4, frameon=False, fontsize=11
        )
        heading(axes, "Gradient norm of each digit")

        axes = figure.add_axes((0.07, 0.1, 0.9, 0.2))
        spikes = [n for n, step in enumerate(steps) if step.named]
        axes.plot([step.loss for step in steps], color=GREY, linewidth=1.2)
        axes.scatter(spikes, [steps[n].loss for n in spikes], s=24, color=ORANGE, zorder=3)
        axes.set(xlabel="training step", xlim=(0, end), yscale="log", ylabel="loss")
        axes.set_yticks([0.2, 0.5, 1, 2], labels=["0.2", "0.5", "1", "2"])
        axes.minorticks_off()
        heading(axes, "Loss of the batch: the named digits are behind its spikes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8, help="of training (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one run of 3 epochs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    epochs, seeds = (3, 1) if options.quick else (options.epochs, options.seeds)
    runs = [train(epochs, seed) for seed in tqdm(range(seeds), desc="training", unit="run")]
    with (options.out / "loss_spikes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "loss", "threshold", "damaged", "named", "named by loss"])
        for number, steps in enumerate(runs):
            for n, step in enumerate(steps):
                sets = (step.damaged, step.named, step.by_loss)
                ids = (" ".join(map(str, sorted(each))) for each in sets)
                writer.writerow([number, n, f"{step.loss:.5g}", f"{step.threshold:.5g}", *ids])
    arrived, *found = (median(column) for column in zip(*map(counts, runs), strict=True))
    by_norm, by_loss, false, false_by_loss = map(int, found)
    summary = (
        f"of {arrived:.0f} broken images, norms name {by_norm} and losses {by_loss}; of the sound "
        f"ones {false} and {false_by_loss} (median of {seeds} runs)"
    )
    draw(options.out / "loss_spikes.png", runs[0], summary)
    print(summary)


if __name__ == "__main__":
    main()
