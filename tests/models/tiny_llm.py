"""Tiny random language models on disk, of the families that matter here."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fedprune_app.models.embedded import byte_tokenizer
from fedprune_app.models.llm import perplexities
from fedprune_app.models.transformers import import_transformers

FAMILIES = ("opt", "llama", "qwen2", "qwen3", "mistral", "phi")
_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU]))
"""For parametrised tests: the CPU, and where there is one the GPU."""


def tiny_model(family: str, num_layers: int = 3, seed: int = 0, vocabulary: int = 37, dropout: float = 0.0):
    """A transformers model of width 16; matrices, biases and norms are all away from their defaults."""
    transformers = import_transformers()
    if family == "opt":
        config = transformers.OPTConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            num_hidden_layers=num_layers,
            ffn_dim=32,
            num_attention_heads=2,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            dropout=dropout,
        )
    else:
        kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "phi": "Phi"}
        config = getattr(transformers, f"{kinds[family]}Config")(
            vocab_size=vocabulary,
            hidden_size=16,
            num_hidden_layers=num_layers,
            intermediate_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **({"head_dim": 4} if family == "qwen3" else {}),
        )
    return drawn_model(config, seed)


def drawn_model(config, seed: int):
    """A model of this configuration whose weights are drawn, those of norms around 1."""
    model = import_transformers().AutoModelForCausalLM.from_config(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.25 + (parameter.dim() == 1))
    return model


def tiny_checkpoint(
    folder: Path, family: str, num_layers: int = 3, dtype: torch.dtype = torch.float32, dropout: float = 0.0
) -> Path:
    """Such a model in a folder."""
    tiny_model(family, num_layers, dropout=dropout).to(dtype).save_pretrained(folder)
    return folder


def tokens(num_sequences: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(37, (num_sequences, length), generator=torch.Generator().manual_seed(seed))


def tiny_byte_model(folder: Path, family: str, num_layers: int = 2, dtype: torch.dtype = torch.float32) -> Path:
    """Such a model whose tokens are bytes, with its tokenizer."""
    tiny_model(family, num_layers, vocabulary=256).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def text_folder(folder: Path, num_documents: int = 4, size: int = 400) -> Path:
    """Documents of random words for clients, and two test texts."""
    draw = random.Random(5)

    def words(count: int) -> str:
        return " ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(count))

    (folder / "calibration").mkdir(parents=True)
    (folder / "test").mkdir()
    for i in range(num_documents):
        (folder / "calibration" / f"client{i}.txt").write_text(words(size))
    (folder / "test" / "first.txt").write_text(words(40))
    (folder / "test" / "second.txt").write_text(words(60))
    return folder


def perplexity(model, layers, windows, batch_size):
    """That of one text."""
    return perplexities(model, layers, {"": windows}, batch_size)[""]
