"""Evaluations: of clients' models after a round, of newcomers after the last one, and after one more local phase."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.federation.exchanges import channel_of, exchange
from fedprune_app.federation.round import Round, RoundLog
from fedprune_app.results import metrics
from fedprune_app.results.statistics import mean

if TYPE_CHECKING:  # only the hooks of the base class: nothing here knows a system
    from strategies.base import FederatedStrategy

EVALUATION = metrics.ReplyKind.EVALUATION
# a client's columns after a last phase, and those of an evaluation that say the same of its model then
_LAST_PHASE = {"accuracy_last_phase": "accuracy_personal", "accuracy_last_phase_validation": "accuracy_validation"}


def evaluate(strategy: FederatedStrategy, round: Round) -> dict[str, Any]:
    """Have clients evaluate; return the columns of the round's record over those that replied.

    Raises :class:`fedprune_app.engine.exchange.TooFewReplies`. With ``dp.enabled`` the error is the column ``failure``:
    what came is paid for, and is recorded first.
    """
    log, participation = RoundLog(notes=round.log.notes), strategy.participation
    evaluators = participation.evaluators(round.number)
    outgoing = (message for message in strategy.send_to_evaluate(round) if message.client in evaluators)
    name, least = f"the evaluation of round {round.number}", strategy.config.min_replies
    rows_by_client: dict[int, dict[str, Any]] = {}
    failure = {}
    try:
        for reply in exchange(replace(round, log=log), outgoing, name=name, kind=EVALUATION, least=least):
            with log.rejecting(reply):
                reply.row = {"num_examples": reply.num_examples, "digest": digest_in(reply.fields)}
                reply.row |= strategy.metrics.evaluation_row(reply)
                rows_by_client[reply.client] = reply.row
    except TooFewReplies as error:
        if not strategy.config.dp.enabled:
            raise
        failure = {"failure": error}
    rows = dict(sorted(rows_by_client.items()))
    strategy.digests = {client: row.pop("digest") for client, row in rows.items()}
    columns = {
        "evaluation_bytes_up": log.bytes_up,
        "evaluation_bytes_down": log.bytes_down,
        **strategy.budgets.columns(),
        "evaluated": len(rows),
        "clients": len(participation.members),
        "evaluation_failures": len(log.failures),
        **strategy.metrics.evaluation_columns(round, rows),
        **failure,
    }
    for client, row in rows.items():
        round.log.clients.setdefault(client, {}).update(row)
    return columns


def newcomers(strategy: FederatedStrategy, round: Round) -> dict[str, Any]:
    """Have the held-out clients join after the last ``round``; return the columns of its record.

    Each receives a participant's message and trains for one local phase. Its reply is discarded. Then it is tested on
    its own data.
    """
    phase = strategy.participation.following(round, strategy.participation.holdouts, round.log)
    _local_phase(strategy, "the clients that were held out", {"accuracy_newcomer": "accuracy_personal"}, phase)
    return {**_mean_of("accuracy_newcomer", round.log), **strategy.budgets.columns()}


def last_phase(strategy: FederatedStrategy, round: Round) -> dict[str, Any]:
    """Have every member train once more after the last ``round``; return the columns of its record.

    Each receives a participant's message, and its reply is discarded. It is tested with the model that it has trained,
    so the test's message is empty. Systems that fine-tune for every test have done this phase already.
    """
    log, rows, flops = RoundLog(notes=round.log.notes), round.log.clients, None
    if not strategy.fine_tunes:
        phase = strategy.participation.following(round, strategy.participation.members, log)
        flops = _local_phase(strategy, "the last phase", _LAST_PHASE, phase, Payload({}))
    tested_rows = rows if strategy.fine_tunes else log.clients
    for client in strategy.participation.members:
        tested = tested_rows.get(client, {})
        of_client = {name: tested.get(own if strategy.fine_tunes else name) for name, own in _LAST_PHASE.items()}
        rows.setdefault(client, {}).update(of_client)
    costs = {"bytes_up": log.bytes_up, "bytes_down": log.bytes_down, "flops": flops}
    means = {key: value for name in _LAST_PHASE for key, value in _mean_of(name, round.log).items()}
    return {**means, **{f"last_phase_{key}": cost for key, cost in costs.items()}}


def _local_phase(
    strategy: FederatedStrategy,
    name: str,
    columns: Mapping[str, str],
    phase: Round,
    tested: Payload | None = None,
) -> float:
    """Have the participants of ``phase`` train, discard their updates, and test them; return the FLOPs of training.

    ``columns`` of a client's row are recorded, each by that of an evaluation. The payload ``tested`` replaces that of
    the evaluation's message; without it the client's tested model counts as its final one.
    """
    channel, flops = channel_of(phase), 0.0
    phase = replace(phase, channel=replace(channel, state_rounds=dict(channel.state_rounds)))
    strategy.begin(phase)
    trained = set[int]()
    sent, into = strategy.send(phase), strategy.accumulator()
    for reply in exchange(phase, sent, strategy.expect, name=name, into=into, discards=True):
        for client, row in reply.by_client.items():
            flops += row["flops"]
            row.clear()
            trained.add(client)
    requests = (
        message if tested is None else replace(message, payload=tested)
        for message in strategy.send_to_evaluate(phase)
        if message.client in trained
    )
    for reply in exchange(phase, requests, name=name, kind=EVALUATION):
        with phase.log.rejecting(reply):
            if tested is None:
                strategy.digests[reply.client] = digest_in(reply.fields)
            found = strategy.metrics.evaluation_row(reply)
            reply.row = {column: found.get(own) for column, own in columns.items()}
    return flops


def digest_in(fields: wire.Fields) -> str:
    """Return the digest of the client's model. Raises ``ValueError`` for an invalid one."""
    digest = fields.get("digest")
    if not (isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
        raise ValueError(f"field 'digest' is {reprlib.repr(digest)}, allowed: 64 hexadecimal digits")
    return digest


def _mean_of(column: str, log: RoundLog) -> dict[str, float | None]:
    """Return the mean of a column over the clients that have it, in ascending order."""
    values = [row[column] for _, row in sorted(log.clients.items()) if row.get(column) is not None]
    return {f"{column}_mean": mean(values) if values else None}
