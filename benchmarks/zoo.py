"""Real models: a training step with norms over the plain step, of transformers, peft and timm.

    python benchmarks/zoo.py [names ...]

Small configurations with random weights, on a CPU, one thread, the warm heap (fresh.py); BatchNorm
by running statistics. Between the timed steps SGD moves the weights, as in training: branches that
begin as zeros do not stay so. Writes results/zoo.json, which docs/benchmarks.md shows, if all were
asked for. A model whose library is missing is left out by name.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from facts import ROOT, facts
from fresh import forked, rows_of, say
from timing import Budget, interleaved
from torch import Tensor, nn

import torchgradx

VOCABULARY, CLASSES = 1000, 10
OUT = ROOT / "benchmarks/results/zoo.json"
GPT = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128,
       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
       "eos_token_id": 0}  # fmt: skip
LLAMA = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
         "num_attention_heads": 4}  # fmt: skip
GROUPED = LLAMA | {"num_key_value_heads": 2, "head_dim": 64}
BERT = LLAMA | {"intermediate_size": 1024, "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {"d_model": 256, "d_kv": 64, "d_ff": 688, "num_layers": 3, "num_heads": 4,
      "dropout_rate": 0.0}  # fmt: skip
BUDGET = Budget(7, 10.0, far=3)


class Example(NamedTuple):
    model: nn.Module
    inputs: dict[str, Tensor]  # by keyword; of an image model, "" alone
    targets: Tensor  # [N] or [N, T]

    def step(self, model: nn.Module) -> None:
        inputs = dict(self.inputs)
        image = inputs.pop("", None)
        out = model(**inputs) if image is None else model(image)
        out = getattr(out, "logits", out)
        loss = F.cross_entropy(out.flatten(0, -2), self.targets.flatten())
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

    plain()
    plain()
    probe = torchgradx.attach(ours)
    start = time.perf_counter()
    with_norms()
    first = time.perf_counter() - start
    with_norms()
    ratio = interleaved(plain, {"ours": with_norms}, BUDGET, burst=0.0)["ours"]
    return {
        "model": name,
        "plain_ms": round(ratio.plain_milliseconds, 1),
        "ratio": ratio.row(),
        "first_step": round(1e3 * first / ratio.plain_milliseconds, 2),
        "layers": probe.explain().splitlines()[0],
    }


def main(names: list[str]) -> None:
    asked = names or list(MODELS)
    missing = {lib for name in asked if find_spec(lib := MODELS[name][0]) is None}
    rows = []
    for name in asked:
        if MODELS[name][0] in missing:
            print(f"{name}: left out, needs {MODELS[name][0]}")
            continue
        rows += rows_of("zoo.py", "--one", name, heap="warm", threads=1)
        print(f"{name}: {rows[-1]['ratio']['median']:.2f}, first {rows[-1]['first_step']:.1f}")
    if not names and not missing:
        OUT.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if sys.argv[1:2] == ["--one"]:
        torch.set_num_threads(1)
        say(forked(measured, sys.argv[2]))
    else:
        main(sys.argv[1:])
