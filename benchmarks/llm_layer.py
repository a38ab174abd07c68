"""Seconds and peak memory of pruning one decoder layer, against a bare SparseGPT loop over the same layer.

    python benchmarks/llm_layer.py [--shape opt-125m] [--segments 8] [--length 512] [--clients 1] [--repeats 3]
    python benchmarks/llm_layer.py --shape llama-2-7b --segments 32 --length 2048 --clients 4 --device cuda

Weights are random, of the shapes of OPT-125m, OPT-1.3b or LLaMA-2-7b; the paper's calibration is 32 segments of 2048.
They are float16 on a GPU, as the paper's are, and float32 on the CPU, unless --dtype says otherwise.
The bare loop is SparseGPT as its paper and released code go through a layer: each matrix gathers its own Hessian in a
forward pass, is pruned, and a second pass gives the next layer's inputs. The two take turns, so that what else the
machine does falls on both; the ratio is the median of the pairs'. Without a GPU, seconds are processor time.

Several clients have segments of their own and one device, where they take turns. What is timed is then all that
FedSpaLLM does with a layer, in parts: clients prune and encode it, the server decodes and adds each reply, takes the l0
mean and expands the masks. The bare loop goes over the layer once for each client.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _turns import clock_of, compute_in
from torch import Tensor, nn

from fedprune_app.core.aggregate import L0Mean
from fedprune_app.core.codec import pack, unpack
from fedprune_app.models.layer_pruning import Pruner, prune_layer
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.transformers import import_transformers

OPT = {"tiny": (32, 64, 2), "opt-125m": (768, 3072, 12), "opt-1.3b": (2048, 8192, 32)}  # width, inner width, heads
PARTS = ("load", "prune", "encode", "decode", "add", "mean and expansion")


def default_dtype(device: str) -> str:
    """The papers' on a GPU; the CPU is slow with that."""
    return "float32" if device == "cpu" else "float16"


def random_layer(shape: str, dtype: str, device: str) -> tuple[LanguageModel, dict[str, Tensor]]:
    """Return a model of one decoder layer and few tokens, and the layer, which is what is measured."""
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
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):  # a GPU draws weights sooner
            made = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
        made.save_pretrained(folder)
        model = LanguageModel(Path(folder), device=device)
        return model, model.layer_tensors(0)


def bare_loop(model: LanguageModel, module: nn.Module, hidden: Tensor) -> list[Tensor]:
    """The next layer's inputs, after ``module`` was pruned to half in place."""
    linears = [each for each in module.modules() if isinstance(each, nn.Linear)]
    hessians = {each: torch.zeros(each.in_features, each.in_features, device=each.weight.device) for each in linears}
    counts = dict.fromkeys(linears, 0)

    def add(linear: nn.Linear, arguments: tuple[Tensor]) -> None:
        inputs = arguments[0].reshape(-1, arguments[0].shape[-1]).t().float()
        hessians[linear] *= counts[linear] / (counts[linear] + 1)
        counts[linear] += 1
        inputs = math.sqrt(2 / counts[linear]) * inputs
        hessians[linear] += inputs.matmul(inputs.t())

    hooks = [each.register_forward_pre_hook(add) for each in linears]  # type: ignore[arg-type]
    for _ in model.run(module, hidden, 1):
        pass
    for hook in hooks:
        hook.remove()
    for each in linears:
        each.weight.data = bare_sparsegpt(each.weight.data.clone().float(), hessians[each]).to(each.weight.dtype)
    return list(model.run(module, hidden, 1))


