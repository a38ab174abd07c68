"""A task is what a client is asked, as one value; here alone Flower's messages become tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from flwr.app import RecordDict

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire


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
    fields: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def state_round(self) -> int:
        """The round of the update that the server last took in from this client, 0 for none."""
        return int(self.fields.get("state-round", 0))

    def digest(self) -> str:
        """Return the digest of all payloads together."""
        tensors, masks = dict(self.payload.tensors), dict(self.payload.masks)
        for sender, update in self.peer_updates.items():
            tensors |= {f"peer/{sender}/{name}": tensor for name, tensor in update.tensors.items()}
            masks |= {f"peer/{sender}/{name}": mask for name, mask in update.masks.items()}
        return Payload(tensors, masks).digest()

    @classmethod
    def from_message(cls, content: RecordDict, message_schema: wire.Schema, peer_schema: wire.Schema) -> Self:
        """Read a message. An update of another client that does not fit is noted and left out.

        Raises ``ValueError`` for a payload that cannot be decoded.
        """
        payload = wire.payload_of(content, message_schema.max_bytes)
        peer_updates, notes = wire.peer_updates_of(content, peer_schema)
        fields = wire.fields_of(content)
        return cls(int(fields["round"]), payload, peer_updates, fields, notes)
