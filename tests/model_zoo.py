"""Tiny models of the library that most users bring: a row each, random weights, nothing fetched.

Each sample's loss is the mean over its own labelled positions, the batch's the mean of those.
"""

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason='needs `pip install ".[models]"`')
transformers.logging.set_verbosity_error()
VOCABULARY, CLASSES, PAD, IGNORED = 37, 5, 1, -100
DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BERT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 24,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": PAD}  # fmt: skip
GROUPED = BERT | {"num_key_value_heads": 2}
EIGHT = BERT | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 6}
GPT2 = ({"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24,
         "bos_token_id": 0, "eos_token_id": 2},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"))  # fmt: skip
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
       "num_attention_heads": 4, "max_position_embeddings": 24}  # fmt: skip
RELATIVE = BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                   "position_biased_input": False, "max_relative_positions": 8}  # fmt: skip
LATENT = GROUPED | {
    "head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "index_head_dim": 8,
    "index_n_heads": 2, "partial_rotary_factor": 0.5, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "experts_implementation": "eager", "use_cache": False}  # fmt: skip
IMAGE = {"image_size": 16, "num_channels": 3}


@dataclass(frozen=True)
class Row:
    name: str
    kind: str  # what its labels are: "next", "token", "tag" (of a token), "text", "image"
    model: str  # the class in transformers, which knows its configuration's
    config: dict
    dropouts: tuple[str, ...]  # what the configuration calls them
    refused: tuple[str, ...] = ()  # patterns of parameters, whatever the step
    reentrantly: tuple[str, ...] = ()  # as well, where layers are checkpointed reentrantly
    tables: tuple[str, ...] = ()  # called on no samples: no layout describes what they give
    adapter: dict | None = None  # of peft
    # N, then N of a second batch. Root mean squares in float32 inside a float64 model round a
    # gradient by 1e-8 unless the 1/N of the mean is a power of two.
    samples: tuple[int, int] = (3, 5)
    equal: int | None = None  # an N that another dimension has too; None: the T of a text
    evaluates: bool = False  # batch statistics: in eval mode only
    reentrant: bool = True  # False: torch itself cannot backward it, reentrantly checkpointed
    flat: bool = False  # layers work on flattened rows or windows, of which sizes leave a doubt

    def build(self, dropout: float = 0.0) -> nn.Module:
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        config = {"num_labels": CLASSES} | self.config | dict.fromkeys(self.dropouts, dropout)
        model = kind(kind.config_class(**config))
        if self.adapter is not None:
            peft = pytest.importorskip("peft", reason='needs `pip install ".[models]"`')
            adapter = peft.LoraConfig(r=4, lora_dropout=dropout, init_lora_weights=False,
                                      **self.adapter)  # fmt: skip
            model = peft.get_peft_model(model, adapter)
        return model.double().train(not self.evaluates)

    def refusals(self, model: nn.Module, reentrant: bool = False) -> set[str]:
        """Names that a CoverageError must hold."""
        patterns = self.refused + (self.reentrantly if reentrant else ())
        names = dict(model.named_parameters())
        return {n for n in names for pattern in patterns if fnmatchcase(n, pattern)}

    @property
    def checkpoints(self) -> list[bool]:
        """The values of use_reentrant under which its layers can be checkpointed."""
        if not getattr(transformers, self.model).supports_gradient_checkpointing:
            return []
        return [False, True] if self.reentrant else [False]

    def batch(self, n: int, t: int = 7) -> tuple[torch.Tensor, ...]:
        """(pixels, labels), or (ids, mask, labels) of texts of unequal lengths. What continues a
        text is padded on its left where T is odd, as for generation."""
        if self.kind == "image":
            return torch.randn(n, 3, 16, 16).double(), torch.randint(0, CLASSES, (n,))
        mask = torch.arange(t)[None] < torch.tensor([max(2, t - k) for k in range(n)])[:, None]
        mask = mask.flip(1) if self.kind == "next" and t % 2 else mask
        ids = torch.randint(3, VOCABULARY, (n, t)).where(mask, torch.tensor(PAD))
        if self.kind == "next":
            labels = ids.where(mask, torch.tensor(IGNORED))
            labels = torch.cat([labels[:, 1:], torch.full((n, 1), IGNORED)], 1)
        elif self.kind == "text":
            labels = torch.randint(0, CLASSES, (n,))
        else:
            values = ids if self.kind == "token" else torch.randint(0, CLASSES, (n, t))
            labels = values.where(mask, torch.tensor(IGNORED))
        return ids, mask.long(), labels

    def keywords(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ["pixel_values"] if self.kind == "image" else ["input_ids", "attention_mask"]
        return dict(zip(names, inputs, strict=True))

    def losses(self, model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        """[N]"""
        *inputs, labels = batch
        return sample_losses(model(**self.keywords(*inputs)).logits, labels)

    def loss(self, model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        return self.losses(model, *batch).mean()


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[N, C] and [N], or [N, T, C] and [N, T] -> [N]."""
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    each = F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED)
    return each.sum(1) / (labels != IGNORED).sum(1)


ROWS = [
    Row("gpt2", "next", "GPT2LMHeadModel", *GPT2, tables=("transformer.wpe.weight",)),
    Row("llama", "next", "LlamaForCausalLM", GROUPED, ("attention_dropout",), samples=(4, 2)),
    Row("opt", "next", "OPTForCausalLM", OPT | {"word_embed_proj_dim": 32},
        ("dropout", "attention_dropout"), flat=True),
    Row("gpt-neox", "next", "GPTNeoXForCausalLM", BERT, ("hidden_dropout", "attention_dropout")),
    Row("mistral", "next", "MistralForCausalLM", GROUPED | {"sliding_window": 3},
        ("attention_dropout",), samples=(4, 2)),
    Row("qwen3", "next", "Qwen3ForCausalLM", EIGHT, ("attention_dropout",),
        samples=(4, 2)),
    Row("bert", "token", "BertForMaskedLM", BERT, DROPOUT,
        tables=("bert.embeddings.position_embeddings.weight",)),
    Row("roberta", "token", "RobertaForMaskedLM", BERT, DROPOUT),
    Row("deberta-v2", "tag", "DebertaV2ForTokenClassification", RELATIVE, DROPOUT,
        reentrantly=("*.rel_embeddings.weight", "*.pos_key_proj.*", "*.pos_query_proj.*")),
    Row("deberta-v3", "tag", "DebertaV2ForTokenClassification",
        RELATIVE | {"position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        DROPOUT, reentrant=False),
    Row("vit", "image", "ViTForImageClassification",
        IMAGE | {"patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "intermediate_size": 48},
        DROPOUT, equal=5),  # four patches and the class token
    Row("swin", "image", "SwinForImageClassification",
        IMAGE | {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
                 "window_size": 4},
        (*DROPOUT, "drop_path_rate"), equal=4,  # windows
        flat=True, reentrantly=("*.relative_position_bias_table",)),  # read, and not a module's
    Row("convnext", "image", "ConvNextForImageClassification",
        IMAGE | {"patch_size": 2, "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1],
                 "layer_scale_init_value": 0.5},
        ("drop_path_rate",), equal=8),  # pixels of a side
    Row("resnet", "image", "ResNetForImageClassification",
        {"num_channels": 3, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
         "layer_type": "basic"}, (), equal=8, evaluates=True),
    Row("lora on gpt2", "next", "GPT2LMHeadModel", *GPT2,
        adapter={"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    Row("lora on llama", "next", "LlamaForCausalLM", GROUPED, ("attention_dropout",),
        samples=(4, 2), adapter={"target_modules": ["q_proj", "embed_tokens"], "bias": "all",
                                 "modules_to_save": ["lm_head"]}),
    Row("dora on opt", "next", "OPTForCausalLM", OPT | {"word_embed_proj_dim": 32},
        ("dropout", "attention_dropout"),
        adapter={"target_modules": ["q_proj", "v_proj"], "use_dora": True},
        reentrantly=("*.lora_A.*", "*.lora_B.*")),  # called on an identity matrix as well
]  # fmt: skip
# These cast weights to float32 themselves: not exact in float64.
ROUNDED = [
    Row("gemma3, tied", "next", "Gemma3ForCausalLM", EIGHT, ("attention_dropout",)),
    Row("mamba", "next", "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
         "use_cache": False}, ()),
    Row("deepseek-v4", "next", "DeepseekV4ForCausalLM", LATENT, ("attention_dropout",)),
]  # fmt: skip
