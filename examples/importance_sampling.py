"""Draw the samples that still teach: by gradient norms, against losses and even draws.

Three networks learn the same digits with the same steps, batch and learning rate. One draws its
samples evenly; the others by the norm, or by the loss, that each sample had when it was last met,
with weights that leave the expected gradient what it was. Norms come off the step's own backward;
losses are the free baseline.

    python examples/importance_sampling.py [--steps 1000] [--out out] [--quick]

Writes importance_sampling.png and importance_sampling.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.ticker import FuncFormatter, NullFormatter
from plotting import BLUE, GREEN, GREY, ORANGE, digits_split, heading, name_lines, picture
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchgradx

BATCH, EVERY = 8, 20
ROUND = 50 * BATCH  # samples drawn before new norms take effect
EVENLY, BY_LOSS, BY_NORM = "evenly", "by loss", "by gradient norm"
COLOURS = {EVENLY: ORANGE, BY_LOSS: GREEN, BY_NORM: BLUE}


def train(way: str, steps: int, seed: int, bar: tqdm) -> Tensor:
    """[looks, 2]: the loss over all training digits, and the part of the test digits misread."""
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = digits_split(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    smoothing = 1.0 if way == EVENLY else 0.2  # 1: evenly, and every weight is 1
    sampler = torchgradx.ImportanceSampler(
        len(labels), num_samples=ROUND, smoothing=smoothing, seed=seed
    )
    data = torchgradx.IndexedDataset(TensorDataset(images, labels))
    loader, looks, step = DataLoader(data, batch_size=BATCH, sampler=sampler), [], 0
    with torchgradx.attach(model) as probe:
        while step < steps:
            for index, (x, y) in loader:
                weights = sampler.weights(index).float()
                losses = F.cross_entropy(model(x), y, reduction="none")
                (weights * losses).mean().backward()
                norms = probe.norms(loss_scale=weights)
                sampler.update(index, losses if way == BY_LOSS else norms)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % EVERY == 0:
                    with torch.no_grad():
                        whole = F.cross_entropy(model(images), labels).item()
                        wrong = (model(test_images).argmax(1) != test_labels).float().mean()
                    looks.append((whole, wrong.item()))
                if step == steps:
                    break
    bar.update()
    return torch.tensor(looks)


def draw(path: Path, found: dict[str, Tensor]) -> None:  # [seeds, looks, 2] each
    middles = {way: looks.quantile(0.5, 0) for way, looks in found.items()}
    steps = torch.arange(1, len(middles[EVENLY]) + 1) * EVERY
    goal = middles[EVENLY][-1, 0]
    as_good = steps[middles[BY_NORM][:, 0] <= goal].tolist()
    by_loss = steps[middles[BY_LOSS][:, 0] <= goal].tolist()
    headline = "Drawn evenly, it learns as fast here"
    if as_good:
        headline = f"Drawn by norm, {as_good[0]:,} steps reach the loss of {int(steps[-1]):,}"
        headline += f"; by loss {by_loss[0]:,}" if by_loss else "; by loss not"
    seeds = len(found[EVENLY])
    below = (
        f"1,437 digits, batches of {BATCH}, the same learning rate; median of {seeds} runs, 10-90%"
    )
    with picture(path, headline, below) as figure:
        for place, column, title in (
            ((0.07, 0.1, 0.47, 0.67), 0, "Loss over all training digits"),
            ((0.75, 0.1, 0.22, 0.67), 1, "Test digits misread"),
        ):
            axes, ends = figure.add_axes(place), {}
            for way, colour in COLOURS.items():
                low, high = found[way][:, :, column].quantile(torch.tensor([0.1, 0.9]), 0)
                line = middles[way][:, column]
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
                axes.plot(steps, line, color=colour)
                ends[way] = (float(steps[-1]), float(line[-1]), colour)
            axes.set(yscale="log", xlabel="training step", xlim=(0, int(steps[-1])))
            axes.set_ylabel("loss" if column == 0 else "misread")
            heading(axes, title)
            if column == 0:
                if as_good:
                    end = int(steps[-1])
                    axes.hlines(goal, as_good[0], end, color=GREY, linestyle=":", lw=1.5)
                name_lines(axes, ends)
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            else:
                axes.set_yticks([0.03, 0.1, 0.3], labels=["3%", "10%", "30%"])
                axes.yaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of each run (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="two runs each of 300 steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    steps, seeds = (300, 2) if options.quick else (options.steps, 5)
    with tqdm(total=seeds * len(COLOURS), desc="training", unit="run") as bar:
        found = {
            way: torch.stack([train(way, steps, seed, bar) for seed in range(seeds)])
            for way in COLOURS
        }
    with (options.out / "importance_sampling.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["drawn", "run", "step", "loss", "misread"])
        for way, runs in found.items():
            for number, looks in enumerate(runs):
                for look, (loss, wrong) in enumerate(looks.tolist(), start=1):
                    writer.writerow([way, number, look * EVERY, f"{loss:.6g}", f"{wrong:.4f}"])
    draw(options.out / "importance_sampling.png", found)
    last = {way: runs[:, -1, 0].median().item() for way, runs in found.items()}
    print(f"loss after {steps} steps: " + ", ".join(f"{v:.4f} drawn {k}" for k, v in last.items()))


if __name__ == "__main__":
    main()
