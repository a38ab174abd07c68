"""Reading a causal language model from a folder, part by part.

Choice of files, renaming of tensors and conversion follow transformers' ``from_pretrained``. Only safetensors are read:
nothing is unpickled.
"""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fedprune_app.core.named import TensorDict, Tensors
from fedprune_app.core.texts import one_line
from fedprune_app.models.transformers import import_transformers

INDEX = "model.safetensors.index.json"
DTYPES = ("auto", "float32", "float16", "bfloat16")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as in files


def inside(folder: Path, name: object) -> Path:
    """Return the file ``name`` in a checkpoint's folder. ``ValueError`` for a file elsewhere, after following links.

    In the hub's cache a snapshot's files are links to the blobs of the same model.
    """
    path = folder / str(name)
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":
        roots.append((folder.parent.parent / "blobs").resolve())
    is_plain = not Path(str(name)).is_absolute() and ".." not in Path(str(name)).parts
    if not is_plain or not any(path.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{str(name)!r} is outside the folder, allowed: the folder's own files")
    return path


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads: ``model.safetensors``, or the shards that the index names.

    Empty if the folder has neither. ``ValueError`` for an index that cannot be read or names files elsewhere.
    """
    if (path := folder / "model.safetensors").exists():
        return [path]
    if not (index := folder / INDEX).exists():
        return []
    try:
        return [inside(folder, name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"checkpoint {str(folder)!r} cannot be read: {error}") from None


class TensorFiles:
    """The tensors of a checkpoint's files, by name, each read on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self.kinds: dict[str, str] = {}  # by name, the dtype as named in the file
        self.like: TensorDict = {}  # by name, a tensor of the same shape without values
        try:
            for path in weight_files(folder):
                with safe_open(path, framework="pt") as file:
                    entries = {name: file.get_slice(name) for name in sorted(file.keys())}
                self._file_of |= dict.fromkeys(entries, path)
                self.kinds |= {name: entry.get_dtype() for name, entry in entries.items()}
                self.like |= {n: torch.empty(entry.get_shape(), device="meta") for n, entry in entries.items()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"checkpoint {str(folder)!r} cannot be read: {error}") from None
        if not self._file_of:
            raise ValueError(f"checkpoint {str(folder)!r} holds no safetensors, allowed: model.safetensors, or {INDEX}")

    def read(self, names: Iterable[str]) -> TensorDict:
        """Return copies of the tensors ``names``, aligned as torch's own."""
        tensors: TensorDict = {}
        try:
            for name in names:
                with safe_open(self._file_of[name], framework="pt") as file:
                    tensors[name] = file.get_tensor(name).clone()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"checkpoint {str(self.folder)!r} cannot be read: {error}") from None
        return tensors


