"""The server half that all systems share: the hooks of a round, and Flower's interface to them.

A system's file implements the hooks. ``fedprune_app/federation`` runs the rounds and calls them;
:meth:`FederatedStrategy.run` is the entry point for Flower's grid.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedprune_app.config import Config
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.holders import HELD, Holders
from fedprune_app.core.masks import packed
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import ResumePoint, State
from fedprune_app.federation import loop
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.exchanges import Accumulator, exchange, request_payloads
from fedprune_app.federation.metrics import ImageMetrics, Metrics
from fedprune_app.federation.participation import Participation, check_min_replies
from fedprune_app.federation.privacy_warnings import privacy_warnings
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from fedprune_app.results import system_metrics

log = logging.getLogger("flwr.fedprune")


class StreamedStrategy(Strategy):
    """The part of Flower's interface for rounds whose replies are processed one at a time.

    Flower's own ``start`` holds all replies of a round in memory and passes them to four methods as lists. These
    methods raise here: a round that they ran would have no checks, records or checkpoints.
    """

    @abstractmethod
    def run(self, grid: Grid, rounds_completed: int = 0, num_rounds: int | None = None) -> None:
        """Run the rounds after ``rounds_completed``, to ``num_rounds`` or to the run's own number."""

    def start(  # the rest of Flower's arguments are the run's own settings, which the strategy has
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Any = None,
    ) -> Result:
        """Run all rounds. The results are in the run folder and in the strategy; the returned object is empty."""
        self.run(grid, num_rounds=num_rounds)
        return Result()

    def summary(self) -> None:
        log.info("%s starts", type(self).__name__)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("replies are streamed: call start, which runs all rounds")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse


class FederatedStrategy(StreamedStrategy):
    """Base class of all systems: a Flower strategy that receives checked :class:`Payload` replies one at a time.

    ``model`` is the server's model: every tensor that the clients share, by name. ``prunable`` names the tensors that
    systems may prune (weights of convolutions and linear layers). Clients, seeds and records use the client's number,
    never Flower's random node ids, so that a run is the same on every engine.
    """

    headline = "accuracy_personal_mean"  # the metric by which the system is judged
    has_global_model = True
    fine_tunes = False  # whether clients train once more for every test
    paper_formula = "32 bits per parameter, both ways"  # what paper_bytes computes, for readers of the report

    def __init__(
        self, context: RunContext, model: Mapping[str, Tensor] | None = None, prunable: frozenset[str] = frozenset()
    ) -> None:
        self.context = context
        self.config: Config = context.config
        self.clients = context.clients
        self.recorder = context.recorder
        self.model = dict(model or {})
        self.prunable = prunable
        self.budgets = Budgets(self.config.dp.enabled)
        self.participation = Participation(self.config, self.clients, self.budgets)
        self.members = self.participation.members  # clients that rounds may sample; held-out ones join after the last
        check_min_replies(self.config, self.participation.most, len(self.members))
        self.declarations = system_metrics.all_of(self.config.system)
        self.metrics: Metrics = ImageMetrics(context, prunable, self.declarations)
        self.state_rounds: dict[int, int] = {}  # by client, the round of its last accepted update
        self.digests: dict[int, str] = {}  # by client, of its model in the latest evaluation

    # --- what a system does in a round ------------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Return one line for each thing that makes the run less than its settings promise.

        They are shown before the run begins, and recorded.
        """
        return [*self.participation.warnings(), *privacy_warnings(self.config, self.clients, self.headline)]

    def prepare(self) -> None:
        """Do what must precede the first round; not called when a run resumes from a checkpoint."""

    def begin(self, round: Round) -> None:
        """Prepare for the replies of a round."""

    def train(self, round: Round) -> None:
        """Have clients train: by default the participants, in one exchange."""
        for reply in exchange(round, self.send(round), self.expect, into=self.accumulator()):
            with round.log.rejecting(reply):
                self.receive(round, reply)

    def accumulator(self) -> Accumulator | None:
        """Return what :meth:`receive` adds replies up with, where it does nothing else with them."""
        return None

    @abstractmethod
    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield the message to each participant; each is made only when it is sent."""

    @abstractmethod
    def expect(self, round: Round, client: int) -> wire.Schema:
        """Return the schema of a participant's reply; a reply that differs from it is rejected."""

    @abstractmethod
    def receive(self, round: Round, reply: Reply) -> None:
        """Process one valid reply, in order of arrival, and keep no reference to it. ``ValueError`` rejects it."""

    def end(self, round: Round) -> None:
        """Make the new model after the last reply; exchanges made here belong to the round."""

    def finish(self) -> None:
        """Write the system's own files and notes into the run folder, after the last round."""

    # --- what clients report, and what a round costs -----------------------------------------------------------------

    def record(self, round: Round, name: str, value: object) -> None:
        """Record a metric of the round that the system declares as a ``SystemMetric`` with ``source="server"``.

        Raises ``ValueError`` for another name, and for a value outside the declared bounds.
        """
        declarations = {m.name: m for m in system_metrics.of_system(self.config.system) if m.source == "server"}
        if name not in declarations:
            allowed = ", ".join(declarations) or "none here"
            raise ValueError(f"record() has {name!r}, allowed: the system's metrics with source='server', {allowed}")
        round.log.columns[name] = declarations[name].number(value, f"{type(self).__name__} tells that")

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield the message with the model that each client evaluates: by default the server's, if it has one."""
        return OutgoingMessage.to_each(self.clients, Payload(self.model if self.has_global_model else {}))

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return a round's (down, up) bytes by the paper's own formula, to compare with the measured ones."""
        dense_bytes = 4.0 * sum(tensor.numel() for tensor in self.model.values() if tensor.is_floating_point())
        return len(round.participants) * dense_bytes, len(round.participants) * dense_bytes

    def traffic(self, round: Round) -> dict[str, Any]:
        """Return the round's traffic columns. In a star the busiest node is the server, in one direction."""
        log, (paper_down, paper_up) = round.log, self.paper_bytes(round)
        node_bytes = [max(row["bytes_up"], row["bytes_down"]) for row in log.clients.values()]
        return {
            "busiest_node_bytes": max(log.bytes_up, log.bytes_down),
            "node_bytes_mean": sum(node_bytes) / max(len(node_bytes), 1),
            "paper_bytes_down": paper_down,
            "paper_bytes_up": paper_up,
            "paper_busiest_bytes": max(paper_down, paper_up),
        }

    # --- state and results ------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return all that :meth:`restore` needs to continue bit for bit."""
        meta: dict[str, Mapping[int, float]] = {"state-rounds": self.state_rounds, **self.budgets.state()}
        return State(
            self.model, {name: {str(k): v for k, v in sorted(values.items())} for name, values in meta.items()}
        )

    def restore(self, state: State) -> None:
        """Continue from a state that :meth:`state` returned."""
        self.model = {name: state.tensors[name] for name in self.model}
        self.state_rounds.clear()  # in place: other objects hold this dict
        self.state_rounds |= state_rounds_of(state.meta)
        self.budgets.restore(state.meta)

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """Yield the points from which a run can resume with the checkpoint of ``round`` and its ``meta``, latest first.

        Round 0 is the run's start, which has no checkpoint.
        """
        yield ResumePoint(round, state_rounds_of(meta))

    def model_digest(self) -> str:
        """Return the SHA-256 of the server's model."""
        return Payload(self.model).digest()

    # --- Flower's entry point ---------------------------------------------------------------------------------------

    def run(self, grid: Grid, rounds_completed: int = 0, num_rounds: int | None = None) -> None:
        """Run the rounds after ``rounds_completed``; Flower's ``start`` calls this."""
        self.summary()
        loop.run(self, grid, num_rounds or self.config.num_server_rounds, rounds_completed)


