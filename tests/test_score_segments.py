"""score(sample_ids=): an entry for each document or graph, against a loop over single ones."""

import numpy as np
import pytest
import segment_models as models
import torch
from segment_models import WORDS, D, ring
from test_score_files import columns_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchgradx

LENGTHS = [[3, 4, 2], [5], [1, 6, 1, 1], [2, 2], [4, 4], [9], [2, 3, 4]]
S = 9  # positions of a row


class Corpus:
    """Packed rows, each an item: its tokens, positions, document ids, and next tokens."""

    def __init__(self, lengths=LENGTHS, read=None):
        generator = torch.Generator().manual_seed(3)
        self.lengths, self.read = lengths, read or (lambda index: None)
        self.tokens = torch.randint(0, WORDS, (len(lengths), S), generator=generator)
        self.targets = torch.randint(0, WORDS, (len(lengths), S), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.read(index)
        ids, at = models.packed_row(self.lengths[index], S)
        return self.tokens[index], at, ids, self.targets[index]

    def documents(self):
        """(item, id, tokens, positions, targets) of each, alone."""
        for item in range(len(self)):
            tokens, at, ids, targets = self[item]
            for k in range(len(self.lengths[item])):
                one = ids == k
                yield item, k, tokens[one][None], at[one][None], targets[one]


def packed(samples):
    """Rows of several items, whose documents are numbered one after another."""
    tokens, at, ids, targets = map(torch.stack, zip(*samples, strict=True))
    counts = ids.amax(1) + 1
    first = (counts.cumsum(0) - counts)[:, None]
    ids = torch.where(ids < 0, ids, ids + first)
    return tokens, at, ids, (ids, targets)


def mean_of_documents(out, targets):
    """The mean over documents of each one's mean over its tokens."""
    ids, words = targets
    each = F.cross_entropy(out.transpose(1, 2), words, reduction="none")
    return torch.stack([each[ids == k].mean() for k in range(int(ids.max()) + 1)]).mean()


def ids_of(args, kwargs):
    return args[2]


def gpt(seed=0):
    torch.manual_seed(seed)
    return models.gpt(tied=False, layers=1).double()


def score(model, data=None, batch=3, **options):
    loader = DataLoader(data or Corpus(), batch, collate_fn=packed)
    options = {"sample_ids": ids_of, "progress": False, **options}
    return torchgradx.score(model, mean_of_documents, loader, **options)


def loop(model, data=None):
    """[(item, id, {parameter: norm})] of each document alone."""
    found = []
    for item, k, tokens, at, targets in (data or Corpus()).documents():
        loss = F.cross_entropy(model(tokens, at)[0], targets)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        norms = {name: float(g.norm()) for name, g in zip(names, grads, strict=True)}
        found.append((item, k, norms))
    return found


def whole(norms):
    return sum(norm**2 for norm in norms.values()) ** 0.5


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_packed_rows_have_an_entry_for_each_document(batch):
    model = gpt()
    got, want = score(model, batch=batch), loop(model)
    assert list(got) == ["item", "id", "norm"]
    assert [(i, k) for i, k, _ in want] == list(zip(got["item"], got["id"], strict=True))
    np.testing.assert_allclose(got["norm"], [whole(norms) for *_, norms in want], rtol=1e-9)
    chosen = np.isin(got["item"], [2, 6])
    for name, column in score(model, batch=batch, indices=[6, 2]).items():
        np.testing.assert_allclose(column, got[name][chosen], rtol=1e-9)


def test_the_parts_of_each_documents_norm_and_the_mean_of_two_models():
    models = gpt(), gpt(1)
    got = score(models, per="parameter")
    want = [loop(model) for model in models]
    for name, _ in models[0].named_parameters():
        means = [(a[2][name] + b[2][name]) / 2 for a, b in zip(*want, strict=True)]
        np.testing.assert_allclose(got[name], means, rtol=1e-8, atol=1e-12)


SIZES = [3, 5, 2, 4, 7, 2]


def graphs():
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(size, D, generator=g, dtype=torch.float64), ring(size, 2, g),
             torch.randint(0, 3, (), generator=g)) for size in SIZES]  # fmt: skip


def concatenated(samples):
    x, edges, y = zip(*samples, strict=True)
    sizes = torch.tensor([len(each) for each in x])
    starts = (sizes.cumsum(0) - sizes).tolist()
    joined = torch.cat([each + start for each, start in zip(edges, starts, strict=True)], 1)
    batch = torch.repeat_interleave(torch.arange(len(x)), sizes)
    return torch.cat(x), joined, batch, len(x), torch.stack(y)


