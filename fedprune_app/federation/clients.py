"""The server keeps here what each client said of itself when the run began."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from fedprune_app.core.bounds import LARGEST_SAID
from fedprune_app.engine import wire

_NAMES_SHOWN = 12
# the network tells columns apart by their place alone
_OTHER_COLUMNS = "other columns, or the same in another order, allowed: the same in the same order in all tables"
_MOST_VALUES = 2**24  # of an image
_MOST_OUTPUTS = 2**32  # an image's values times the classes: what a linear layer between them would hold
_MOST_LAYERS, _MOST_DOCUMENTS = 1024, 64  # that a client of text names


@dataclass(frozen=True)
class ClientInfo:
    """The server knows this of one client, from the client's answer to the first query."""

    id: int  # its number in the run, from 0: never Flower's random node id
    node_id: int
    num_examples: int
    capacity: float | None  # share of the model that its node can bear, where its operator says so
    own_data: bool  # it has data of its own, and its number from the server
    # among how many clients the data are divided, as its operator says; 0 with data of its own
    num_partitions: int = field(default=0, kw_only=True)

    @classmethod
    def read(cls, node_id: int, fields: wire.Fields) -> Self:
        """Read the ``fields`` of a node's answer. Raises ``ValueError`` naming a field that cannot be."""
        return cls(
            id=int(wire.number(fields, "partition", 0, 2**31)),
            node_id=node_id,
            num_examples=int(wire.number(fields, "num-examples", 1, 2**31)),
            capacity=float(wire.number(fields, "capacity", 1e-9, 1)) if "capacity" in fields else None,
            own_data=fields.get("own-data") is True,
            num_partitions=int(wire.number(fields, "num-partitions", 1, 2**31)) if "num-partitions" in fields else 0,
            **cls.facts(fields),
        )

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        """Read the fields that this kind of client has beside the common ones."""
        return {}

    def description(self) -> dict[str, Any]:
        """Describe the data that the client holds, for run.json."""
        return {}

    def common(self) -> tuple[Any, ...]:
        """Return the facts in which all clients of a run must agree."""
        return (self.own_data, self.num_partitions)

    def unlike(self, first: ClientInfo) -> str:
        """Say why this client cannot take part in a run with the client ``first``; an empty text if it can."""
        return ""

    def contradicts(self, first: ClientInfo) -> str:
        """Say why no run can have both this client and the client ``first``; an empty text if a run can.

        Where as many clients are like the one as like the other, nobody can say which of them the run is about.
        """
        if self.own_data == first.own_data:
            if self.num_partitions == first.num_partitions:
                return ""
            return (
                f"node {first.node_id} has num-partitions={first.num_partitions} and node {self.node_id} "
                f"{self.num_partitions}, allowed: the same on all nodes"
            )
        owner, other = (self, first) if self.own_data else (first, self)
        return (
            f"node {owner.node_id} has data of its own and node {other.node_id} partition-id {other.id}, "
            "allowed: partition-ids on all nodes or on none"
        )


