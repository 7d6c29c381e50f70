"""Find mislabelled handwritten digits by their gradient norms.

A tenth of the labels of scikit-learn's 1,797 digits is flipped, a small CNN is trained on them for
a few epochs, and every sample is scored by the norm of its own loss's gradient: one whose label
contradicts its image still pulls hard at the weights when the others no longer do.

The same scores are computed in three ways, which have to agree and are timed against each other:
by a loop over single samples, by torch.func.vmap, and by torchgradx off an ordinary backward. What
the loss and EL2N find, which cost a forward alone, stands beside them: see which_score.py.

    python examples/rank_digits.py [--epochs 10] [--out out] [--quick]

Writes ranking.csv and ranking.png into the folder that --out names.
"""

import argparse
import csv
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from plotting import BLUE, HEADING, ORANGE, PALE, heading, picture
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torchgradx

FLIPPED_PART = 0.1
BATCH = 256


class Digits(NamedTuple):
    images: Tensor  # [N, 1, 8, 8], 0 to 1
    given: Tensor  # [N], the labels to learn from
    true: Tensor  # [N]

    @property
    def flipped(self) -> Tensor:  # [N]
        return self.given != self.true

    def batches(self) -> zip:
        return zip(self.images.split(BATCH), self.given.split(BATCH), strict=True)


def flipped_digits(generator: torch.Generator) -> Digits:
    """The digits, a tenth of whose labels is moved to another class."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    true = torch.tensor(digits.target)
    chosen = torch.randperm(len(true), generator=generator)[: round(FLIPPED_PART * len(true))]
    given = true.clone()
    given[chosen] += torch.randint(1, 10, chosen.shape, generator=generator)
    return Digits(images, given % 10, true)


def small_cnn() -> nn.Sequential:
    features = [
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    ]
    return nn.Sequential(*features, nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: nn.Module, digits: Digits, epochs: int, generator: torch.Generator) -> None:
    """Few epochs on purpose: trained to the end, it would know the flipped labels by heart."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in tqdm(range(epochs), desc="training", unit="epoch"):
        for batch in torch.randperm(len(digits.given), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(digits.images[batch]), digits.given[batch]).backward()
            optimizer.step()


# The same scores, three ways: (model, digits) -> gradient norms [N]


def by_loop(model: nn.Module, digits: Digits) -> Tensor:
    norms = []
    for image, label in zip(digits.images.split(1), digits.given.split(1), strict=True):
        gradient = torch.autograd.grad(F.cross_entropy(model(image), label), model.parameters())
        norms.append(torch.cat([g.flatten() for g in gradient]).norm())
    return torch.stack(norms)


def by_vmap(model: nn.Module, digits: Digits) -> Tensor:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = functional_call(model, parameters, image.unsqueeze(0))
        return F.cross_entropy(output, label.unsqueeze(0))

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    norms = []
    for images, labels in digits.batches():
        per_sample = gradients(parameters, images, labels).values()  # [N, *parameter.shape] each
        norms.append(torch.stack([g.flatten(1).square().sum(1) for g in per_sample]).sum(0).sqrt())
    return torch.cat(norms)


def by_torchgradx(model: nn.Module, digits: Digits) -> Tensor:
    with torchgradx.attach(model, weight_grad=False) as probe:
        for images, labels in digits.batches():
            F.cross_entropy(model(images), labels).backward()
        return probe.norms()


WAYS = {"loop": by_loop, "vmap": by_vmap, "torchgradx": by_torchgradx}


def compare(model: nn.Module, digits: Digits, rounds: int) -> tuple[Tensor, dict[str, float]]:
    """The scores, and each way's median time in seconds. Raises if the ways disagree."""
    norms, times = {}, {name: [] for name in WAYS}
    with tqdm(total=rounds * len(WAYS), desc="scoring", unit="run") as bar:
        for _ in range(rounds):  # in turn, so that a busy moment of the machine hits all alike
            for name, way in WAYS.items():
                begin = time.perf_counter()
                norms[name] = way(model, digits)
                times[name].append(time.perf_counter() - begin)
                bar.update()
    assert_agreement(norms)
    return norms["torchgradx"], {name: median(seconds) for name, seconds in times.items()}


def assert_agreement(norms: dict[str, Tensor]) -> None:
    """Equal within the rounding of float32: about eps * sqrt(K) for each sum of K terms.

    The longest sum has 1,024 terms; four layers, forth and back, make eight of them. The gradient
    of a well-learnt sample is a difference of two probabilities near one, which is exact to eps
    only on the scale of the others': hence the absolute part.
    """
    tolerance = 8 * torch.finfo(torch.float32).eps * 1024**0.5
    expected = norms["loop"]
    bound = tolerance * (expected + expected.mean())
    for way, actual in norms.items():
        worst = ((actual - expected).abs() / bound).max().item()
        if not worst <= 1:  # NaN included
            raise AssertionError(f"{way} is off the loop's norms by {worst:.3g} tolerances")


def baselines(model: nn.Module, digits: Digits) -> dict[str, int]:
    """How many of the flipped labels the scores of a forward alone find."""
    loader = DataLoader(TensorDataset(digits.images, digits.given), batch_size=BATCH)
    kinds = ["loss", "el2n"]
    scores = torchgradx.score(model, F.cross_entropy, loader, kind=kinds, progress=False)
    return {kind: Ranking.of(digits, torch.tensor(of)).found for kind, of in scores.items()}


