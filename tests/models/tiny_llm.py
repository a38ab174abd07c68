"""Tiny random language models on disk, of the families that matter here."""

from __future__ import annotations

from pathlib import Path

import torch

from fedprune_app.models.llm import import_transformers

FAMILIES = ("opt", "llama")


def tiny_model(family: str, num_layers: int = 3, seed: int = 0):
    """A transformers model of width 16 with 37 tokens; matrices, biases and norms are all away from their defaults."""
    transformers = import_transformers()
    if family == "opt":
        config = transformers.OPTConfig(
            vocab_size=37,
            hidden_size=16,
            num_hidden_layers=num_layers,
            ffn_dim=32,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            dropout=0.0,
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=37,
            hidden_size=16,
            num_hidden_layers=num_layers,
            intermediate_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.25 + (parameter.dim() == 1))
    return model


def tiny_checkpoint(folder: Path, family: str, num_layers: int = 3, dtype: torch.dtype = torch.float32) -> Path:
    """Such a model in a folder."""
    tiny_model(family, num_layers).to(dtype).save_pretrained(folder)
    return folder


def tokens(num_sequences: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(37, (num_sequences, length), generator=torch.Generator().manual_seed(seed))
