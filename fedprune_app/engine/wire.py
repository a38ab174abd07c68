"""Conversion between payloads and Flower records: encoding, sizes in bytes, and the check of messages."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedprune_app.core import codec
from fedprune_app.core.bounds import LARGEST_NUMBER, bounded
from fedprune_app.core.named import Tensors, ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.engine.flower_private import recorddict_to_proto
from fedprune_app.engine.printable import printable

Fields = Values
PAYLOAD = "payload"
# the largest magnitude of a value in a reply or a peer's update: the limit of an exact sum of one addend
LARGEST = 2.0**23
_PEER_UPDATE = "peer/"
_STYPE = "fedprune.codec"
_LINE = 500


def to_arrays(payload: Payload) -> ArrayRecord:
    """Encode a payload; the arrays hold the codec's bytes without numpy's file header."""
    return from_bytes({name: array.tobytes() for name, array in codec.encode(payload).items()})


class PendingArray(Array):
    """The one array of a record of :func:`to_arrays` that a thread encodes: reading its bytes waits for the thread."""

    def __init__(self, encoded: Future[ArrayRecord]) -> None:
        self.dtype, self.stype, self._encoded = "uint8", _STYPE, encoded

    def __getattr__(self, name: str) -> Any:
        """Return ``shape`` or ``data``, which are only missing before they are first read."""
        if name not in ("shape", "data"):
            raise AttributeError(name)
        self.__dict__ |= vars(self._encoded.result()[codec.KEY])
        return self.__dict__[name]


def from_bytes(encoded: Mapping[str, bytes]) -> ArrayRecord:
    """Return a record of arrays from the codec's bytes."""
    return ArrayRecord({name: Array("uint8", (len(data),), _STYPE, data) for name, data in encoded.items()})


def to_bytes(arrays: ArrayRecord) -> dict[str, bytes]:
    """Undo :func:`from_bytes`, without decoding the bytes.

    Raises ``ValueError`` for arrays that are not the codec's.
    """
    return {name: _codec_bytes(name, array) for name, array in arrays.items()}


def from_arrays(arrays: ArrayRecord, max_bytes: int) -> Payload:
    """Decode a record of :func:`to_arrays`.

    Raises ``ValueError`` for anything else, and for a payload of more than ``max_bytes``.
    """
    encoded = {name: np.frombuffer(_codec_bytes(name, array), dtype=np.uint8) for name, array in arrays.items()}
    return codec.decode(encoded, max_bytes=max_bytes)


def digest_of(payload: Payload, names: Container[str]) -> str:
    """Return the digest of those tensors of a payload that are among ``names``."""
    return Payload({name: tensor for name, tensor in payload.tensors.items() if name in names}).digest()


def _codec_bytes(name: str, array: Array) -> bytes:
    if array.stype != _STYPE or array.dtype != "uint8":
        raise ValueError(f"array '{name}' is of type {array.stype!r}/{array.dtype!r}, allowed: {_STYPE!r}")
    return array.data


def pack(
    arrays: ArrayRecord | None, fields: Fields, peer_updates: Mapping[int, ArrayRecord] | None = None
) -> RecordDict:
    """Return a message's content: fields, an encoded payload if any, and other clients' payloads by client.

    Raises ``TypeError`` for a field of a type that no message supports.
    """
    record = RecordDict({"fields": _config_record(fields)})
    if arrays is not None:
        record[PAYLOAD] = arrays
    for client, update in (peer_updates or {}).items():
        record[peer_update_name(client)] = update
    return record


def _config_record(fields: Fields) -> ConfigRecord:
    record = ConfigRecord()
    for name, value in fields.items():
        try:
            record[name] = value
        except TypeError:
            raise TypeError(
                f"field {name!r} of a message is {reprlib.repr(value)}, allowed: a number, a text, bytes, true or "
                "false, or a list of one of these"
            ) from None
    return record


def num_bytes(content: RecordDict) -> int:
    """Return the size of a message's content in Flower's serialisation: the sum of its parts."""
    return sum(item_bytes(name, record) for name, record in content.items())


def item_bytes(name: str, record: Any) -> int:
    """Return the size of one record of a message, with its name, in Flower's serialisation.

    Arrays are serialised without their data: copying these would take longer than all other work of a server.
    """
    if not isinstance(record, ArrayRecord):
        return int(recorddict_to_proto(RecordDict({name: record})).ByteSize())
    hollow = ArrayRecord({key: Array(a.dtype, a.shape, a.stype, b"") for key, a in record.items()})
    (item,) = recorddict_to_proto(RecordDict({name: hollow})).items
    arrays = 0
    for entry, array in zip(item.array_record.items, record.values(), strict=True):
        size = entry.value.ByteSize() + (_field(len(array.data)) if array.data else 0)
        arrays += _field(_field(len(entry.key.encode())) + _field(size))
    return _field(_field(len(name.encode())) + _field(arrays))


