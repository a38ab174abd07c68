"""The properties that clients report at registration, and their checks."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fedprune_app.core.bounds import LARGEST_NUMBER
from fedprune_app.engine import wire

_SHOWN = 100  # characters of a property in an error
_ALLOWED = {  # by property, the allowed values for an error, if "the same on all nodes" is too little
    "own-data": "partition-ids on all nodes or on none",
    "classes": "the same on all nodes (a class's folder may be empty), or the key classes",
    "features": "the same columns in the same order in all tables",
    "features-digest": "the same columns in the same order in all tables",
}
_MOST_VALUES = 2**24  # of an image
_MOST_OUTPUTS = 2**32  # an image's values times the classes: the weights of a linear layer between them
_MOST_LAYERS, _MOST_DOCUMENTS = 1024, 64  # that a client with text may name


@dataclass(frozen=True)
class ClientInfo:
    """Properties of one client, from its reply at registration."""

    id: int  # its number in the run, from 0: never Flower's random node id
    node_id: int
    num_examples: int
    capacity: float | None  # share of the model that its node can train, if its operator sets one
    own_data: bool  # it has data of its own, and its number from the server
    # number of clients that share the data, from its operator; 0 with data of its own
    num_partitions: int = field(default=0, kw_only=True)
    name: str = field(default="", kw_only=True)  # of whose data it has, which a simulation alone tells

    @classmethod
    def read(cls, node_id: int, fields: wire.Fields) -> Self:
        """Read the ``fields`` of a node's reply. Raises ``ValueError`` that names an invalid field."""
        return cls(
            id=int(wire.number(fields, "partition", 0, 2**31)),
            node_id=node_id,
            num_examples=int(wire.number(fields, "num-examples", 1, 2**31)),
            capacity=float(wire.number(fields, "capacity", 1e-9, 1)) if "capacity" in fields else None,
            own_data=fields.get("own-data") is True,
            num_partitions=int(wire.number(fields, "num-partitions", 1, 2**31)) if "num-partitions" in fields else 0,
            name=str(fields.get("owner", ""))[:256],
            **cls.facts(fields),
        )

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        """Read the fields of this kind of client, without the common ones."""
        return {}

    def description(self) -> dict[str, Any]:
        return {}

    def common(self) -> tuple[tuple[str, Hashable], ...]:
        """Return the (name, value) pairs that must be equal for all clients of a run; None for one not reported."""
        return ("own-data", self.own_data), ("num-partitions", self.num_partitions)

    def place(self) -> str:
        """Return a description of the node for the user."""
        return f"node {self.node_id}"

    def difference(self, first: ClientInfo) -> str:
        """Return why no run can have both this client and ``first``; empty if one can."""
        for (name, value), (_, first_value) in zip(self.common(), first.common(), strict=True):
            if value != first_value and None not in (value, first_value):
                return (
                    f"{first.place()} has {name} {_in_words(first_value, value)} and {self.place()} "
                    f"{_in_words(value, first_value)}, allowed: {_ALLOWED.get(name, 'the same on all nodes')}"
                )
        return ""


