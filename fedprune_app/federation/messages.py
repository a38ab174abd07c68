"""The server's messages: a strategy says what each client is sent, and here it becomes Flower's messages."""

from collections.abc import Iterable, Iterator, Mapping

from flwr.app import Message

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import message_to
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.round import Outgoing, Round, RunContext


def messages(
    context: RunContext,
    round: Round,
    outgoing: Iterable[Outgoing],
    kind: str,
    state_rounds: Mapping[int, int],
    budgets: Budgets,
) -> Iterator[tuple[int, Message]]:
    """Yield (client, message), each made when it is sent: a message that has left is not kept while the next is made.

    ``state_rounds`` tells each client which version of its state the server last took in.
    """
    payload: Payload | None = None
    arrays: wire.EncodedArrays | None = None
    for message in outgoing:
        if message.payload is not payload:
            payload = message.payload
            arrays = wire.to_arrays(payload) if payload.tensors else None
        client = context.clients[message.client]
        fields = {
            **message.fields,
            "round": round.number,
            "run-key": context.run_key,
            "state-round": state_rounds.get(client.id, 0),
            "evaluates": round.evaluates,
        }
        if (epsilon := budgets.epsilon_of(client.id)) is not None:
            fields["epsilon-rdp"] = epsilon  # the client's ledger must hold as much
        if client.own_data:
            fields["partition"] = client.id  # its operator gave it none
        content = wire.pack(arrays, fields, message.peer_updates)
        del message
        yield client.id, message_to(client.node_id, content, kind, round.number, context.config.deadline_seconds)
        del content
