"""An exported model's file is what ``fedprune export --format safetensors`` writes; this module also loads it.

The file is one safetensors file, so loading runs no code of its author's. It has one tensor, a payload in the bytes of
the wire codec (kept values and entropy-coded masks). Where channels were removed, the payload is the small network's.
In the file's metadata, under ``fedprune``, is a JSON object with the fields of :class:`ExportInfo` and two digests:

* ``body_sha256`` is the digest of the tensor.
* ``content_sha256`` is the digest of the object itself.

A file that contradicts its digests, or has none, is refused.

>>> model = load_model("client-3.safetensors")  # doctest: +SKIP
>>> logits = model(images)  # (N, C, H, W) in [0, 1], then (x - mean) / std with read_export_info's
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.core.seals import check_json, sealed_json
from fedprune_app.core.structured import ChannelGroup, Slice, shrink
from fedprune_app.files import as_path
from fedprune_app.models.names import BUILDERS, MODELS
from fedprune_app.models.sparse import sparsify
from fedprune_app.models.vision import (
    Build,
    architecture,
    load_state_tensors,
    named_tensors,
    parameter_names,
)

FORMAT = 1
_BODY = "body_sha256"
MAX_FILE_BYTES = 1 << 31
_MAX_SIDE = 1 << 12  # of an image, in pixels or channels
_MAX_CLASSES = 1 << 20
_MAX_NAME = 1 << 10


@dataclass(frozen=True)
class ExportInfo:
    """An exported model is a personal model of ``client`` after ``round``, or the global one (None).

    ``image_shape`` is (channels, height, width). The network expects images scaled to [0, 1], less ``mean``, divided by
    ``std``, per channel. ``density`` is the share of the full network's parameters that is left. ``channels`` has, for
    each group of channels that could be removed, the indices of the full network's channels that are left, ascending;
    it is empty for a system that removes none. ``class_names`` are empty where classes are numbers. ``image_fit`` says
    how an image of another size is brought to the right one: "crop" or "stretch". ``inputs`` says what ``mean`` and
    ``std`` are of: "images" of 8 bits, which are scaled to [0, 1] before, or "numbers" as they are, as in a table.
    "unknown" is for a plug-in's dataset that was not there when the model was exported. ``features`` are the names of a
    table's columns in the order in which the network takes them; they are empty for all other data.
    """

    system: str
    client: int | None
    round: int
    model: str
    image_shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    density: float
    channels: Mapping[str, tuple[int, ...]]
    class_names: tuple[str, ...] = ()
    image_fit: str = "crop"
    inputs: str = "images"
    features: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the metadata of an export file, which :meth:`from_json` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ExportInfo:
        """Return the info in a text, which is checked.

        Raises ``ValueError`` for whatever :meth:`to_json` would not write, except unknown keys.
        """
        try:
            metadata = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its metadata is not valid JSON ({type(error).__name__})") from None
        if not isinstance(metadata, dict):
            raise ValueError(f"its metadata is {_short(metadata)}, allowed: a JSON object")
        for key, (is_allowed, allowed) in _KEYS.items():
            if key not in metadata:
                raise ValueError(f"its metadata has no '{key}', allowed: {allowed}")
            if not is_allowed(metadata[key]):
                raise ValueError(f"'{key}' is {_short(metadata[key])}, allowed: {allowed}")
        depth = metadata["image_shape"][0]
        for key in ("mean", "std"):
            if len(metadata[key]) != depth:
                raise ValueError(f"'{key}' has {len(metadata[key])} numbers, allowed: {depth}, one per channel")
        if (count := len(metadata["class_names"])) not in (0, metadata["classes"]):
            raise ValueError(f"'class_names' has {count} names, allowed: {metadata['classes']}, or none")
        if (count := len(metadata["features"])) not in (0, math.prod(metadata["image_shape"])):
            raise ValueError(f"'features' has {count} names, allowed: {math.prod(metadata['image_shape'])}, or none")
        values: dict[str, Any] = {
            f.name: tuple(v) if isinstance(v := metadata[f.name], list) else v for f in fields(cls)
        }
        channels = {name: tuple(indices) for name, indices in metadata["channels"].items()}
        return cls(**{**values, "channels": channels})


def encode_export(info: ExportInfo, payload: Payload) -> bytes:
    """Return the content of an export file made of ``info`` and ``payload``.

    The payload has all parameters and running statistics of the network, and is small where channels are gone.
    """
    body = torch.from_numpy(codec.encode(payload)[codec.KEY])
    metadata = sealed_json({**json.loads(info.to_json()), _BODY: _sha256(body)})
    return save({codec.KEY: body}, metadata={"fedprune": json.dumps(metadata)})


def _sha256(body: Tensor) -> str:
    return hashlib.sha256(body.numpy().data).hexdigest()


def read_export_info(path: str | PathLike[str]) -> ExportInfo:
    """Return what an export file says that it holds, without a look at its tensors.

    Raises a one-line ``ValueError`` naming the file.
    """
    content = _read(Path(path), with_tensors=False)
    _check_digests(Path(path), content)
    return content.info


def load_model(path: str | PathLike[str], *, build: Build | None = None, sparse: bool = False) -> nn.Module:
    """Load the exported network on the CPU, in evaluation mode, with the logits of the model that was exported.

    A network of a plug-in is made by ``build(image_shape, num_classes)``, the plug-in's own function; where a plug-in
    registered the network under a name, it is enough to import the plug-in.

    With ``sparse``, linear layers compute with their kept weights alone where that is faster on this machine, see
    :func:`~fedprune_app.models.sparse.sparsify`.

    Pruned weights are zeros, and removed channels are not there. The file may come from a stranger: everything is
    checked before memory is taken for it, and the memory is never more than the full network would need. Raises a
    one-line ``ValueError`` naming the file.
    """
    path = as_path("path", path)
    content = _read(path, with_tensors=True, build=build)
    try:
        network = network_of(content.info, content.payload, build)
    except ValueError as error:
        raise ValueError(f"exported model {str(path)!r}: {error}{_build_hint(build)}") from None
    _check_digests(path, content)  # last, because a digest cannot say what is wrong
    if sparse:
        sparsify(network)
    return network


def network_of(info: ExportInfo, payload: Payload, build: Build | None = None) -> nn.Module:
    """Return the network of the model's name, as small as the payload's tensors, in evaluation mode.

    ``build`` makes a network that has no such name.

    Raises ``ValueError`` where tensors are missing or too many, do not fit each other, or are not what ``info`` says.
    """
    build = build or BUILDERS.get(info.model)
    model = architecture(info.model, info.image_shape, info.classes, build)
    full = named_tensors(model)
    for name in sorted(full.keys() ^ payload.tensors.keys()):
        raise ValueError(f"tensor {name!r} is {'missing' if name in full else 'not in the model'}")
    for name, tensor in payload.tensors.items():
        _check_tensor(name, tensor, full[name], bool(info.channels))
    shrink(model, *_cuts(full, payload.tensors))
    model.eval().requires_grad_(False)
    try:
        logits = model(torch.zeros(1, *info.image_shape, device=next(model.parameters()).device))
    except RuntimeError as error:
        raise ValueError(f"its tensors do not fit each other: {str(error).splitlines()[0]}") from None
    if logits.shape != (1, info.classes):
        raise ValueError(f"its network gives outputs of shape {tuple(logits.shape)}, allowed: (1, {info.classes})")
    if build is None:
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.zero_()  # the counters, which are in no file
    load_state_tensors(model, payload.tensors)
    return model


def full_density(model: nn.Module, payload: Payload) -> float:
    """Return the number of parameters that a payload keeps, as a share of those of the full ``model``."""
    return num_parameters(payload, parameter_names(model)) / sum(parameter.numel() for parameter in model.parameters())


def num_parameters(payload: Payload, names: list[str]) -> int:
    """Return how many values a payload keeps of the tensors ``names``."""
    return Payload(_subset(payload.tensors, names), _subset(payload.masks, names)).num_kept()


@dataclass(frozen=True, eq=False)
class _Content:
    """A file holds an ``info``, and where tensors were asked for a ``body`` and its ``payload``."""

    info: ExportInfo
    metadata: str
    body: Tensor | None = None
    payload: Payload = field(default_factory=lambda: Payload({}))


def _check_digests(path: Path, content: _Content) -> None:
    metadata = json.loads(content.metadata)
    try:
        check_json(metadata)
        if content.body is None or _sha256(content.body) == metadata.get(_BODY):
            return
    except (ValueError, RecursionError):
        pass
    raise ValueError(f"exported model {str(path)!r} is damaged: its content is not what was written")


def _read(path: Path, with_tensors: bool, build: Build | None = None) -> _Content:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{size} bytes, allowed: at most {MAX_FILE_BYTES}")
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("fedprune")
            names = list(file.keys())
            if text is None or names != [codec.KEY]:
                raise ValueError("no model that `fedprune export --format safetensors` wrote")
            info = ExportInfo.from_json(text)
            if not with_tensors:
                return _Content(info, text)
            body = file.get_tensor(codec.KEY)
        if body.dtype != torch.uint8:
            raise ValueError(f"tensor {codec.KEY!r} has dtype {body.dtype}, allowed: torch.uint8")
        if info.model not in MODELS and build is None:
            raise ValueError(
                f"model {info.model!r} is of a plug-in, allowed: with --build FILE.py:FUNCTION, or in Python "
                "load_model(path, build=function)"
            )
        model = architecture(info.model, info.image_shape, info.classes, build)
        # the values, and one byte per element of a mask
        num_bytes = sum(
            codec.counted(tensor.shape) * (tensor.element_size() + 1) for tensor in named_tensors(model).values()
        )
        try:
            payload = codec.decode({codec.KEY: body.numpy()}, max_bytes=min(num_bytes, MAX_FILE_BYTES))
        except ValueError as error:
            raise ValueError(f"{error}{_build_hint(build)}") from None
        return _Content(info, text, body, payload)
    except OSError as error:
        reason = "it is a folder, allowed: a file" if Path(path).is_dir() else error.strerror or error
        raise ValueError(f"exported model {str(path)!r} cannot be read: {reason}") from None
    except SafetensorError as error:
        reason = str(error).splitlines()[0]
        problem = f"it is no file of safetensors ({reason}), allowed: one that `fedprune export` wrote as safetensors"
        raise ValueError(f"exported model {str(path)!r}: {problem}") from None
    except ValueError as error:
        raise ValueError(f"exported model {str(path)!r}: {str(error).splitlines()[0]}") from None


def _build_hint(build: Build | None) -> str:
    return "; the network of build may be another than the one that was exported" if build else ""


def _subset(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names if name in tensors}


def _cuts(full: Mapping[str, Tensor], small: Mapping[str, Tensor]) -> tuple[list[ChannelGroup], dict[str, Tensor]]:
    """Return the channels that :func:`shrink` is to remove.

    They are given as a number per tensor and dimension, because the values come from elsewhere.
    """
    groups, kept = [], {}
    for name, tensor in full.items():
        for dim, (size, num_left) in enumerate(zip(tensor.shape, small[name].shape, strict=True)):
            if num_left < size:
                group = ChannelGroup(f"{name} {dim}", size, (), (Slice(name, dim),))
                groups.append(group)
                kept[group.name] = torch.arange(size) < num_left
    return groups, kept


def _check_tensor(name: str, tensor: Tensor, expected: Tensor, may_be_cut: bool) -> None:
    if tensor.dtype != expected.dtype:
        raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, allowed: {expected.dtype}")
    full = expected.shape
    fits = tensor.dim() == len(full) and all(
        min(1, most) <= size <= most for size, most in zip(tensor.shape, full, strict=True)
    )
    if not fits or (tensor.shape != full and not may_be_cut):
        allowed = f"at most {tuple(full)}" if may_be_cut else tuple(full)
        raise ValueError(f"tensor {name!r} has shape {_short(tuple(tensor.shape))}, allowed: {allowed}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)  # type: ignore[arg-type]


def _is_list(value: object, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_names(value: object) -> bool:
    return _is_list(value, lambda name: isinstance(name, str) and len(name) < _MAX_NAME)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_COUNT = 1 << 53
_INPUTS = ("images", "numbers", "unknown")
_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda v: _is_whole(v, FORMAT, FORMAT), str(FORMAT)),
    "inputs": (lambda v: v in _INPUTS, ", ".join(_INPUTS)),
    "system": (lambda v: isinstance(v, str), "text"),
    "client": (lambda v: v is None or _is_whole(v, 0, _COUNT), "a number from 0, or null"),
    "round": (lambda v: _is_whole(v, 0, _COUNT), "a number from 0"),
    "model": (lambda v: isinstance(v, str) and 0 < len(v) < _MAX_NAME, "the name of a network"),
    "image_shape": (
        lambda v: _is_list(v, lambda n: _is_whole(n, 1, _MAX_SIDE)) and len(v) == 3,
        f"3 numbers from 1 to {_MAX_SIDE}",
    ),
    "classes": (lambda v: _is_whole(v, 2, _MAX_CLASSES), f"2 to {_MAX_CLASSES}"),
    "mean": (lambda v: _is_list(v, _is_number), "numbers"),
    "std": (lambda v: _is_list(v, lambda n: _is_number(n) and n > 0), "numbers above 0"),
    "density": (lambda v: _is_number(v) and 0 <= v <= 1, "0 to 1"),
    "channels": (
        lambda v: isinstance(v, dict) and all(_is_list(one, lambda n: _is_whole(n, 0, _COUNT)) for one in v.values()),
        "an object of lists of whole numbers",
    ),
    "class_names": (_is_names, "a list of names"),
    "features": (_is_names, "a list of names"),
    "image_fit": (lambda v: v in ("crop", "stretch"), "crop, stretch"),
}
