"""score(): a whole pool of samples, in one array, in the dataset's order."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..attach import attach
from ..kept import random_state_kept
from ..options import Model, Parts, check_loss, check_per
from ..scoring import Loss
from . import fingerprint
from .arguments import indices_of
from .job import Job
from .pool import Pool, Split
from .quantities import KINDS, OF_OUTPUT, Logits, Quantities
from .ranks import Ranks
from .tables import checked_path, save_scores

Models = nn.Module | Iterable[nn.Module]
Kind = Literal["norm", "egl", "el2n", "loss", "margin", "entropy"]
SampleIds = Callable[[tuple[Any, ...], dict[str, Any]], Tensor]


@overload
def score(
    model: Models, loss_fn: Loss | None, loader: Any, *, sample_ids: SampleIds, **options: Any
) -> dict[str, NDArray[Any]]: ...


@overload
def score(
    model: Models, loss_fn: Loss | None, loader: Any, *, per: Model = "model", kind: Kind = "norm",
    sample_ids: None = None, **options: Any,
) -> NDArray[Any]: ...  # fmt: skip


@overload
def score(
    model: Models, loss_fn: Loss | None, loader: Any, *, per: Parts, kind: Kind = "norm",
    **options: Any,
) -> dict[str, NDArray[Any]]: ...  # fmt: skip


@overload
def score(
    model: Models, loss_fn: Loss | None, loader: Any, *, kind: list[Kind] | tuple[Kind, ...],
    **options: Any,
) -> dict[str, NDArray[Any]]: ...  # fmt: skip


def score(
    model: Models,
    loss_fn: Loss | None,
    loader: Any,
    *,
    per: str = "model",
    progress: bool = True,
    kind: str | Sequence[str] = "norm",
    top_classes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = True,
    split: Split | None = None,
    logits: Logits | None = None,
    indices: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    eval_mode: bool = True,
    distributed: bool = True,
    loss_reduction: str = "mean",
    **options: Any,
) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Score each sample of a dataset, by default by the norm of its own loss's gradient.

    Equivalent to::

        model.eval()
        for n in range(len(dataset)):
            x, y = default_collate([dataset[n]])
            gradients = torch.autograd.grad(loss_fn(model(x), y), model.parameters())
            scores[n] = torch.cat([g.flatten() for g in gradients]).norm()

    Every sample is scored once, whatever the loader's sampler draws, repeats or drops: only its
    batch size counts (and, of a batch sampler of your own, which samples go together). The model's
    mode, buffers and `.grad` and all random number generators are afterwards as they were.

    Under torch.distributed each rank scores every world-size-th sample, and every rank returns the
    whole. Model, dataset and arguments must be the same on all; an error of one is one of all.

    Kinds, with g the gradient of all parameters and p = softmax(logits):

    * "norm": |g| (GraNd, Paul et al. 2021, arXiv:2107.07075, for several models). Costs a forward
      and the part of a backward that norms need.
    * "egl": sum_c p_c |g_c|, with g_c the gradient of the cross entropy were c the label (expected
      gradient length, Settles and Craven 2008). Costs a forward and a backward for each class, or
      for each sample's `top_classes` likeliest (a lower bound). No targets.
    * "loss": the sample's own loss. Costs a forward, as the next three do; and one of each sample
      alone where `loss_fn` is None, or the outputs do not have the samples in one dimension.
    * "el2n": |p - onehot(target)| (EL2N of Paul et al.). Needs no `loss_fn`.
    * "margin": p1 - p2 of the two largest probabilities; a small one is uncertain. No targets.
    * "entropy": -sum_c p_c log p_c, in nats. No targets.

    A list of kinds scores all of them in one pass. docs/which_score.md says which finds what.

    With `sample_ids` an item may hold several samples, as a packed row its documents. Equivalent to
    this, with the norm of each as above::

        entries = [(item, id, norm(model, document)) for item in range(len(dataset))
                   for id, document in enumerate(documents_of(dataset[item]))]

    From ids [B, T] row b is the b-th item of the batch; where there are as many samples as items
    (graphs, bags, items packed by the collate_fn), sample n is item n; of a batch of one item all
    are its own. "id" counts the samples of an item, by their ids. Kinds other than "norm" need
    outputs of one row for each sample.

    Args:
        model: a module, or an iterable of them (a generator makes one at a time): the mean of
            their scores.
        loss_fn: (output, targets) -> the batch's loss, reduced as `loss_reduction` says. None: the
            output's `.loss`, or nothing for kinds that need none.
        loader: a DataLoader over a map-style dataset; its workers and collate_fn are used. Batches
            are moved to the model's device.
        per: "model", "module" or "parameter", as in `Probe.norms`; the latter two for one of the
            kinds "norm" and "egl".
        progress: tqdm's bar on stderr, where that is installed.
        kind, top_classes: see above.
        out: a file to write, .npz, .csv or .parquet. Until it is whole, `<out>.partial` beside it
            holds every batch that is done (of rank r: `<out>.rank<r>.partial`).
        resume: go on from the partial file, if there is one; False begins anew. It must be of the
            same model, dataset and options. A dataset is known by its length, eight of its samples,
            and what a TensorDataset or a Subset holds; a function by its name, its source text and,
            of a functools.partial, its arguments, but not by what it closes over or calls.
        split: batch -> (inputs, targets), both as of `grad_norms`. Unless given, the last of a
            sequence is the targets, and a dict is the inputs, its "labels" the targets.
        logits: the model's output -> [N, C]. Unless given, the output or its `.logits`.
        indices: the samples to score; the others' scores are NaN (with `sample_ids`: the items to
            score; the others have no entries).
        eval_mode: False scores in the mode that the model is in.
        distributed: False has this process score everything.
        options: of `attach`: loss_scale, batch_dim, batch_size, sample_ids, layout, algorithm,
            backend, check ("samples" unless given: two samples are also run alone, once per
            structure).

    Returns:
        An array [len(dataset)], float32 (float64 for float64 models); a dict of them by name for
        per="module" and "parameter", by kind for a list of kinds. With `sample_ids` always a dict
        of arrays with an entry for each sample, in the order of "item" (int64, index of the
        dataset) and "id" (int64), which are its first two.

    Raises:
        ValueError, TypeError: an argument is not as above; the text names it.
        RuntimeError: another rank failed.
        ResumeError: the partial file is of another model, dataset or options.
        CoverageError: as of `grad_norms`.
    """
    ranks = Ranks(distributed)
    with ranks.together():
        kinds = list(kind) if isinstance(kind, Iterable) and not isinstance(kind, str) else [kind]
        if isinstance(top_classes, SupportsIndex):  # of numpy, too
            top_classes = operator.index(top_classes)
        _check(kinds, per, loss_fn, top_classes, options)
        pool = Pool(loader)
        wanted = np.full(len(pool), indices is None)
        if indices is not None:
            wanted[indices_of(indices, len(pool))] = True
        path = None if out is None else checked_path(out)
        facts: dict[str, Any] = {
            "dataset": fingerprint.of_dataset(pool),
            "indices": fingerprint.of_values(wanted),
            "kind": kinds,
            "per": per,
            "top_classes": top_classes,
            "eval_mode": eval_mode,
            "loss_reduction": loss_reduction,
        }
        if ranks.world > 1 and not ranks.agree(fingerprint.of_values(repr(facts), path is None)):
            raise ValueError(
                "the dataset (a random_split needs a generator of the same seed), indices, kind, "
                "per, top_classes, eval_mode, loss_reduction and whether out is given must be the "
                "same on all ranks"
            )
    quantity = Quantities(kinds, per, loss_fn, loss_reduction, logits, top_classes, options)
    shows = progress and ranks.rank == 0
    kept = path and ranks.beside(path)
    job = Job(pool, quantity, wanted, ranks, split, eval_mode, shows, kept, facts, resume)
    try:
        with ranks.together(), random_state_kept(pool.generators()):
            if path is not None:
                facts["dataset"] += fingerprint.of_samples(pool)
                functions = {"split": split, "logits": logits, "collate_fn": loader.collate_fn}
                functions["loss_fn"] = loss_fn if quantity.needs_loss else None
                for name, function in (functions | options).items():
                    facts[name] = fingerprint.of_function(function)
                facts["rank"] = [ranks.rank, ranks.world]
            job.run(model)
        columns = job.columns()
        if path is not None:
            with ranks.together():
                if ranks.rank == 0:
                    save_scores(path, columns)
            job.close(remove=True)
        one = per == "model" and isinstance(kind, str) and not quantity.by_sample
        return columns[str(kind)] if one else columns
    finally:
        job.close()


