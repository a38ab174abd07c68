"""What strategies and the loop exchange with clients: training, questions within a round, evaluation.

Every reply passes the same checks on its way in, whichever system asked for it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import Answer, exchange, message_to, require
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.participation import Budgets
from fedprune_app.federation.round import Outgoing, Round, RoundLog, RunContext
from fedprune_app.results.measures import Measures, Reply
from fedprune_app.results.recorder import from_training, number_in, round_columns, row_of
from fedprune_app.results.statistics import mean

if TYPE_CHECKING:  # its hooks say what a system does; nothing here knows a system
    from strategies.base import FederatedStrategy

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


# columns by client, ascending
Rows = Mapping[int, dict[str, Any]]


class Exchanges:
    """The exchanges that a strategy can have with its clients, and what is recorded of them.

    A system whose rounds have other exchanges, or whose clients do not learn from images, has a class of its own.
    """

    def __init__(self, strategy: FederatedStrategy, grid: Grid) -> None:
        self.strategy = strategy
        self.grid = grid

    def train_round(self, round: Round) -> dict[str, Any]:
        """Exchange messages with the participants, here once; return columns of the round's record."""
        strategy, name = self.strategy, f"round {round.number}"
        self.train(name, round, strategy.send(round), strategy.reply_bytes(round))
        num_good = round.log.replies + len(round.log.declined)
        require(num_good, strategy.context.config.min_replies, name, round.log.failures)
        return training_columns(round, strategy.budgets, strategy.measures)

    def train(self, name: str, round: Round, outgoing: Iterable[Outgoing], reply_bytes: int) -> None:
        """Have clients train and take in their replies, of at most ``reply_bytes`` each when decoded, as the round's.

        ``name`` says in the log what is exchanged.
        """
        strategy = self.strategy

        def read(client: int, fields: wire.Fields, content: RecordDict) -> dict[str, Any]:
            registered_count = strategy.context.clients[client].num_examples
            num_examples = number_in("num_examples", fields)
            row = {"num_examples": num_examples, **self.training_row(round, client, fields)}
            if num_examples != registered_count:
                raise ValueError(f"field 'num-examples' is {num_examples}, it said {registered_count} before")
            notes_of(client, fields, round.log, strategy.context.lose)
            strategy.accept(round, client, content)
            round.log.replies += 1
            strategy.state_rounds[client] = round.number
            return row

        answers = self._answers(round, self._checked_messages(outgoing, "send"), MessageType.TRAIN, reply_bytes)
        collect(name, answers, round.log, self._charging_reader(round, read))

    def ask(self, name: str, round: Round, outgoing: Iterable[Outgoing], read: Read) -> None:
        """Ask clients something else within a round; ``read`` takes in their answers. It is part of the round's log."""
        collect(
            name, self._answers(round, outgoing, MessageType.EVALUATE), round.log, self._charging_reader(round, read)
        )

    def ask_for(
        self,
        name: str,
        round: Round,
        outgoing: Iterable[Outgoing],
        schema: wire.Schema,
        take: Callable[[int, Payload], None],
    ) -> None:
        """Ask clients for a payload of this schema within a round; ``take`` gets each client's answer.

        Clients answer with ``answer(task, state)``, and keep no new state. ``ValueError`` of ``take`` refuses an
        answer. Raises :class:`fedprune_app.engine.exchange.TooFewReplies`.
        """
        answered_clients: list[int] = []

        def read(client: int, fields: wire.Fields, content: RecordDict) -> dict[str, Any]:
            payload = wire.payload_of(content, schema.max_bytes)
            schema.check(payload)
            take(client, payload)
            answered_clients.append(client)
            return {}

        requests = (replace(message, fields={**message.fields, "asks": name}) for message in outgoing)
        collect(
            name,
            self._answers(round, requests, MessageType.TRAIN, schema.max_bytes),
            round.log,
            self._charging_reader(round, read),
        )
        require(len(answered_clients), self.strategy.context.config.min_replies, name, round.log.failures)

    def evaluate(self, round: Round) -> dict[str, Any]:
        """Have clients evaluate; return the columns of the round's record over those that answered.

        Raises :class:`fedprune_app.engine.exchange.TooFewReplies`.
        """
        strategy, budgets = self.strategy, self.strategy.budgets
        name, log = f"the evaluation of round {round.number}", RoundLog(notes=round.log.notes)
        rows_by_client: dict[int, dict[str, Any]] = {}

        def read(client: int, fields: wire.Fields, content: RecordDict) -> dict[str, Any]:
            facts = {"num_examples": strategy.context.clients[client].num_examples, "digest": digest_in(fields)}
            notes_of(client, fields, log, strategy.context.lose)
            row = facts | self.evaluation_row(client, fields)
            rows_by_client[client] = row | budgets.take(client, fields, round.number, log.note)
            return {}

        evaluators = strategy.participation.evaluators(round.number)
        stream = self._checked_messages(strategy.send_to_evaluate(round), "send_to_evaluate")
        outgoing = (message for message in stream if message.client in evaluators)
        collect(name, self._answers(round, outgoing, MessageType.EVALUATE), log, read)
        require(len(rows_by_client), strategy.context.config.min_replies, name, log.failures)
        rows = dict(sorted(rows_by_client.items()))
        strategy.digests = {client: row.pop("digest") for client, row in rows.items()}
        columns = {
            "evaluation_bytes_up": log.bytes_up,
            "evaluation_bytes_down": log.bytes_down,
            **budgets.columns(),
            "evaluated": len(rows),
            "clients": len(strategy.participation.members),
            "evaluation_failures": len(log.failures),
            **self.evaluation_metrics(round, rows),
        }
        for client, row in rows.items():
            round.log.clients.setdefault(client, {}).update(row)
        return columns

    def newcomers(self, round: Round) -> dict[str, Any]:
        """Let the clients that were held out join after the last ``round``; return the columns of its record.

        Each is sent what a participant is sent, and trains for one local phase. Nobody takes in its reply. Then it is
        tested on its own data.
        """
        phase = self.strategy.participation.following(round, self.strategy.participation.holdouts, round.log)
        self._local_phase("the clients that were held out", "accuracy_newcomer", phase)
        return {**_mean_of("accuracy_newcomer", round.log), **self.strategy.budgets.columns()}

    def last_phase(self, round: Round) -> dict[str, Any]:
        """Have every member train once more after the last ``round``; return the columns of its record.

        Each is sent what a participant is sent, and nobody takes in its reply. It is tested with the model that it has
        trained, so that nothing is sent for the test. Clients that fine-tune for every test have done so already.
        """
        strategy, log, name = self.strategy, RoundLog(notes=round.log.notes), "accuracy_last_phase"
        rows, flops = round.log.clients, None
        if not strategy.fine_tunes:
            phase = strategy.participation.following(round, strategy.participation.members, log)
            flops = self._local_phase("the last phase", name, phase, Payload({}))
        told, key = (rows, "accuracy_personal") if strategy.fine_tunes else (log.clients, name)
        for client in strategy.participation.members:
            rows.setdefault(client, {})[name] = told.get(client, {}).get(key)
        costs = {"bytes_up": log.bytes_up, "bytes_down": log.bytes_down, "flops": flops}
        return {**_mean_of(name, round.log), **{f"last_phase_{key}": cost for key, cost in costs.items()}}

    def _local_phase(self, name: str, column: str, phase: Round, tested: Payload | None = None) -> float:
        """Have the participants of ``phase`` train, take in no reply, and test them; return the FLOPs of training.

        A client's accuracy stands in its ``column`` of the log. The payload ``tested`` takes the place of the one that
        a client is sent for a test; without it the client's model is one of the run's.
        """
        strategy, log = self.strategy, phase.log
        state_rounds, flops = dict(strategy.state_rounds), 0.0

        def budget(client: int, fields: wire.Fields) -> dict[str, Any]:
            return strategy.budgets.take(client, fields, phase.number, log.note)

        def read_training(client: int, fields: wire.Fields, _: RecordDict) -> dict[str, Any]:
            nonlocal flops
            flops += self.training_row(phase, client, fields)["flops"]
            state_rounds[client] = phase.number
            return budget(client, fields)

        def read_evaluation(client: int, fields: wire.Fields, _: RecordDict) -> dict[str, Any]:
            if tested is None:
                strategy.digests[client] = digest_in(fields)
            return {column: self.evaluation_row(client, fields).get("accuracy_personal"), **budget(client, fields)}

        strategy.begin(phase)
        stream = self._checked_messages(strategy.send(phase), "send")
        answers = self._answers(phase, stream, MessageType.TRAIN, strategy.reply_bytes(phase), state_rounds)
        collect(name, answers, log, read_training)
        requests = (
            message if tested is None else replace(message, payload=tested)
            for message in strategy.send_to_evaluate(phase)
            if state_rounds.get(message.client) == phase.number
        )
        answers = self._answers(phase, requests, MessageType.EVALUATE, 0, state_rounds)
        collect(name, answers, log, read_evaluation)
        return flops

    # --- what is recorded ---------------------------------------------------------------------------------------

    def training_row(self, round: Round, client: int, fields: wire.Fields) -> dict[str, Any]:
        """Check what a client says of its training; return the columns of its row."""
        private = self.strategy.context.config.dp.enabled
        return row_of(Reply.TRAINING, fields, private=private, declared=self.strategy.measures)

    def evaluation_row(self, client: int, fields: wire.Fields) -> dict[str, Any]:
        """Check what a client says of its evaluation; return the columns of its row."""
        strategy, context = self.strategy, self.strategy.context
        info = context.clients[client]
        classes = info.num_classes if isinstance(info, ImageClientInfo) else 0
        options: dict[str, Any] = {"layers": strategy.prunable, "num_classes": classes, "declared": strategy.measures}
        return row_of(Reply.EVALUATION, fields, private=context.config.dp.enabled, **options)

    def evaluation_metrics(self, round: Round, rows: Rows) -> dict[str, Any]:
        """Return the columns of an evaluation from the clients' rows, which may change."""
        for client, row in rows.items():
            row |= from_training(row, round.log.clients.get(client, {}))
        other_rows = [row for client, row in round.log.clients.items() if client not in rows]
        densities_by_row = (row.get("density_by_layer") or {} for row in rows.values())
        empty_layers = sorted(
            {name for densities in densities_by_row for name, density in densities.items() if not density}
        )
        self.strategy.context.recorder.note(
            f"a client keeps no weight of {name!r}: if nothing bypasses this layer, every image has the same answer"
            for name in empty_layers
        )
        return round_columns(rows.values(), Reply.EVALUATION, other_rows, self.strategy.measures)

    # --- messages -----------------------------------------------------------------------------------------------

    def _checked_messages(self, outgoing: Iterable[Outgoing], method: str) -> Iterator[Outgoing]:
        """Yield messages of a strategy's method, which a plug-in may have got wrong. Raises ``TypeError``."""
        method_name, clients = f"{type(self.strategy).__name__}.{method}()", self.strategy.context.clients
        sent_to: set[int] = set()
        for message in outgoing:
            is_extra = message.client not in clients or message.client in sent_to
            if is_extra or not isinstance(message.payload, Payload):
                raise TypeError(
                    f"{method_name} yields a message to client {message.client!r} with a payload of type "
                    f"{type(message.payload).__name__}, allowed: one Payload to each client in self.clients"
                )
            sent_to.add(message.client)
            yield message

    def _answers(
        self,
        round: Round,
        outgoing: Iterable[Outgoing],
        kind: str,
        reply_bytes: int = 0,
        state_rounds: Mapping[int, int] | None = None,
    ) -> Iterator[Answer]:
        strategy, context = self.strategy, self.strategy.context
        versions = strategy.state_rounds if state_rounds is None else state_rounds
        stream = messages(context, round, outgoing, kind, versions, strategy.budgets)
        return exchange(self.grid, stream, context.config.deadline_seconds, reply_bytes=reply_bytes)

    def _charging_reader(self, round: Round, read: Read) -> Read:
        """Enter what each reply says it spent. A reply that declines is not read.

        A client declines where its privacy budget does not bear the round: that is no failure, and the client is not
        asked again.
        """
        budgets, log = self.strategy.budgets, round.log

        def read_and_charge(client: int, fields: wire.Fields, content: RecordDict) -> dict[str, Any]:
            if not (budgets.enabled and "declined" in fields):
                budgets.check(fields)  # before the reply moves anything
                return read(client, fields, content) | budgets.take(client, fields, round.number, log.note)
            columns = budgets.take(client, {**fields, "budget-spent": True}, round.number, log.note)
            log.declined[client] = wire.one_line(str(fields["declined"]))
            log.note(client, log.declined[client])
            return columns

        return read_and_charge


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
    arrays: ArrayRecord | None = None
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


