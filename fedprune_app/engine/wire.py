"""Where payloads become Flower records: encoding, measured bytes, and the checks every message passes once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from torch import Tensor

from fedprune_app.core import codec
from fedprune_app.core.payload import Payload

Fields = Mapping[str, Any]
_STYPE = "fedprune.codec"


def to_arrays(payload: Payload) -> ArrayRecord:
    """Encode a payload; the arrays hold the codec's bytes as they are, without numpy's file header."""
    encoded = codec.encode(payload)
    return ArrayRecord({name: Array("uint8", (a.size,), _STYPE, a.tobytes()) for name, a in encoded.items()})


def from_arrays(arrays: ArrayRecord, max_bytes: int) -> Payload:
    """Decode what :func:`to_arrays` made. Raises ``ValueError`` for anything else, or above ``max_bytes``."""
    encoded = {}
    for name, array in arrays.items():
        if array.stype != _STYPE or array.dtype != "uint8":
            raise ValueError(f"array '{name}' is of type {array.stype!r}/{array.dtype!r}, allowed: {_STYPE!r}")
        encoded[name] = np.frombuffer(array.data, dtype=np.uint8)
    return codec.decode(encoded, max_bytes=max_bytes)


def pack(arrays: ArrayRecord | None, fields: Fields) -> RecordDict:
    """A message's content: an encoded payload, if any, and named values."""
    record = RecordDict({"fields": ConfigRecord(dict(fields))})
    if arrays is not None:
        record["payload"] = arrays
    return record


def num_bytes(content: RecordDict, known: dict[int, int] | None = None) -> int:
    """The size of a message's content as Flower serialises it, measured.

    Serialising costs a copy, so sizes of payloads that several messages share are kept in ``known``, by ``id``.
    """
    known = {} if known is None else known
    total = 0
    for name, record in content.items():  # the serialised parts of a RecordDict lie side by side
        if id(record) not in known or name != "payload":
            known[id(record)] = int(recorddict_to_proto(RecordDict({name: record})).ByteSize())
        total += known[id(record)]
    return total


def fields_of(content: RecordDict) -> dict[str, Any]:
    """The named values of a message. Raises ``ValueError`` when there are none."""
    record = content.get("fields")
    if not isinstance(record, ConfigRecord):
        raise ValueError("the message has no record 'fields'")
    return dict(record)


def payload_of(content: RecordDict, max_bytes: int) -> Payload:
    """The payload of a message, or an empty one. Raises ``ValueError`` when it cannot be decoded."""
    record = content.get("payload")
    if record is None:
        return Payload({})
    if not isinstance(record, ArrayRecord):
        raise ValueError("record 'payload' holds no arrays")
    return from_arrays(record, max_bytes)


def number(fields: Fields, name: str, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number from a message's fields, within bounds, else ``ValueError``."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"field '{name}' is {value!r}, allowed: a number")
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"field '{name}' is {value!r}, allowed: {least:g} to {most:g}")
    return value


@dataclass(frozen=True)
class Schema:
    """What a reply must hold: exactly these tensors, and masks for exactly those of them."""

    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    masked: frozenset[str] = frozenset()

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], masked: frozenset[str] = frozenset()) -> Schema:
        return cls(
            {name: t.shape for name, t in tensors.items()},
            {name: t.dtype for name, t in tensors.items()},
            masked,
        )

    @property
    def max_bytes(self) -> int:
        """Decoded size of a payload of this schema: values, and one byte per mask element."""
        sizes = ((shape.numel(), self.dtypes[name].itemsize) for name, shape in self.shapes.items())
        return sum(count * (size + 1) for count, size in sizes)

    def check(self, payload: Payload) -> None:
        """Raise ``ValueError`` unless the payload fits: names, shapes, dtypes, masks, finite values."""
        if payload.tensors.keys() != self.shapes.keys():
            missing = sorted(self.shapes.keys() - payload.tensors.keys())
            extra = sorted(payload.tensors.keys() - self.shapes.keys())
            raise ValueError(f"wrong tensors: missing {missing[:3]}, not asked for {extra[:3]}")
        if payload.masks.keys() != self.masked:
            wrong = sorted(payload.masks.keys() ^ self.masked)
            raise ValueError(f"wrong masks: {wrong[:3]} missing or not asked for")
        for name, tensor in payload.tensors.items():
            if tensor.shape != self.shapes[name]:
                raise ValueError(
                    f"tensor '{name}' has shape {tuple(tensor.shape)}, allowed: {tuple(self.shapes[name])}"
                )
            if tensor.dtype != self.dtypes[name]:
                raise ValueError(f"tensor '{name}' has dtype {tensor.dtype}, allowed: {self.dtypes[name]}")
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"tensor '{name}' has values that are NaN or infinite")
