"""Many real models: is every norm exact, and what does a step cost beside the first?

    python -W ignore benchmarks/corpus.py [--checkpoint] [part of a name ...]

Each class that transformers registers for text, translation and images, and each family of timm, in
a tiny configuration with random weights, in float64 where the model runs there. Four steps on new
batches, with SGD between: norms against a loop over single samples. Texts are of unequal lengths,
padded and masked, where a model takes masks. --checkpoint: under gradient checkpointing (not
reentrant). Needs no download and about half an hour on two cores. Writes results/corpus.json, or
results/corpus-checkpoint.json, if all were asked for.

A model is "exact", "refused" (with the text), "wrong", "crashed", or "left out" (with the reason):
it has no tiny configuration here, draws random numbers in its forward, or is not finite.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
from facts import ROOT, facts
from torch import Tensor, nn

import torchgradx

N, T, VOCABULARY, STEPS = 3, 12, 100, 4
MOST, SECONDS, MEMORY = 60_000_000, 200, 14 << 30  # parameters, of one model; bytes
OUT = ROOT / "benchmarks/results"
CHECKPOINT = "--checkpoint"
CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV}
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION",
         "IMAGE_CLASSIFICATION")  # fmt: skip


def sized(size: float, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, size)


# What configurations call their sizes. A second try leaves those of attention's heads alone.
SIZES = {
    **sized(32, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size",
            "image_size", "moe_intermediate_size"),
    **sized(64, "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim",
            "decoder_ffn_dim", "max_position_embeddings", "n_positions"),
    **sized(2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
            "decoder_layers", "num_decoder_layers", "type_vocab_size", "num_experts_per_tok"),
    **sized(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    **sized(0, "pad_token_id", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout",
            "attention_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
            "residual_dropout", "dropout_rate", "layerdrop", "encoder_layerdrop",
            "decoder_layerdrop", "drop_path_rate", "use_cache", "router_jitter_noise"),
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3,
    "patch_size": 8,
}  # fmt: skip
HEADS = {
    **sized(8, "head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
            "linear_key_head_dim", "linear_value_head_dim"),
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16,
}  # fmt: skip


def small(config: Any, sizes: dict[str, float]) -> Any:
    """Return a configuration with these sizes, as far as it has them, and two kinds of layers."""
    for name, size in sizes.items():
        with contextlib.suppress(Exception):  # some are computed from others
            before = getattr(config, name)
            if before is None or isinstance(before, (int, float)):
                setattr(config, name, type(before or 0)(size))
    kinds = list(getattr(config, "layer_types", None) or ())
    with contextlib.suppress(Exception):
        if kinds:
            config.layer_types = kinds[:2] if "full_attention" in kinds[:2] else kinds[-2:]
    return config


def build(task: str, name: str, kind: str, sizes: dict[str, float], masked: bool) -> Any:
    """Return a model and a function that makes inputs for it. masked: texts are padded."""
    if task == "timm":
        import timm

        with torch.device("meta"):
            count = sum(p.numel() for p in timm.create_model(kind, num_classes=3).parameters())
        if count > MOST // 2:
            raise ValueError("too large")
        model = timm.create_model(kind, num_classes=3, drop_rate=0.0)
        known = model.default_cfg
        size = known["input_size"][1:] if known.get("fixed_input_size") else (96, 96)
        return model, lambda: {"": torch.randn(N, 3, *size)}
    import transformers

    config = small(transformers.CONFIG_MAPPING[name](), sizes)
    with torch.device("meta"):
        known = getattr(transformers, kind)(copy.deepcopy(config))
    if sum(p.numel() for p in known.parameters()) > MOST:
        raise ValueError("too large")
    model = getattr(transformers, kind)(config)
    if task.startswith("IMAGE"):
        return model, lambda: {"pixel_values": torch.randn(N, 3, 32, 32)}

    def words() -> dict[str, Tensor]:
        inputs = {"input_ids": torch.randint(3, VOCABULARY - 10, (N, T))}
        if "CLASSIFICATION" in task:  # encoder-decoders look for the end
            inputs["input_ids"][:, -1] = getattr(config, "eos_token_id", 2) or 2
        if task.startswith("SEQ_TO_SEQ"):
            inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY - 10, (N, T - 5))
        if masked:
            inputs["attention_mask"] = (torch.arange(T) < torch.randint(6, T, (N, 1))).long()
            inputs["input_ids"] *= inputs["attention_mask"]
        return inputs

    return model, words


def losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """[N]"""
    out = model(inputs[""]) if "" in inputs else model(**inputs)
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, (tuple, list)) else out
    wide = out if out.dtype == torch.float64 else out.float()
    return wide.flatten(1).log_softmax(-1)[:, 0]


def loop(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """[N], without torchgradx. Each sample is there twice: of a batch of one, torch's BatchNorm in
    eval mode on a CPU has wrong gradients where these do not lie as its outputs do (2.13)."""
    live, norms = [p for p in model.parameters() if p.requires_grad], []
    for k in range(N):
        loss = losses(model, {key: t[[k, k]] for key, t in inputs.items()}).mean()
        found = torch.autograd.grad(loss, live, allow_unused=True)
        flat = torch.cat([g.double().flatten() for g in found if g is not None])
        norms.append(flat.norm())
    return torch.stack(norms)


def prepared(task: str, name: str, kind: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a model that runs, in float64 if it can, and the inputs of each step."""
    for sizes, masked in itertools.product((SIZES | HEADS, SIZES), (True, False)):
        torch.manual_seed(0)
        try:
            model, make = build(task, name, kind, sizes, masked)
            if CHECKPOINT in sys.argv and task == "timm":
                model.set_grad_checkpointing()
            elif CHECKPOINT in sys.argv:
                options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
                model.train().gradient_checkpointing_enable(**options)
            batches = [make() for _ in range(STEPS)]
            losses(model, batches[0])
            break
        except Exception as error:
            failure = error
    else:
        raise failure
    for p in model.parameters():
        if not p.isfinite().all() or p.abs().max() > 100:  # made of empty memory
            nn.init.normal_(p, std=0.02)
    for module in model.train().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    try:
        wide = [{key: t.double() if t.is_floating_point() else t for key, t in inputs.items()}
                for inputs in batches]  # fmt: skip
        if losses(model.double(), wide[0]).mean().isfinite():
            return model, wide
    except Exception:  # a product of float32 alone
        pass
    return model.float(), batches


