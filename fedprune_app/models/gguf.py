"""Conversion of a language model in a GGUF file, once per machine, into the user's cache."""

from contextlib import redirect_stderr
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from fedprune_app.core.named import ValueDict
from fedprune_app.core.texts import one_line
from fedprune_app.files import scratch_folder, sha256_of
from fedprune_app.models.cached import cache_folder, cached_model
from fedprune_app.models.gguf_keys import KEYS, import_gguf, write_keys
from fedprune_app.models.transformers import import_transformers


def folder_of_gguf(path: Path) -> Path:
    """Return the cached folder of a GGUF file's model, named by the file's content.

    transformers computes the weights from the file's blocks, as 32-bit numbers. ``ValueError`` if the file is missing
    or truncated, or transformers cannot read its model or its tokenizer.
    """
    if not path.is_file():
        raise ValueError(f"model is {str(path)!r}: no such file")
    return _converted_folder(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)  # the file and its copy are read once per process, not for every message of a run
def _converted_folder(path: Path, changed: int) -> Path:
    folder = cache_folder() / f"gguf-whole-{sha256_of(path)[:16]}"
    return cached_model(folder, f"reads {str(path)!r}", lambda new_folder: _convert(path, new_folder))


def _convert(path: Path, folder: Path) -> None:
    """Read the file in a folder of its own, so that a tokenizer next to it has no influence."""
    with scratch_folder() as alone:
        (alone / path.name).symlink_to(path)
        _convert_in(alone, path, folder)


def _convert_in(alone: Path, path: Path, folder: Path) -> None:
    transformers = import_transformers()
    import_gguf()  # transformers' error for a missing gguf is less clear
    source: ValueDict = {"pretrained_model_name_or_path": alone, "gguf_file": path.name}
    options: ValueDict = {"dtype": torch.float32, "quantization_config": transformers.GgufConfig(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        with redirect_stderr(StringIO()):  # a progress bar, which logs would show line by line
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, **options)
    except Exception as error:  # transformers raises many types of error
        raise ValueError(
            f"model {str(path)!r} cannot be read ({one_line(error)[:200]}), allowed: a whole GGUF file of a language "
            "model that transformers knows, with its tokenizer"
        ) from None
    if lost := _left_out(path, model):
        raise ValueError(
            f"model {str(path)!r} has {lost}, which transformers leaves out, allowed: the folder of the model that the "
            "file was made of"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_keys(path, folder / KEYS)


def _left_out(path: Path, model: Any) -> str:
    """Return what of the file the model has not: without it the model computes something else."""
    reader, head = import_gguf().GGUFReader(path), "output.weight"  # a file may repeat tied embeddings as the head
    rope = getattr(model.config, "rope_parameters", None) or {}  # None where a model has no rotary positions
    if rope.get("rope_type", "default") == "default":
        for name, field in reader.fields.items():
            if name.endswith("rope.scaling.type") and field.contents() != "none":
                return str(name)
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    taken = sum(parameter.numel() for parameter in model.parameters())
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        taken -= sizes.get(head, 0)
    there = sum(sizes.values()) - sizes.get(head, 0)
    extra = [name for name in sizes if name.startswith("rope_") or name.endswith(".bias")]
    return f"{there - taken:,} numbers more, such as {extra[:3]}" if there > taken else ""
