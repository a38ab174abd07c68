"""A client whose privacy may have a budget: what it plans to spend, and how it declines what the budget does not bear.

All of this acts with ``dp.enabled`` alone.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clients.node import AnUpdate, Node, Place
from clients.privacy import ClientPrivacy, Plan
from clients.reply_fields import ReplyFields
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State
from fedprune_app.files import kept_secret

if TYPE_CHECKING:  # dp-accounting takes seconds to import, and most runs do without
    from fedprune_app.privacy.ledger import Data

_EPSILONS = frozenset({"epsilon", "epsilon-pld", "epsilon-rdp", "epsilon-paper", "epsilon-second"})
_SPENT = _EPSILONS | {"epsilon-simulated", "budget-spent"}


class BudgetedNode(Node[AnUpdate]):
    """A budgeted node keeps a ledger with ``dp.enabled``, and plans its noise for ``dp.target-epsilon``."""

    privacy_kind: type[ClientPrivacy] = ClientPrivacy
    declares: ClassVar = ReplyFields(
        training=_SPENT | {"declined"},
        evaluation=_SPENT,
        only_when_private=_SPENT | {"declined"},
    )

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__(config, place)
        self.privacy: ClientPrivacy | None = None  # what dp.enabled adds, see open_privacy

    def open_privacy(self) -> None:
        """Open the ledger where ``dp.enabled`` asks for one, once the client knows its data.

        Raises ``ValueError`` where the ledger is damaged, and where the noise is less than the node asks for.
        """
        if self.config.dp.enabled:
            plan = Plan(self.planned_epochs(), self.round_epochs(), self.planned_counts(), self.round_counts())
            data, policy = self.ledger_data(), self.place.policy
            self.privacy = self.privacy_kind(
                self.config, self.client_id, self.num_examples, plan, self.ledger_path(data), data, policy
            )

    @abstractmethod
    def record_digests(self) -> list[bytes]:
        """Return a digest of each record of the client's data, all parts of them."""

    def ledger_data(self) -> Data:
        """Say whose ledger the client's is: its data's, known by their content.

        Where the node's operator says where the ledger is, there is one for all data. Elsewhere a client's own data may
        change with time, and go on with the same ledger while they share a record with the data before. Data that are
        dealt otherwise have another ledger.
        """
        from fedprune_app.privacy.ledger import Data

        if self.place.has_own_data:
            about, joins = "a folder of the client's own", self.has_ledger_of_its_own
            return Data.of(self.record_digests(), about, may_change=True, joins=joins)
        config, (number, clients) = self.config, self.place.share
        about = f"client {number} of {clients}, {config.dataset} dealt by {self.dealing} with seed {config.seed}"
        return Data.of(self.record_digests(), about, joins=self.has_ledger_of_its_own)

    def split_secret(self) -> str:
        """Return the node's secret by which parts of its own data are drawn; empty where the run's seed draws them.

        The secret is for private runs whose noise nobody else knows. It is made once, and is beside the ledger.
        """
        dp = self.config.dp
        if not (self.place.has_own_data and dp.enabled and dp.secure_rng):
            return ""
        return kept_secret(Path(dp.ledger_dir or self.place.state_dir) / "split.secret")

    @property
    def dealing(self) -> str:
        """Say how data are dealt to clients, for readers of the ledger."""
        return self.config.partition

    @property
    def has_ledger_of_its_own(self) -> bool:
        """Say whether the node's operator asks for one ledger, whatever the runs make of the node's data."""
        policy = self.place.policy
        return bool(policy.ledger_dir or policy.epsilon_budget)

    def ledger_path(self, data: Data) -> Path:
        """Return the path of the client's ledger: beside its state, or in ``dp.ledger-dir`` for all runs on the data.

        The name of a ledger of own data follows from the data. The client's number, which the server gives, plays no
        part in it.
        """
        from fedprune_app.privacy.ledger import ledger_of

        shared = self.config.dp.ledger_dir
        if self.place.has_own_data:
            return ledger_of(data, Path(shared) if shared else self.place.state_dir)
        if not shared:
            return self.store.folder / "ledger.jsonl"
        dealing = "" if self.has_ledger_of_its_own else f"-{data.identity[:16]}"
        return Path(shared) / f"{self.client_id:05d}{dealing}.jsonl"

    # --- what a system plans to spend ---------------------------------------------------------------------------

    def round_epochs(self) -> int:
        """How many epochs of training the local part of one round has."""
        return self.config.local_epochs

    def planned_epochs(self) -> int:
        """How many epochs of training a client is planned to have in the whole run."""
        return self.planned_rounds() * self.round_epochs()

    def round_counts(self) -> int:
        """How many counts of correct predictions, which are noised, every round asks for."""
        return 0

    def evaluation_counts(self) -> int:
        """How many counts an evaluation asks for at most."""
        return 0

    def planned_counts(self) -> int:
        """How many noised counts a client is planned to tell in the whole run at most."""
        noised = self.config.dp.accuracies == "noised"
        evaluations = self.evaluations * self.evaluation_counts() if noised else 0
        return self.planned_rounds() * self.round_counts() + evaluations

    def planned_rounds(self) -> int:
        """How many rounds a client is planned to join."""
        return self.config.dp.planned_rounds or self.config.num_server_rounds

    @property
    def evaluations(self) -> int:
        """How often all clients are evaluated, in a run that has all its rounds."""
        rounds, every = self.config.num_server_rounds, self.config.evaluate_every
        return -(-rounds // every) if every else 1

    # --- answers and state --------------------------------------------------------------------------------------

    def answer_training(self, task: Task) -> tuple[Payload, dict[str, Any]]:
        """Answer as every client does, or decline a round that the privacy budget does not bear to its end.

        A reply that declines has no payload.
        """
        if self.privacy is None:
            return super().answer_training(task)
        from fedprune_app.privacy.ledger import Overspent

        try:
            self.privacy.ledger.require(self.privacy.round_cost)
            return super().answer_training(task)
        except Overspent as error:
            return Payload({}), self.privacy.declined(task.round, error)

    def load_state(self, task: Task, before: int) -> tuple[State, str]:
        """Load the state as every client does, and raise ``ValueError`` where the ledger has lost a charge."""
        state, lost = super().load_state(task, before)
        if self.privacy is not None:
            told = float(task.fields.get("epsilon-rdp", 0.0))
            self.privacy.require_memory(int(state.meta.get("charges", 0)), told)
        return state, lost

    def kept_state(self, update: AnUpdate) -> State:
        """Remember in the state how many charges there are, apart from the ledger, which must not shrink."""
        state = super().kept_state(update)
        if self.privacy is None:
            return state
        return State(state.tensors, {**state.meta, "charges": self.privacy.charges})