def skeleton(config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """Return a config's transformers model in evaluation mode, with weights on the meta device, for :func:`fill`.

    Buffers that are in no checkpoint have their values. ``options`` are passed to transformers' ``from_config``.
    """
    with torch.device("meta"):
        auto = import_transformers().AutoModelForCausalLM
        model = auto.from_config(copy.deepcopy(config), dtype=dtype, **options)
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()  # computes nothing for weights on the meta device
    return model.eval()


def fill(model: Any, tensors: Tensors) -> Any:
    """Load ``tensors`` as the weights of ``model``, tie those that are tied and not among them, and return ``model``.

    ``ValueError`` naming a tensor that is unexpected or missing.
    """
    unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    model.tie_weights(missing_keys=model.state_dict().keys() - tensors.keys())
    missing_names = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing_names or unexpected:
        raise ValueError(f"it has other tensors than its config: {[*missing_names, *unexpected][:3]}")
    return model


class Checkpoint:
    """A folder's causal language model, read in parts as transformers reads the whole.

    ``dtype`` is one of :data:`DTYPES`; "auto" is transformers' choice: the config's, or else that of the first tensor.
    Opening checks that all tensors exist, and raises a one-line ``ValueError`` otherwise.
    """

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        transformers = import_transformers()
        self.folder = folder
        try:
            self.config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"checkpoint {str(folder)!r} cannot be read: {one_line(error)}") from None
        if quantized := getattr(self.config, "quantization_config", None):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else type(quantized).__name__
            raise self.refused(f"whose weights are quantized ({method}), allowed: {', '.join(DTYPES[1:])}")
        self._files = TensorFiles(folder)
        self.dtype = self._dtype(dtype)
        layers, most = getattr(self.config.get_text_config(), "num_hidden_layers", None), len(self._files.like)
        if isinstance(layers, int) and layers > most:  # a skeleton of so many would take minutes
            raise self.refused(f"num_hidden_layers is {layers}, allowed: at most {most}, the tensors in its files")
        try:  # an expert's matrix can be observed only if each expert computes separately
            self.skeleton = skeleton(self.config, self.dtype, experts_implementation="eager")
        except Exception as error:  # transformers' classes raise many types of error
            raise self.refused(f"allowed: a causal language model ({one_line(error)[:200]})") from None
        self._sources = self._names()
        self._check()

    def refused(self, reason: str) -> ValueError:
        """Return an error that names the folder and its model's class."""
        return ValueError(f"checkpoint {str(self.folder)!r} is of {type(self.config).__name__}, {reason}")

    def read(self, names: Iterable[str]) -> TensorDict:
        """Return tensors by their name in the model, on the CPU, as transformers converts and casts them.

        Tensors that the checkpoint lacks because they are tied to others are omitted. Request all tensors of a module
        together.
        """
        names = list(names)
        model = copy.deepcopy(self.skeleton)
        sources = {source for name in names for source in self._sources.get(name, ())}
        self._load(model, self._files.read(source for source in self._files.like if source in sources), "cpu")
        state = model.state_dict()
        return {name: state[name] for name in names if not state[name].is_meta}

    def as_stored(self, tensors: Tensors) -> TensorDict:
        """Return tensors with the names and shapes in which transformers saves this model."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.skeleton, dict(tensors)))

    # --- inside -------------------------------------------------------------------------------------------------

    def _dtype(self, name: str) -> torch.dtype:
        file_dtypes = (_FLOATS[kind] for kind in self._files.kinds.values() if kind in _FLOATS)
        value: Any = getattr(torch, name) if name != "auto" else self.config.dtype or next(file_dtypes, None)
        if str(value).removeprefix("torch.") not in DTYPES:
            raise self.refused(f"of dtype {value}, allowed: {', '.join(DTYPES[1:])} (fedspallm.dtype)")
        dtype: torch.dtype = value
        return dtype

    def _names(self) -> dict[str, list[str]]:
        """Return, by a tensor's name in the model, the names of its sources in the files.

        If several tensors have the same source, it is listed under the first.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(self.skeleton)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix, state = self.skeleton.base_model_prefix, self.skeleton.state_dict()
        sources_by_name: dict[str, list[str]] = {}
        for source in sorted(self._files.like):
            name = rename_source_key(source, renamings, converters, prefix, state)[0]
            if name not in state:
                name = rename_source_key(source, [], [], prefix, state)[0]
            if name in state and state[name].is_floating_point() and self._files.kinds[source] not in _FLOATS:
                kind = self._files.kinds[source]
                raise self.refused(f"and has tensor '{source}' of {kind}, allowed: {', '.join(_FLOATS)}")
            sources_by_name.setdefault(name, []).append(source)
        return sources_by_name

    def _load(self, model: Any, tensors: Tensors, device: str) -> Any:
        """Load some of the files' tensors into ``model`` as ``from_pretrained`` does; return transformers' report."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        rules: Any = get_model_conversion_mapping(model)
        options = LoadStateDictConfig(
            device_map={"": device},
            dtype=self.dtype,
            dtype_plan=model._get_dtype_plan(self.dtype),
            weight_mapping=rules,
        )
        return model._load_pretrained_model(model, tensors, None, options)[0]

    def _check(self) -> None:
        """Load all tensors without their values: the skeleton takes the dtypes of later reads."""
        report = self._load(self.skeleton, self._files.like, "meta")
        missing_keys = set(report.missing_keys)
        self.skeleton.tie_weights(missing_keys=missing_keys)  # it removes the tied ones
        wrong_names = sorted([*(key[0] for key in report.mismatched_keys), *report.conversion_errors, *missing_keys])
        if wrong_names:
            raise self.refused(
                f"and its tensor '{wrong_names[0]}' is missing, or has another shape than the config says"
            )
