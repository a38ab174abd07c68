"""A pruned language model is written to disk a layer at a time: as any transformers checkpoint, or packed."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.core.seals import check_json, sealed_json
from fedprune_app.files import replacing_folder
from fedprune_app.models.checkpoints import INDEX, inside
from fedprune_app.models.llm import LanguageModel, cast, import_transformers

PrunedLayers = Callable[[int], Payload]
"""A function of this type returns the pruned matrices of decoder layer i with their masks; none for a dense layer."""
_PARTS = "packed.json"
_COPIED = (  # files of the checkpoint's folder whose names begin so: tokenizer and generation settings
    "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece", "chat_template",
    "generation_config",
)  # fmt: skip


def write_checkpoint(model: LanguageModel, layers: PrunedLayers, folder: Path) -> int:
    """Write a folder that plain transformers load with ``from_pretrained``, one file a layer.

    Return the bytes of its weights.
    """
    count = model.num_layers + 1
    weight_map: dict[str, str] = {}
    total = 0
    with replacing_folder(folder) as new:
        _write_config(model, new)
        for part in range(count):
            tensors = _named_part(model, layers, part - 1)[0]
            name = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
            save_file({n: t.contiguous() for n, t in tensors.items()}, new / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (new / INDEX).write_text(json.dumps(index, indent=1))
    return total


def write_packed(model: LanguageModel, layers: PrunedLayers, folder: Path) -> int:
    """Write the model as kept values and entropy-coded masks, for :func:`load_packed`.

    Return the bytes of its weights.
    """
    sizes, digests = {}, {}
    total = 0
    with replacing_folder(folder) as new:
        _write_config(model, new)
        for part in range(model.num_layers + 1):
            tensors, masks = _named_part(model, layers, part - 1)
            data = codec.pack(Payload(tensors, masks))
            name = f"part-{part:05d}.fp"
            (new / name).write_bytes(data)
            digests[name] = hashlib.sha256(data).hexdigest()
            sizes[name] = sum(t.numel() * (t.element_size() + 1) for t in tensors.values())
            total += len(data)
        (new / _PARTS).write_text(json.dumps(sealed_json({"parts": sizes, "sha256": digests}), indent=1))
    return total


def load_packed(folder: Path | str) -> Any:
    """Return a transformers model from a folder of :func:`write_packed`. ``ValueError`` for another folder."""
    folder = Path(folder)
    transformers = import_transformers()
    tensors: dict[str, Tensor] = {}
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        index = json.loads((folder / _PARTS).read_text())
        if "sha256" in index:  # earlier versions wrote no digests
            check_json(index)
        for name, max_bytes in index["parts"].items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no name of a part")
            data = (folder / name).read_bytes()
            if "sha256" in index and hashlib.sha256(data).hexdigest() != index["sha256"][name]:
                raise ValueError(f"{name} is damaged: its content is not what was written")
            tensors |= codec.unpack(data, int(max_bytes)).tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"packed model {str(folder)!r} cannot be read: {error}") from None
    dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    model: Any = cast(transformers.AutoModelForCausalLM.from_config(config), dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    known = {tensor.data_ptr() for name, tensor in model.state_dict().items() if name in tensors}
    lacking = [name for name in missing if model.state_dict()[name].data_ptr() not in known]
    if lacking or unexpected:
        raise ValueError(
            f"packed model {str(folder)!r} has other tensors than its config: {[*lacking, *unexpected][:3]}"
        )
    return model.eval()


def _named_part(
    model: LanguageModel, layers: PrunedLayers, layer: int
) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
    """Return (tensors, masks) by full name: of a decoder layer, or for -1 of all the rest."""
    if layer < 0:
        return model.shell_tensors(), {}
    pruned, start = layers(layer), f"{model.prefix}.{layer}."
    tensors = {**model.layer_tensors(layer), **pruned.tensors}
    return {start + n: t for n, t in tensors.items()}, {start + n: m for n, m in pruned.masks.items()}


def _write_config(model: LanguageModel, folder: Path) -> None:
    """Write the model's configuration, in the dtype that it has here, and its tokenizer."""
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype
    config.save_pretrained(folder)
    for path in sorted(model.folder.iterdir()):
        if path.is_file() and path.name.startswith(_COPIED):
            shutil.copyfile(inside(model.folder, path.name), folder / path.name)
