"""Tiny GGUF files, with a tokenizer, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from fedprune_app.models.embedded import byte_tokenizer
from fedprune_app.models.transformers import import_transformers
from tests.models.tiny_llm import drawn_model


def gguf_model(seed: int = 0, width: int = 32):
    """A random LLaMA of transformers with four heads, whose rows are long enough for blocks of 32 weights."""
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return drawn_model(config, seed)


def write_gguf(
    path: Path,
    model,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    has_tokenizer: bool = True,
) -> Path:
    """Write such a model with matrices of this ``kind``, norms in 32 bits, and a tokenizer of bytes and "he"."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    if has_tokenizer:
        vocabulary = byte_tokenizer().get_vocab() | {"he": 256}  # llama.cpp's vocabularies have merges
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
        writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stem, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:  # llama.cpp turns neighbours where transformers turns halves
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        of = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = np.ascontiguousarray(gguf.quants.quantize(values, of))
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
