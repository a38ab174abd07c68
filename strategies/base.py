"""The server half all systems share: sample, send, take each reply as it comes, close the round, evaluate, record.

A system's file says only what is particular to it: what a client receives (:meth:`plan`), what its reply must hold
(:meth:`reply_schema`), how it is taken in (:meth:`open_round`, :meth:`accept`, :meth:`close_round`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import reprlib
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedprune_app.config import Config, ConfigError
from fedprune_app.core import rng
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.core.robust import BoundedMean, TrimmedMean
from fedprune_app.engine import rounds, wire
from fedprune_app.engine.rounds import Answer, Peer, Roster
from fedprune_app.engine.store import ResumePoint, State, VersionedStore, owner, write_tensors
from fedprune_app.results import measures
from fedprune_app.results.measures import Reply
from fedprune_app.results.recorder import Recorder

log = logging.getLogger("flwr.fedprune")
_REASONS_KEPT = 20  # per round, in the record
_LOSS = 300  # characters of what a client says it lost


@dataclass
class RoundLog:
    """What happened in one round, as far as it is known."""

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what clients say they lost
    declined: dict[int, str] = field(default_factory=dict)  # whose privacy budget does not bear the round, and why
    stragglers: int = 0
    replies: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)

    def count(self, answer: Answer) -> None:
        self.bytes_up += answer.bytes_up
        self.bytes_down += answer.bytes_down

    def fail(self, what: str, answer: Answer, reason: str) -> None:
        text = f"client {answer.partition}: {wire.one_line(reason)}"
        self.failures.append(text)
        self.stragglers += answer.late
        log.warning("%s: %s", what, text)


@dataclass(frozen=True)
class Contents:
    """What one message carries: a payload, other clients' payloads by partition, all encoded, and named values."""

    payload: ArrayRecord | None = None
    letters: Mapping[int, ArrayRecord] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


