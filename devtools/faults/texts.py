"""A random language model of two tiny layers, and random texts, for schedules of systems that prune language models."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from fedprune_app.config import Scalar
from fedprune_app.models.embedded import byte_tokenizer
from fedprune_app.models.transformers import import_transformers

_CLIENT_TEXTS = 3


def tiny_texts(folder: Path) -> dict[str, Scalar]:
    """Write the model and the texts to a folder; return the settings of a run with them."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    for part, count in (("calibration", _CLIENT_TEXTS), ("test", 1)):
        (folder / "data" / part).mkdir(parents=True)
        for number in range(count):
            text = "".join(draw.choices("abcdefgh ", k=400))
            (folder / "data" / part / f"{number}.txt").write_text(text)
    sizes = {"segments": 2, "segment-length": 24, "window": 32, "block-size": 8}
    return {
        "dataset": "text",
        "data-dir": str(folder / "data"),
        "model": str(folder / "model"),
        **{f"fedspallm.{key}": size for key, size in sizes.items()},
    }
