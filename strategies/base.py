"""The server half that all systems share: hooks that say what a system does in a round, and Flower's door to them.

A system's file holds only what is particular to that system. ``fedprune_app/federation`` runs the rounds and calls the
hooks; :meth:`FederatedStrategy.run` is the door for Flower's grid.
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
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import ResumePoint, State
from fedprune_app.federation import loop
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.exchanges import exchange
from fedprune_app.federation.metrics import ImageMetrics, Metrics
from fedprune_app.federation.participation import Participation, check_min_replies
from fedprune_app.federation.privacy_warnings import privacy_warnings
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from fedprune_app.results import system_metrics

log = logging.getLogger("flwr.fedprune")


class StreamedStrategy(Strategy):
    """A strategy whose rounds are streamed: :meth:`start` runs them all.

    Flower's own ``start`` holds all replies of a round at once and hands them to four methods as lists. These methods
    refuse, so that nobody runs a round without the checks, records and checkpoints of a streamed one.
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
        """Run all rounds. What they give is in the run folder and in the strategy, not in the result."""
        self.run(grid, num_rounds=num_rounds)
        return Result()

    def summary(self) -> None:
        log.info("%s starts", type(self).__name__)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("replies are streamed: call start, which runs all rounds")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse


class FederatedStrategy(StreamedStrategy):
    """A Flower strategy over streamed, checked :class:`Payload` replies.

    ``model`` is the server's model: every tensor that the clients share, by name. ``prunable`` names the tensors that
    systems may prune (weights of convolutions and linear layers). Clients, seeds and records go by the client's number,
    never by Flower's random node ids, so that a run is the same on every engine.
    """

    headline = "accuracy_personal_mean"  # the number that the system is judged by
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
        self.members = self.participation.members  # the clients that rounds may ask; the others join after the last one
        check_min_replies(self.config, self.participation.most, len(self.members))
        self.declarations = system_metrics.all_of(self.config.system)
        self.metrics: Metrics = ImageMetrics(context, prunable, self.declarations)
        self.state_rounds: dict[int, int] = {}  # by client, the round of the last update taken in from it
        self.digests: dict[int, str] = {}  # by client, of its model in the latest evaluation

    # --- what a system does in a round ------------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Return what makes the run less than its settings seem to say; each is a line for the user.

        They are said before the run begins, and are in its record.
        """
        return privacy_warnings(self.config, self.clients, self.headline)

    def prepare(self) -> None:
        """Do what comes before the first round; not called where a run goes on from a checkpoint."""

    def begin(self, round: Round) -> None:
        """Get ready for the replies of a round."""

    def train(self, round: Round) -> None:
        """Have clients train: by default the participants, in one exchange."""
        for reply in exchange(round, self.send(round), self.expect):
            with round.log.rejecting(reply):
                self.receive(round, reply)

    @abstractmethod
    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield the message to each participant, made when it is sent."""

    @abstractmethod
    def expect(self, round: Round, client: int) -> wire.Schema:
        """Return what the reply of a participant must hold; any other reply is left out of the round."""

    @abstractmethod
    def receive(self, round: Round, reply: Reply) -> None:
        """Process one valid reply, in order of arrival, and keep nothing of it. ``ValueError`` refuses the reply."""

    def end(self, round: Round) -> None:
        """Make the new model, after the last reply; further exchanges are part of the round."""

    def finish(self) -> None:
        """Write what else the run leaves in its folder, after the last round."""

    # --- what clients report, and what a round costs -----------------------------------------------------------------

    def record(self, round: Round, name: str, value: object) -> None:
        """Record a number of the round that the system declares as an ``SystemMetric`` with ``source="server"``.

        Raises ``ValueError`` for another name, and for a value out of the declared bounds.
        """
        declarations = {m.name: m for m in system_metrics.of_system(self.config.system) if m.source == "server"}
        if name not in declarations:
            allowed = ", ".join(declarations) or "none here"
            raise ValueError(f"record() has {name!r}, allowed: the system's metrics with source='server', {allowed}")
        round.log.columns[name] = declarations[name].number(value, f"{type(self).__name__} tells that")

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield what each client evaluates as the received model: by default the server's, if it has one."""
        return OutgoingMessage.to_each(self.clients, Payload(self.model if self.has_global_model else {}))

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return the (down, up) bytes of a round by the paper's own formula, to compare with the measured ones."""
        dense_bytes = 4.0 * sum(tensor.numel() for tensor in self.model.values() if tensor.is_floating_point())
        return len(round.participants) * dense_bytes, len(round.participants) * dense_bytes

    def traffic(self, round: Round) -> dict[str, Any]:
        """Return who carried how much. In a star the busiest node is the server, in one direction."""
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
        """Continue from a state that :meth:`state` gave."""
        self.model = {name: state.tensors[name] for name in self.model}
        self.state_rounds.clear()  # whoever has this dict has the new rounds
        self.state_rounds |= state_rounds_of(state.meta)
        self.budgets.restore(state.meta)

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """Yield the points from which a run can go on by the checkpoint of ``round`` and its ``meta``, latest first.

        Round 0 is the run's start, which has no checkpoint.
        """
        yield ResumePoint(round, state_rounds_of(meta))

    def model_digest(self) -> str:
        """Return the SHA-256 of the server's model."""
        return Payload(self.model).digest()

    # --- Flower's door ----------------------------------------------------------------------------------------------

    def run(self, grid: Grid, rounds_completed: int = 0, num_rounds: int | None = None) -> None:
        """Run the rounds after ``rounds_completed``; ``start``, Flower's name for it, comes here too."""
        self.summary()
        loop.run(self, grid, num_rounds or self.config.num_server_rounds, rounds_completed)


def state_rounds_of(meta: Mapping[str, Any]) -> dict[int, int]:
    """Return whose reply of which round a checkpoint had taken in."""
    return {int(k): int(round) for k, round in meta["state-rounds"].items()}


class AveragingStrategy(FederatedStrategy):
    """The new model is the average of the replies, by default a masked mean in which all clients count alike."""

    by_examples = False  # whether a client counts by its number of examples

    def weight_of(self, client: int) -> int:
        """Return how much a client counts."""
        return self.clients[client].num_examples if self.by_examples else 1

    # --- the mean, which systems override ---------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        largest = max(map(self.weight_of, round.participants))
        self.mean = MaskedMean(len(round.participants), max_weight=largest)

    def receive(self, round: Round, reply: Reply) -> None:
        self.mean.add(reply.update, weight=self.weight_of(reply.client))

    def end(self, round: Round) -> None:
        self.model = self.mean.mean(self.model)  # a coordinate that nobody sent is as it was
