"""The file of an exported model, as ``fedprune export --format safetensors`` writes it, and its loading.

It is one safetensors file, so loading runs no code of its author. It has one tensor, a payload in the bytes of the wire
codec (kept values and entropy-coded masks). If channels were removed, the payload is the small network's. In the file's
metadata, under ``fedprune``, is a JSON object with the fields of :class:`ExportInfo` and two digests:

* ``body_sha256`` is the digest of the tensor.
* ``content_sha256`` is the digest of the object itself.

A file without valid digests is rejected.

>>> model = load_model("client-3.safetensors")  # doctest: +SKIP
>>> logits = model(images)  # (N, C, H, W) in [0, 1], then (x - mean) / std with read_export_info's
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedprune_app.core import codec
from fedprune_app.core.digests import check_json, json_with_digest
from fedprune_app.core.named import TensorDict, Tensors, ValueDict
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import ChannelGroup, Slice, shrink
from fedprune_app.files import as_path
from fedprune_app.models.names import BUILDERS, MODELS
from fedprune_app.models.vision import (
    PROBED,
    Build,
    architecture,
    computes,
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
    """Description of an exported model: the personal one of ``client`` after ``round``, or the global one (None).

    * ``image_shape``: (channels, height, width). The network expects images scaled to [0, 1], minus ``mean``, divided
      by ``std``, per channel.
    * ``density``: the kept share of the full network's parameters.
    * ``channels``: for each group of channels that could be removed, the kept indices of the full network, ascending;
      empty for a system that removes none.
    * ``class_names``: empty if classes are numbers.
    * ``image_fit``: how an image of another size is resized, "crop" or "stretch".
    * ``inputs``: the data of ``mean`` and ``std``: "images" of 8 bits, scaled to [0, 1] first; unscaled "numbers", as
      in a table; "unknown" for a plug-in's dataset that was missing when the model was exported.
    * ``features``: the names of a table's columns in the network's order; empty for all other data.
    * ``seed``: for a plug-in's function that makes the network, since the file has only floating-point tensors.
    * ``logits``: those of the run's own model for :func:`probe`'s images, to check a network made anew.
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
    seed: int = 0
    logits: tuple[float, ...] = ()

    def to_json(self) -> str:
        """Return the metadata of an export file, which :meth:`from_json` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ExportInfo:
        """Return the info in a text.

        Raises ``ValueError`` for anything that :meth:`to_json` would not write, except unknown keys.
        """
        metadata = {"seed": 0, "logits": [], **_json_object(text)}  # missing in older files
        for key, (is_allowed, allowed) in _KEYS.items():
            if key not in metadata:
                raise ValueError(f"its metadata has no '{key}', allowed: {allowed}")
            if not is_allowed(metadata[key]):
                raise ValueError(f"'{key}' is {reprlib.repr(metadata[key])}, allowed: {allowed}")
        shape = metadata["image_shape"]
        lengths = {"mean": shape[0], "std": shape[0], "class_names": metadata["classes"], "features": math.prod(shape)}
        for key, length in lengths.items():
            may_be_empty = key in ("class_names", "features")
            if len(metadata[key]) != length and not (may_be_empty and not metadata[key]):
                raise ValueError(f"'{key}' has {len(metadata[key])} entries, allowed: {length}")
        values: ValueDict = {f.name: tuple(v) if isinstance(v := metadata[f.name], list) else v for f in fields(cls)}
        channels = {name: tuple(indices) for name, indices in metadata["channels"].items()}
        return cls(**{**values, "channels": channels})


def encode_export(info: ExportInfo, payload: Payload) -> bytes:
    """Return the content of an export file with ``info`` and ``payload``.

    The payload has all parameters and running statistics of the network, without removed channels.
    """
    body = torch.from_numpy(codec.encode(payload)[codec.KEY])
    metadata = json_with_digest({**json.loads(info.to_json()), _BODY: _sha256(body)})
    return save({codec.KEY: body}, metadata={"fedprune": json.dumps(metadata)})


def _sha256(body: Tensor) -> str:
    return hashlib.sha256(body.numpy().data).hexdigest()


def read_export_info(path: str | PathLike[str]) -> ExportInfo:
    """Return the description in an export file. Raises a one-line ``ValueError`` that names the file."""
    with _naming(Path(path)):
        return _read(Path(path))[0]


def load_model(path: str | PathLike[str], *, build: Build | None = None) -> nn.Module:
    """Load the exported network on the CPU, in evaluation mode, with the logits of the original model.

    A plug-in's own function ``build(image_shape, num_classes)`` makes a plug-in's network; if the plug-in registered
    the network under a name, importing the plug-in is enough.

    Pruned weights are zeros, and removed channels are missing. The file need not be trusted: everything is checked
    before memory is allocated, never more than for the full network. Raises a one-line ``ValueError`` that names the
    file.
    """
    path = as_path("path", path)
    with _naming(path):
        info, body = _read(path)
        if info.model not in MODELS and build is None:
            raise ValueError(
                f"model {info.model!r} is of a plug-in, allowed: with --build FILE.py:FUNCTION, or in Python "
                "load_model(path, build=function)"
            )
        full = named_tensors(architecture(info.model, info.image_shape, info.classes, build, seed=info.seed))
        # the values, and one byte per element of a mask
        num_bytes = sum(codec.counted(tensor.shape) * (tensor.element_size() + 1) for tensor in full.values())
        payload = codec.decode({codec.KEY: body.numpy()}, max_bytes=min(num_bytes, MAX_FILE_BYTES))
        return network_of(info, payload, build)


def network_of(info: ExportInfo, payload: Payload, build: Build | None = None) -> nn.Module:
    """Return the network of the model's name, cut to the payload's tensors, in evaluation mode.

    ``build`` makes a network without such a name.

    Raises ``ValueError`` for missing or unknown tensors, and for tensors that contradict each other or ``info``.
    """
    build = build or BUILDERS.get(info.model)
    model = architecture(info.model, info.image_shape, info.classes, build, seed=info.seed)
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
            buffer.zero_()  # counters are in no file
    load_state_tensors(model, payload.tensors)
    if info.logits and not computes(model, info.image_shape, info.logits):
        raise ValueError(
            f"model {info.model!r} made anew computes something else than the run's own, allowed: the run's code, and "
            "networks that keep what they draw and change in floating-point tensors of their state"
        )
    return model


def full_density(model: nn.Module, payload: Payload) -> float:
    """Return the share of the full ``model``'s parameters that a payload keeps."""
    return num_parameters(payload, parameter_names(model)) / sum(parameter.numel() for parameter in model.parameters())


