"""Real models: a training step with norms over the plain step, of four libraries' models.

    python benchmarks/zoo.py [names ...]

Small configurations with random weights, on a CPU, one thread, the warm heap (fresh.py); BatchNorm
by running statistics. As in training, each step has another batch, and SGD moves the weights
between: branches that begin as zeros do not stay so, and experts get other rows. Opacus is timed
beside, where it is installed, runs and is right; the peak of memory is of a process each
(memory.py). Writes results/zoo.json, which docs/benchmarks.md shows, if all were asked for. A model
whose library is missing is left out by name.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from facts import ROOT, facts
from fresh import forked, rows_of, say
from memory import high_water
from rivals import norm_of_samples
from timing import Budget, interleaved
from torch import Tensor, nn

import torchgradx

VOCABULARY, CLASSES = 1000, 10
OUT = ROOT / "benchmarks/results/zoo.json"
WRONG = 2e-3  # of a norm: off by more is wrong
GPT = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128,
       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
       "eos_token_id": 0}  # fmt: skip
LONG_GPT = GPT | {"n_positions": 224}
LLAMA = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
         "num_attention_heads": 4}  # fmt: skip
GROUPED = LLAMA | {"num_key_value_heads": 2, "head_dim": 64}
MIXTRAL = GROUPED | {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}
BERT = LLAMA | {"intermediate_size": 1024, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {"d_model": 256, "d_kv": 64, "d_ff": 688, "num_layers": 3, "num_heads": 4,
      "dropout_rate": 0.0}  # fmt: skip
BUDGET = Budget(7, 10.0, far=3)


class Example(NamedTuple):
    model: nn.Module
    inputs: dict[str, Tensor]  # by keyword; of an image model, "" alone
    targets: Tensor  # [N] or [N, T]
    ids: Tensor | None = None  # [B, T] of packed documents; the loss is a mean over them
    graphs: Tensor | None = None  # [nodes], of batched graphs

    @property
    def options(self) -> dict[str, Any]:
        """Of attach()."""
        ids = self.graphs if self.ids is None else self.ids
        return {} if ids is None else {"sample_ids": lambda args, kwargs: ids}

    def step(self, model: nn.Module) -> None:
        for name, t in self.inputs.items():  # another batch of the same sizes
            if name.endswith("input_ids"):
                t.random_(3, VOCABULARY)
            elif t.is_floating_point():
                t.normal_()
        inputs = dict(self.inputs)
        image = inputs.pop("", None)
        out = model(**inputs) if image is None else model(image)
        out = getattr(out, "logits", out)
        if self.ids is None:
            loss = F.cross_entropy(out.flatten(0, -2), self.targets.flatten())
        else:
            each = F.cross_entropy(out.flatten(0, -2), self.targets.flatten(), reduction="none")
            counts = self.ids.flatten().bincount()
            loss = (each / counts[self.ids.flatten()]).sum() / len(counts)
        model.zero_grad()
        loss.backward()


def text(kind: str, config: dict[str, Any], n: int = 8, t: int = 128) -> Example:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    known = getattr(transformers, kind)
    model = known(known.config_class(vocab_size=VOCABULARY, use_cache=False, **config))
    ids = torch.randint(3, VOCABULARY, (n, t))
    inputs = {"input_ids": ids}
    if kind.startswith("T5"):
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (n, t))
    return Example(model, inputs, ids if "Classification" not in kind else ids[:, 0] % 2)


def checkpointed(*arguments: Any) -> Example:
    """Texts of unequal lengths, padded and masked; layers run again in backward."""
    example = text(*arguments)
    ids = example.inputs["input_ids"]
    n, t = ids.shape
    mask = torch.arange(t) < torch.linspace(t // 2, t, n)[:, None]
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    example.model.train().gradient_checkpointing_enable(**options)
    return example._replace(inputs=example.inputs | {"attention_mask": mask.long()})


def packed(
    kind: str,
    config: dict[str, Any],
    lengths: Sequence[int] = (32, 64, 96, 128, 128, 160, 192, 224),
) -> Example:
    """Documents in one row: a block-diagonal mask, positions that restart."""
    example = text(kind, config, 1, sum(lengths))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    at = torch.cat([torch.arange(length) for length in lengths])[None]
    mask = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]
    inputs = example.inputs | {"position_ids": at, "attention_mask": mask}
    return example._replace(inputs=inputs, ids=ids)


class OfGraphs(nn.Module):
    """Layers of torch_geometric, between the features of nodes and classes of graphs."""

    def __init__(self, kind: str, n: int, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        from torch_geometric import nn as geometric

        self.n, self.pool, layer = n, geometric.global_mean_pool, getattr(geometric, kind)
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(layer(width, width) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        for layer in self.layers:
            h = torch.relu(layer(h, edges))
        out: Tensor = self.last(self.pool(h, graph, self.n))
        return out


def graphs(kind: str, n: int = 64, nodes: int = 25, degree: int = 4) -> Example:
    """Batched graphs of as many nodes and random edges."""
    torch.manual_seed(0)
    first = nodes * torch.arange(n)[:, None]
    edges = torch.stack([(first + torch.randint(0, nodes, (n, degree * nodes))).flatten()
                         for _ in range(2)])  # fmt: skip
    graph = torch.arange(n).repeat_interleave(nodes)
    inputs = {"x": torch.randn(n * nodes, 32), "edges": edges, "graph": graph}
    return Example(OfGraphs(kind, n), inputs, torch.randint(0, CLASSES, (n,)), graphs=graph)


def adapted(**options: Any) -> Example:
    import peft

    example = text("LlamaForCausalLM", LLAMA)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, **options)
    return example._replace(model=peft.get_peft_model(example.model, config))


def image(name: str, n: int = 8, size: int = 64, **options: Any) -> Example:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **options).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    targets = torch.randint(0, CLASSES, (n,))
    return Example(model, {"": torch.randn(n, 3, size, size)}, targets)


MODELS: dict[str, tuple[str, Callable[[], Example]]] = {
    "GPT-2": ("transformers", lambda: text("GPT2LMHeadModel", GPT)),
    "BERT": ("transformers", lambda: text("BertForSequenceClassification", BERT)),
    "Llama": ("transformers", lambda: text("LlamaForCausalLM", LLAMA)),
    "Gemma 3": ("transformers", lambda: text("Gemma3ForCausalLM", GROUPED)),
    "Qwen 3": ("transformers", lambda: text("Qwen3ForCausalLM", GROUPED)),
    "GPT-2, packed": ("transformers", lambda: packed("GPT2LMHeadModel", LONG_GPT)),
    "Qwen 3, packed": ("transformers", lambda: packed("Qwen3ForCausalLM", GROUPED)),
    "GCN, batched graphs": ("torch_geometric", lambda: graphs("GCNConv")),
    "GAT, batched graphs": ("torch_geometric", lambda: graphs("GATConv")),
    "Mixtral": ("transformers", lambda: text("MixtralForCausalLM", MIXTRAL)),
    "Mixtral, checkpointed": (
        "transformers", lambda: checkpointed("MixtralForCausalLM", MIXTRAL)),
    "T5": ("transformers", lambda: text("T5ForConditionalGeneration", T5, t=64)),
    "Mamba": ("transformers", lambda: text(
        "MambaForCausalLM", {"hidden_size": 128, "num_hidden_layers": 4}, n=4, t=64)),
    "LoRA on Llama": ("peft", adapted),
    "DoRA on Llama": ("peft", lambda: adapted(use_dora=True)),
    "ResNet-18": ("timm", lambda: image("resnet18")),
    "ConvNeXt": ("timm", lambda: image("convnext_atto")),
    "MobileNetV3": ("timm", lambda: image("mobilenetv3_small_100")),
    "EfficientNet-B0": ("timm", lambda: image("efficientnet_b0")),
    "RegNetY": ("timm", lambda: image("regnety_002")),
    "ViT-tiny": ("timm", lambda: image("vit_tiny_patch16_224", size=96, img_size=96)),
    "SwinV2-tiny": ("timm", lambda: image("swinv2_tiny_window8_256", 4, 128, img_size=128)),
}  # fmt: skip


def opacus_hooks(example: Example, model: nn.Module) -> Callable[[], Tensor]:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, strict=False)
    trained = [p for p in wrapped.parameters() if p.requires_grad]

    def step() -> Tensor:
        example.step(wrapped)
        return norm_of_samples([p.grad_sample for p in trained])

    return step


def opacus_ghost(example: Example, model: nn.Module) -> Callable[[], Tensor]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, strict=False)

    def step() -> Tensor:
        example.step(wrapped)
        return wrapped.get_norm_sample()

    return step


OPACUS = {"Opacus hooks": opacus_hooks, "Opacus ghost": opacus_ghost}


def rivals_of(
    example: Example, want: Tensor
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Any]]:
    """Steps of those that run and are right; what is to be said of the others."""
    steps, said = {}, {}
    for way, make in OPACUS.items() if find_spec("opacus") else ():
        try:
            step = make(example, copy.deepcopy(example.model))
            torch.manual_seed(0)  # the batch that `want` is of
            off = float(((step() - want).abs() / want).max())
        except Exception as error:
            said[way] = {"verdict": f"refuses: {type(error).__name__}"}
            continue
        if off > WRONG:
            said[way] = {"off": round(off, 4)}
        else:
            steps[way] = step
    return steps, said


def peak(name: str, norms: bool) -> dict[str, Any]:
    """Return the peak of a process, in MiB, that takes three steps."""
    example = MODELS[name][1]()
    probe = torchgradx.attach(example.model, **example.options) if norms else None
    for _ in range(3):
        example.step(example.model)
        if probe is not None:
            probe.norms()
    return {"peak_mib": high_water()}


def measured(name: str) -> dict[str, Any]:
    example = MODELS[name][1]()
    ours, twin = example.model, copy.deepcopy(example.model)
    sgd = {model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-4)
           for model in (ours, twin)}  # fmt: skip

    def plain() -> None:
        example.step(twin)
        sgd[twin].step()

    def with_norms() -> None:
        example.step(ours)
        probe.norms()
        sgd[ours].step()

    with torchgradx.attach(twin, check="samples", **example.options) as probe:
        torch.manual_seed(0)
        example.step(twin)
        want = probe.norms()
    steps, said = rivals_of(example, want)
    plain()
    plain()
    probe = torchgradx.attach(ours, **example.options)
    start = time.perf_counter()
    with_norms()
    first = time.perf_counter() - start
    with_norms()
    ratios = interleaved(plain, {"ours": with_norms, **steps}, BUDGET, burst=0.0)
    ratio = ratios.pop("ours")
    return {
        "model": name,
        "plain_ms": round(ratio.plain_milliseconds, 1),
        "ratio": ratio.row(),
        "first_step": round(1e3 * first / ratio.plain_milliseconds, 2),
        "layers": probe.explain().splitlines()[0],
        "rivals": said | {way: ratio.row() for way, ratio in ratios.items()},
    }


def main(names: list[str]) -> None:
    asked = names or list(MODELS)
    missing = {lib for name in asked if find_spec(lib := MODELS[name][0]) is None}
    rows = []
    for name in asked:
        if MODELS[name][0] in missing:
            print(f"{name}: left out, needs {MODELS[name][0]}")
            continue
        (row,) = rows_of("zoo.py", "--one", name, heap="warm", threads=1)
        plain, ours = (next(rows_of("zoo.py", "--peak", name, way, heap="tight", threads=1))
                       for way in ("plain", "ours"))  # fmt: skip
        row["peak"] = round(ours["peak_mib"] / plain["peak_mib"], 3)
        rows.append(row)
        print(f"{name}: {row['ratio']['median']:.2f}, first {row['first_step']:.1f}, "
              f"memory {row['peak']:.2f}, {row['rivals']}", flush=True)  # fmt: skip
    if not names and not missing:
        OUT.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if sys.argv[1:2] == ["--one"]:
        torch.set_num_threads(1)
        say(forked(measured, sys.argv[2]))
    elif sys.argv[1:2] == ["--peak"]:
        torch.set_num_threads(1)
        say(forked(peak, sys.argv[2], sys.argv[3] == "ours"))
    else:
        main(sys.argv[1:])