def state_rounds_of(meta: Mapping[str, Any]) -> dict[int, int]:
    """Return from a checkpoint, by client, the round of its last accepted update."""
    return {int(k): int(round) for k, round in meta["state-rounds"].items()}


class AveragingStrategy(FederatedStrategy):
    """For systems whose new model is an average of the replies: a masked mean, by default with equal weights."""

    by_examples = False  # whether a client's weight is its number of examples
    sends_parts = False  # whether clients send different coordinates
    mean = MaskedMean(1)  # that of the round

    def weight_of(self, client: int) -> int:
        """Return the client's weight in the mean."""
        return self.clients[client].num_examples if self.by_examples else 1

    @property
    def min_holders(self) -> int:
        """How many clients must hold a coordinate that is averaged; 0 where all clients hold all."""
        return self.config.min_holders if self.sends_parts else 0

    # --- the mean, which systems override ---------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        largest = max(map(self.weight_of, round.participants))
        self.mean = MaskedMean(len(round.participants), max_weight=largest)

    def accumulator(self) -> Accumulator:
        return Holders(self.model, self.mean.max_addends) if self.min_holders else self.mean

    def train(self, round: Round) -> None:
        """Where clients send parts, secure sums are two: of who holds what, and of the values that enough hold."""
        if not (self.config.secure_sums and self.min_holders):
            super().train(round)
            return
        holders, members, whole = Holders(self.model, self.mean.max_addends), [], wire.Schema.like(self.model)
        for reply in exchange(round, self.send(round), lambda *_: whole, into=holders):
            with round.log.rejecting(reply):
                members = sorted(reply.by_client)
                holders.add(reply.update, len(members))
        chosen = {name: counts >= self.min_holders for name, counts in holders.counts.items()}
        schema = wire.Schema.like(packed(self.model, chosen))
        outgoing = OutgoingMessage.to_each(members, Payload(chosen, chosen), model=Payload(self.model).digest())
        for reply in request_payloads(round, HELD, outgoing, schema, self.mean, least=len(members)):
            with round.log.rejecting(reply):
                self.mean.add_held(reply.update, len(members), holders.counts, chosen)

    def receive(self, round: Round, reply: Reply) -> None:
        self.mean.add(reply.update, weight=sum(map(self.weight_of, reply.by_client)))

    def end(self, round: Round) -> None:
        if self.min_holders > 1:
            round.log.columns["few_holders"] = self.mean.leave_out(self.min_holders)
        self.model = self.mean.mean(self.model)  # a coordinate that nobody sent is unchanged