def test_concatenated_graphs_have_an_entry_for_each_item_and_kind():
    torch.manual_seed(0)
    model, data = models.convolving().double(), graphs()
    kinds = ["norm", "loss", "el2n", "margin", "entropy", "egl"]
    loader = DataLoader(data, 4, collate_fn=concatenated)
    options = {"sample_ids": ids_of, "progress": False}
    got = torchgradx.score(model, F.cross_entropy, loader, kind=kinds, **options)
    assert list(got) == ["item", "id", *kinds]
    assert got["item"].tolist() == list(range(len(SIZES)))
    assert not got["id"].any()
    for k, (x, edges, y) in enumerate(data):
        out = model(x, edges, torch.zeros(len(x), dtype=torch.long), 1)
        p = out.detach().softmax(1)[0]
        losses = F.cross_entropy(out.expand(3, 3), torch.arange(3), reduction="none")
        norms = [
            torch.cat([g.flatten() for g in torch.autograd.grad(
                one, list(model.parameters()), retain_graph=True)]).norm()
            for one in losses
        ]  # fmt: skip
        first, second = p.sort(descending=True).values[:2]
        want = {
            "norm": norms[int(y)], "loss": losses[y].detach(), "margin": first - second,
            "el2n": (p - F.one_hot(y, 3)).norm(), "entropy": -(p * p.log()).sum(),
            "egl": (p * torch.stack(norms)).sum(),
        }  # fmt: skip
        for kind, value in want.items():
            assert got[kind][k] == pytest.approx(float(value), rel=1e-8), (kind, k)


def test_what_was_interrupted_in_the_second_model_goes_on_behind_its_finished_batches(tmp_path):
    out, reads, looked = tmp_path / "scores.csv", [], len(LENGTHS)  # the fingerprint reads all

    def read(index):
        reads.append(index)
        if len(reads) == looked + len(LENGTHS) + 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([gpt(0), gpt(1)], Corpus(read=read), batch=2, out=out)
    reads[:] = []
    score([gpt(0), gpt(1)], Corpus(read=reads.append), batch=2, out=out)
    assert reads == [*range(looked), *range(4, len(LENGTHS))]
    held = columns_of(out)
    assert list(held) == ["item", "id", "norm"]
    for name, column in score([gpt(0), gpt(1)]).items():
        np.testing.assert_allclose(held[name], column, rtol=1e-9)


def renumbered(rows):
    def collate(samples):
        tokens, at, _, (_, words) = packed(samples)
        ids = torch.tensor(rows).repeat_interleave(3, 1)[: len(tokens)]
        return tokens, at, ids, (ids, words)

    return collate


@pytest.mark.parametrize(
    "rows", [[[0, 1, 2], [1, 3, 4]], [[0, 1, 1], [-1, -1, -1]], [[1, 1, 1], [0, 0, 0]], [[0, 1, 2]]]
)
def test_samples_whose_item_is_not_clear_are_refused(rows):
    loader = DataLoader(Corpus([[3, 3, 3]] * 2), 2, collate_fn=renumbered(rows))
    with pytest.raises(ValueError, match="in a batch of 2 items, and does not show which item"):
        torchgradx.score(gpt(), lambda out, y: out.square().mean(), loader, sample_ids=ids_of)


def test_kinds_that_are_not_by_sample_are_refused():
    for kind in ("loss", "entropy", ["norm", "el2n"]):
        with pytest.raises(ValueError, match=r'kind must be "norm" with sample_ids \[B, T\]'):
            score(gpt(), kind=kind)
    loader = DataLoader(graphs(), 4, collate_fn=concatenated)
    with pytest.raises(ValueError, match="needs a loss_fn with sample_ids"):
        torchgradx.score(nn.Linear(2, 2), None, loader, kind="loss", sample_ids=ids_of)
    named = nn.ModuleDict({"item": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="'item' is the name of a column with sample_ids"):
        torchgradx.score(named, F.mse_loss, loader, per="module", sample_ids=ids_of)
    with pytest.raises(ValueError, match="sample_ids must name the same samples"):
        score([gpt(0), gpt(1)], Halved())


class Halved(Corpus):
    """Documents that are others when they are read again."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        tokens, at, ids, targets = super().__getitem__(index)
        if self.reads > len(self):
            ids = torch.where(ids == 0, 0, -1)
        return tokens, at, ids, targets


def test_a_row_of_padding_alone_has_no_entry():
    model, data = gpt(), Corpus([[3, 4], [], [2, 2]])
    for batch in (3, 1):
        got = score(model, data, batch=batch)
        assert got["item"].tolist() == [0, 0, 2, 2]
        np.testing.assert_allclose(got["norm"], [whole(n) for *_, n in loop(model, data)], 1e-9)
