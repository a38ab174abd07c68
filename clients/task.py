"""A task is what a client is asked, as one value; here alone Flower's arrays and config become tasks, and back.

Flower's ``NumPyClient`` takes a list of arrays and a dictionary. The names of the arrays travel in the dictionary, and
those of a neighbour's update, from client 3 say, begin with ``peer/3/``.
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
_NOTES = "refused"  # the name in Flower's config under which notes come
_PEER = "peer/"
_NAMES = ("tensor-names", "mask-names")


@dataclass(frozen=True)
class Task:
    """A task is what the server asks of a client in one message.

    * ``round``: the round that the message is of.
    * ``payload``: what the server sends, empty where it sends nothing.
    * ``peer_updates``: what other clients published, by client, in systems where clients see each other's updates.
    * ``fields``: the named values beside them.
    * ``notes``: what the client writes down while it works. Its reply tells them.
    """

    round: int
    payload: Payload = Payload({})  # noqa: RUF009 - frozen, and what it holds cannot be changed
    peer_updates: Mapping[int, Payload] = field(default_factory=dict)
    fields: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def state_round(self) -> int:
        """The round of the update that the server last took in from this client, 0 for none."""
        return int(self.fields.get("state-round", 0))

    def digest(self) -> str:
        """Return the digest of all payloads together."""
        return self._as_one_payload().digest()

    # --- the threshold ------------------------------------------------------------------------------------------

    @classmethod
    def from_message(cls, content: RecordDict, message_schema: wire.Schema, peer_schema: wire.Schema) -> Self:
        """Read a message. An update of another client that does not fit is noted and left out.

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
    """Return the names that Flower's list of arrays lacks, as they travel beside the list."""
    return dict(zip(_NAMES, (list(payload.tensors), list(payload.masks)), strict=True))


def payload_from_numpy(arrays: NDArrays, config: Values) -> Payload:
    """Return the payload that Flower's list of arrays and the names in ``config`` make."""
    return Payload.from_ndarrays(arrays, *(config[names] for names in _NAMES))


def reply_from_numpy(arrays: NDArrays, metrics: Values) -> tuple[Payload, ValueDict]:
    """Return what a client's ``fit`` answered: the payload, and the fields beside it."""
    return payload_from_numpy(arrays, metrics), {n: value for n, value in metrics.items() if n not in _NAMES}
