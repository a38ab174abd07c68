"""The one loop over replies: each is counted, read and taken in as it arrives, and a bad one is named and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import RecordDict

from fedprune_app.engine import wire
from fedprune_app.engine.exchange import Answer
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.round import Round, RoundLog

Read = Callable[[int, RecordDict], dict[str, Any]]
"""Takes in the content of a client's reply, returns columns for the client's row. ``ValueError`` refuses the reply."""


def collect(exchange: str, answers: Iterable[Answer], log: RoundLog, read: Read) -> None:
    """Count each answer in ``log`` and have ``read`` take it in; ``exchange`` names what is going on, for the log."""
    for answer in answers:
        row = log.count(answer)
        try:
            if answer.content is None:
                raise ValueError(answer.error)
            row |= read(answer.client, answer.content)
        except Declined as declined:
            row |= declined.columns
            log.declined[answer.client] = str(declined)
            log.note(answer.client, str(declined))
        except ValueError as error:
            log.fail(exchange, answer, str(error))


class Declined(Exception):
    """A client says that its privacy budget does not bear the round: no failure. ``columns`` are for its row."""

    def __init__(self, reason: str, columns: dict[str, Any]) -> None:
        super().__init__(reason)
        self.columns = columns


def may_decline(read: Read, round: Round, budgets: Budgets) -> Read:
    """Wrap ``read`` for exchanges that cost privacy: a client that declines is not asked again."""
    if not budgets.enabled:
        return read

    def read_or_decline(client: int, content: RecordDict) -> dict[str, Any]:
        fields = wire.fields_of(content)
        if "declined" not in fields:
            return read(client, content)
        columns = budgets.take(client, {**fields, "budget-spent": True}, round.number, round.log.note)
        raise Declined(wire.one_line(str(fields["declined"])), columns)

    return read_or_decline


def notes_of(client: int, fields: wire.Fields, log: RoundLog, lose: Callable[[int, str], None]) -> None:
    """Enter what a reply says the client lost: a note in the round's record, a loss in run.json."""
    if "note" in fields:
        log.note(client, str(fields["note"]))
    if "lost" in fields:
        lose(client, str(fields["lost"]))
