"""``fedprune export RUN -o model.gguf`` writes a run's language model as one file, and says what the file costs."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from clients.fedspallm import language_model
from fedprune_app.config import ConfigError
from fedprune_app.exports.find import finished_checkpoint
from fedprune_app.exports.gguf_file import Codes, write_gguf
from fedprune_app.exports.llama_cpp import LlamaCpp, is_installed, token_milliseconds
from fedprune_app.files import make_durable, scratch_folder
from fedprune_app.models.checkpoints import weight_files
from fedprune_app.models.gguf_keys import KEYS
from fedprune_app.models.llm import LanguageModel
from fedprune_app.preflight.given import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.reader import load_run, read_info
from fedprune_app.results.texts import windows_of_text

CODES = "codes.safetensors"  # beside a checkpoint: its packed matrices, each named "TYPE NAME"
_SAMPLE = "Don't split 12,345 tokens:\n\n\t  x = f(3.14)  # naïve Żółć, 日本語 🙂"


@dataclass(frozen=True)
class Costs:
    """What a model costs: bytes on disk, and milliseconds for a token where llama.cpp is installed.

    ``perplexity`` is the one that the run measured, of the weights before they were rounded, on ``text``.
    """

    name: str
    bytes: int
    milliseconds: float | None
    perplexity: float | None
    text: str


def export_gguf(folder: Path, output: Path, kind: str = "", *, force: bool = False) -> list[Costs]:
    """Write the model of a run, or of a checkpoint, to the GGUF file ``output``; return what it costs.

    What the run's dense model costs comes first, where that model is still there. ``kind`` is as in
    :func:`~fedprune_app.exports.gguf_file.write_gguf`. Raises a one-line ``ValueError``; nothing is left then.
    """
    if output.is_dir() or (output.exists() and not force):
        raise ConfigError("--output", output, "a new file", which="exists", hint="force replaces a file")
    checkpoint = finished_checkpoint(folder)
    model, dense, runs_here = LanguageModel(checkpoint), _dense_model(folder), is_installed()
    output.parent.mkdir(parents=True, exist_ok=True)
    milliseconds: list[float | None] = [None, None]
    with scratch_folder(output.parent) as scratch:
        path = scratch / "exported"
        kind = write_gguf(model, path, kind, _codes(checkpoint))
        if runs_here:
            _compare_tokens(model, path)
            paths = [path]
            if dense is not None:
                write_gguf(dense, scratch / "dense")
                paths = [scratch / "dense", path]
            milliseconds = [*token_milliseconds(paths)]
        os.replace(path, output)
    make_durable([output])
    text, perplexity = _perplexities(folder)
    rows = [Costs(kind, output.stat().st_size, milliseconds[-1], perplexity.get("global"), text)]
    if dense is not None:
        num_bytes = sum(file.stat().st_size for file in weight_files(dense.folder))
        rows.insert(0, Costs("dense", num_bytes, milliseconds[0], perplexity.get("dense"), text))
    return rows


def _codes(checkpoint: Path) -> Codes:
    if not (path := checkpoint / CODES).is_file():
        return {}
    named = {name.partition(" "): tensor for name, tensor in load_file(path).items()}
    return {name: (kind, tensor) for (kind, _, name), tensor in named.items()}


def _dense_model(folder: Path) -> LanguageModel | None:
    """Return the model that a run pruned, where it is still on this machine."""
    with suppress(ValueError):
        return language_model(prepare(of_run(read_info(folder), ())).config)
    return None


def _perplexities(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the first text that a run tested its models on, and their perplexities."""
    with suppress(ValueError):
        for text, row in load_run(folder).last_table("perplexity_by_text").items():
            return windows_of_text(text, row), row
    return "", {}


def _compare_tokens(model: LanguageModel, path: Path) -> None:
    """Raise ``ValueError`` where llama.cpp splits a text into other tokens than the tokenizer that the file has."""
    expected, found = model.encode(_SAMPLE).tolist(), LlamaCpp(path).encode(_SAMPLE)
    if found != expected and not (model.folder / KEYS).is_file():  # transformers' copy of a GGUF file's may differ
        raise ValueError(f"llama.cpp splits a text into {found}, allowed: {expected}, as the model's tokenizer does")
