"""A pruned language model is packed: a folder of kept values and coded masks, which a CPU also computes with.

``fedprune export --format sparse`` writes such a folder from a FedSpaLLM run, or from any checkpoint of transformers
whose pruned weights are zeros.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedprune_app.config import ConfigError
from fedprune_app.core.payload import Payload
from fedprune_app.exports.formats import SUFFIXES, medians, one_thread
from fedprune_app.models.checkpoints import resolve_checkpoint
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import load_packed, write_packed
from fedprune_app.models.sparse import SparseLinear
from fedprune_app.results.reader import check_models, read_info

CHECKPOINT = Path("models") / "global"  # where a run of a language model leaves its global model, for transformers


@dataclass(frozen=True)
class Cost:
    """A language model costs these bytes on disk and in memory, and these milliseconds for one token on one thread."""

    disk: int
    memory: int
    milliseconds: float


@dataclass(frozen=True)
class Packed:
    """A checkpoint was packed: what the ``dense`` model costs, and the ``sparse`` one.

    ``density`` is the share of the prunable weights that is left. Of ``layers`` linear layers in the decoder,
    ``sparse_layers`` are computed from packed weights on this machine; the others are faster dense.
    """

    dense: Cost
    sparse: Cost
    density: float
    layers: int
    sparse_layers: int


def is_language_model(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or a run that left one."""
    return any((place / "config.json").is_file() for place in (folder, folder / CHECKPOINT))


def check_options(output: Path, client: int | None, format: str, **options: object) -> None:
    """Raise :class:`ConfigError` for options of ``fedprune export`` that a language model does not have.

    ``options`` are those without effect, by name; they are there where they are not empty.
    """
    condition = "with a language model"
    if client is not None:
        raise ConfigError("--client", client, "none, for the global model", condition=condition)
    if format not in ("", "sparse"):
        raise ConfigError("--format", format, "sparse", condition=condition)
    if output.suffix.lower() in SUFFIXES:
        raise ConfigError("--output", output, "a folder, whose name has no suffix of a file", condition=condition)
    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "none, since it has no effect", condition=condition)


def pack_model(folder: Path, output: Path, *, force: bool = False) -> Packed:
    """Write the packed model of a run, or of a checkpoint, to the folder ``output``, and measure both.

    A weight that is exactly 0 counts as pruned. Raises a one-line ``ValueError``.
    """
    if output.exists() and not (force and (output / "packed.json").is_file()):
        raise ConfigError(
            "--output", output, "a new folder", which="exists", hint="" if force else "force replaces a packed model"
        )
    if (folder / "run.json").exists():
        info = read_info(folder)
        if (status := info["status"]) != "completed":
            raise ValueError(f"run {str(folder)!r} is {status}, allowed: a completed run")
        if damages := check_models(folder, info):
            raise ValueError(damages[0])
        folder = folder / CHECKPOINT
    model = LanguageModel(resolve_checkpoint(str(folder), download=False))
    counts = {"all": 0, "kept": 0}

    def layer(number: int) -> Payload:
        all_tensors = model.layer_tensors(number)
        tensors = {name: all_tensors[name] for name in model.prunable(number)}
        payload = Payload.pruned(tensors, {name: tensor != 0 for name, tensor in tensors.items()})
        counts["all"] += sum(tensor.numel() for tensor in tensors.values())
        counts["kept"] += payload.num_kept()
        return payload

    disk_bytes = write_packed(model, layer, output)
    with one_thread():
        dense, sparse = load_packed(output), load_packed(output, sparse=True)
    token = torch.zeros((1, 1), dtype=torch.int64)
    with one_thread(), torch.inference_mode():
        times = medians([partial(network, use_cache=False) for network in (dense, sparse)], token)
    linear_types = [type(module) for module in sparse.modules() if isinstance(module, nn.Linear | SparseLinear)]
    return Packed(
        Cost(_bytes(dense), _bytes(dense), times[0]),
        Cost(disk_bytes, _bytes(sparse), times[1]),
        counts["kept"] / max(1, counts["all"]),
        max(0, len(linear_types) - 1),  # the head is no layer of the decoder
        linear_types.count(SparseLinear),
    )


def _bytes(model: nn.Module) -> int:
    tensors = {tensor.data_ptr(): tensor for tensor in [*model.parameters(), *model.buffers()]}  # tied ones once
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
