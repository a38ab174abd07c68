"""The one loop over replies: each is counted, read and taken in as it arrives, and a bad one is named and left out."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import RecordDict

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import Answer
from fedprune_app.federation.round import RoundLog

# takes in a client's reply, its named values and its content; returns columns. ``ValueError`` refuses the reply
Read = Callable[[int, wire.Fields, RecordDict], dict[str, Any]]


def collect(exchange: str, answers: Iterable[Answer], log: RoundLog, read: Read) -> None:
    """Count each answer in ``log`` and have ``read`` take it in; ``exchange`` names what is going on, for the log."""
    for answer in answers:
        row = log.count(answer)
        try:
            if answer.content is None:
                raise ValueError(answer.error)
            row |= read(answer.client, wire.fields_of(answer.content), answer.content)
        except ValueError as error:
            log.fail(exchange, answer, str(error))


def notes_of(client: int, fields: wire.Fields, log: RoundLog, lose: Callable[[int, str], None]) -> None:
    """Enter what a reply says the client lost: a note in the round's record, a loss in run.json."""
    if "note" in fields:
        log.note(client, str(fields["note"]))
    if "lost" in fields:
        lose(client, str(fields["lost"]))
