"""``fedprune export RUN -o model.gguf``: a run's language model as one file, and its costs."""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fedprune_app.exports.compressed import SumsRun
from fedprune_app.exports.find import finished_checkpoint
from fedprune_app.exports.gguf_file import write_gguf, write_imatrix
from fedprune_app.exports.llama_cpp import token_milliseconds
from fedprune_app.files import make_durable, scratch_folder
from fedprune_app.learning.language_models import language_model
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import read_codes
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.ownership import check_new_file
from fedprune_app.results.reader import load_run, read_info


class Costs(NamedTuple):
    """Name and type of a model in a GGUF file, its bytes, and llama.cpp's milliseconds per token, if installed.

    ``perplexity`` is that of the run on its first test text, before weights were rounded.
    """

    model: str
    bytes: int
    milliseconds: float | None
    perplexity: float | None


def export_gguf(folder: Path, output: Path, kind: str = "", *, force: bool = False) -> list[Costs]:
    """Write the model of a run, or of a checkpoint, to the GGUF file ``output``; return its costs.

    The costs of the run's dense model in its own dtype come first, if that model still exists. ``kind`` is as in
    :func:`~fedprune_app.exports.gguf_file.write_gguf`; without it, matrices that the run rounded keep their codes.
    Raises a one-line ``ValueError``, and then leaves no file.
    """
    check_new_file(output, force)
    checkpoint = finished_checkpoint(folder)
    models = {"global": LanguageModel(checkpoint)}
    codes = {} if kind else read_codes(checkpoint.parent / "codes")
    perplexities: Mapping[str, float] = {}
    with suppress(ValueError):
        models = {"dense": language_model(prepare(of_run(read_info(folder), ())).config), **models}
        perplexities = next(iter(load_run(folder).last_table("perplexity_by_text").values()), {})
    output.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(output.parent) as scratch:
        paths = {name: scratch / name for name in models}
        chosen = {"global": (kind, codes)}
        kinds = {name: write_gguf(models[name], paths[name], *chosen.get(name, ())) for name in models}
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        times = token_milliseconds([*paths.values()]) if find_spec("xllamacpp") else repeat(None)
        os.replace(paths["global"], output)
    make_durable([output])
    return [
        Costs(f"{name}, {kinds[name]}", sizes[name], milliseconds, perplexities.get(name))
        for name, milliseconds in zip(models, times, strict=False)
    ]


def export_imatrix(folder: Path, output: Path, *, force: bool = False) -> int:
    """Write the importance matrix of a run's model, by the sums that the run kept, to the GGUF file ``output``.

    It is for the file that :func:`export_gguf` writes. Returns the number of segments that the sums are over. Raises a
    one-line ``ValueError``; nothing is left then.
    """
    check_new_file(output, force)
    source = SumsRun(folder, {})
    model, squares = source.model, dict[str, tuple[Tensor, int]]()
    for layer in range(model.num_layers):
        sums, masks = source.sums(layer).sums, source.pruned.layer(layer).masks
        hessian_of = source.compression.hessians_of(sums)
        for names in source.compression.groups:
            count = sums[names[0]].weight
            diagonal = hessian_of[names[0]].diagonal().cpu() * count / 2  # twice the mean over segments
            if source.compression.cut is not None:
                diagonal = diagonal[masks[names[0]].any(dim=0)]
            squares |= dict.fromkeys(model.named(layer, dict.fromkeys(names, diagonal)), (diagonal, count))
    output.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(output.parent) as scratch:
        path = scratch / "imatrix"
        write_imatrix(model, path, squares, model.sequence_length(source.options.segment_length))
        os.replace(path, output)
    make_durable([output])
    return max(count for _, count in squares.values())
