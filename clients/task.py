"""A message to a client as one value, and its conversion from and to Flower's arrays and config.

Flower's ``NumPyClient`` takes a list of arrays and a dictionary. The names of the arrays travel in the dictionary;
those of an update of client 3, for example, begin with ``peer/3/``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from flwr.app import RecordDict

from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire

NDArrays = list[np.ndarray[Any, Any]]
_NOTES = "refused"  # the name of the notes in Flower's config
_PEER = "peer/"
_NAMES = ("tensor-names", "mask-names")


@dataclass(frozen=True)
class Task:
    """One message of the server, decoded for a client.

    * ``round``: the message's round.
    * ``payload``: the server's tensors and masks, possibly none.
    * ``peer_updates``: other clients' updates, by client, in systems where clients receive them.
    * ``fields``: the message's named values.
    * ``notes``: lines that the client adds while it works, for its reply.
    """

    round: int
    payload: Payload = Payload({})  # noqa: RUF009 - frozen, and its content is immutable
    peer_updates: Mapping[int, Payload] = field(default_factory=dict)
    fields: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def state_round(self) -> int:
        """The round of this client's last accepted update, 0 for none."""
        return int(self.fields.get("state-round", 0))

    def digest(self) -> str:
        """Return the digest of all payloads together."""
        return self._as_one_payload().digest()

    # --- conversion ---------------------------------------------------------------------------------------------

    @classmethod
    def from_message(cls, content: RecordDict, message_schema: wire.Schema, peer_schema: wire.Schema) -> Self:
        """Decode a message. An update of another client that does not match its schema is noted and left out.

        Raises ``ValueError`` for a payload that cannot be decoded.
        """
        payload = wire.payload_of(content, message_schema.max_bytes)
        peer_updates, notes = wire.peer_updates_of(content, peer_schema)
        fields = wire.fields_of(content)
        return cls(int(fields["round"]), payload, peer_updates, fields, notes)

    def to_numpy(self) -> tuple[NDArrays, ValueDict]:
        """Return the task as Flower's ``NumPyClient`` takes it."""
        payload = self._as_one_payload()
        return payload.to_ndarrays(), {**self.fields, "round": self.round, _NOTES: self.notes} | names_of(payload)

    @classmethod
    def from_numpy(cls, arrays: NDArrays, config: Values) -> Self:
        """Undo :meth:`to_numpy`; the payloads share their memory with the arrays."""
        fields = {name: value for name, value in config.items() if name not in (_NOTES, *_NAMES)}
        payload, peer_updates = _split_payload(payload_from_numpy(arrays, config))
        return cls(int(fields["round"]), payload, peer_updates, fields, list(config.get(_NOTES, [])))

    def _as_one_payload(self) -> Payload:
        tensors, masks = dict(self.payload.tensors), dict(self.payload.masks)
        for sender, update in self.peer_updates.items():
            tensors |= {f"{_PEER}{sender}/{name}": tensor for name, tensor in update.tensors.items()}
            masks |= {f"{_PEER}{sender}/{name}": mask for name, mask in update.masks.items()}
        return Payload(tensors, masks)


def _split_payload(payload: Payload) -> tuple[Payload, dict[int, Payload]]:
    senders = dict.fromkeys(int(name.split("/")[1]) for name in payload.tensors if name.startswith(_PEER))
    updates = {}
    for sender in senders:
        start = f"{_PEER}{sender}/"
        parts = [
            {name.removeprefix(start): tensor for name, tensor in part.items() if name.startswith(start)}
            for part in (payload.tensors, payload.masks)
        ]
        updates[sender] = Payload(*parts)
    own_tensors = {name: tensor for name, tensor in payload.tensors.items() if not name.startswith(_PEER)}
    own_masks = {name: mask for name, mask in payload.masks.items() if not name.startswith(_PEER)}
    return Payload(own_tensors, own_masks), updates


def names_of(payload: Payload) -> dict[str, list[str]]:
    """Return the names of the arrays, which Flower's list lacks, for the config beside it."""
    return dict(zip(_NAMES, (list(payload.tensors), list(payload.masks)), strict=True))


def payload_from_numpy(arrays: NDArrays, config: Values) -> Payload:
    """Return the payload of Flower's list of arrays and the names in ``config``."""
    return Payload.from_ndarrays(arrays, *(config[names] for names in _NAMES))


def reply_from_numpy(arrays: NDArrays, metrics: Values) -> tuple[Payload, ValueDict]:
    """Return the payload and the fields of a client's ``fit``."""
    return payload_from_numpy(arrays, metrics), {n: value for n, value in metrics.items() if n not in _NAMES}
