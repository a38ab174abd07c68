"""Size and speed of language models on one CPU thread, in turns, in stock transformers.

    python benchmarks/llm_speed.py dense=FOLDER cut=runs/x/0/models/global

A folder is what ``AutoModelForCausalLM.from_pretrained`` loads. A turn reads a prompt of ``--prompt`` tokens, or writes
``--tokens`` tokens with a cache. Ratios are medians over the turns, of processor time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedprune_app.models.transformers import import_transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {name: Path(folder) for name, _, folder in (text.partition("=") for text in options.models)}
    models = {name: opened(folder) for name, folder in folders.items()}
    work = {
        "ms for the prompt": lambda model: partial(read, model, options.prompt),
        "ms for a token": lambda model: partial(write, model, options.tokens),
    }
    times = {what: milliseconds(make, models, options.repeats) for what, make in work.items()}
    first = next(iter(models))
    print("| model | MB on disk | MB in memory | ms for the prompt | ms for a token | tokens/s, of " + f"{first} |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, model in models.items():
        prompt, token = (of_model[name] for of_model in times.values())
        disk = sum(path.stat().st_size for path in folders[name].iterdir() if path.suffix == ".safetensors")
        sizes = f"{disk / 1e6:.0f} | {memory(model) / 1e6:.0f} | {median(prompt):.0f}"
        faster = median(a / b for a, b in zip(times["ms for a token"][first], token, strict=True))
        print(f"| {name} | {sizes} | {median(token) / options.tokens:.1f} | {faster:.2f} |")


def opened(folder: Path) -> Any:
    """Return the model in a folder, in evaluation mode."""
    transformers = import_transformers()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def memory(model: Any) -> int:
    """Return the bytes of a model's tensors; tied ones count once."""
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@torch.inference_mode()
def read(model: Any, prompt: int) -> None:
    """Read a prompt of so many tokens."""
    model(torch.arange(prompt)[None] % 250, use_cache=False)


@torch.inference_mode()
def write(model: Any, tokens: int) -> None:
    """Write so many tokens after one, each with the cache of those before it."""
    ids, cache = torch.zeros((1, 1), dtype=torch.int64), None
    for _ in range(tokens):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)


def milliseconds(
    make: Callable[[Any], Callable[[], None]], models: dict[str, Any], repeats: int
) -> dict[str, list[float]]:
    """Return by model the processor time of each turn, after one to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + repeats):
        for name, model in models.items():
            started = time.thread_time()
            make(model)()
            taken[name].append(1000 * (time.thread_time() - started))
    return {name: times[1:] for name, times in taken.items()}


if __name__ == "__main__":
    main()