def num_parameters(payload: Payload, names: list[str]) -> int:
    tensors = {name: payload.tensors[name] for name in names}
    return Payload(tensors, {name: mask for name, mask in payload.masks.items() if name in tensors}).num_kept()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise errors of the block as a one-line ``ValueError`` with the file's name."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"exported model {str(path)!r} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        problem = f"it is no file of safetensors ({str(error).splitlines()[0]}), allowed: one of `fedprune export`"
        raise ValueError(f"exported model {str(path)!r}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"exported model {str(path)!r}: {str(error).splitlines()[0]}") from None


def _read(path: Path) -> tuple[ExportInfo, Tensor]:
    """Return the info and the one tensor of an export file, after a check of their digests."""
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes, allowed: at most {MAX_FILE_BYTES}")
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("fedprune")
        if text is None or list(file.keys()) != [codec.KEY]:
            raise ValueError("no model that `fedprune export --format safetensors` wrote")
        body = file.get_tensor(codec.KEY)
    if body.dtype != torch.uint8:
        raise ValueError(f"tensor {codec.KEY!r} has dtype {body.dtype}, allowed: torch.uint8")
    metadata = _json_object(text)
    check_json(metadata)
    if _sha256(body) != metadata.get(_BODY):
        raise ValueError("its content is not what was written")
    return ExportInfo.from_json(text), body


def _json_object(text: str) -> ValueDict:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"its metadata is no JSON object ({type(error).__name__})") from None


def _cuts(full: Tensors, small: Tensors) -> tuple[list[ChannelGroup], TensorDict]:
    """Return the channels for :func:`shrink` to remove: only their number per tensor and dimension matters.

    The values are loaded afterwards.
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
    full = expected.shape
    fits = tensor.dim() == len(full) and all(
        min(1, most) <= size <= most for size, most in zip(tensor.shape, full, strict=True)
    )
    if tensor.dtype != expected.dtype or not fits or (tensor.shape != full and not may_be_cut):
        allowed = f"{expected.dtype} and {'at most ' * may_be_cut}{tuple(full)}"
        shape = reprlib.repr(tuple(tensor.shape))
        raise ValueError(f"tensor {name!r} has dtype {tensor.dtype} and shape {shape}, allowed: {allowed}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)  # type: ignore[arg-type]


def _is_list(value: object, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_names(value: object) -> bool:
    return _is_list(value, lambda name: isinstance(name, str) and len(name) < _MAX_NAME)


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
    "logits": (lambda v: _is_list(v, _is_number) and len(v) <= PROBED, f"at most {PROBED} numbers"),
    "seed": (lambda v: _is_whole(v, 0, 2**62), "a number from 0 to 2**62"),
    "image_fit": (lambda v: v in ("crop", "stretch"), "crop, stretch"),
}
