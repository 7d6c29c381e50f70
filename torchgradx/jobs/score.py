"""score(): a whole pool of samples, in one array, in the dataset's order."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..attach import attach
from ..options import Model, Parts, check_loss, check_per
from ..scoring import Loss
from . import fingerprint
from .job import Job
from .pool import Pool, Split, random_state_kept
from .quantities import KINDS, OF_OUTPUT, Logits, Quantities
from .ranks import Ranks
from .tables import checked_path, save_scores

__all__ = ["score"]

Kind = Literal["norm", "egl", "el2n", "loss", "margin", "entropy"]


@overload
def score(
    model: nn.Module | Iterable[nn.Module],
    loss_fn: Loss | None,
    loader: Any,
    *,
    per: Model = "model",
    progress: bool = True,
    kind: Kind = "norm",
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
) -> NDArray[Any]: ...


@overload
def score(
    model: nn.Module | Iterable[nn.Module],
    loss_fn: Loss | None,
    loader: Any,
    *,
    per: Parts,
    progress: bool = True,
    kind: Kind = "norm",
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
) -> dict[str, NDArray[Any]]: ...


@overload
def score(
    model: nn.Module | Iterable[nn.Module],
    loss_fn: Loss | None,
    loader: Any,
    *,
    per: Model = "model",
    progress: bool = True,
    kind: list[Kind] | tuple[Kind, ...],
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
) -> dict[str, NDArray[Any]]: ...


def score(
    model: nn.Module | Iterable[nn.Module],
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
    """A number for each sample of a dataset, by default the norm of its own loss's gradient.

    Equivalent to::

        model.eval()
        for n in range(len(dataset)):
            x, y = default_collate([dataset[n]])
            gradients = torch.autograd.grad(loss_fn(model(x), y), model.parameters())
            scores[n] = torch.cat([g.flatten() for g in gradients]).norm()

    Every sample is scored once, whatever the loader's sampler draws, repeats or leaves out, and
    whether it drops the last batch: the sampler says nothing but the batch size. (A batch sampler
    of your own also says which samples go together.) Score a part through `indices`, or as a
    `torch.utils.data.Subset`. The model's mode, buffers and `.grad` and the states of all random
    number generators are afterwards as they were. Needs the memory of one batch and of the result.

    Where torch.distributed runs, each rank scores every world-size-th sample, as those of a
    DistributedSampler without its padding, and every rank returns the whole. They must be given
    the same model, dataset and arguments, which is looked at; an error of one is one of all.

    Kinds, with the gradients g of all parameters, the probabilities p = softmax(logits):

    * "norm": |g|, the GraNd of Paul et al. 2021 (arXiv:2107.07075) where `model` is several, whose
      scores are averaged. Costs a forward and the part of a backward that norms need.
    * "egl": sum_c p_c |g_c| with g_c the gradient of the cross entropy were c the label, the
      expected gradient length of Settles and Craven 2008: no targets. Costs a forward and C
      backwards; with `top_classes=k`, of each sample's k most probable classes alone (a lower
      bound), k.
    * "el2n": |p - onehot(target)|, their EL2N. Costs a forward, as the next three do, and needs no
      `loss_fn`.
    * "loss": the sample's own loss.
    * "margin": p1 - p2 of the two largest probabilities; a small one is uncertain. No targets.
    * "entropy": -sum_c p_c log p_c, in nats. No targets.

    A list of kinds scores all of them in one pass. docs/which_score.md says which finds what.

    Args:
        model: a module, or an iterable of them (a generator makes one at a time): the mean of
            their scores.
        loss_fn: (output, targets) -> the batch's loss, reduced as `loss_reduction` says. None: the
            output's `.loss` (kind="loss" then calls the model once for each sample), or nothing
            for kinds that need none.
        loader: a DataLoader over a map-style dataset; its workers and collate_fn are used. Batches
            are moved to the model's device.
        per: "model", "module" or "parameter", as in `Probe.norms`; the latter two for one of the
            kinds "norm" and "egl".
        progress: a bar (tqdm's, if installed) on stderr.
        kind, top_classes: see above.
        out: a file to write, .npz, .csv or .parquet. Until it is whole, `<out>.partial` beside it
            holds every batch that is done (of rank r: `<out>.rank<r>.partial`).
        resume: go on from the partial file, if there is one; False begins anew. It need not be of
            the same batch size, but of the same model, dataset and options. A dataset is told by
            its length, eight of its samples, and all that a TensorDataset or a Subset holds; a
            function (loss_fn, split, logits, collate_fn, an option) by its name, its source text
            and, of a functools.partial, its arguments; an object by its class and the numbers
            and words among its attributes. What a function closes over, its globals and what it
            calls are not looked at: pass such values by functools.partial.
        split: batch -> (inputs, targets), both as of `grad_norms`. Unless given, the last of a
            sequence is the targets, and a dict is the inputs, its "labels" the targets.
        logits: the model's output -> [N, C]. Unless given, the output or its `.logits`.
        indices: the samples to score; the others' scores are NaN.
        eval_mode: False scores in the mode that the model is in.
        distributed: False has this process score everything.
        options: of `attach`: loss_scale, batch_dim, batch_size, layout, algorithm, backend, check
            ("samples" unless given: two samples are also run alone, once per structure).

    Returns:
        An array [len(dataset)], float32 (float64 for float64 models); a dict of them by name for
        per="module" and "parameter", by kind for a list of kinds.

    Raises:
        ValueError, TypeError: an argument is not as above; the text names it.
        RuntimeError: another rank failed.
        ResumeError: the partial file is of another model, dataset or options.
        CoverageError: some parameters' gradients are not accounted for sample by sample, or the
            loss is seen not to be reduced as said.
    """
    ranks = Ranks(distributed)
    with ranks.together():
        check_per(per)
        kinds = [kind] if isinstance(kind, str) else list(kind)
        quantity = _quantity(kinds, per, loss_fn, loss_reduction, logits, top_classes, options)
        pool = Pool(loader)
        wanted = _wanted(indices, len(pool))
        path = None if out is None else checked_path(out)
        if ranks.world > 1:
            _agree(ranks, pool, wanted, (kinds, per, top_classes, eval_mode, path is None))
    job = Job(pool, quantity, wanted, ranks, options)
    job.split, job.eval_mode = split, eval_mode
    job.shown = progress and ranks.rank == 0
    try:
        with ranks.together(), random_state_kept(pool.generators()):
            if path is not None:
                if resume and ranks.rank == 0 and (unused := ranks.strangers(path)):
                    warnings.warn(
                        f"{', '.join(map(str, unused))}: begun by another number of processes, and "
                        "not gone on with. Delete them, or run as many processes again",
                        stacklevel=2,
                    )
                facts = {
                    "dataset": fingerprint.of_dataset(pool),
                    "indices": fingerprint.of_values(wanted),
                    "kind": kinds,
                    "per": per,
                    "top_classes": top_classes,
                    "eval_mode": eval_mode,
                    "loss_reduction": loss_reduction,
                    "loss_fn": fingerprint.of_function(loss_fn if quantity.needs_loss else None),
                    "split": fingerprint.of_function(split),
                    "logits": fingerprint.of_function(logits),
                    "collate_fn": fingerprint.of_function(loader.collate_fn),
                    "options": {
                        name: fingerprint.of_option(value)
                        for name, value in sorted(options.items())
                    },
                    "rank": [ranks.rank, ranks.world],
                }
                job.keep(ranks.beside(path), facts, resume)
            job.run(model)
        columns = job.columns()
        scores = columns[kind] if per == "model" and isinstance(kind, str) else columns
        if path is not None:
            with ranks.together():
                if ranks.rank == 0:
                    save_scores(path, columns)
            job.forget()
        return scores
    finally:
        job.close()


def _quantity(
    kinds: Sequence[str],
    per: str,
    loss_fn: Loss | None,
    loss_reduction: str,
    logits: Logits | None,
    top_classes: int | None,
    options: dict[str, Any],
) -> Quantities:
    named = ", ".join(map(repr, kinds))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or len(set(kinds)) < len(kinds):
        raise ValueError(
            f"kind must be one of {', '.join(map(repr, KINDS))}, or a list of different ones; got "
            f"{', '.join(map(repr, unknown)) or named or 'none'}"
        )
    if per != "model" and (len(kinds) > 1 or kinds[0] in OF_OUTPUT):
        raise ValueError(f'per must be "model" for kind {named}; got {per!r}')
    if top_classes is not None and ("egl" not in kinds or top_classes < 1):
        raise ValueError(
            f'top_classes must be 1 or more, and goes with kind="egl"; got {top_classes!r} with '
            f"{named}"
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
    if options.get("sample_ids") is not None:
        raise ValueError("score gives one number for each item: use attach(sample_ids=) in a loop")
    return Quantities(kinds, per, loss_fn, loss_reduction, logits, top_classes)


def _agree(ranks: Ranks, pool: Pool, wanted: NDArray[np.bool_], arguments: tuple[Any, ...]) -> None:
    """Check that all ranks score one pool."""
    told = {
        "the dataset (a random_split needs a generator of the same seed)": fingerprint.of_dataset(
            pool, samples=0
        ),
        "indices": fingerprint.of_values(wanted),
        "kind, per, top_classes, eval_mode, and whether out is given,": fingerprint.of_values(
            arguments
        ),
    }
    for what, mark in told.items():
        if not ranks.agree(mark):
            raise ValueError(f"{what} must be the same on all ranks")


def _wanted(indices: Any, size: int) -> NDArray[np.bool_]:
    if indices is None:
        return np.ones(size, bool)
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
        raise TypeError(f"indices must be integers, of one dimension; got {indices!r:.60}")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < size:
        raise ValueError(
            f"indices must be from 0 to {size - 1}; got {chosen.min()} to {chosen.max()}"
        )
    wanted = np.zeros(size, bool)
    wanted[chosen.astype(np.int64)] = True
    return wanted
