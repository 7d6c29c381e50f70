"""Watch where each text's gradient lives, layer by layer, while a small transformer learns.

A transformer of characters is trained on Python's own documentation, which every Python brings. At
every step the norms of each sample's gradient are read by module, off the step's own backward.

    python examples/transformer_layers.py [--steps 300] [--out out] [--quick]

Writes transformer_layers.png and transformer_layers.csv into the folder that --out names.
"""

import argparse
import csv
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from matplotlib.colors import LogNorm
from plotting import BLUE, GREY, heading, picture
from torch import Tensor, nn
from tqdm import tqdm

import torchgradx

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 48, 4, 3, 48, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        nn.init.normal_(self.characters.weight, std=0.1)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, ids: Tensor) -> Tensor:  # [N, T] -> [N, T, characters]
        x = self.characters(ids) + self.places
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def documentation() -> tuple[Tensor, int]:
    """Python's documentation as ids [L], and how many characters there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    return torch.tensor([index[character] for character in text]), len(characters)


# The rows of the picture, from the input up: what is shown, and the modules that it is made of
ROWS = {
    "head": ["head"],
    **{
        f"{i + 1} {part}": [f"blocks.{i}.{name}" for name in names]
        for i in reversed(range(DEPTH))
        for part, names in {
            "MLP": ["up", "down"],
            "attention": ["attention", "attention.out_proj"],
        }.items()
    },
    "embedding": ["characters", ""],  # "": the places, the model's own parameter
}


def train(steps: int, generator: torch.Generator) -> tuple[list[float], Tensor, Tensor]:
    """The losses; norms [steps, rows, N] by row of the picture; norms [steps, N] of the model."""
    text, characters = documentation()
    model = Transformer(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, by_row, whole = [], [], []
    with torchgradx.attach(model) as probe:
        for _ in tqdm(range(steps), desc="training", unit="step"):
            starts = torch.randint(0, len(text) - LENGTH, (BATCH, 1), generator=generator)
            window = text[starts + torch.arange(LENGTH + 1)]
            loss = F.cross_entropy(model(window[:, :-1]).mT, window[:, 1:])
            loss.backward()
            whole.append(probe.norms())
            modules = probe.norms(per="module")
            by_row.append(
                torch.stack(
                    [torch.stack([modules[m] for m in row]).norm(dim=0) for row in ROWS.values()]
                )
            )
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, torch.stack(by_row), torch.stack(whole)


def smooth(values: Tensor, width: int = 9) -> Tensor:
    """A running mean over the first dimension, shorter at its ends."""
    padded = F.pad(values.cumsum(0), (*(0, 0) * (values.dim() - 1), 1, 0))
    last = torch.arange(1, len(values) + 1)
    first = (last - width).clamp(min=0)
    return (padded[last] - padded[first]) / (last - first).view(-1, *[1] * (values.dim() - 1))


def draw(path: Path, losses: list[float], by_row: Tensor, whole: Tensor) -> None:
    shares = smooth((by_row.square() / whole.square().unsqueeze(1)).mean(2))  # [steps, rows]
    top, last = list(ROWS), int(shares[-1].argmax())
    peak, row = divmod(int(shares.argmax()), len(ROWS))
    headline = (
        f"The gradient moves from the {top[row]} ({shares[peak, row]:.0%}) "
        f"to the {top[last]} ({shares[-1, last]:.0%})"
    )
    below = (
        f"how much of each text's squared gradient is in which layer, {len(losses)} steps of a "
        f"transformer on Python's own documentation"
    )
    steps = range(1, len(losses) + 1)
    with picture(path, headline, below) as figure:
        axes = figure.add_axes((0.09, 0.09, 0.52, 0.68))
        image = axes.imshow(
            100 * shares.T, aspect="auto", cmap="viridis", interpolation="nearest",
            norm=LogNorm(vmin=0.5, vmax=100), extent=(1, len(losses), len(ROWS) - 0.5, -0.5),
        )  # fmt: skip
        axes.set_yticks(range(len(ROWS)), list(ROWS))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="training step", ylabel="layer")
        heading(axes, "Share of the squared norm, mean over texts")
        bar = figure.colorbar(image, cax=figure.add_axes((0.62, 0.09, 0.01, 0.68)))
        bar.set_ticks([1, 3, 10, 30, 100], labels=["1%", "3%", "10%", "30%", "100%"])
        bar.outline.set_visible(False)

        axes = figure.add_axes((0.74, 0.5, 0.23, 0.27))
        low, middle, high = smooth(whole.quantile(torch.tensor([0.1, 0.5, 0.9]), 1).T, 5).T
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0)
        axes.plot(steps, middle, color=BLUE)
        axes.set(yscale="log", xlim=(1, len(losses)), xlabel="training step", ylabel="norm")
        axes.yaxis.set_major_formatter("{x:g}")
        heading(axes, "Norm of a text's gradient, 10-90%")

        axes = figure.add_axes((0.74, 0.09, 0.23, 0.27))
        axes.plot(steps, losses, color=GREY, linewidth=1)
        axes.set(xlabel="training step", xlim=(1, len(losses)), ylabel="loss")
        heading(axes, "Loss by character")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="30 steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    steps = 30 if options.quick else options.steps
    losses, by_row, whole = train(steps, torch.Generator().manual_seed(0))
    with (options.out / "transformer_layers.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "model", *ROWS])
        for step, (loss, rows, norms) in enumerate(zip(losses, by_row, whole, strict=True), 1):
            means = [norms.mean(), *rows.mean(1)]
            writer.writerow([step, f"{loss:.6g}", *(f"{value.item():.6g}" for value in means)])
    draw(options.out / "transformer_layers.png", losses, by_row, whole)
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; median norm of a text's gradient "
        f"{whole[0].median():.2f} -> {whole[-1].median():.2f}"
    )


if __name__ == "__main__":
    main()