@dataclass(frozen=True)
class ImageClientInfo(ClientInfo):
    """Properties of a client with images or table rows to classify."""

    image_shape: tuple[int, int, int]
    num_classes: int
    label_counts: Mapping[str, list[int]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # their names, empty if these are numbers
    data_dir: str = ""
    mean: tuple[float, ...] = ()  # by channel, for the normalisation of images; empty if not reported
    std: tuple[float, ...] = ()
    features: tuple[str, ...] = ()  # the columns of a dealt table, in order; empty for images
    features_digest: str = ""  # of the columns of the client's own table
    data_sha256: str = ""  # of all data that are dealt out; empty if not reported

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        shape = fields.get("image-shape")
        sizes = shape if isinstance(shape, list) else []
        if not (len(sizes) == 3 and all(type(n) is int and 0 < n <= 4096 for n in sizes)):
            raise ValueError(f"field 'image-shape' is {reprlib.repr(shape)}, allowed: three sizes")
        num_classes = int(wire.number(fields, "num-classes", 2, 10**6))
        if math.prod(sizes) > _MOST_VALUES or math.prod(sizes) * num_classes > _MOST_OUTPUTS:
            raise ValueError(
                f"field 'image-shape' is {sizes!r} with {num_classes} classes, "
                f"allowed: at most {_MOST_VALUES} values, {_MOST_OUTPUTS} times the classes"
            )
        counts = {
            part: _values(fields, f"labels-{part}", num_classes, _is_count, "a count per class")
            for part in ("train", "validation", "test")
        }
        classes = _values(fields, "classes", num_classes, _is_text, "a name per class")
        features = _values(fields, "features", math.prod(sizes), _is_text, "a name per number of an example")
        mean, std = (
            tuple(map(float, _values(fields, name, sizes[0], _is_number, f"{sizes[0]} numbers, one per channel")))
            for name in ("normalisation-mean", "normalisation-std")
        )
        if len(mean) != len(std) or (std and min(std) <= 0):
            raise ValueError(
                f"field 'normalisation-std' is {reprlib.repr(list(std))}, allowed: a number above 0 for each mean"
            )
        return {
            "image_shape": (sizes[0], sizes[1], sizes[2]),
            "num_classes": num_classes,
            "label_counts": counts,
            "classes": tuple(classes),
            "features": tuple(features),
            "features_digest": str(fields.get("features-digest", ""))[:64],
            "data_dir": str(fields.get("data-dir", ""))[:1024],
            "data_sha256": str(fields.get("data-sha256", ""))[:64],
            "mean": mean,
            "std": std,
        }

    def common(self) -> tuple[tuple[str, Hashable], ...]:
        return (
            *super().common(),
            ("classes", self.classes if self.own_data else None),
            ("image-shape", "x".join(map(str, self.image_shape))),
            ("num-classes", self.num_classes),
            ("features", self.features or None),
            ("features-digest", self.features_digest or None),
            ("data-sha256", self.data_sha256 or None),
        )

    def description(self) -> dict[str, Any]:
        return dict(self.label_counts)

    def place(self) -> str:
        return f"{super().place()}, data-dir {self.data_dir!r}," if self.own_data else super().place()


@dataclass(frozen=True)
class TextClientInfo(ClientInfo):
    """Properties of a client with text and a language model; ``num_examples`` counts its calibration segments.

    The strategy compares the digests with those of the server's model.
    """

    shell_digest: str
    layer_digests: tuple[str, ...]
    documents: tuple[str, ...] = ()

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        digests, documents = fields.get("layer-digests", ()), fields.get("documents", [])
        for name, values, limit in (
            ("layer-digests", digests, _MOST_LAYERS),
            ("documents", documents, _MOST_DOCUMENTS),
        ):
            if not (isinstance(values, list) and len(values) <= limit and all(map(_is_text, values))):
                raise ValueError(f"field '{name}' is {reprlib.repr(values)}, allowed: at most {limit} texts")
        return {
            "shell_digest": str(fields.get("shell-digest"))[:256],
            "layer_digests": tuple(digests),
            "documents": tuple(documents),
        }

    def description(self) -> dict[str, Any]:
        return {"segments": self.num_examples, "documents": list(self.documents)}


# the clients of a run by their numbers, ascending: Flower's node ids are random and unordered
Roster = dict[int, ClientInfo]


def _values(fields: wire.Fields, name: str, count: int, is_valid: Callable[[object], bool], allowed: str) -> list[Any]:
    """Read a list of ``count`` valid values, or an empty one. Raises ``ValueError`` with the field and ``allowed``."""
    values = fields.get(name, [])
    if not (isinstance(values, list) and len(values) in (0, count) and all(map(is_valid, values))):
        raise ValueError(f"field '{name}' is {reprlib.repr(values)}, allowed: {allowed}")
    return values


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 256


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= LARGEST_NUMBER  # NaN is not


def _in_words(value: Hashable, other: Hashable) -> str:
    """Return a property as text; names that the other client lacks come first."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return str(sorted(value, key=other.__contains__))[:_SHOWN]
    return str(value)[:_SHOWN]