class FederatedStrategy(Strategy):
    """A Flower strategy over streamed, validated :class:`Payload` replies.

    ``model`` is the server's model: every tensor the clients share, by name; ``prunable`` names those that systems may
    prune (convolution and linear weights). Participants, seeds and records are keyed
    by partition id, never by Flower's random node ids, so that a run is the same on every engine.
    """

    headline = "accuracy_personal_mean"  # the number the system is judged by
    has_global_model = True
    paper_formula = "32 bits per parameter, both ways"  # what paper_bytes computes, for readers of the report

    def __init__(
        self,
        config: Config,
        model: Mapping[str, Tensor],
        prunable: frozenset[str],
        roster: Roster,
        recorder: Recorder,
        checkpoints: VersionedStore,
        run_key: str,
    ) -> None:
        self.config = config
        self.model = dict(model)
        self.prunable = prunable
        self.roster = roster
        self.recorder = recorder
        self.checkpoints = checkpoints
        self.run_key = run_key
        self.log = RoundLog()
        self.state_rounds: dict[int, int] = {}  # partition -> round of the last update taken in from it
        self.digests: dict[int, str] = {}  # of the clients' models, from the latest evaluation
        self.epsilons: dict[int, float] = {}  # partition -> what the client says it has spent of its privacy
        self.paper_epsilons: dict[int, float] = {}
        self.second_epsilons: dict[int, float] = {}  # at dp.second-delta
        self.spent: dict[int, int] = {}  # partition -> the round after which its budget bears no other
        self.check_robust()

    averages = False  # whether it averages models by :meth:`averaging`, so that ``robust`` means something

    # --- what a system says -------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, round: int, participants: list[int]) -> Mapping[int, Payload]:
        """What each participant receives; one payload object for several is encoded once."""

    @abstractmethod
    def reply_schema(self, partition: int) -> wire.Schema:
        """What the reply of a participant must hold; anything else is left out of the round."""

    def reply_bytes(self, participants: list[int]) -> int:
        """What the largest of their replies holds, decoded: more is not looked at."""
        return max(self.reply_schema(partition).max_bytes for partition in participants)

    def outgoing(self, round: int, participants: list[int]) -> Iterator[tuple[int, Contents]]:
        """What each participant is sent, made one by one as it is sent: by default its payload of :meth:`plan`."""
        return _encoded(self.plan(round, participants))

    def evaluated(self, round: int) -> Iterator[tuple[int, Contents]]:
        """What each client is sent to evaluate: by default :meth:`evaluation_payload`, the same for all."""
        return _encoded(dict.fromkeys(self.roster, self.evaluation_payload()))

    def prepare(self) -> None:
        """Before the first round; not where a run goes on from a checkpoint."""

    def open_round(self, round: int, participants: list[int]) -> None:
        """Before the first reply."""

    def receive(self, peer: Peer, round: int, content: RecordDict) -> None:
        """Take in one reply: decode it, check it once, :meth:`accept` it. ``ValueError`` refuses it."""
        schema = self.reply_schema(peer.partition)
        update = wire.payload_of(content, schema.max_bytes)
        schema.check(update)
        self.accept(peer, update)

    @abstractmethod
    def accept(self, peer: Peer, update: Payload) -> None:
        """Take in one valid reply, in arrival order, and keep nothing of it. ``ValueError`` refuses it."""

    def close_round(self, round: int) -> None:
        """After the last reply."""

    def after_round(self, grid: Grid, round: int, timeout: float) -> dict[str, Any]:
        """What else is exchanged once the round is closed, by default nothing; what is recorded of it."""
        return {}

    def averaging(self, count: int, max_weight: int = 1) -> MaskedMean | BoundedMean | TrimmedMean:
        """The average that ``robust`` asks for, of at most ``count`` models in the coordinates of the server's."""
        if self.config.robust == "trimmed-mean":
            return TrimmedMean(self.config.robust_trim)
        mean = MaskedMean(count, max_weight)
        return BoundedMean(mean, self.model, self.config.robust_norm) if self.config.robust == "clip" else mean

    def weight_of(self, partition: int) -> int:
        """What a client counts where numbers of examples do: that number, which it chose; alike under ``robust``."""
        return self.roster[partition].num_examples if self.config.robust == "none" else 1

    def check_robust(self) -> None:
        """Refuse a robust average that would never move anything. Raises :class:`ConfigError`."""
        trim, count = self.config.robust_trim, self._sample_size(len(self.roster))
        if self.config.robust == "trimmed-mean" and trim and int(trim * count + 1e-9) < 1:
            allowed = f"{math.ceil(1000 / count) / 1000:g} to below 0.5" if count > 2 else "another value of robust"
            raise ConfigError(
                f"robust-trim is {trim:g}, allowed with {count} clients a round: {allowed} "
                "(a coordinate of which no value can be left out stays where it is)"
            )

    def evaluation_payload(self) -> Payload:
        """What a client evaluates as the received model."""
        return Payload(self.model)

    def paper_bytes(self, num_participants: int) -> tuple[float, float]:
        """(down, up) bytes of one round by the paper's own formula, for comparison with what was measured."""
        dense = 4.0 * sum(t.numel() for t in self.model.values() if t.is_floating_point())
        return num_participants * dense, num_participants * dense

    def traffic(self, num_participants: int) -> dict[str, Any]:
        """Who carried how much in the round just ended. In a star the busiest node is the server, in one direction."""
        paper_down, paper_up = self.paper_bytes(num_participants)
        heavier = [max(row["bytes_up"], row["bytes_down"]) for row in self.log.clients.values()]
        return {
            "busiest_node_bytes": max(self.log.bytes_up, self.log.bytes_down),
            "node_bytes_mean": sum(heavier) / max(len(heavier), 1),
            "paper_bytes_down": paper_down,
            "paper_bytes_up": paper_up,
            "paper_busiest_bytes": max(paper_down, paper_up),
        }

    def finish(self) -> None:
        """After the last round: what else the run leaves in its folder."""

    def write_model(self, folder: Path) -> None:
        """The server's final model, into the run's folder of models."""
        if self.has_global_model:
            round, whose = int(self.recorder.info["rounds_completed"]), owner("global model", self.run_key)
            write_tensors(folder / "global.safetensors", self.model, round=round, owner=whose)

    # --- the life of a run --------------------------------------------------------------------------------------

    def start(  # type: ignore[override]  # no server-side evaluation: every client evaluates, on its own data
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        *,
        rounds_completed: int = 0,
    ) -> Result:
        """Run rounds ``rounds_completed + 1`` to ``num_rounds``; checkpoint and record each.

        Raises :class:`fedprune_app.engine.rounds.TooFewReplies` when a round has fewer than ``min-replies`` good ones.
        """
        result = Result()
        arrays = initial_arrays
        self.summary()
        if not rounds_completed:
            self.prepare()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        for current in range(rounds_completed + 1, num_rounds + 1):
            if not self.willing(current):
                log.info("every client has spent its privacy budget: %d rounds of %d", current - 1, num_rounds)
                break
            self.log = RoundLog()
            started = time.monotonic()
            self.open_round(current, self.sample(current))
            train_metrics = self.train_round(grid, current, arrays, timeout, train_config)
            if self.log.replies:
                self.close_round(current)
            train_metrics |= self.after_round(grid, current, timeout)
            row: dict[str, Any] = {"round": current, "seconds": time.monotonic() - started, **train_metrics}

            failed = None
            if self.evaluates(current) or not self.willing(current + 1):
                try:
                    row |= self._evaluate(grid, current, arrays, timeout, evaluate_config)
                except rounds.TooFewReplies as error:
                    if not self.config.dp.enabled:
                        raise
                    failed = error  # the round itself is not repeated on a resume: its privacy is spent
            row["notes"] = self.log.notes[:_REASONS_KEPT]
            # the record comes first: killed between the two, the run repeats the round and its record is dropped
            self.recorder.clients(
                {"round": current, "partition": partition, **row_of}
                for partition, row_of in sorted(self.log.clients.items())
            )
            self.recorder.round(row)
            self.checkpoints.save(current, self.recorded_state())
            if failed is not None:
                raise failed
            log.info("round %d/%d: %s", current, num_rounds, measures.summary_line(row))
        if self.config.dp.enabled and not self.state_rounds:
            first = next(iter(self.log.declined.values()), "none was asked")
            raise rounds.TooFewReplies(f"no client could afford to train; first reason: {first}")
        if not self.digests:  # killed after its last checkpoint: only the final models' digests are lacking
            self._evaluate(grid, num_rounds, arrays, timeout, evaluate_config)
        self.finish()
        result.arrays = wire.to_arrays(Payload(self.model))
        return result

    def train_round(
        self, grid: Grid, round: int, arrays: ArrayRecord, timeout: float, config: ConfigRecord
    ) -> dict[str, Any]:
        """The exchanges of a round with its participants, by default one; what is recorded of them."""
        messages = self._by_partition(self.configure_train(round, arrays, config, grid))
        reply_bytes = self.reply_bytes(self.sample(round))
        _, found = self.aggregate_train(round, rounds.exchange(grid, messages, timeout, reply_bytes=reply_bytes))
        return dict(found or {})

    def _evaluate(
        self, grid: Grid, round: int, arrays: ArrayRecord, timeout: float, config: ConfigRecord
    ) -> dict[str, Any]:
        started = time.monotonic()
        messages = self._by_partition(self.configure_evaluate(round, arrays, config, grid))
        row: dict[str, Any] = dict(self.aggregate_evaluate(round, rounds.exchange(grid, messages, timeout)) or {})
        return {**row, "evaluation_seconds": time.monotonic() - started}

    def state(self) -> State:
        """All that :meth:`restore` needs to continue bit for bit."""
        kept: dict[str, Mapping[int, float]] = {"state-rounds": self.state_rounds}
        if self.config.dp.enabled:
            kept |= {"epsilons": self.epsilons, "paper-epsilons": self.paper_epsilons, "spent": self.spent}
            kept |= {"second-epsilons": self.second_epsilons}
        return State(self.model, {key: {str(p): v for p, v in sorted(of.items())} for key, of in kept.items()})

    def restore(self, state: State) -> None:
        """Continue from a state that :meth:`state` gave."""
        self.model = {name: state.tensors[name] for name in self.model}
        self.state_rounds = state_rounds_of(state.meta)
        self.epsilons = {int(p): float(e) for p, e in state.meta.get("epsilons", {}).items()}
        self.paper_epsilons = {int(p): float(e) for p, e in state.meta.get("paper-epsilons", {}).items()}
        self.second_epsilons = {int(p): float(e) for p, e in state.meta.get("second-epsilons", {}).items()}
        self.spent = {int(p): int(r) for p, r in state.meta.get("spent", {}).items()}

    def recorded_state(self) -> State:
        """:meth:`state`, and what vouches for the records that were written before it."""
        state = self.state()
        return State(state.tensors, {**state.meta, "records": self.recorder.marks})

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """Where a run can go on from by the checkpoint of ``round``, which says ``meta``: the latest point first."""
        yield ResumePoint(round, state_rounds_of(meta))

    def go_on_from(self, point: ResumePoint) -> None:
        """Drop what the run folder has of a later time than ``point``, one of :meth:`resume_points`."""

    def summary(self) -> None:
        """Log what will run (a Flower strategy's duty)."""
        log.info("%s: %d clients, %d tensors", type(self).__name__, len(self.roster), len(self.model))

    # --- Flower's four hooks ------------------------------------------------------------------------------------

    def evaluates(self, round: int) -> bool:
        """Whether all clients are evaluated after this round."""
        every = self.config.evaluate_every
        return round == self.config.num_server_rounds or bool(every and round % every == 0)

    def willing(self, round: int) -> list[int]:
        """Who can still take part in the round: those whose privacy budget bears it."""
        return [partition for partition in self.roster if self.spent.get(partition, round) >= round]

    def sampled(self, round: int) -> list[int]:
        """``max(⌊fraction · K⌋, 1)`` distinct ones of the K who are willing, drawn from (seed, round) alone."""
        partitions = self.willing(round)
        drawn = rng.numpy_generator(self.config.seed, "sample", round=round).permutation(len(partitions))
        return sorted(partitions[i] for i in drawn[: self._sample_size(len(partitions))])

    def _sample_size(self, willing: int) -> int:
        return max(int(self.config.fraction_train * willing + 1e-9), 1)

    def dropped(self, round: int) -> list[int]:
        """Those of the sampled who drop out, each with ``drop-probability``, but never the last one."""
        draws = rng.numpy_generator(self.config.seed, "drop", round=round).random(len(self.roster))
        luck = dict(zip(self.roster, draws, strict=True))
        sampled = self.sampled(round)
        last = max(sampled, key=lambda partition: luck[partition])
        return [p for p in sampled if luck[p] < self.config.drop_probability and p != last]

    def sample(self, round: int) -> list[int]:
        """Who takes part in the round: the sampled who did not drop out."""
        dropped = self.dropped(round)
        return [partition for partition in self.sampled(round) if partition not in dropped]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to this round's participants."""
        return self._messages(self.outgoing(server_round, self.sample(server_round)), server_round, MessageType.TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to all clients, not only to the participants."""
        return self._messages(self.evaluated(server_round), server_round, MessageType.EVALUATE)

    def aggregate_train(  # type: ignore[override]  # streamed answers instead of a list of messages
        self, server_round: int, replies: Iterable[Answer]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in each reply as it arrives."""
        asked = self.take_in(server_round, replies)
        good = self.log.replies + len(self.log.declined)
        rounds.require(good, self.config.min_replies, f"round {server_round}", self.log.failures)
        rows = [row for _, row in sorted(self.log.clients.items())]
        return (
            None,
            {  # type: ignore[return-value]  # a plain dict: MetricRecord holds no counts beside means
                **self.exchanged(server_round, asked),
                **measures.over_clients(rows, Reply.TRAINING),
                **self._privacy_row(),
            },
        )

    def take_in(self, round: int, replies: Iterable[Answer]) -> int:
        """Count, check and accept each reply as it arrives; how many were asked for."""
        asked = 0
        for answer in replies:
            asked += 1
            self.log.count(answer)
            row = self.log.clients.setdefault(answer.partition, {"bytes_up": 0, "bytes_down": 0})
            row["bytes_up"] += answer.bytes_up
            row["bytes_down"] += answer.bytes_down
            try:
                if self.declines(round, answer):
                    continue
                row |= self._accept(round, answer)
            except ValueError as error:
                self.log.fail(f"round {round}", answer, str(error))
                continue
            self.log.replies += 1
            self.state_rounds[answer.partition] = round
        return asked

    def declines(self, round: int, answer: Answer) -> bool:
        """Whether a client says that its privacy budget does not bear what it was asked for: no failure, and it is not
        asked again."""
        if not self.config.dp.enabled or answer.content is None:
            return False
        fields = wire.fields_of(answer.content)
        if "declined" not in fields:
            return False
        told = self._privacy_of(answer.partition, {**fields, "budget-spent": True}, round)
        self.log.clients[answer.partition] |= told
        self.log.declined[answer.partition] = why = wire.one_line(str(fields["declined"]))
        self.note(answer.partition, why)
        return True

    def exchanged(self, round: int, asked: int) -> dict[str, Any]:
        """What is recorded of a round's exchange, whatever was exchanged."""
        return {
            "replies": self.log.replies,
            "failures": len(self.log.failures),
            "stragglers": self.log.stragglers,
            "failure_reasons": self.log.failures[:_REASONS_KEPT],
            "bytes_up": self.log.bytes_up,
            "bytes_down": self.log.bytes_down,
            "dropped": len(self.dropped(round)),
            **self.traffic(asked),
        }

    def _accept(self, round: int, answer: Answer) -> dict[str, Any]:
        if answer.content is None:
            raise ValueError(answer.error)
        peer = self.roster[answer.partition]
        fields = wire.fields_of(answer.content)
        row = {"num_examples": measures.told("num_examples", fields), **self.training_row(peer, fields)}
        if row["num_examples"] != peer.num_examples:
            raise ValueError(f"field 'num-examples' is {row['num_examples']}, it said {peer.num_examples} before")
        self._notes_of(answer.partition, fields)
        self._epsilons_of(fields)  # all that may refuse the reply comes before it moves anything
        self.receive(peer, round, answer.content)
        return row | self._privacy_of(answer.partition, fields, round)

    def training_row(self, peer: Peer, fields: wire.Fields) -> dict[str, Any]:
        """What a client says of its training, checked."""
        return measures.row_of(Reply.TRAINING, fields, private=self.config.dp.enabled)

    @staticmethod
    def _epsilons_of(fields: wire.Fields) -> dict[str, float]:
        """What a client says it has spent, checked, by its name in the record."""
        told = measures.row_of(Reply.PRIVACY, fields)
        return {name: value for name, value in told.items() if value is not None}

    @property
    def _books(self) -> dict[str, dict[int, float]]:
        """What the clients say they have spent, by its name in the record."""
        return {
            "epsilon": self.epsilons,
            "epsilon_second": self.second_epsilons,
            "epsilon_paper": self.paper_epsilons,
        }

    def _privacy_of(self, partition: int, fields: wire.Fields, round: int) -> dict[str, Any]:
        """What a client says of its privacy, for its row; whoever has none left is not asked again."""
        if not self.config.dp.enabled:
            return {}
        for name, now in self._epsilons_of(fields).items():
            known = self._books[name]
            if now < known.get(partition, 0.0) * (1 - 1e-6):
                word = measures.MEASURES.of_clients[name].wire_name
                self.note(partition, f"its {word} was {known[partition]:.4g} and is {now:.4g}: a ledger is lost")
            known[partition] = now
        if fields.get("budget-spent") is True:
            self.spent.setdefault(partition, round)
        return {name: book.get(partition) for name, book in self._books.items()}

    def _privacy_row(self) -> dict[str, Any]:
        if not self.config.dp.enabled:
            return {}
        rows = [{name: value} for name, book in self._books.items() for value in book.values()]
        return {**measures.over_clients(rows, Reply.PRIVACY), "budgets_spent": len(self.spent)}

    def note(self, partition: int, text: str) -> None:
        """Record, once, what a client lost or what was left out because of it."""
        line = f"client {partition}: {wire.one_line(text)[:200]}"
        if line not in self.log.notes:
            self.log.notes.append(line)
            log.warning("%s", line)

    def _notes_of(self, partition: int, fields: wire.Fields) -> None:
        if "note" in fields:
            self.note(partition, str(fields["note"]))
        if "lost" in fields:
            self.lose(partition, str(fields["lost"]))

    def lose(self, partition: int, text: str) -> None:
        """Mark the run, in run.json: from now on it is not what it would have been without this loss."""
        line = f"client {partition}: {wire.one_line(text)[:_LOSS]}"
        if line not in (losses := list(self.recorder.info.get("losses", []))):
            self.recorder.annotate(losses=[*losses, line])

    def aggregate_evaluate(  # type: ignore[override]  # streamed answers instead of a list of messages
        self, server_round: int, replies: Iterable[Answer]
    ) -> MetricRecord | None:
        """Mean, spread and worst decile over all clients that answered."""
        num_bytes = {"evaluation_bytes_up": 0, "evaluation_bytes_down": 0}
        rows: dict[int, dict[str, Any]] = {}
        failures: list[str] = []
        for answer in replies:
            num_bytes["evaluation_bytes_up"] += answer.bytes_up
            num_bytes["evaluation_bytes_down"] += answer.bytes_down
            try:
                if answer.content is None:
                    raise ValueError(answer.error)
                fields = wire.fields_of(answer.content)
                row = self.evaluation_row(answer.partition, fields)
                rows[answer.partition] = row | self._privacy_of(answer.partition, fields, server_round)
            except ValueError as error:
                failures.append(f"client {answer.partition}: {wire.one_line(str(error))}")
                log.warning("evaluation of round %d: %s", server_round, failures[-1])
        rounds.require(len(rows), self.config.min_replies, f"the evaluation of round {server_round}", failures)
        rows = dict(sorted(rows.items()))
        self.digests = {partition: row.pop("digest") for partition, row in rows.items()}
        found = {**num_bytes, **self._privacy_row(), "evaluation_failures": len(failures)}
        found |= self.evaluation_metrics(server_round, rows)
        for partition, row in rows.items():
            self.log.clients.setdefault(partition, {}).update(row)
        return found  # type: ignore[return-value]  # a plain dict, as in aggregate_train

    def evaluation_metrics(self, round: int, rows: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """What is recorded of an evaluation, from the clients' rows of :meth:`evaluation_row`, which may change."""
        for partition, row in rows.items():
            row |= measures.from_training(row, self.log.clients.get(partition, {}))
        return measures.over_clients(rows.values(), Reply.EVALUATION)

    def evaluation_row(self, partition: int, fields: wire.Fields) -> dict[str, Any]:
        """What a client says of its evaluation, checked."""
        numbers = measures.row_of(Reply.EVALUATION, fields, layers=self.prunable)
        return {**self.evaluation_facts(partition, fields), **numbers}

    def evaluation_facts(self, partition: int, fields: wire.Fields) -> dict[str, Any]:
        """What every evaluation says, whatever was evaluated; its notes are kept."""
        digest = fields.get("digest")
        if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise ValueError(f"field 'digest' is {reprlib.repr(digest)}, allowed: 64 hexadecimal digits")
        self._notes_of(partition, fields)
        return {"num_examples": self.roster[partition].num_examples, "digest": digest}

    def model_digest(self) -> str:
        """SHA-256 of the server's model."""
        return Payload(self.model).digest()

    def final_sha256(self) -> str:
        """One hash over all final models: the server's, then the clients' in partition order."""
        total = hashlib.sha256()
        if self.has_global_model:
            total.update(self.model_digest().encode())
        for partition in self.roster:
            total.update(self.digests.get(partition, "missing").encode())
        return total.hexdigest()

    # --- messages -----------------------------------------------------------------------------------------------

    def _messages(self, outgoing: Iterable[tuple[int, Contents]], round: int, kind: str) -> Iterator[Message]:
        for partition, contents in outgoing:
            fields = {
                **contents.fields,
                "round": round,
                "run-key": self.run_key,
                "state-round": self.state_rounds.get(partition, 0),
                "evaluates": self.evaluates(round),
            }
            if partition in self.epsilons:
                fields["epsilon"] = self.epsilons[partition]  # its ledger must hold as much
            if self.roster[partition].own_data:
                fields["partition"] = partition  # its operator gave it none
            content = wire.pack(contents.payload, fields, contents.letters)
            node_id = self.roster[partition].node_id
            del contents  # what has been sent is not kept while the next is made
            yield rounds.message_to(node_id, content, kind, round, self.config.deadline_seconds)
            del content

    def _by_partition(self, messages: Iterable[Message]) -> Iterator[tuple[int, Message]]:
        partition_of = {peer.node_id: peer.partition for peer in self.roster.values()}
        for message in messages:
            yield partition_of[message.metadata.dst_node_id], message
            del message  # as in _messages


def state_rounds_of(meta: Mapping[str, Any]) -> dict[int, int]:
    """Whose reply of which round a checkpoint had taken in."""
    return {int(p): int(r) for p, r in meta["state-rounds"].items()}


def _encoded(plan: Mapping[int, Payload]) -> Iterator[tuple[int, Contents]]:
    """A plan's contents; one payload for several clients is encoded once."""
    encoded: dict[int, ArrayRecord | None] = {}  # by the payload's id: the plan keeps it alive
    for partition, payload in plan.items():
        if id(payload) not in encoded:
            encoded[id(payload)] = wire.to_arrays(payload) if payload.tensors else None
        yield partition, Contents(encoded[id(payload)])
