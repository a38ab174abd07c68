"""Every client half has this, whatever it trains or prunes: its place, its state on disk, its answers to Flower."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flwr.app import ArrayRecord, Message, MessageType
from flwr.client import NumPyClient

from clients.context import NodeContext
from clients.privacy import ClientPrivacy, PlannedReleases, data_of, ledger_path
from clients.task import NDArrays, Task, names_of, reply_from_numpy
from fedprune_app.config import Config
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.simulated_grid import shares_disk_with_server
from fedprune_app.engine.store import State, VersionedStore, client_store
from fedprune_app.learning.device import device_of
from fedprune_app.results import system_metrics

ReplyType = Literal["registration", "training", "evaluation"]
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReplyFields:
    """Reply fields are the names of the fields that a class of clients adds to what its base classes may send.

    ``registration``, ``training`` and ``evaluation`` are the kinds of replies. A name that ends in "/" stands for all
    names that begin with it. Of all these names, those in ``withheld_when_private`` are not sent with ``dp.enabled``,
    and those in ``only_when_private`` are not sent without.
    """

    registration: frozenset[str] = _NONE
    training: frozenset[str] = _NONE
    evaluation: frozenset[str] = _NONE
    withheld_when_private: frozenset[str] = _NONE
    only_when_private: frozenset[str] = _NONE

    def __or__(self, other: ReplyFields) -> ReplyFields:
        return ReplyFields(
            self.registration | other.registration,
            self.training | other.training,
            self.evaluation | other.evaluation,
            self.withheld_when_private | other.withheld_when_private,
            self.only_when_private | other.only_when_private,
        )

    def allowed(self, kind: ReplyType, is_private: bool) -> frozenset[str]:
        """Return the names, and the prefixes of names, that a reply of this kind may have."""
        fields_by_kind = {"registration": self.registration, "training": self.training, "evaluation": self.evaluation}
        return fields_by_kind[kind] - (self.withheld_when_private if is_private else self.only_when_private)


def declared(kind: type) -> ReplyFields:
    """Return what a class of clients declares, together with what all its base classes declare."""
    fields = ReplyFields()
    for base in kind.__mro__:
        fields |= vars(base).get("declares", ReplyFields())
    return fields


def fields_of(kind: type, system: str) -> ReplyFields:
    """Return which fields the replies of this class of clients may have in a run of the system."""
    metrics = system_metrics.of_system(system)
    return declared(kind) | ReplyFields(
        training=frozenset(metric.name for metric in metrics if metric.source == "training"),
        evaluation=frozenset(metric.name for metric in metrics if metric.source == "evaluation"),
        withheld_when_private=frozenset(metric.name for metric in metrics if not metric.public),
    )


def check_reply(kind: type, config: Config, reply: ReplyType, fields: Iterable[str]) -> None:
    """Raise ``ValueError`` for a field that this class of clients does not declare in a ``reply`` of this kind."""
    allowed = fields_of(kind, config.system).allowed(reply, config.dp.enabled)
    if unknown_names := undeclared(fields, allowed):
        raise ValueError(f"field '{unknown_names[0]}' is in a reply, allowed in {reply}: {', '.join(sorted(allowed))}")


def undeclared(names: Iterable[str], allowed: frozenset[str]) -> list[str]:
    """Return those of ``names`` that are not ``allowed``, by themselves or by a prefix."""
    prefixes = tuple(name for name in allowed if name.endswith("/"))
    return [name for name in names if name not in allowed and not name.startswith(prefixes)]


_SPENT = frozenset(
    {
        *("epsilon", "epsilon-pld", "epsilon-rdp", "epsilon-paper", "epsilon-second"),
        *("epsilon-simulated", "budget-spent"),
    }
)


class Node(NumPyClient):
    """A node is one client of a run, with its state below ``place.state_dir``.

    Flower calls :meth:`get_properties`, :meth:`fit` and :meth:`evaluate`. These call, with the message as a
    :class:`Task`: :meth:`registration`; :meth:`local_update`, then :meth:`report`; and :meth:`evaluation`.

    ``privacy`` is what ``dp.enabled`` adds: noise, and a ledger that :meth:`open_privacy` opens.
    """

    versions_kept = 3  # of its state, below the one the server last took in
    not_private = "nobody has examined what it releases"  # why the system cannot be private; empty if it can
    privacy_kind: type[ClientPrivacy] = ClientPrivacy
    state_waits_for_checkpoint = False  # whether nothing relies on a state before the round's checkpoint
    declares: ClassVar = ReplyFields(
        registration=frozenset(
            {"partition", "num-partitions", "num-examples", "capacity", "own-data", "lost-rounds", "lost-reasons"}
        ),
        training=frozenset({"num-examples", "seconds", "note", "lost", "declined"}) | _SPENT,
        evaluation=frozenset({"num-examples", "note", "lost"}) | _SPENT,
        withheld_when_private=frozenset({"seconds"}),  # how long the work takes may depend on the data
        only_when_private=_SPENT | {"declined"},
    )

    def __init__(self, config: Config, context: NodeContext) -> None:
        self.config = config
        self.context = context
        self.client_id = context.client_id
        self.store: VersionedStore = client_store(
            context.state_dir, context.client_id, context.run_key, self.versions_kept
        )
        self.device = device_of(config)
        self.kept_properties: ValueDict = {}  # what every state of the client says, beside what an update says
        self.privacy: ClientPrivacy | None = None

    # --- what a client says -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """How much the client learns from, in whatever it counts."""

    def registration(self) -> ValueDict:
        """Return what a client says of itself when it is asked who it is."""
        return {
            "partition": self.client_id,
            "num-examples": self.num_examples,
            **({} if self.context.capacity is None else {"capacity": self.context.capacity}),
            **({"own-data": True} if self.context.has_own_data else {"num-partitions": self.context.num_clients}),
        }

    @abstractmethod
    def message_schema(self) -> wire.Schema:
        """Return the largest payload that the server may send to the client."""

    def peer_schema(self) -> wire.Schema:
        """Return what other clients' updates must hold, in systems where clients see them."""
        return wire.Schema.like({})

    @abstractmethod
    def local_update(self, task: Task, state: State) -> Any:
        """Do the client's part of a round.

        An update has a ``payload`` to send, a ``state`` to keep, and ``metrics``, more to tell the server.
        """

    def answer(self, task: Task, state: State) -> Payload:
        """Answer what the server asks for beside training; ``task.fields["asks"]`` names it. No state is kept."""
        raise NotImplementedError(f"{type(self).__name__} has no answer() to {task.fields['asks']!r}")

    @abstractmethod
    def report(self, task: Task, update: Any) -> ValueDict:
        """Return what the server records of an update. Raises ``ValueError`` for one that must not count."""

    @abstractmethod
    def evaluation(self, task: Task, state: State) -> tuple[int, ValueDict]:
        """Return on how many examples the client's own model was evaluated, and what was found."""

    def planned_releases(self) -> PlannedReleases:
        """Return what the client plans to release, in a round and beside the rounds, with ``dp.enabled``."""
        return PlannedReleases(self.config.local_epochs)

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Say in one line for the user why the system cannot run so with ``dp.enabled``; empty if it can.

        It can where everything that leaves a client, or is evaluated, is made of weights that were trained privately,
        of what others released, of draws without data, and of noised counts. A system says so itself, by
        ``not_private``, or by this method where its options decide.
        """
        return never_private(config, cls.not_private) if cls.not_private else ""

    def open_privacy(self, records: Callable[[], list[bytes]], dealing: str) -> ClientPrivacy | None:
        """Open the ledger where ``dp.enabled`` asks for one, once the client knows its data.

        ``records`` gives a digest of each record of the client's data, all parts of them. ``dealing`` says for readers
        of the ledger how data are dealt to clients. Raises ``ValueError`` where the ledger is damaged, and where the
        noise is less than the node asks for.
        """
        config, context = self.config, self.context
        if not config.dp.enabled:
            return None
        data = data_of(config, context, records(), dealing)
        path, planned_releases = ledger_path(config, context, data, self.store.folder), self.planned_releases()
        return self.privacy_kind(
            config, self.client_id, self.num_examples, planned_releases, path, data, context.policy
        )

    # --- Flower's NumPyClient -----------------------------------------------------------------------------------

    def get_properties(self, config: ValueDict) -> ValueDict:
        return self.registration()

    def fit(self, parameters: NDArrays, config: ValueDict) -> tuple[NDArrays, int, ValueDict]:
        payload, fields = self.answer_training(Task.from_numpy(parameters, config))
        return payload.to_ndarrays(), self.num_examples, {**fields, **names_of(payload)}

    def evaluate(self, parameters: NDArrays, config: ValueDict) -> tuple[float, int, ValueDict]:
        return 0.0, *self.answer_evaluation(Task.from_numpy(parameters, config))

    # --- answers and state --------------------------------------------------------------------------------------

    def reply_to(self, message: Message) -> Message:
        """Train or evaluate as a message asks, and pack the reply."""
        task = Task.from_message(message.content, self.message_schema(), self.peer_schema())
        if message.metadata.message_type == MessageType.EVALUATE:
            _, num_examples, fields = self.evaluate(*task.to_numpy())
            return self.pack(message, "evaluation", {**fields, "num-examples": num_examples})
        arrays, num_examples, metrics = self.fit(*task.to_numpy())
        payload, fields = reply_from_numpy(arrays, metrics)
        encoded: ArrayRecord | None = wire.to_arrays(payload) if payload.tensors else None
        return self.pack(message, "training", {**fields, "num-examples": num_examples}, encoded)

    def pack(self, message: Message, kind: ReplyType, fields: Values, arrays: ArrayRecord | None = None) -> Message:
        """Pack a reply. Raises ``ValueError`` for a field that the class does not declare."""
        check_reply(type(self), self.config, kind, fields)
        return Message(wire.pack(arrays, fields), reply_to=message)

    def answer_training(self, task: Task) -> tuple[Payload, ValueDict]:
        """Load the state, update it, save it, and only then return the reply.

        A round that is asked for again (a resumed run) starts from the state before it, so it gives the same reply.
        A private client declines a round that its budget does not bear to its end: that reply has no payload. Raises
        ``ValueError`` and saves nothing when the update must not count: when training diverges, say.
        """
        if "asks" in task.fields:
            return self.answer(task, self.load_state(task)[0]), {}
        if self.privacy is None:
            return self._train_and_store(task)
        from fedprune_app.privacy.ledger import Overspent

        try:
            self.privacy.ledger.require(self.privacy.round_cost)
            return self._train_and_store(task)
        except Overspent as error:
            return Payload({}), self.privacy.declined(task.round, error)

    def _train_and_store(self, task: Task) -> tuple[Payload, ValueDict]:
        start = time.monotonic()
        state, loss = self.load_state(task)
        update = self.local_update(task, state)
        report = self.report(task, update)
        meta = {**update.state.meta, **self.kept_properties}
        if self.privacy is not None:  # apart from the ledger, which must not shrink
            meta["charges"] = len(self.privacy.ledger)
        durable = not (self.state_waits_for_checkpoint and shares_disk_with_server())
        state = State(update.state.tensors, meta)
        self.store.save(task.round, state, accepted=task.state_round, durable=durable)
        timing = {} if self.privacy is not None else {"seconds": time.monotonic() - start}
        return update.payload, self._checked_fields({**report, **timing, **update.metrics, **_notes(task, loss)})

    def answer_evaluation(self, task: Task) -> tuple[int, ValueDict]:
        """Load the state, evaluate it, and return the reply: how many examples, and what was found."""
        state, loss = self.load_state(task)
        num_examples, scores = self.evaluation(task, state)
        return num_examples, self._checked_fields({**scores, **_notes(task, loss)})

    def _checked_fields(self, fields: ValueDict) -> ValueDict:
        subject = f"{type(self).__name__} tells that"
        return system_metrics.for_reply(self.config.system, fields, self.config.dp.enabled, subject)

    def load_state(self, task: Task) -> tuple[State, str]:
        """Return the state after the round that the server last took in from this client (``task.state_round``).

        If the state is lost, it is the one before that, with a note that says so. Raises ``ValueError`` where a private
        client's ledger has lost a charge.
        """
        wanted_round, loss = task.state_round, ""
        latest = self.store.load(before=wanted_round + 1) if wanted_round else None
        round, state = latest or (0, State())
        if round != wanted_round:
            way = f"went on from round {round}" if round else "began anew"
            loss = f"the state of round {wanted_round} is lost, {way}"
        if self.privacy is not None:
            epsilon_known = float(task.fields.get("epsilon-rdp", 0.0))
            self.privacy.require_memory(int(state.meta.get("charges", 0)), epsilon_known)
        return state, loss

    def check_state(self, round: int) -> None:
        """Raise ``ValueError`` naming the file where what is kept since ``round`` is damaged or missing."""
        self.store.read(round)

    def lost_states(self, rounds: Iterable[int]) -> ValueDict:
        """Answer a server that resumes a run: which of these versions of its state it has lost, and why."""
        reasons: dict[int, str] = {}
        for round in rounds:
            try:
                self.check_state(round)
            except ValueError as error:
                reasons[round] = str(error)
                if self.context.has_own_data:  # where its operator keeps its files is nobody's business
                    reasons[round] = reasons[round].replace(str(self.store.folder), self.store.folder.name)
        return {"partition": self.client_id, "lost-rounds": list(reasons), "lost-reasons": list(reasons.values())}


def _notes(task: Task, loss: str) -> dict[str, str]:
    notes = list(filter(None, [loss, *task.notes]))
    fields = {"note": "; ".join(notes)} if notes else {}
    return {**fields, "lost": loss} if loss else fields


def parts_not_private(config: Config, feature: str) -> str:
    """Say why ``feature``, which trains parts of the network, cannot be private; empty if it can.

    Only ``dp.grad-sample`` auto and one-pass can do it.
    """
    if config.dp.grad_sample in ("auto", "one-pass"):
        return ""
    return f"dp.grad-sample is {config.dp.grad_sample!r}, allowed with {feature}: auto, one-pass"


def never_private(config: Config, reason: str) -> str:
    """Say in one line for the user that ``dp.enabled`` does not go with the system."""
    return f"dp.enabled is true, allowed with system {config.system!r}: false; {reason}"
