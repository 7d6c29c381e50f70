"""Catch the samples that make the loss spike, as they arrive.

While a network learns digits a sensor begins to fail: now and then an image comes with its halves
exchanged, and far too bright. OutlierWatch holds each sample's gradient norm against a running
quantile of those before it, and names what stands out: the samples behind each spike of the loss.

    python examples/loss_spikes.py [--epochs 8] [--out out] [--quick]

Writes loss_spikes.png and loss_spikes.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from plotting import BLUE, GREY, ORANGE, PALE, digits_split, heading, name_lines, picture
from torch import Tensor, nn
from tqdm import tqdm

import torchgradx

BATCH = 32
DAMAGED = 12  # images, from the second epoch on
BRIGHT = 10  # times as bright as they should be


class Step(NamedTuple):
    loss: float
    norms: Tensor  # [N]
    threshold: float
    named: list[int]  # indices into the digits
    damaged: list[int]


def train(epochs: int) -> list[Step]:
    torch.manual_seed(0)
    (images, labels), _ = digits_split(seed=0)
    damaged = torch.randperm(len(labels))[:DAMAGED]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, steps = torchgradx.OutlierWatch(quantile=0.99, factor=3.0), []
    with torchgradx.attach(model) as probe:
        for epoch in tqdm(range(epochs), desc="training", unit="epoch"):
            if epoch == 1:
                images[damaged] = BRIGHT * images[damaged].roll(32, dims=1)
            for batch in torch.randperm(len(labels)).split(BATCH):
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                norms, threshold = probe.norms(), watch.threshold
                named = [outlier.index for outlier in watch.update(norms, indices=batch)]
                if not named:  # else the step is left out
                    optimizer.step()
                optimizer.zero_grad()
                there = damaged[torch.isin(damaged, batch)].tolist() if epoch else []
                steps.append(Step(loss.item(), norms, threshold, named, there))
    return steps


def draw(path: Path, steps: list[Step], found: int, false: int) -> None:
    end, spikes = len(steps), [n for n, step in enumerate(steps) if step.named]
    headline = f"{found} broken images are named as they arrive"
    below = (
        f"of {sum(len(s.norms) for s in steps):,} digits learned from; {false} sound ones are named"
    )
    with picture(path, headline, below) as figure:
        axes = figure.add_axes((0.07, 0.44, 0.82, 0.33))
        places = [n for n, step in enumerate(steps) for _ in step.norms]
        norms = torch.cat([step.norms for step in steps])
        axes.scatter(places, norms, s=2, color=PALE, rasterized=True)
        peaks = [steps[n].norms.max().item() for n in spikes]
        axes.scatter(spikes, peaks, s=42, color=ORANGE, zorder=3)
        axes.plot([step.threshold for step in steps], color=BLUE)
        axes.set(yscale="log", xlim=(0, end), ylim=(0.05, None))
        axes.tick_params(labelbottom=False)
        heading(axes, "Gradient norm of each digit; three times the 99% quantile of those before")
        name_lines(axes, {"threshold": (end, steps[-1].threshold, BLUE),
                          "named": (end, peaks[-1], ORANGE)})  # fmt: skip

        axes = figure.add_axes((0.07, 0.1, 0.82, 0.2))
        axes.plot([step.loss for step in steps], color=GREY, linewidth=1.2)
        axes.scatter(spikes, [steps[n].loss for n in spikes], s=24, color=ORANGE, zorder=3)
        axes.set(xlabel="training step", xlim=(0, end), yscale="log")
        axes.set_yticks([0.2, 0.5, 1, 2], labels=["0.2", "0.5", "1", "2"])
        axes.minorticks_off()
        heading(axes, "Loss of the batch: the named digits are behind its spikes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8, help="of training (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="3 epochs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    steps = train(3 if options.quick else options.epochs)
    with (options.out / "loss_spikes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "threshold", "damaged", "named"])
        for number, step in enumerate(steps):
            lists = (" ".join(map(str, sorted(ids))) for ids in (step.damaged, step.named))
            writer.writerow((number, f"{step.loss:.5g}", f"{step.threshold:.5g}", *lists))
    found = sum(len(set(step.damaged) & set(step.named)) for step in steps)
    false = sum(len(set(step.named) - set(step.damaged)) for step in steps)
    draw(options.out / "loss_spikes.png", steps, found, false)
    arrived = sum(len(step.damaged) for step in steps)
    print(f"{found} of {arrived} broken images named, {false} sound ones")


if __name__ == "__main__":
    main()