_REASONS_KEPT = 20  # per round, in the record


def training_columns(round: Round, budgets: Budgets, declared: Measures) -> dict[str, Any]:
    """Return the columns of a round's training, over the clients that trained; ``declared`` are all numbers."""
    rows = [row for _, row in sorted(round.log.clients.items())]
    return {**round_columns(rows, Reply.TRAINING, declared=declared), **budgets.columns()}


def exchange_columns(round: Round) -> dict[str, Any]:
    return {
        "replies": round.log.replies,
        "failures": len(round.log.failures),
        "stragglers": round.log.stragglers,
        "failure_reasons": round.log.failures[:_REASONS_KEPT],
        "bytes_up": round.log.bytes_up,
        "bytes_down": round.log.bytes_down,
        "dropped": len(round.dropped),
    }


def star_traffic(log: RoundLog, paper_bytes: tuple[float, float]) -> dict[str, Any]:
    """Return who carried how much in a star, whose server is the busiest node; ``paper_bytes`` are (down, up)."""
    paper_down, paper_up = paper_bytes
    node_bytes = [max(row["bytes_up"], row["bytes_down"]) for row in log.clients.values()]
    return {
        "busiest_node_bytes": max(log.bytes_up, log.bytes_down),
        "node_bytes_mean": sum(node_bytes) / max(len(node_bytes), 1),
        "paper_bytes_down": paper_down,
        "paper_bytes_up": paper_up,
        "paper_busiest_bytes": max(paper_down, paper_up),
    }


def digest_in(fields: wire.Fields) -> str:
    """Return the digest of the client's model. Raises ``ValueError`` for what is none."""
    digest = fields.get("digest")
    if not (isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
        raise ValueError(f"field 'digest' is {reprlib.repr(digest)}, allowed: 64 hexadecimal digits")
    return digest


def _mean_of(column: str, log: RoundLog) -> dict[str, float | None]:
    """Return the mean of a column over the clients, in ascending order, that have it."""
    values = [row[column] for _, row in sorted(log.clients.items()) if row.get(column) is not None]
    return {f"{column}_mean": mean(values) if values else None}
