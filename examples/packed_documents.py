"""Find damaged documents in a packed corpus, by the norm of each one's gradient and by its loss.

Sentences of the documentation of Python's standard library are packed, eight in a row. In a tenth
of them the letters are shuffled, or ROT13 stands for another language. A small transformer learns
all; then `torchgradx.score(sample_ids=...)` gives the norm of each document's own gradient.

    python examples/packed_documents.py [--out out] [--quick]

Writes packed_documents.png and packed_documents.csv into the folder that --out names.
"""

import argparse
import codecs
import csv
import importlib
import inspect
import random
from pathlib import Path

import torch
from plotting import BLUE, ORANGE, PALE, heading, picture
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

import torchgradx

TOGETHER, COLOURS = 8, {"sound": PALE, "shuffled": ORANGE, "ROT13": BLUE}
MODULES = "argparse ast asyncio csv datetime decimal difflib inspect json logging os pathlib random"
MODULES += " shutil socket statistics subprocess tarfile threading unittest"


def documents(count: int) -> list[tuple[str, str]]:
    """(kind, text) of each."""
    owners: list[object] = list(map(importlib.import_module, MODULES.split()))
    owners += [kind for owner in owners for _, kind in inspect.getmembers(owner, inspect.isclass)]
    functions = (f for owner in owners for _, f in inspect.getmembers(owner, inspect.isroutine))
    said = {" ".join((inspect.getdoc(function) or "").split()) for function in functions}
    texts, draw = {t for t in said if 40 <= len(t) <= 160 and t.isascii()}, random.Random(0)
    chosen = [("sound", text) for text in draw.sample(sorted(texts), count)]
    for k in range(0, count, 20):
        chosen[k] = "shuffled", "".join(draw.sample(chosen[k][1], len(chosen[k][1])))
        chosen[k + 1] = "ROT13", codecs.encode(chosen[k + 1][1], "rot13")
    return draw.sample(chosen, count)


def packed(texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """One row [1, S] of letters, the document of each, and both as targets."""
    letters = torch.tensor([*"".join(texts).encode()])
    ids = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor([*map(len, texts)]))
    return letters[None], ids[None], torch.stack([letters, ids])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, 64), nn.Embedding(160, 64)
        layers = (nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2))
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(64, 128)

    def forward(self, letters: Tensor, ids: Tensor) -> Tensor:
        seen = (ids[:, :, None] == ids[:, None, :]).tril()  # of a document, what comes before
        h = self.letters(letters) + self.places(seen.sum(-1) - 1)
        for layer in self.layers:
            h = layer(h, src_mask=~seen.repeat_interleave(4, 0))
        return self.head(h)


def losses(out: Tensor, targets: Tensor) -> Tensor:
    """[documents]: the mean over the letters of each but its first."""
    letters, ids = targets
    inside = ids[1:] == ids[:-1]
    each = F.cross_entropy(out[0, :-1][inside], letters[1:][inside], reduction="none")
    counts = ids[1:][inside].bincount()
    return torch.zeros(len(counts)).index_add(0, ids[1:][inside], each) / counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="200 documents, 100 steps")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    kinds, texts = map(list, zip(*documents(200 if options.quick else 600), strict=True))
    model, draw = Transformer(), random.Random(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in tqdm(range(100 if options.quick else 400), desc="training", unit="step"):
        *inputs, targets = packed(draw.sample(texts, TOGETHER))
        optimizer.zero_grad()
        losses(model(*inputs), targets).mean().backward()
        optimizer.step()
    loader = DataLoader(texts, batch_size=TOGETHER, collate_fn=packed)
    by_ids = {"sample_ids": lambda args, kwargs: args[1]}
    scores = torchgradx.score(model, lambda out, y: losses(out, y).mean(), loader, **by_ids)
    with torch.no_grad():
        scores["loss"] = torch.cat([losses(model(*inputs), y) for *inputs, y in loader]).numpy()
    scores |= {"kind": kinds, "text": texts}
    with (options.out / "packed_documents.csv").open("w", newline="") as file:
        csv.writer(file).writerows([scores, *zip(*scores.values(), strict=True)])
    damaged = len(kinds) - kinds.count("sound")
    first = {name: (-scores[name]).argsort()[:damaged] for name in ("norm", "loss")}
    found = {name: sum(kinds[k] != "sound" for k in of) for name, of in first.items()}
    headline = f"Of {damaged} damaged documents norms find {found['norm']}, losses {found['loss']}"
    below = f"among the first {damaged} of {len(kinds)} documents, packed {TOGETHER} in a row"
    with picture(options.out / "packed_documents.png", headline, below) as figure:
        axes = figure.add_axes((0.07, 0.1, 0.88, 0.67))
        for kind, colour in COLOURS.items():
            of = [k for k, one in enumerate(kinds) if one == kind]
            axes.scatter(scores["loss"][of], scores["norm"][of], s=36, color=colour, label=kind)
        axes.set(xlabel="loss of the document, nats per letter", ylabel="norm of its gradient")
        axes.legend(frameon=False, loc="upper left")
        heading(axes, "Each document of the corpus")
    print(headline)


if __name__ == "__main__":
    main()