@dataclass(frozen=True)
class ImageClientInfo(ClientInfo):
    """A client that classifies images."""

    image_shape: tuple[int, int, int]
    num_classes: int
    label_counts: Mapping[str, list[int]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # their names, empty where these are numbers
    data_dir: str = ""
    mean: tuple[float, ...] = ()  # by channel, with which images are normalised; empty where this is not told
    std: tuple[float, ...] = ()
    features: tuple[str, ...] = ()  # the columns of a dealt table, in order; empty for images
    features_digest: str = ""  # of those of the client's own table
    data_sha256: str = ""  # of all data that are dealt out; empty where this is not told

    @classmethod
    def facts(cls, fields: wire.Fields) -> dict[str, Any]:
        shape = fields.get("image-shape")
        sizes = shape if isinstance(shape, list) else []
        if not (len(sizes) == 3 and all(type(n) is int and 0 < n <= 4096 for n in sizes)):
            raise ValueError(f"field 'image-shape' is {reprlib.repr(shape)}, allowed: three sizes")
        num_classes = int(wire.number(fields, "num-classes", 2, 10**6))
        if math.prod(sizes) > _MOST_VALUES or math.prod(sizes) * num_classes > _MOST_OUTPUTS:
            allowed = f"at most {_MOST_VALUES} values, {_MOST_OUTPUTS} times the classes"
            raise ValueError(f"field 'image-shape' is {sizes!r} with {num_classes} classes, allowed: {allowed}")
        counts = {}
        for part in ("train", "validation", "test"):
            values = fields.get(f"labels-{part}", [])
            is_list = isinstance(values, list) and len(values) in (0, num_classes)
            if not (is_list and all(type(n) is int and 0 <= n < 2**53 for n in values)):
                raise ValueError(f"field 'labels-{part}' is {reprlib.repr(values)}, allowed: counts per class")
            counts[part] = list(values)
        classes = _names(fields, "classes", num_classes, "class")
        features = _names(fields, "features", math.prod(sizes), "number of an example")
        mean, std = (_channel_values(fields, name, sizes[0]) for name in ("normalisation-mean", "normalisation-std"))
        if len(mean) != len(std) or (std and min(std) <= 0):
            raise ValueError(
                f"field 'normalisation-std' is {reprlib.repr(list(std))}, allowed: a number above 0 for each mean"
            )
        return {
            "image_shape": (sizes[0], sizes[1], sizes[2]),
            "num_classes": num_classes,
            "label_counts": counts,
            "classes": classes,
            "features": features,
            "features_digest": str(fields.get("features-digest", ""))[:64],
            "data_dir": str(fields.get("data-dir", ""))[:1024],
            "data_sha256": str(fields.get("data-sha256", ""))[:64],
            "mean": mean,
            "std": std,
        }

    def common(self) -> tuple[Any, ...]:
        classes = self.own_data and self.classes
        columns = self.features, self.features_digest
        return (*super().common(), classes, self.image_shape, self.num_classes, *columns)

    def description(self) -> dict[str, Any]:
        return dict(self.label_counts)

    def contradicts(self, first: ClientInfo) -> str:
        assert isinstance(first, ImageClientInfo)
        if not (self.own_data and first.own_data):
            return super().contradicts(first)
        if self.classes == first.classes:
            if self._has_columns_of(first):
                return ""
            return f"{first._place()} and {self._place()} have {_OTHER_COLUMNS}"
        extra_names, missing_names = (
            sorted({*self.classes} - {*first.classes}),
            sorted({*first.classes} - {*self.classes}),
        )
        return (
            f"{first._place()} has the classes {_names_text(first.classes)}; {self._place()} lacks "
            f"{_names_text(missing_names)} and has {_names_text(extra_names)} besides; allowed: the same on all nodes "
            "(a class's folder may be empty), or the key classes"
        )

    def _has_columns_of(self, first: ImageClientInfo) -> bool:
        """Return whether both have the same columns in the same order, as far as they tell."""
        pairs = (self.features, first.features), (self.features_digest, first.features_digest)
        return all(value == first_value or not (value and first_value) for value, first_value in pairs)

    def _place(self) -> str:
        return f"node {self.node_id}, data-dir {self.data_dir!r},"

    def unlike(self, first: ClientInfo) -> str:
        assert isinstance(first, ImageClientInfo)
        if not self._has_columns_of(first):
            return f"has {_OTHER_COLUMNS}"
        if (self.image_shape, self.num_classes) == (first.image_shape, first.num_classes):
            return ""
        first_shape = f"{first.image_shape} of {first.num_classes}"
        return f"has images {self.image_shape} of {self.num_classes} classes, allowed: as most have, {first_shape}"


@dataclass(frozen=True)
class TextClientInfo(ClientInfo):
    """A client that holds text and a language model; ``num_examples`` counts its calibration segments.

    The strategy holds the server's model, so the strategy compares the digests with it.
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
            if not (isinstance(values, list) and len(values) <= limit) or not all(
                isinstance(v, str) and len(v) <= 256 for v in values
            ):
                raise ValueError(f"field '{name}' is {reprlib.repr(values)}, allowed: at most {limit} texts")
        return {
            "shell_digest": str(fields.get("shell-digest"))[:256],
            "layer_digests": tuple(digests),
            "documents": tuple(documents),
        }

    def description(self) -> dict[str, Any]:
        return {"segments": self.num_examples, "documents": list(self.documents)}


Roster = dict[int, ClientInfo]
"""The clients of a run by their numbers, ascending: Flower's node ids are random and unordered."""


def _names(fields: wire.Fields, name: str, count: int, unit: str) -> tuple[str, ...]:
    """Read a list of ``count`` names, or none. Raises ``ValueError`` naming the field."""
    values = fields.get(name, [])
    is_list = isinstance(values, list) and len(values) in (0, count)
    if not (is_list and all(isinstance(value, str) and len(value) <= 256 for value in values)):
        raise ValueError(f"field '{name}' is {reprlib.repr(values)}, allowed: a name per {unit}")
    return tuple(values)


def _channel_values(fields: wire.Fields, name: str, channels: int) -> tuple[float, ...]:
    values = fields.get(name, [])
    is_list = isinstance(values, list) and len(values) in (0, channels)
    if not (is_list and all(type(v) in (int, float) and abs(v) <= LARGEST_SAID for v in values)):  # NaN is not
        raise ValueError(f"field '{name}' is {reprlib.repr(values)}, allowed: {channels} numbers, one per channel")
    return tuple(map(float, values))


def _names_text(names: Sequence[str]) -> str:
    """Return the first few names, as prose."""
    text = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    num_more = len(names) - _NAMES_SHOWN
    return (text + (f" and {num_more} more" if num_more > 0 else "")) or "none"
