"""Other ways to the norms, each a thin use of its own public calls: workload -> step -> norms [N].

`loop`, `copies` and `vmap` give norms alone, as no batch gradient comes with them; all others
beside the batch's gradient. A rival is held against the oracle before it is timed: `judged`.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType

import torch
from by_hand import by_bmm
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import MAX_NORM, Way, Workload, by_loop, norm

WRONG = 0.01  # of any norm: far beyond rounding, a ReLU at 0 and a float32 Gram's cancellation
VMAP_CHUNK = 32  # samples whose gradients vmap holds at a time

Step = Callable[[], Tensor]


class NotInstalledError(Exception):
    pass


def judged(make: Way, w: Workload, oracle: Tensor) -> tuple[Step | None, str]:
    """The step, if it is worth a clock, and the verdict: "right", "wrong 12%" (of a norm, the
    worst), "refuses: why" or "not installed"."""
    try:
        step = make(w)
        norms = step()
    except NotInstalledError:
        return None, "not installed"
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return None, f"refuses: {said}"
    if norms.shape != oracle.shape:
        return None, f"wrong shape {list(norms.shape)}"
    off = ((norms.detach().double() - oracle) / oracle).abs().max().item()
    return (step, "right") if off < WRONG else (None, f"wrong {off:.0%}")


def installed(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise NotInstalledError(package) from None


def loaded(rivals: bool) -> None:
    """Before a process forks: what a training script has loaded, and the rivals if it has any."""
    # Making any optimizer loads torch's compiler, 70 MiB.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    packages = ("opacus.grad_sample", "opacus.validators", "backpack.extensions", "fastDP")
    for package in packages if rivals else ():
        with suppress(NotInstalledError):
            installed(package)


def by_copies(w: Workload) -> Step:
    """A copy of the model for each sample: one backward fills the copies' gradients."""
    copies = [copy.deepcopy(w.model) for _ in w.inputs]
    samples = w.inputs.split(1)

    def step() -> Tensor:
        for model in copies:
            model.zero_grad()
        w.inputs.grad = None
        outputs = [model(x) for model, x in zip(copies, samples, strict=True)]
        (w.loss(torch.cat(outputs), w.targets) * len(copies)).backward()
        return torch.stack([norm(p.grad for p in model.parameters()) for model in copies])

    return step


def by_vmap(w: Workload, chunk: int | None) -> Step:
    parameters = {name: p.detach() for name, p in w.model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return w.loss(functional_call(w.model, parameters, x[None]), y[None])

    gradient = grad(loss, argnums=(0, 1) if w.inputs.requires_grad else (0,))

    def norm_of_one(x: Tensor, y: Tensor) -> Tensor:
        return norm(gradient(parameters, x, y)[0].values())

    warnings.filterwarnings("ignore", "There is a performance drop")  # it has no rule for attention
    norms = vmap(norm_of_one, chunk_size=chunk)
    return lambda: norms(w.inputs.detach(), w.targets)


def opacus_hooks(w: Workload) -> Step:
    opacus = installed("opacus")
    model = opacus.GradSampleModule(opacus_model(w))

    def step() -> Tensor:
        w.step(model)
        return norm_of_samples([p.grad_sample for p in model.parameters()])

    return step


def opacus_ghost(w: Workload, clip: bool) -> Step:
    """Norms after one backward, or the whole step: a second one, of the losses clipped by them."""
    grad_sample = installed("opacus.grad_sample")
    wrapped = grad_sample.GradSampleModuleFastGradientClipping
    model = wrapped(opacus_model(w), max_grad_norm=MAX_NORM)

    def step() -> Tensor:
        if not clip:
            w.step(model)
            return model.get_norm_sample()
        model.zero_grad()
        w.inputs.grad = None
        losses = w.loss(model(w.inputs), w.targets, reduction="none").reshape(len(w.inputs), -1)
        losses = losses.mean(1)
        losses.mean().backward(retain_graph=True)
        model.zero_grad()
        factors = model.get_clipping_coef()
        model.disable_hooks()
        (factors * losses).mean().backward()
        model.enable_hooks()
        return model.get_norm_sample()

    return step


def opacus_model(w: Workload) -> torch.nn.Module:
    """As its guide says: layers that it has no rule for (LSTM) give way to its own."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    return installed("opacus.validators").ModuleValidator.fix(w.model)


def backpack(w: Workload) -> Step:
    package = installed("backpack")
    extension = installed("backpack.extensions").BatchL2Grad
    model = package.extend(w.model)

    def step() -> Tensor:
        with package.backpack(extension()):
            w.step(model)
        if without := {type(m).__name__ for m in model.modules() if not covered(m)}:
            raise NotImplementedError(f"no rule for {', '.join(sorted(without))}")
        return len(w.inputs) * sum(p.batch_l2 for p in model.parameters()).sqrt()

    def covered(layer: torch.nn.Module) -> bool:
        return all(hasattr(p, "batch_l2") for p in layer.parameters(recurse=False))

    return step


def fastdp(w: Workload) -> Step:
    """Written from its sources: no release of it installs beside a torch of today."""
    hooks = installed("fastDP.autograd_grad_sample")
    model = w.model
    for p in model.parameters():
        p.initially_requires_grad = p.requires_grad
    hooks.add_hooks(model, loss_reduction="mean", block_heads=[])

    def step() -> Tensor:
        w.step(model)
        norms = [p.norm_sample for p in model.parameters()]
        return torch.stack(norms).square().sum(0).sqrt()

    return step


def norm_of_samples(gradients: list[Tensor]) -> Tensor:  # each [N, ...] -> [N]
    return sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()


RIVALS: dict[str, Way] = {
    "loop": by_loop,
    "copies": by_copies,
    "vmap": partial(by_vmap, chunk=None),
    "vmap, chunks": partial(by_vmap, chunk=VMAP_CHUNK),
    "bmm + norm": by_bmm,
    "Opacus hooks": opacus_hooks,
    "Opacus ghost": partial(opacus_ghost, clip=False),
    "Opacus ghost, clips": partial(opacus_ghost, clip=True),
    "BackPACK": backpack,
    "fastDP": fastdp,
}