def asked(task: str, name: str, kind: str) -> dict[str, Any]:
    """Return what is said of one model."""
    try:
        model, batches = prepared(task, name, kind)
        with torch.random.fork_rng():
            twice = [losses(model, batches[0]) for _ in range(2)]
        if not torch.equal(*twice):
            model.eval()
        losses(model, batches[0]).mean().backward()
        model.zero_grad()
    except Exception as error:
        return {"verdict": "left out", "why": f"{type(error).__name__}: {error}"[:120]}
    is_wide = next(model.parameters()).dtype == torch.float64
    backwards: list[int] = []
    off = 0.0
    probe = torchgradx.attach(model)
    for inputs in batches:
        with patch("torch.autograd.grad", side_effect=torch.autograd.grad) as grad:
            loss = losses(model, inputs).mean()  # what is proven is proven at its end
        try:
            loss.backward()
            norms = probe.norms().double()
        except torchgradx.CoverageError as error:
            return {"verdict": "refused", "why": str(error)[:400], "step": len(backwards)}
        except Exception as error:
            return {"verdict": "crashed", "why": f"{type(error).__name__}: {error}"[:400]}
        backwards.append(grad.call_count)
        want = loop(copy.deepcopy(model), inputs)
        if not want.isfinite().all():
            return {"verdict": "left out", "why": "not finite"}
        off = max(off, float(((norms - want).abs() / want.clamp_min(1e-30)).max()))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(1e-3 * p.grad / p.grad.norm().clamp_min(1e-9) * p.norm().clamp_min(0.1))
        model.zero_grad()
    again = [line.split(": ")[0] for line in probe.explain().splitlines() if "run again" in line]
    verdict = "exact" if off < (1e-5 if is_wide else 2e-3) else "wrong"
    return {"verdict": verdict, "off": off, "backwards": backwards, "again": len(again)}


def all_models() -> Iterator[tuple[str, str, str]]:
    import timm
    from transformers.models.auto import modeling_auto as auto

    seen = set()
    for task in TASKS:
        for name, kinds in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            kind = kinds if isinstance(kinds, str) else kinds[0]
            if kind not in seen:
                seen.add(kind)
                yield task, name, kind
    families: dict[str, str] = {}
    for name in timm.list_models():
        families.setdefault(name.split("_")[0].rstrip("0123456789"), name)
    yield from (("timm", name, name) for name in families.values())


def alone(job: tuple[str, str, str]) -> dict[str, Any]:
    """Ask in a process of its own, with limits of time and memory."""

    def child(there: Any) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.alarm(SECONDS)
        there.send(asked(*job))

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(there,))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        process.join()
        verdict = "crashed" if process.exitcode in CRASHES else "left out"
        found = {"verdict": verdict, "why": f"its process ended with {process.exitcode}"}
    process.join()
    return {"task": job[0], "model": job[2], **found}


def main(arguments: list[str]) -> None:
    import transformers

    names = [name for name in arguments if name != CHECKPOINT]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    jobs = [job for job in all_models() if not names or any(name in job[2] for name in names)]
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for row in pool.map(alone, jobs):
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(Counter(row["verdict"] for row in rows))
    if not names:
        out = OUT / ("corpus-checkpoint.json" if CHECKPOINT in arguments else "corpus.json")
        out.write_text(json.dumps({**facts(), **summary(rows)}, indent=1) + "\n")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many are what, those refused or wrong, and those proven in later steps too."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["task"], Counter())[row["verdict"]] += 1
    steady = {row["model"]: row["backwards"] for row in rows if any(row.get("backwards", ())[2:])}
    told = [row for row in rows if row["verdict"] in ("refused", "wrong", "crashed")]
    return {"counts": counts, "rows": told, "proven again": steady}


if __name__ == "__main__":
    main(sys.argv[1:])
