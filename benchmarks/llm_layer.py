"""Seconds and peak memory of pruning one decoder layer, against SparseGPT alone on the same matrices.

    python benchmarks/llm_layer.py [--shape opt-125m] [--segments 8] [--length 512] [--device cpu] [--dtype float32]

Weights are random, of the shapes of OPT-125m, OPT-1.3b or LLaMA-2-7b; the paper's calibration is 32 segments of 2048.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch

from fedprune_app.core.sparsegpt import Hessian, sparsegpt
from fedprune_app.models.layer_pruning import Pruner, prune_layer
from fedprune_app.models.llm import LanguageModel, import_transformers

OPT = {"opt-125m": (768, 3072, 12), "opt-1.3b": (2048, 8192, 32)}  # width, inner width, heads


def random_checkpoint(shape: str, folder: Path, dtype: torch.dtype) -> None:
    """A model of one decoder layer and few tokens: the layer is what is measured."""
    transformers = import_transformers()
    if shape in OPT:
        width, inner, heads = OPT[shape]
        config = transformers.OPTConfig(
            vocab_size=512,
            hidden_size=width,
            word_embed_proj_dim=width,
            ffn_dim=inner,
            num_attention_heads=heads,
            num_hidden_layers=1,
            dropout=0.0,
        )
    else:
        config = transformers.LlamaConfig(vocab_size=512, num_hidden_layers=1)  # the defaults are LLaMA-2-7b's
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*OPT, "llama-2-7b"], default="opt-125m")
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()

    def now() -> float:
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(given.shape, Path(folder), getattr(torch, given.dtype))
        model = LanguageModel(Path(folder), device=given.device)
        module = model.layer(0, model.layer_tensors(0))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(given.segments, given.length, model.config.hidden_size, generator=draw).to(model.dtype)
    weights = {name: module.get_parameter(name).data.clone() for name in model.prunable(0)}
    started = now()
    prune_layer(model, 0, module, hidden, Pruner(density=0.5), batch_size=1)
    whole = now() - started
    bare = 0.0
    for weight in weights.values():
        hessian = Hessian(weight.shape[1], weight.device)
        hessian.add(torch.randn(4, 2 * weight.shape[1], weight.shape[1], generator=draw).to(weight.device))
        started = now()
        sparsegpt(weight, hessian.matrix, 0.5)
        bare += now() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{given.shape} on {given.device}, {given.dtype}, {given.segments} segments of {given.length} tokens")
    print(f"one decoder layer: {whole:.2f} s; SparseGPT alone on its matrices: {bare:.2f} s")
    print(f"peak memory: {peak / 1e9:.2f} GB")
    if given.device == "cuda":
        print(f"peak memory of the device: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
