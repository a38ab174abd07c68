"""Writing a pruned language model layer by layer, as a transformers checkpoint or packed, and loading it."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedprune_app.core import codec
from fedprune_app.core.digests import check_json, json_with_digest
from fedprune_app.core.grids import Quantized
from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.files import as_path, replacing_folder
from fedprune_app.models.checkpoints import INDEX, fill, inside, skeleton
from fedprune_app.models.cutting import Cut, narrowed
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.transformers import import_transformers

# Returns the pruned matrices of decoder layer i with their masks; empty for a dense layer.
PrunedLayers = Callable[[int], Payload]
_PARTS = "packed.json"
_COPIED = (  # prefixes of the checkpoint's other files: tokenizer and generation settings
    "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece", "chat_template",
    "generation_config",
)  # fmt: skip


def write_checkpoint(model: LanguageModel, layers: PrunedLayers, folder: Path, cut: Cut | None = None) -> int:
    """Write a folder that plain transformers load with ``from_pretrained``, one file per layer.

    With ``cut``, the removed parts are left out. Return the bytes of its weights.
    """
    count = model.num_layers + 1
    weight_map: dict[str, str] = {}
    total = 0
    with replacing_folder(folder) as new_folder:
        _write_config(model, new_folder, cut)
        for part in range(count):
            tensors = model.checkpoint.as_stored(_named_part(model, layers, part - 1, cut)[0])
            name = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
            save_file({n: t.contiguous() for n, t in tensors.items()}, new_folder / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (new_folder / INDEX).write_text(json.dumps(index, indent=1))
    return total


def write_packed(model: LanguageModel, layers: PrunedLayers, folder: Path, cut: Cut | None = None) -> int:
    """Write the model as kept values and entropy-coded masks, for :func:`load_packed`.

    With ``cut``, the removed parts are left out. Return the bytes of its weights.
    """
    sizes, digests = {}, {}
    total = 0
    with replacing_folder(folder) as new_folder:
        _write_config(model, new_folder, cut)
        for part in range(model.num_layers + 1):
            tensors, masks = _named_part(model, layers, part - 1, cut)
            data = codec.pack(Payload(tensors, masks))
            name = f"part-{part:05d}.fp"
            (new_folder / name).write_bytes(data)
            digests[name] = hashlib.sha256(data).hexdigest()
            sizes[name] = sum(t.numel() * (t.element_size() + 1) for t in tensors.values())
            total += len(data)
        (new_folder / _PARTS).write_text(json.dumps(json_with_digest({"parts": sizes, "sha256": digests}), indent=1))
    return total


def write_codes(folder: Path, model: LanguageModel, layer: int, quantized_of: Mapping[str, Quantized]) -> None:
    """Write a layer's rounded matrices as bytes in a GGUF file's layout, for :func:`read_codes`."""
    packed = model.named(layer, {name: quantized.packed().cpu() for name, quantized in quantized_of.items()})
    kinds = dict(zip(packed, (quantized.grid.gguf_type for quantized in quantized_of.values()), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(packed, folder / f"layer-{layer:05d}.safetensors", metadata=kinds)


def read_codes(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Return, by transformers' name, GGUF's block type and the bytes (rows, bytes of a row) of all matrices."""
    codes: dict[str, tuple[str, Tensor]] = {}
    for path in sorted(folder.glob("layer-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            codes |= {name: (kind, file.get_tensor(name)) for name, kind in file.metadata().items()}
    return codes


def load_packed(folder: Path | str) -> Any:
    """Return a transformers model from a folder of :func:`write_packed`, on the CPU, in evaluation mode.

    Raises ``ValueError`` for another folder.
    """
    folder = as_path("folder", folder)
    if not folder.is_dir():  # transformers would treat it as a name on the hub
        raise ValueError(f"packed model {str(folder)!r}: there is no such folder")
    try:
        transformers = import_transformers()
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        tensors = {name: tensor for part in _parts(folder) for name, tensor in part.tensors.items()}
        dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
        model = fill(skeleton(config, dtype), tensors)
        if (folder / "generation_config.json").is_file():  # where an instruct model ends its turn
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        return model
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"packed model {str(folder)!r} cannot be read: {error}") from None


def _parts(folder: Path) -> Iterator[Payload]:
    """Yield the parts of a packed model, each checked: the shell first, then the decoder layers."""
    index = json.loads((folder / _PARTS).read_text())
    check_json(index)
    for name, max_bytes in index["parts"].items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a part")
        data = (folder / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != index["sha256"][name]:
            raise ValueError(f"{name} is damaged: its content is not what was written")
        yield codec.unpack(data, int(max_bytes))


def _named_part(model: LanguageModel, layers: PrunedLayers, layer: int, cut: Cut | None) -> tuple[TensorDict, Tensors]:
    """Return (tensors, masks) by full name of a decoder layer, or of the rest for -1."""
    if layer < 0:
        return model.shell_tensors(), {}
    pruned = layers(layer)
    tensors = {**model.layer_tensors(layer), **pruned.tensors}
    if cut is not None:
        return model.named(layer, narrowed(tensors, pruned.masks)), {}
    return model.named(layer, tensors), model.named(layer, pruned.masks)


def _write_config(model: LanguageModel, folder: Path, cut: Cut | None) -> None:
    """Write the model's configuration, in its dtype here, and its tokenizer."""
    config = copy.deepcopy(model.config) if cut is None else cut.config(model.config)
    config.dtype = model.dtype
    config.save_pretrained(folder)
    for path in sorted(model.folder.iterdir()):
        if path.is_file() and path.name.startswith(_COPIED):
            shutil.copyfile(inside(model.folder, path.name), folder / path.name)
