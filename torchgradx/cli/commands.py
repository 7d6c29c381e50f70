"""The commands: what their arguments are and become, what they print, how they end."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ..errors import CoverageError, VerificationError
from ..jobs import score
from ..jobs.pool import Pool, missed, moved, split_batch
from ..kept import random_state_kept
from ..verify import verify
from . import named
from .facts import table
from .named import UsageError

EXIT_CODES = """\
exit codes:
  0    done
  1    verify found a difference, or a model was refused (the text names the parameters); or
       code of yours failed (its traceback is shown)
  2    an argument is wrong (the text names it)
  130  interrupted; the same command goes on where it was
"""

SCORE = """\
Score every sample of a dataset and write the scores in its order.

  torchgradx score --model nets.py:make --checkpoint best.pt --data data.py:pool --out scores.csv
  torchrun --nproc-per-node 4 -m torchgradx score ...   each process scores a part

--model and --data name an object or a function that returns it: package.module:name, or
file.py:name. A dataset gives (input, target) pairs; for others --split names a function
batch -> (inputs, targets). While it runs, OUT.partial keeps what is done: after an interrupt or
a kill the same command goes on. A result that is there is replaced with --force alone.
"""

VERIFY = """\
Compare the norms of a model, on a few samples, with a loop over single samples.

  torchgradx verify --model nets.py:make --data data.py:pool --samples 8
"""

QUANTILES = {"least": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "99%": 0.99, "most": 1.0}
TOP = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. argv: without the program's name, None for sys.argv."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as ended:  # --help, or a usage that argparse has explained
        return int(ended.code or 0)
    try:
        arguments.command(arguments)
        return 0
    except UsageError as error:
        text, code = str(error), 2
    except CoverageError as error:
        text, code = f"refused: {error}", 1
    except VerificationError as error:
        text, code = f"verify failed: {error}", 1
    except KeyboardInterrupt:
        out = Path(getattr(arguments, "out", ""))
        kept = [str(path) for path in sorted(out.parent.glob(f"{escape(out.name)}*.partial"))]
        go_on = "keeps what is done, and the same command goes on from there"
        text, code = f"interrupted; {f'{kept[0]} {go_on}' if kept else 'nothing was kept'}", 130
    print(f"torchgradx: {text}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    look: Any = {"formatter_class": _Help, "epilog": EXIT_CODES}
    description = "Per-sample gradient norms of PyTorch models."
    parser = argparse.ArgumentParser(prog="torchgradx", description=description, **look)
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    info = commands.add_parser("info", help="the facts of this installation")
    info.set_defaults(command=lambda _: print(table()))
    for name, text, run in (("score", SCORE, _score), ("verify", VERIFY, _verify)):
        command = commands.add_parser(name, help=text.partition("\n")[0], description=text, **look)
        command.set_defaults(command=run)
        add, losses = command.add_argument, ", ".join(named.LOSSES)
        add("--model", required=True, metavar="M:NAME", help="an nn.Module, or what makes it")
        add("--data", required=True, metavar="M:NAME", help="a dataset or DataLoader, or its maker")
        add("--loss", default="cross_entropy", metavar="LOSS", help=f"{losses}, or M:NAME of a "
            "function (output, targets) -> the batch's loss")  # fmt: skip
        add("--loss-reduction", choices=("mean", "sum"), default="mean", help="of --loss")
        add("--split", metavar="M:NAME", help="batch -> (inputs, targets), if not a pair or a dict")
        add("--device", help="cpu, cuda, cuda:1; unless given, a GPU if there is one")
        add("--backend", choices=("auto", "native", "vmap"), default="auto", help="of the norms")
        add("--train-mode", action="store_true", help="the model in train mode, not eval")
        add("--seed", type=int, default=0, help="of torch, before the model is made")
        (_score_options if name == "score" else _verify_options)(command)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Texts as they are written, options with their defaults."""


def _score_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--out", required=True, help="the file to write: .csv, .npz or .parquet")
    add("--checkpoint", action="append", metavar="FILE",
        help="a state_dict to load; given several times: the mean of their scores")  # fmt: skip
    add("--seeds", type=int, default=1, metavar="K",
        help="make K models, of seeds SEED to SEED + K - 1: the mean of their scores")  # fmt: skip
    add("--kind", action="append", default=None,
        help="norm: gradient norm, taken unless another is given; egl: expected gradient length "
        "over the predicted labels; loss; el2n: |softmax - onehot|; margin and entropy of the "
        "probabilities. Several (by commas, or --kind again): columns")  # fmt: skip
    add("--per", choices=("model", "module", "parameter"), default="model",
        help="a column for the model, or for each part")  # fmt: skip
    add("--top-classes", type=int, metavar="K", help="egl: each sample's K likeliest classes only")
    add("--batch-size", type=int, default=64, help="of a dataset; a DataLoader has its own")
    add("--workers", type=int, default=0, help="processes that read a dataset")
    add("--fresh", action="store_true", help="begin anew, even if a partial result is there")
    add("--force", action="store_true", help="replace a result that is there")
    add("--quiet", action="store_true", help="no progress, and no summary of the scores")


