"""Messages to clients, and their replies one by one: decoded, checked, charged and counted.

Every reply passes the same checks, in all systems. A round is a plain loop::

    for reply in exchange(round, strategy.send(round), strategy.expect):
        with round.log.rejecting(reply):
            strategy.receive(round, reply)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType

from fedprune_app.core.holders import HOLDERS
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import ReceivedReply, TooFewReplies, message_to, require, send_and_receive
from fedprune_app.engine.secure_aggregation import AGREE, INPUT, KEYS, MASKED, OPEN, SHARES, SecureSum, body_of
from fedprune_app.federation.round import Channel, OutgoingMessage, Reply, Round
from fedprune_app.results import metrics
from fedprune_app.results.recorder import number_in, row_of

TRAINING, LAYER, ANSWER = metrics.ReplyKind.TRAINING, metrics.ReplyKind.LAYER, metrics.ReplyKind.ANSWER
Expect = Callable[[Round, int], wire.Schema]


class Accumulator(Protocol):
    """What adds replies up in integers, which clients compute by the same ``terms``."""

    @property
    def terms(self) -> Mapping[str, int]: ...

    def integer_shapes(self, shapes: Mapping[str, torch.Size], /) -> dict[str, torch.Size]:
        """Return the names and shapes of the integers of a reply with these tensors."""


def exchange(
    round: Round,
    outgoing: Iterable[OutgoingMessage],
    expect: Expect | None = None,
    *,
    name: str = "",
    kind: metrics.ReplyKind = TRAINING,
    least: int = 0,
    into: Accumulator | None = None,
    discards: bool = False,
) -> Iterator[Reply]:
    """Send messages and yield each valid reply as it arrives, one at a time; count all of them in the round's log.

    ``expect(round, client)`` is the schema of a reply's payload; without it replies have none. ``kind`` selects the
    metrics that replies report, and ``name`` is the exchange's name in the log. A reply that is late, rejected or
    declined is not yielded: its reason is in the log. A yielded one counts unless the caller rejects it, see
    :meth:`RoundLog.rejecting`. Raises :class:`fedprune_app.engine.exchange.TooFewReplies` at the end if fewer than
    ``least`` replies counted. ``into`` is what the caller adds the replies up with, if it does nothing else with them:
    with ``secure-sums`` one reply is then yielded, the sum of all, which is not opened if the caller ``discards`` it.
    """
    name = name or f"round {round.number}"
    if channel_of(round).context.config.secure_sums and into is not None and expect is not None:
        return _summed(round, outgoing, expect, name, kind, least, into, discards)
    return _one_by_one(round, outgoing, expect, name, kind, least)


def _one_by_one(
    round: Round,
    outgoing: Iterable[OutgoingMessage],
    expect: Expect | None,
    name: str,
    kind: metrics.ReplyKind,
    least: int,
) -> Iterator[Reply]:
    channel, log = channel_of(round), round.log
    max_bytes = max((expect(round, client).max_bytes for client in round.participants), default=0) if expect else 0
    num_good, num_failures = 0, len(log.failures)
    stream = messages(round, outgoing, MessageType.EVALUATE if kind.is_evaluation else MessageType.TRAIN)
    deadline = channel.context.config.deadline_seconds
    for answer in send_and_receive(channel.grid, stream, deadline, reply_bytes=max_bytes):
        row = log.count(answer)
        reply = Reply(answer.client, channel.context.clients[answer.client].num_examples, name, answer.late)
        with log.rejecting(reply):
            _read(round, reply, answer, expect, kind)
        del answer
        if reply.counts:
            yield reply
        if reply.counts:  # the caller did not reject it
            reply.row |= channel.budgets.record(reply.client, reply.fields, round.number, log.note)
            row |= reply.row
            if kind in (TRAINING, LAYER):
                log.replies += 1
                channel.state_rounds[reply.client] = round.number
        num_good += reply.counts or (reply.client in log.declined and not kind.is_evaluation)
        reply.update, reply.encoded = Payload({}), None  # its memory is free before the next reply is fetched
    require(num_good, least, name, log.failures[num_failures:])


def _summed(
    round: Round,
    outgoing: Iterable[OutgoingMessage],
    expect: Expect,
    name: str,
    kind: metrics.ReplyKind,
    least: int,
    into: Accumulator,
    discards: bool,
) -> Iterator[Reply]:
    """Yield one reply that is the sum of all, of which none is seen; see :mod:`fedprune_app.engine.secure_aggregation`.

    Raises :class:`fedprune_app.engine.exchange.TooFewReplies` too where the sum is rejected.
    """
    log, inputs, context = round.log, list(outgoing), channel_of(round).context
    threshold, members = context.config.secure_sums_threshold, [message.client for message in inputs]
    # members refuse to open a sum of other members for the same message: a repeated round has the same ones
    earlier, key = context.recorder.info.get("sum_members", {}), f"{round.number}: {name}"
    schema = expect(round, members[0])
    if schema.masked and HOLDERS not in into.terms:
        raise ValueError("replies have masks, allowed in a secure sum: none, since one client's weights would be alone")
    sent = schema.shapes
    received = wire.digest_of(inputs[0].payload, sent) + str(inputs[0].fields.get("model", ""))
    secure = SecureSum(name, threshold, members, into.terms, received, least)
    for stage in (KEYS, SHARES):
        _ask_members(round, secure, stage)
    shapes = dict(sorted(into.integer_shapes(sent).items()))
    sizes = [shape.numel() for shape in shapes.values()]
    masked = {MASKED: torch.Size([sum(sizes)])}
    schema = wire.Schema(masked, {MASKED: torch.int64}, unscaled=frozenset(masked))
    inputs = [
        replace(message, fields={**message.fields, **secure.message(INPUT, message.client)})
        for message in inputs
        if message.client in secure.members
    ]
    total, num_failures = Reply(-1, 0, name, counts=True), len(log.failures)
    for reply in _one_by_one(round, inputs, lambda *_: schema, name, kind, 0):
        with log.rejecting(reply):
            if reply.client not in earlier.get(key, members):
                raise ValueError("it was lost when the server lost this sum, allowed: the same members")
            secure.add(reply.client, reply.update.tensors[MASKED].numpy().view(np.uint64))
            total.num_examples += reply.num_examples
            total.rows[reply.client], reply.row = reply.row, {}
    secure.close(INPUT, log.failures[num_failures:])
    if not discards:  # members would refuse to open another sum for the same message, such as that of a longer run
        if secure.survivors != members:
            context.recorder.annotate(sum_members={**earlier, key: secure.survivors})
        for stage in (AGREE, OPEN):
            _ask_members(round, secure, stage)
        words = torch.from_numpy(secure.unmasked().view(np.int64))
        parts = zip(shapes, torch.split(words, sizes), strict=True)
        total.update = Payload({key: part.view(shapes[key]) for key, part in parts})
    yield total
    if not total.counts:
        raise TooFewReplies(log.failures[-1])
    for client, row in total.rows.items():
        log.clients[client] |= row


def _ask_members(round: Round, secure: SecureSum, stage: str) -> None:
    """Take the members of a secure sum through a stage, and end it."""
    num_failures = len(round.log.failures)
    requests = [OutgoingMessage(client, fields=secure.message(stage, client)) for client in secure.members]
    for reply in _one_by_one(round, requests, None, f"stage '{stage}' of {secure.name}", ANSWER, 0):
        with round.log.rejecting(reply):
            secure.take(stage, reply.client, body_of(reply.fields, stage))
    secure.close(stage, round.log.failures[num_failures:])


def request_payloads(
    round: Round,
    name: str,
    outgoing: Iterable[OutgoingMessage],
    schema: wire.Schema,
    into: Accumulator | None = None,
    least: int = 0,
) -> Iterator[Reply]:
    """Request a payload of this schema from clients within a round, and yield each valid reply.

    Clients reply by ``answer(task, state)``, and keep no new state. ``into`` is as in :func:`exchange`. Raises
    :class:`fedprune_app.engine.exchange.TooFewReplies` if fewer than ``least`` or ``min-replies`` replies counted.
    """
    requests = (replace(message, fields={**message.fields, "asks": name}) for message in outgoing)
    least = max(least, channel_of(round).context.config.min_replies)
    return exchange(round, requests, lambda *_: schema, name=name, kind=ANSWER, least=least, into=into)


def channel_of(round: Round) -> Channel:
    """Return the channel of a round. Raises ``ValueError`` for a round outside a run, which has none."""
    if round.channel is None:
        raise ValueError(f"round {round.number} has no channel, allowed: a round of a run")
    return round.channel


def _read(round: Round, reply: Reply, answer: ReceivedReply, expect: Expect | None, kind: metrics.ReplyKind) -> None:
    """Decode and check what arrived into ``reply``. Raises ``ValueError`` with the reason to reject it.

    A client declines if its privacy budget cannot pay for the round: that is no failure, and the client is not sampled
    again.
    """
    if answer.content is None:
        raise ValueError(answer.error)
    channel, log, client = channel_of(round), round.log, reply.client
    config, budgets = channel.context.config, channel.budgets
    reply.fields = fields = wire.fields_of(answer.content)
    if budgets.enabled and "declined" in fields:
        log.clients[client] |= budgets.record(client, {**fields, "budget-spent": True}, round.number, log.note)
        log.declined[client] = wire.one_line(str(fields["declined"]))
        log.note(client, log.declined[client])
        return
    budgets.check(fields)  # before the reply has any effect
    if kind in (TRAINING, LAYER):
        num_examples = number_in("num_examples", fields)
        numbers = row_of(kind, fields, private=config.dp.enabled, declared=channel.declarations)
        reply.row = {"num_examples": num_examples, **numbers}
        if num_examples != reply.num_examples:
            raise ValueError(f"field 'num-examples' is {num_examples}, it said {reply.num_examples} before")
    if "note" in fields:
        log.note(client, str(fields["note"]))
    if "lost" in fields:
        channel.context.mark_lost(client, str(fields["lost"]))
    if expect is not None:
        reply.encoded = wire.arrays_of(answer.content)
        reply.update = expect(round, client).read(reply.encoded)
    reply.counts = True


def messages(round: Round, outgoing: Iterable[OutgoingMessage], kind: str) -> Iterator[tuple[int, Message]]:
    """Yield (client, message), each made when it is sent, so that only one is in memory.

    Each has the round of the client's last accepted update, by which the client selects its state.
    """
    channel = channel_of(round)
    context = channel.context
    payload: Payload | None = None
    arrays: ArrayRecord | None = None
    for message in outgoing:
        if message.payload is not payload:
            payload = message.payload
            arrays = wire.to_arrays(payload) if payload.tensors else None
        client = context.clients[message.client]
        fields = {
            **message.fields,
            "round": round.number,
            "partition": client.id,
            "run-key": context.run_key,
            "state-round": channel.state_rounds.get(client.id, 0),
            "evaluates": round.evaluates,
        }
        if (epsilon := channel.budgets.epsilon_of(client.id)) is not None:
            fields["epsilon-rdp"] = epsilon  # the client's ledger must have at least this ε
        if client.capacity is not None:
            fields["capacity"] = client.capacity
        content = wire.pack(arrays, fields, message.peer_updates)
        del message
        yield client.id, message_to(client.node_id, content, kind, round.number, context.config.deadline_seconds)
        del content
