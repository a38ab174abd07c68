"""What strategies and the loop exchange with clients: training, questions within a round, evaluation.

Every reply passes the same checks on its way in, whichever system asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import Answer, exchange, require
from fedprune_app.federation import reports
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.collect import Read, collect, notes_of
from fedprune_app.federation.messages import messages
from fedprune_app.federation.round import Outgoing, Round, RoundLog
from fedprune_app.results.declarations import mean
from fedprune_app.results.measures import Reply
from fedprune_app.results.rows import from_training, number_in, round_columns, row_of

if TYPE_CHECKING:  # its hooks say what a system does; nothing here knows a system
    from strategies.base import FederatedStrategy

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
        return reports.of_training(round, strategy.budgets, strategy.measures)

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
            facts = {"num_examples": strategy.context.clients[client].num_examples, "digest": reports.digest_in(fields)}
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
        strategy = self.strategy
        newcomer_round = strategy.participation.joining(round.number)
        state_rounds: dict[int, int] = {}
        scores: dict[int, float | None] = {}

        def read_training(client: int, fields: wire.Fields, _: RecordDict) -> dict[str, Any]:
            self.training_row(newcomer_round, client, fields)
            state_rounds[client] = newcomer_round.number
            return strategy.budgets.take(client, fields, newcomer_round.number, round.log.note)

        def read_evaluation(client: int, fields: wire.Fields, _: RecordDict) -> dict[str, Any]:
            strategy.digests[client] = reports.digest_in(fields)
            scores[client] = self.evaluation_row(client, fields).get("accuracy_personal")
            epsilons = strategy.budgets.take(client, fields, newcomer_round.number, round.log.note)
            return {"accuracy_newcomer": scores[client], **epsilons}

        name = "the clients that were held out"
        strategy.begin(newcomer_round)
        stream = self._checked_messages(strategy.send(newcomer_round), "send")
        answers = self._answers(
            newcomer_round, stream, MessageType.TRAIN, strategy.reply_bytes(newcomer_round), state_rounds
        )
        collect(name, answers, round.log, read_training)
        requests = (message for message in strategy.send_to_evaluate(newcomer_round) if message.client in state_rounds)
        collect(
            name,
            self._answers(newcomer_round, requests, MessageType.EVALUATE, 0, state_rounds),
            round.log,
            read_evaluation,
        )
        values = [score for _, score in sorted(scores.items()) if score is not None]
        return {"accuracy_newcomer_mean": mean(values) if values else None, **strategy.budgets.columns()}

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