def _verify_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--checkpoint", metavar="FILE", help="a state_dict to load")
    add("--samples", type=int, default=8, help="the first so many are compared")
    add("--rtol", type=float, help="the largest error allowed; unless given, by dtype")


def _score(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    if out.exists() and not arguments.force:
        raise UsageError(f"--out: {out} is there: say --force to replace it, or another name")
    ours = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()  # by torchrun
    if ours:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        device = _device(arguments.device)
        torch.manual_seed(arguments.seed)
        data = named.dataset(arguments.data)
        if not isinstance(data, DataLoader):
            sizes = {"batch_size": arguments.batch_size, "num_workers": arguments.workers}
            data = _or_usage_error("--data", DataLoader, data, **sizes)
        models = _models(arguments, device)
        kinds = ",".join(arguments.kind or ["norm"]).split(",")
        scores = _or_usage_error(
            "score",
            score,
            models if arguments.seeds > 1 or arguments.checkpoint else next(models),
            named.loss(arguments.loss),
            data,
            per=arguments.per,
            progress=not arguments.quiet,
            kind=kinds if arguments.per == "model" or len(kinds) > 1 else kinds[0],
            top_classes=arguments.top_classes,
            out=out,
            resume=not arguments.fresh,
            split=_split(arguments.split),
            eval_mode=not arguments.train_mode,
            loss_reduction=arguments.loss_reduction,
            backend=arguments.backend,
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            count = len(next(iter(scores.values()), ()))
            print(f"{out}: {', '.join(kinds)} of {count:,} samples")
            if not arguments.quiet:
                print(summary(scores))
    finally:
        if ours:
            dist.destroy_process_group()


def _verify(arguments: argparse.Namespace) -> None:
    device = _device(arguments.device)
    torch.manual_seed(arguments.seed)
    data = named.dataset(arguments.data)
    if not isinstance(data, DataLoader):
        data = DataLoader(data, batch_size=max(1, arguments.samples))
    pool = _or_usage_error("--data", Pool, data)
    first = np.arange(min(arguments.samples, len(pool)))
    if not len(first):
        text = f"nothing to compare: {arguments.samples} of {len(pool)} samples"
        raise UsageError(f"--samples: {text}")
    model = named.model(arguments.model, arguments.checkpoint, device).train(arguments.train_mode)
    with random_state_kept():
        batch = moved(next(batch for _, batch in pool.read([first])), device)
    inputs, targets = (_split(arguments.split) or split_batch)(batch)
    report = _or_usage_error(
        "verify",
        missed(targets, arguments.split is None)(verify),
        model,
        named.loss(arguments.loss),
        inputs,
        targets,
        arguments.rtol,
        loss_reduction=arguments.loss_reduction,
        backend=arguments.backend,
    )
    print(report)


def summary(scores: Mapping[str, NDArray[Any]]) -> str:
    """Quantiles of each column, and the samples that come first by the first one."""
    width = max(len(name) for name in scores)
    lines = [" " * width + "".join(f"{title:>11}" for title in QUANTILES)]
    for name, column in scores.items():
        known = column[np.isfinite(column)]
        found = np.quantile(known, list(QUANTILES.values())) if len(known) else []
        lines.append(f"{name:<{width}}" + "".join(f"{value:11.4g}" for value in found))
    name, column = next(iter(scores.items()))
    small = name == "margin"  # is uncertain
    order = np.argsort(column if small else -column, kind="stable")  # nan comes last
    lines.append(f"{'smallest' if small else 'largest'} {name}, by index:")
    lines += [f"  {index:>9,}  {column[index]:.4g}" for index in order[:TOP]]
    return "\n".join(lines)


def _or_usage_error(what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Report a wrong argument in one line; errors of the user's code keep their traceback."""
    try:
        return call(*args, **kwargs)
    except (ValueError, TypeError, ImportError, OSError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        where = frame.f_globals.get("__name__", "")
        if where.startswith(("torchgradx.", "torch.utils.data.")):
            text = str(error).replace("resume=False", "--fresh").replace("split=", "--split")
            raise UsageError(f"{what}: {text}") from error
        raise


def _models(arguments: argparse.Namespace, device: torch.device) -> Iterator[torch.nn.Module]:
    """Yield one at a time: of each checkpoint, or of each seed."""
    if arguments.checkpoint and arguments.seeds != 1:
        raise UsageError("--seeds: a checkpoint's weights are of no seed; leave one of the two out")
    if arguments.seeds < 1:
        raise UsageError(f"--seeds: expected 1 or more; got {arguments.seeds}")
    for k, path in enumerate(arguments.checkpoint or [None] * arguments.seeds):
        torch.manual_seed(arguments.seed + (0 if path else k))
        yield named.model(arguments.model, path, device).train(arguments.train_mode)


def _split(spec: str | None) -> Any:
    return None if spec is None else named.found("--split", spec)


def _device(name: str | None) -> torch.device:
    if name is None:
        local = int(os.environ.get("LOCAL_RANK", 0))
        name = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device: {name} cannot be used here: {reason}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
