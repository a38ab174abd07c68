"""Tiny random models of many architectures that transformers has, and how transformers itself measures them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedprune_app.models.embedded import byte_tokenizer
from fedprune_app.models.transformers import import_transformers

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_GATED = {"intermediate_size": 24, "num_key_value_heads": 2}
_EXPERTS = {**_GATED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_MIXTRAL = {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
_HEAD = {"head_dim": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": _GATED,
    "Mistral": _GATED,
    "Qwen2": _GATED,
    "Qwen3": {**_GATED, **_HEAD},
    "Gemma": {**_GATED, **_HEAD},
    "Gemma2": {**_GATED, **_HEAD, "sliding_window": 4, "query_pre_attn_scalar": 4},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "GPT2": _GPT2,
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GPTNeoX": {"intermediate_size": 24},
    "GPTJ": {**_GPT2, "rotary_dim": 4},
    "GPTBigCode": _GPT2,
    "Mixtral": _MIXTRAL,
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1},
    "Qwen3Moe": {**_EXPERTS, **_HEAD},
    "Olmoe": _EXPERTS,
    "Olmo": _GATED,
    "Olmo2": _GATED,
    "Phi": _GATED,
    "Phi3": _GATED,
    "Phimoe": _MIXTRAL,
    "StableLm": _GATED,
    "Starcoder2": _GATED,
    "Falcon": {},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "Cohere": _GATED,
    "Granite": _GATED,
    "GraniteMoe": _MIXTRAL,
    "JetMoe": {**_MIXTRAL, "kv_channels": 4, "num_key_value_heads": 2},
    "DeepseekV3": {
        **_GATED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
    "GptOss": {**_MIXTRAL, **_HEAD, "sliding_window": 4},
    "SmolLM3": _GATED,
    "Gemma3Text": {**_GATED, **_HEAD, "sliding_window": 4},
    "Llama4Text": {
        **_MIXTRAL,
        **_HEAD,
        "intermediate_size_mlp": 24,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 4, "n_groups": 1, "chunk_size": 8},
    "Jamba": {**_EXPERTS, "num_hidden_layers": 4, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "use_mamba_kernels": False},
    "Bamba": {**_GATED, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_state": 4,
              "mamba_n_groups": 1, "mamba_chunk_size": 8},
    "RecurrentGemma": {**_GATED, "lru_width": 16, "attention_window_size": 8},
    "Rwkv": {},
    "Gemma3nText": {**_GATED, **_HEAD, "sliding_window": 4, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"] * 3,
                    "activation_sparsity_pattern": [0.0] * 6, "vocab_size_per_layer_input": 256,
                    "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
                    "laurel_rank": 4},
    "Zamba2": {**_GATED, "num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"], "mamba_d_state": 4,
               "n_mamba_heads": 8, "mamba_headdim": 4, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1},
    "XGLM": {"d_model": 16, "num_layers": 2, "attention_heads": 4, "ffn_dim": 24, "dropout": 0.0,
             "attention_dropout": 0.0},
    "BioGpt": _GATED,
    "Persimmon": _GATED,
    "Nemotron": _GATED,
    "Glm4": {**_GATED, **_HEAD},
    "Exaone4": _GATED,
    "Ernie4_5_Moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "Lfm2": {**_GATED, "layer_types": ["conv", "full_attention"]},
    "Bert": {"intermediate_size": 24, "is_decoder": True},
    "Helium": {**_GATED, **_HEAD},
}  # fmt: skip
"""By the name of a config class without ``Config``: what makes it tiny."""


def tiny(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of this architecture, whose tensors are all away from their first values."""
    transformers = import_transformers()
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **copy.deepcopy(CONFIGS[kind]), **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model.to(dtype)


def tiny_folder(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """Such a model in a folder, with a tokenizer whose tokens are bytes."""
    tiny(kind, dtype).save_pretrained(folder, **more)
    byte_tokenizer().save_pretrained(folder)
    return folder


def stock_losses(folder: Path, ids: torch.Tensor) -> list[float]:
    """The mean cross entropy of each sequence, by transformers alone."""
    model = import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.float()
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.double().mean(1).tolist()