def _field(size: int) -> int:
    """Return the size of a Protocol Buffers field with ``size`` bytes of content: tag, length and content."""
    return 1 + max(1, -(-size.bit_length() // 7)) + size


def fields_of(content: RecordDict) -> ValueDict:
    """Return a message's fields.

    Raises ``ValueError`` if there are none.
    """
    record = content.get("fields")
    if not isinstance(record, ConfigRecord):
        raise ValueError("the message has no record 'fields'")
    return dict(record)


def arrays_of(content: RecordDict, name: str = PAYLOAD) -> ArrayRecord | None:
    """Return a payload of a message, still encoded, or None.

    Raises ``ValueError`` for a record of another type.
    """
    record = content.get(name)
    if record is not None and not isinstance(record, ArrayRecord):
        raise ValueError(f"record '{name}' holds no arrays")
    return record


def payload_of(content: RecordDict, max_bytes: int, name: str = PAYLOAD) -> Payload:
    """Return a payload of a message, or an empty one.

    Raises ``ValueError`` if the payload cannot be decoded.
    """
    record = arrays_of(content, name)
    return Payload({}) if record is None else from_arrays(record, max_bytes)


def peer_update_name(client: int) -> str:
    """Return the name of the record in which one client's payload is forwarded to another client."""
    return f"{_PEER_UPDATE}{client}"


def peer_updates_of(content: RecordDict, schema: Schema) -> tuple[dict[int, Payload], list[str]]:
    """Return the other clients' payloads in a message, by client, and a line for each that is left out.

    The server may forward a payload without reading it. So the payload, which another client sent, is checked here.
    """
    updates: dict[int, Payload] = {}
    refusals: list[str] = []
    for name in content:
        if not name.startswith(_PEER_UPDATE):
            continue
        try:
            number = name.removeprefix(_PEER_UPDATE)
            if not (number.isdecimal() and peer_update_name(int(number)) == name):
                raise ValueError("its name is no client's")
            updates[int(number)] = schema.read(arrays_of(content, name))
        except ValueError as error:
            refusals.append(f"{name} is left out: {error}")
    return dict(sorted(updates.items())), refusals


def number(fields: Fields, name: str, minimum: float = -LARGEST_NUMBER, maximum: float = LARGEST_NUMBER) -> float:
    """Return a number from a message's fields.

    Raises ``ValueError`` for a value that is not a number from ``minimum`` to ``maximum``.
    """
    return bounded(fields.get(name), f"field '{name}'", minimum, maximum)


def one_line(text: str) -> str:
    """Return a client's text for a log or a record: one printable line of at most 500 characters."""
    return printable(" ".join(text[: 4 * _LINE].split()))[:_LINE]


@dataclass(frozen=True)
class Schema:
    """The tensors that a reply must have, by name, with shapes and dtypes, and masks for exactly the ``masked`` ones.

    Values must be finite, with a magnitude of at most :data:`LARGEST`. The ``unscaled`` tensors, which are not weights,
    only need to be finite. An ``unread`` payload is forwarded, and decoded only by its final recipient.
    """

    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    masked: frozenset[str] = frozenset()
    unscaled: frozenset[str] = frozenset()
    unread: bool = False

    @classmethod
    def like(cls, tensors: Tensors, masked: frozenset[str] = frozenset()) -> Schema:
        """Return the schema of payloads with the names, shapes and dtypes of these tensors."""
        return cls(
            {name: t.shape for name, t in tensors.items()},
            {name: t.dtype for name, t in tensors.items()},
            masked,
        )

    @property
    def max_bytes(self) -> int:
        """Return the decoded size of a payload of this schema: its values, and one byte per mask element."""
        sizes = ((codec.counted(shape), self.dtypes[name].itemsize) for name, shape in self.shapes.items())
        return sum(count * (size + 1) for count, size in sizes)

    def read(self, arrays: ArrayRecord | None) -> Payload:
        """Decode and check a payload; it is empty if there is none, or if it is forwarded unread.

        Raises ``ValueError`` for a payload that cannot be decoded or does not match.
        """
        if self.unread:
            return Payload({})
        payload = Payload({}) if arrays is None else from_arrays(arrays, self.max_bytes)
        self.check(payload)
        return payload

    def check(self, payload: Payload) -> None:
        """Raise ``ValueError`` unless names, shapes, dtypes and masks match and values are finite and bounded."""
        if names := payload.tensors.keys() ^ self.shapes.keys():
            raise ValueError(f"wrong tensors: {sorted(names)[:3]} missing or not asked for")
        if names := payload.masks.keys() ^ self.masked:
            raise ValueError(f"wrong masks: {sorted(names)[:3]} missing or not asked for")
        for name, tensor in payload.tensors.items():
            if tensor.shape != self.shapes[name]:
                raise ValueError(
                    f"tensor '{name}' has shape {tuple(tensor.shape)}, allowed: {tuple(self.shapes[name])}"
                )
            if tensor.dtype != self.dtypes[name]:
                raise ValueError(f"tensor '{name}' has dtype {tensor.dtype}, allowed: {self.dtypes[name]}")
            low, high = map(float, tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ValueError(f"tensor '{name}' has values that are NaN or infinite")
            if max(-low, high) > LARGEST and name not in self.unscaled:
                raise ValueError(f"tensor '{name}' has magnitude {max(-low, high):g}, allowed: at most {LARGEST:g}")
