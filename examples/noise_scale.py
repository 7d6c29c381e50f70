"""Measure how large a batch is worth its cost, while a network learns digits.

The gradient noise scale (McCandlish et al. 2018) says how many samples it takes until their mean
gradient is more signal than noise: far below it a batch twice as large makes almost twice the
progress a step, far above hardly any. NoiseScale reads it off the training's own steps.

    python examples/noise_scale.py [--epochs 16] [--out out] [--quick]

Writes noise_scale.png and noise_scale.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from matplotlib.ticker import FuncFormatter, NullFormatter
from plotting import BLUE, GREY, ORANGE, PALE, digits_split, heading, picture
from torch import Tensor, nn
from tqdm import tqdm

import torchgradx

BATCH = 32
EVERY = 10  # steps between two looks at the test digits


Look = tuple[int, float, float, float]  # step, noise scale, its truth, part of the test misread


def truth(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """tr(Sigma) / |G|^2 of all digits to learn from, which costs a pass over them."""
    norms = torchgradx.grad_norms(model, F.cross_entropy, images, labels)
    loss = F.cross_entropy(model(images), labels)
    whole = sum(g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters())))
    return float(norms.square().mean() / whole) - 1


def train(epochs: int, seed: int) -> list[Look]:
    torch.manual_seed(seed)
    (images, labels), (test_images, test_labels) = digits_split(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    noise, found, step = torchgradx.NoiseScale(), [], 0
    with torchgradx.attach(model) as probe:
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(BATCH):
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                noise.update(probe)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % EVERY == 0:
                    with torch.no_grad():
                        wrong = model(test_images).argmax(1) != test_labels
                    exact = truth(model, images, labels)
                    found.append((step, noise.noise_scale, exact, wrong.float().mean().item()))
    return found


def middle(runs: list[list[Look]], column: int) -> list[tuple[float, ...]]:
    """The lowest, the median and the highest of all runs, at each look."""
    looks = zip(*([look[column] for look in run] for run in runs), strict=True)
    return [(min(look), median(look), max(look)) for look in looks]


def draw(path: Path, runs: list[list[Look]]) -> None:
    steps = [look[0] for look in runs[0]]
    low, scale, high = zip(*middle(runs, 1), strict=True)
    exact = [of[1] for of in middle(runs, 2)]
    early, late = (float(f"{value:.2g}") for value in (scale[0], median(scale[-9:])))
    headline = f"A useful batch grows from {early:,.0f} digits to {late:,.0f}"
    below = f"gradient noise scale while a network learns, median and range of {len(runs)} runs"
    with picture(path, headline, below) as figure:
        axes = figure.add_axes((0.08, 0.39, 0.86, 0.38))
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0)
        axes.plot(steps, scale, color=BLUE)
        axes.plot(steps, exact, color="black", linewidth=1.2, linestyle="--")
        axes.axhline(BATCH, color=PALE, linestyle=(0, (4, 4)), zorder=0)
        axes.text(steps[-1], BATCH, f"the batch of {BATCH} ", ha="right", va="bottom", color=GREY)
        axes.set(yscale="log", xlim=(0, steps[-1]), ylabel="samples")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.tick_params(labelbottom=False)
        heading(axes, "Noise scale; dashed its truth at single steps, by a pass over all digits")

        axes = figure.add_axes((0.08, 0.09, 0.86, 0.18))
        low, wrong, high = zip(*middle(runs, 3), strict=True)
        axes.fill_between(steps, low, high, color=ORANGE, alpha=0.2, linewidth=0)
        axes.plot(steps, wrong, color=ORANGE)
        axes.set(xlabel="training step", xlim=(0, steps[-1]), yscale="log", ylabel="misread")
        axes.set_yticks([0.03, 0.1, 0.3], labels=["3%", "10%", "30%"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        heading(axes, "Test digits misread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=16, help="of training (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one run of 8 epochs, not five")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    epochs, seeds = (8, 1) if options.quick else (options.epochs, 5)
    runs = [train(epochs, seed) for seed in tqdm(range(seeds), desc="training", unit="run")]
    with (options.out / "noise_scale.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "noise_scale", "truth", "misread"])
        for number, run in enumerate(runs):
            writer.writerows((number, s, f"{b:.6g}", f"{t:.6g}", f"{w:.4f}") for s, b, t, w in run)
    draw(options.out / "noise_scale.png", runs)
    first, last = runs[0][1], runs[0][-1]
    exact = median(look[2] for look in runs[0][-9:])
    print(
        f"first run: noise scale {first[1]:.0f} samples after {first[0]} steps, {last[1]:.0f} "
        f"after {last[0]} (truth {exact:.0f}, of the last 9 looks); "
        f"test digits misread {first[3]:.1%} -> {last[3]:.1%}"
    )


if __name__ == "__main__":
    main()