class Ranking(NamedTuple):
    order: Tensor  # [N], the largest norm first
    k: int  # how many labels were flipped
    found: int  # of those, how many stand among the first k
    chance: float  # what a random order would find

    @classmethod
    def of(cls, digits: Digits, norms: Tensor) -> "Ranking":
        order, k = norms.argsort(descending=True), int(digits.flipped.sum())
        return cls(order, k, int(digits.flipped[order[:k]].sum()), k * k / len(norms))


def write_csv(path: Path, digits: Digits, norms: Tensor, ranking: Ranking) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", "index", "norm", "given", "true", "flipped"])
        for rank, i in enumerate(ranking.order.tolist(), start=1):
            given, true = digits.given[i].item(), digits.true[i].item()
            writer.writerow([rank, i, f"{norms[i].item():.6g}", given, true, int(given != true)])


# The picture


def draw(
    path: Path, digits: Digits, norms: Tensor, ranking: Ranking, times: dict, others: dict
) -> None:
    last = ranking.order[ranking.k :]
    top, missed = ranking.order[:36], last[digits.flipped[last]][-9:]
    headline = (
        f"{ranking.found} of {ranking.k} flipped labels found by norm, {others['el2n']} by EL2N"
    )
    below = (
        f"among the first {ranking.k} of {len(norms):,} digits; the loss, which is free, finds "
        f"{others['loss']}, chance {ranking.chance:.0f}"
    )
    with picture(path, headline, below) as figure:
        figure.text(0.03, 0.785, "The largest norms: given label → true label", **HEADING)
        draw_digits(figure, digits, top, rows=4, top=0.76, bottom=0.26)
        figure.text(
            0.03,
            0.185,
            f"Flipped labels that it misses: {len(missed)} of {ranking.k - ranking.found}",
            **HEADING,
        )
        draw_digits(figure, digits, missed, rows=1, top=0.16, bottom=0.06)
        draw_norms(figure.add_axes((0.65, 0.39, 0.32, 0.37)), digits, norms, ranking)
        draw_times(figure.add_axes((0.65, 0.06, 0.32, 0.17)), times)


def draw_digits(figure: plt.Figure, digits: Digits, chosen: Tensor, rows: int, **place) -> None:
    grid = figure.add_gridspec(rows, 9, left=0.03, right=0.56, hspace=0.5, **place)
    for i, cell in zip(chosen.tolist(), grid, strict=False):  # fewer may be missed
        flipped, given, true = (int(values[i]) for values in (digits.flipped, *digits[1:]))
        colour = ORANGE if flipped else BLUE
        axes = figure.add_subplot(cell, xticks=[], yticks=[])
        axes.imshow(digits.images[i, 0], cmap="gray_r")
        axes.spines[:].set(visible=True, color=colour, linewidth=2.5)
        axes.set_xlabel(f"{given} → {true}" if flipped else true, color=colour, weight="bold")


def draw_norms(axes: plt.Axes, digits: Digits, norms: Tensor, ranking: Ranking) -> None:
    logs = norms.clamp(min=norms.max() * 1e-5).log10()  # what is smaller joins the first bin
    edges = 10 ** torch.linspace(logs.min().item(), logs.max().item(), 50)
    for name, colour in (("true", BLUE), ("flipped", ORANGE)):
        part = digits.flipped == (name == "flipped")
        axes.hist(10 ** logs[part], edges, color=colour, alpha=0.75, label=f"{name} label")
    threshold = norms[ranking.order[ranking.k - 1]].item()
    axes.axvline(threshold, color="black", linewidth=1, linestyle=":")
    axes.text(threshold, axes.get_ylim()[1], f" top {ranking.k}", va="top", size=11)
    axes.set(xscale="log", xlabel="gradient norm", ylabel="digits")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="upper left")
    heading(axes, "Norm of each digit's own gradient")


def draw_times(axes: plt.Axes, times: dict[str, float]) -> None:
    colours = [BLUE if way == "torchgradx" else PALE for way in times]
    bars = axes.barh(list(times), list(times.values()), color=colours, height=0.7)
    axes.bar_label(bars, [f"{seconds:.2f} s" for seconds in times.values()], padding=5)
    axes.set_xlim(right=1.15 * max(times.values()))
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.set_xlabel("seconds")
    heading(axes, "Time for all the norms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help="of training (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="time each way once, not three times")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    digits, model = flipped_digits(generator), small_cnn()
    train(model, digits, options.epochs, generator)
    norms, times = compare(model, digits, rounds=1 if options.quick else 3)
    ranking = Ranking.of(digits, norms)
    write_csv(options.out / "ranking.csv", digits, norms, ranking)
    others = baselines(model, digits)
    draw(options.out / "ranking.png", digits, norms, ranking, times, others)
    seconds = ", ".join(f"{time:.2f} s by {way}" for way, time in times.items())
    print(
        f"{ranking.found} of {ranking.k} flipped labels in the top {ranking.k} of {len(norms):,} "
        f"(by loss {others['loss']}, by EL2N {others['el2n']}, by chance {ranking.chance:.0f}); "
        f"scored in {seconds}; all agree. Wrote {options.out / 'ranking.png'} and ranking.csv; "
        "which_score.py compares the scores over seeds and epochs"
    )


if __name__ == "__main__":
    main()