def bare_sparsegpt(weight: Tensor, hessian: Tensor) -> Tensor:
    """SparseGPT's Algorithm 1 at 50 %, blocks of 128 columns."""
    columns = weight.shape[1]
    index = torch.arange(columns, device=weight.device)
    hessian[index, index] += 0.01 * hessian.diagonal().mean()
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    for start in range(0, columns, 128):
        stop = min(start + 128, columns)
        block, errors = weight[:, start:stop].clone(), torch.zeros(weight.shape[0], stop - start, device=weight.device)
        own = factor[start:stop, start:stop]
        scores = block**2 / own.diagonal().reshape(1, -1) ** 2
        gone = scores <= scores.flatten().sort()[0][scores.numel() // 2]
        for i in range(stop - start):
            column = block[:, i]
            kept = column.clone()
            kept[gone[:, i]] = 0
            errors[:, i] = (column - kept) / own[i, i]
            block[:, i:] -= errors[:, i : i + 1].matmul(own[i : i + 1, i:])
            block[:, i] = kept
        weight[:, start:stop] = block
        weight[:, stop:] -= errors.matmul(factor[start:stop, stop:])
    return weight


def whole_layer(
    model: LanguageModel,
    tensors: Mapping[str, Tensor],
    texts: Sequence[Tensor],
    pruner: Pruner,
    batch_size: int,
    timed: Callable[[str, Callable[[], Any]], Any],
) -> int:
    """Do all that clients with these hidden states do with the layer, and their server; return the bytes of a reply.

    Each part of the work is done by ``timed(part, work)``. A lone client has no server.
    """
    mean, num_bytes = L0Mean(len(texts)), 0
    for hidden in texts:
        module = timed("load", partial(model.layer, 0, tensors))
        pruned = timed("prune", partial(prune_layer, model, 0, module, hidden, pruner, batch_size))
        if len(texts) > 1:
            sent = timed("encode", partial(pack, pruned.payload))
            num_bytes = len(sent)
            received = timed("decode", partial(unpack, sent, 8 * len(sent)))
            timed("add", partial(mean.add, received))
            del sent, received
    if len(texts) > 1:
        timed("mean and expansion", partial(mean.expanded, 0.5))
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*OPT, "llama-2-7b"], default="opt-125m")
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    dtype = given.dtype or default_dtype(given.device)
    compute_in("float32", given.device, torch.get_num_threads())
    now = clock_of(given.device, time.process_time)
    model, tensors = random_layer(given.shape, dtype, given.device)
    draw = torch.Generator().manual_seed(0)
    shape = (given.segments, given.length, model.config.hidden_size)
    texts = [torch.randn(shape, generator=draw).to(model.dtype) for _ in range(given.clients)]
    before, peak, device_peak = _peak(), 0, 0
    ours, bare, num_bytes = [], [], 0
    parts: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        started = now()
        found = work()
        parts[part][-1] += now() - started
        return found

    for repeat in range(given.repeats):
        started = now()
        for seconds in parts.values():
            seconds.append(0.0)
        num_bytes = whole_layer(model, tensors, texts, Pruner(density=0.5), 1, timed)
        ours.append(now() - started)
        if not repeat:  # the bare loop has not added its own yet
            peak, device_peak = _peak(), torch.cuda.max_memory_allocated() if given.device == "cuda" else 0
        modules = [model.layer(0, {name: tensor.clone() for name, tensor in tensors.items()}) for _ in texts]
        started = now()
        for module, hidden in zip(modules, texts, strict=True):
            bare_loop(model, module, hidden)
        bare.append(now() - started)
        del modules
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    what = f"{given.segments} segments of {given.length} tokens, clients: {given.clients}"
    print(f"{given.shape} on {given.device}, {dtype}, {what}")
    print(f"one decoder layer: {statistics.median(ours):.2f} s; bare loop {statistics.median(bare):.2f} s")
    if given.clients > 1:
        for part, seconds in parts.items():
            who = "the server" if part in PARTS[3:] else "clients together"
            print(f"  {part}, {who}: {statistics.median(seconds):.2f} s")
        print(f"bytes of a reply: {num_bytes:,}")
    print(f"ratio {ratio:.3f}, median of {given.repeats} pairs")
    print(f"peak memory: {peak / 1e9:.2f} GB, of which {before / 1e9:.2f} GB before pruning began")
    if device_peak:
        print(f"peak memory of the device: {device_peak / 1e9:.2f} GB")


def _peak() -> int:
    """The most memory that this process has ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