def _check(
    kinds: Sequence[str], per: str, loss_fn: Loss | None, top_classes: Any, options: dict[str, Any]
) -> None:
    check_per(per)
    named = ", ".join(map(repr, kinds))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or len(set(kinds)) < len(kinds):
        known = f"one of {', '.join(map(repr, KINDS))}, or a list of different ones"
        raise ValueError(f"kind must be {known}; got {named or 'none'}")
    if per != "model" and (len(kinds) > 1 or kinds[0] in OF_OUTPUT):
        raise ValueError(f'per must be "model" for kind {named}; got {per!r}')
    is_count = isinstance(top_classes, int) and top_classes >= 1
    if top_classes is not None and ("egl" not in kinds or not is_count):
        raise ValueError(
            'top_classes must be an integer of 1 or more, and goes with kind="egl"; got '
            f"{top_classes!r} with {named}"
        )
    if loss_fn is not None:
        check_loss(loss_fn)
    if "loss_scale" in options and list(kinds) != ["norm"]:
        raise ValueError(f'loss_scale goes with kind="norm" alone; got kind {named}')
    unknown = [name for name in options if name not in inspect.signature(attach).parameters]
    if unknown:
        raise TypeError(f"score() knows no {', '.join(sorted(unknown))}, nor does attach()")
    if options.get("weight_grad"):
        raise ValueError("score leaves .grad as it is: weight_grad=True cannot be had")
    if options.get("sample_ids") is not None and "loss" in kinds and loss_fn is None:
        raise ValueError('kind="loss" needs a loss_fn with sample_ids: .loss is of the batch')
