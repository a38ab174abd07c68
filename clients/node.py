"""Base of all client halves: the declared fields of replies, the state on disk, and Flower's interface."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType
from flwr.client import NumPyClient

from clients.context import NodeContext
from clients.privacy import ClientPrivacy, PlannedReleases, data_of, ledger_path
from clients.task import NDArrays, Task, names_of, reply_from_numpy
from fedprune_app.config import Config
from fedprune_app.core.bounds import threshold_of
from fedprune_app.core.holders import HELD
from fedprune_app.core.named import TensorDict, ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.engine import background, wire
from fedprune_app.engine.secure_aggregation import BODY, INPUT, MASKED, STAGE, Identity, Member, body_of
from fedprune_app.engine.simulated_grid import shares_disk_with_server
from fedprune_app.engine.store import State, VersionedStore, client_store, grouped
from fedprune_app.learning.device import device_of
from fedprune_app.results import system_metrics

ReplyType = Literal["registration", "training", "evaluation"]
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReplyFields:
    """Names of the fields that a client class may send besides its base classes' fields.

    ``registration``, ``training`` and ``evaluation`` are the kinds of replies. A name that ends in "/" stands for all
    names that begin with it. Names in ``withheld_when_private`` are not sent with ``dp.enabled``, and those in
    ``only_when_private`` only with it.
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
        """Return the allowed names, and prefixes of names, in a reply of this kind."""
        fields_by_kind = {"registration": self.registration, "training": self.training, "evaluation": self.evaluation}
        return fields_by_kind[kind] - (self.withheld_when_private if is_private else self.only_when_private)


def declared(kind: type) -> ReplyFields:
    """Return the fields that a client class and its base classes declare."""
    fields = ReplyFields()
    for base in kind.__mro__:
        fields |= vars(base).get("declares", ReplyFields())
    return fields


def fields_of(kind: type, system: str) -> ReplyFields:
    """Return the fields that replies of this client class may have in a run of the system."""
    metrics = system_metrics.of_system(system)
    return declared(kind) | ReplyFields(
        training=frozenset(metric.name for metric in metrics if metric.source == "training"),
        evaluation=frozenset(metric.name for metric in metrics if metric.source == "evaluation"),
        withheld_when_private=frozenset(metric.name for metric in metrics if not metric.public),
    )


def check_reply(kind: type, config: Config, reply: ReplyType, fields: Iterable[str]) -> None:
    """Raise ``ValueError`` for a field that this client class does not declare in a ``reply`` of this kind."""
    allowed = fields_of(kind, config.system).allowed(reply, config.dp.enabled)
    if unknown_names := undeclared(fields, allowed):
        raise ValueError(f"field '{unknown_names[0]}' is in a reply, allowed in {reply}: {', '.join(sorted(allowed))}")


def undeclared(names: Iterable[str], allowed: frozenset[str]) -> list[str]:
    """Return those of ``names`` that neither a name nor a prefix in ``allowed`` covers."""
    prefixes = tuple(name for name in allowed if name.endswith("/"))
    return [name for name in names if name not in allowed and not name.startswith(prefixes)]


_SPENT = frozenset(
    {
        *("epsilon", "epsilon-pld", "epsilon-rdp", "epsilon-paper", "epsilon-second"),
        *("epsilon-simulated", "budget-spent"),
    }
)


# Fields of a message that do not change what is asked.
_BESIDE_THE_REQUEST = (
    STAGE,
    BODY,
    "round",
    "state-round",
    "evaluates",
    "epsilon-rdp",
    "partition",
    "capacity",
    "run-key",
)


class Node(NumPyClient):
    """Base class of one client of a run, with its state below ``context.state_dir``.

    Flower calls :meth:`get_properties`, :meth:`fit` and :meth:`evaluate`. These call, with the message as a
    :class:`Task`: :meth:`registration`; :meth:`local_update`, then :meth:`report`; and :meth:`evaluation`.

    ``privacy`` has the noise and the ledger with ``dp.enabled``; :meth:`open_privacy` makes it.
    """

    versions_kept = 3  # of its state, up to the one whose update the server accepted last
    not_summed = "its server reads single updates"  # why the system has no secure sums; empty if it has
    sends_parts = False  # whether clients send different coordinates, which secure sums count first
    not_private = "nobody has examined what it releases"  # why the system cannot be private; empty if it can
    privacy_kind: type[ClientPrivacy] = ClientPrivacy
    state_waits_for_checkpoint = False  # whether a state may be lost until the round's checkpoint is written
    declares: ClassVar = ReplyFields(
        registration=frozenset(
            {"partition", "num-partitions", "num-examples", "capacity", "own-data", "lost-rounds", "lost-reasons"}
        ),
        training=frozenset({"num-examples", "seconds", "note", "lost", "declined", STAGE, BODY}) | _SPENT,
        evaluation=frozenset({"num-examples", "note", "lost"}) | _SPENT,
        withheld_when_private=frozenset({"seconds"}),  # the duration may depend on the data
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
        self.kept_properties: ValueDict = {}  # values in every saved state, besides those of the update
        self.privacy: ClientPrivacy | None = None
        self.member = self._member() if config.secure_sums else None

    def _member(self) -> Member:
        """Return the client's half of secure sums. A node with a ledger has one record of sums for all runs, too."""
        policy, folder = self.context.policy, self.store.folder
        journal = Path(policy.ledger_dir or folder) / "sums.txt"
        identity = Identity.read(policy.node_key, policy.trusted_keys)
        threshold = self.config.secure_sums_threshold
        return Member(folder / "secure-sum.json", journal, self.client_id, threshold, identity)

    # --- what a client reports ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """The number of examples that the client trains on, in the system's own unit."""

    def registration(self) -> ValueDict:
        """Return the properties that a client reports at registration."""
        return {
            "partition": self.client_id,
            "num-examples": self.num_examples,
            **({} if self.context.capacity is None else {"capacity": self.context.capacity}),
            **({"own-data": True} if self.context.has_own_data else {"num-partitions": self.context.num_clients}),
        }

    @abstractmethod
    def message_schema(self) -> wire.Schema:
        """Return the schema of the largest payload that the server may send to the client."""

    def peer_schema(self) -> wire.Schema:
        """Return the schema of other clients' updates, in systems where clients receive them."""
        return wire.Schema.like({})

    @abstractmethod
    def local_update(self, task: Task, state: State) -> Any:
        """Do the client's part of a round.

        An update has a ``payload`` to send, a ``state`` to keep, and ``metrics``, further fields of the reply.
        """

    def answer(self, task: Task, state: State) -> Payload:
        """Return the reply to a request besides training, which ``task.fields["asks"]`` names. No state is kept."""
        raise NotImplementedError(f"{type(self).__name__} has no answer() to {task.fields['asks']!r}")

    @abstractmethod
    def report(self, task: Task, update: Any) -> ValueDict:
        """Return the fields of an update that the server records. Raises ``ValueError`` for an update to discard."""

    @abstractmethod
    def evaluation(self, task: Task, state: State) -> tuple[int, ValueDict]:
        """Evaluate the client's own model; return the number of examples, and the fields of the reply."""

    def planned_releases(self) -> PlannedReleases:
        """Return the releases that the client plans with ``dp.enabled``, in rounds and outside them."""
        return PlannedReleases(self.config.local_epochs)

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Return one line for the user on why these settings cannot run with ``dp.enabled``; empty if they can.

        They can if everything that is sent or evaluated is made only from privately trained weights, other clients'
        releases, draws independent of data, and noised counts. A system declares it by ``not_private``, or by this
        method if it depends on options.
        """
        return never_private(config, cls.not_private) if cls.not_private else ""

    @classmethod
    def why_not_summed(cls, config: Config) -> str:
        """Say in one line for the user why the system cannot run so with ``secure-sums``; empty if it can."""
        if cls.not_summed:
            return f"secure-sums is true, allowed with system {config.system!r}: false; {cls.not_summed}"
        # what a single client keeps would stand in the sum as it is
        least = threshold_of(config.secure_sums_threshold, 0)
        if cls.sends_parts and config.min_holders < least:
            return f"min-holders is {config.min_holders}, allowed with secure-sums: at least {least}"
        return ""

    def integers(self, task: Task, payload: Payload, terms: Mapping[str, int]) -> TensorDict:
        """Return an update as the int64 that the server's exact sums add up, by their ``terms``."""
        raise NotImplementedError

    def open_privacy(self, records: Callable[[], list[bytes]], dealing: str) -> ClientPrivacy | None:
        """Open the client's ledger; None without ``dp.enabled``. Called once the client's data are known.

        ``records`` returns a digest of each record of the client's data, in all parts. ``dealing`` describes for
        readers of the ledger how data are dealt to clients. Raises ``ValueError`` if the ledger is damaged, or if the
        noise is below the node's minimum.
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
        task = Task.from_numpy(parameters, config)
        if self.member is not None and task.fields.get(STAGE) != INPUT:
            payload, fields = Payload({}), self.member.answer(task.fields)
        else:
            payload, fields = self.answer_training(task)
        return payload.to_ndarrays(), self.num_examples, {**fields, **names_of(payload)}

    def evaluate(self, parameters: NDArrays, config: ValueDict) -> tuple[float, int, ValueDict]:
        return 0.0, *self.answer_evaluation(Task.from_numpy(parameters, config))

    # --- replies and state --------------------------------------------------------------------------------------

    def reply_to(self, message: Message) -> Message:
        """Train or evaluate as the message requests, and pack the reply."""
        task = Task.from_message(message.content, self.message_schema(), self.peer_schema())
        if message.metadata.message_type == MessageType.EVALUATE:
            _, num_examples, fields = self.evaluate(*task.to_numpy())
            return self.pack(message, "evaluation", {**fields, "num-examples": num_examples})
        arrays, num_examples, metrics = self.fit(*task.to_numpy())
        payload, fields = reply_from_numpy(arrays, metrics)
        encoded: ArrayRecord | None = background.to_arrays(payload) if payload.tensors else None
        return self.pack(message, "training", {**fields, "num-examples": num_examples}, encoded)

    def pack(self, message: Message, kind: ReplyType, fields: Values, arrays: ArrayRecord | None = None) -> Message:
        """Pack a reply. Raises ``ValueError`` for a field that the class does not declare."""
        check_reply(type(self), self.config, kind, fields)
        return Message(wire.pack(arrays, fields), reply_to=message)

    def answer_training(self, task: Task) -> tuple[Payload, ValueDict]:
        """Load the state, update it, save it, and only then return the reply.

        A repeated round (in a resumed run) starts from the state before it, so its reply is the same. A private client
        declines a round if its budget cannot pay for all of it: that reply has no payload. Raises ``ValueError`` and
        saves nothing for an update to discard, such as one of a training that diverged.
        """
        if "asks" in task.fields:
            state = self.load_state(task)[0]
            if task.fields["asks"] == HELD:
                update = Payload(state.group("sent"), state.group("sent_masks"))
                return self._masked(task, update, str(state.meta.get("received", ""))), {}
            return self._masked(task, self.answer(task, state)), {}
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
        if self.privacy is not None:  # a copy outside the ledger shows if the ledger has lost a charge
            meta["charges"] = len(self.privacy.ledger)
        durable = not (self.state_waits_for_checkpoint and shares_disk_with_server())
        tensors, payload = update.state.tensors, update.payload
        if self.member is not None and self.sends_parts:  # the server asks for the values next
            payload = payload.within(task.payload.tensors)
            tensors = {**tensors, **grouped(sent=payload.tensors, sent_masks=payload.masks)}
            meta["received"] = task.digest()
        state = State(tensors, meta)
        background.save_state(self.store, task.round, state, task.state_round, durable=durable)
        timing = {} if self.privacy is not None else {"seconds": time.monotonic() - start}
        payload = self._masked(task, payload)
        return payload, self._checked_fields({**report, **timing, **update.metrics, **_notes(task, loss)})

    def _masked(self, task: Task, payload: Payload, received: str = "") -> Payload:
        """Return with secure sums one tensor of integers under masks, of which the server can read the sum alone.

        ``received`` is the digest of a model that came before the message.
        """
        if self.member is None:
            return payload
        asked = {name: value for name, value in sorted(task.fields.items()) if name not in _BESIDE_THE_REQUEST}
        message = hashlib.sha256(f"{self.context.run_key} {task.digest()} {asked}".encode()).hexdigest()
        integers = self.integers(task, payload, body_of(task.fields, INPUT)["terms"])
        words = torch.cat([tensor.flatten() for _, tensor in sorted(integers.items())]).numpy().view(np.uint64)
        model = wire.digest_of(task.payload, payload.tensors) + received
        masked, notes = self.member.masked(task.fields, words, message, model, payload.digest())
        task.notes.extend(notes)
        return Payload({MASKED: torch.from_numpy(masked.view(np.int64))})

    def answer_evaluation(self, task: Task) -> tuple[int, ValueDict]:
        """Load the state, evaluate it, and return the number of examples and the fields of the reply."""
        state, loss = self.load_state(task)
        num_examples, scores = self.evaluation(task, state)
        return num_examples, self._checked_fields({**scores, **_notes(task, loss)})

    def _checked_fields(self, fields: ValueDict) -> ValueDict:
        subject = f"{type(self).__name__} tells that"
        return system_metrics.for_reply(self.config.system, fields, self.config.dp.enabled, subject)

    def load_state(self, task: Task) -> tuple[State, str]:
        """Return the state after this client's last accepted round (``task.state_round``), and a note if it is lost.

        The state is then the latest one before. Raises ``ValueError`` if a private client's ledger has lost a charge.
        """
        wanted_round, loss = task.state_round, ""
        latest = self.store.load(before=wanted_round + 1) if wanted_round else None
        round, state = latest or (0, State())
        if round != wanted_round:
            way = f"went on from round {round}" if round else "began anew"
            loss = f"the state of round {wanted_round} is lost, {way}"
        self.check_kept(state.meta)
        if self.privacy is not None:
            epsilon_known = float(task.fields.get("epsilon-rdp", 0.0))
            self.privacy.require_memory(int(state.meta.get("charges", 0)), epsilon_known)
        return state, loss

    def check_kept(self, meta: Values) -> None:
        """Raise ``ValueError`` for a state of other data of the node."""
        if meta.get("data-sha256", digest := self.kept_properties.get("data-sha256")) != digest:
            raise ValueError("the node's own data have changed since the run began, allowed: the same data")

    def check_state(self, round: int) -> None:
        """Raise ``ValueError`` with the file's name if the state after ``round`` is damaged, or of other data."""
        self.check_kept(self.store.read(round).meta)

    def lost_states(self, rounds: Iterable[int]) -> ValueDict:
        """Return which of these versions of the state are lost, and why, for a server that resumes a run."""
        reasons: dict[int, str] = {}
        for round in rounds:
            try:
                self.check_state(round)
            except ValueError as error:
                reasons[round] = str(error)
                if self.context.has_own_data:  # the operator's paths are private
                    reasons[round] = reasons[round].replace(str(self.store.folder), self.store.folder.name)
        return {"partition": self.client_id, "lost-rounds": list(reasons), "lost-reasons": list(reasons.values())}


def _notes(task: Task, loss: str) -> dict[str, str]:
    notes = list(filter(None, [loss, *task.notes]))
    fields = {"note": "; ".join(notes)} if notes else {}
    return {**fields, "lost": loss} if loss else fields


def parts_not_private(config: Config, feature: str) -> str:
    """Return why ``feature``, which trains parts of the network, cannot be private; empty if it can.

    Only ``dp.grad-sample`` auto and one-pass support it.
    """
    if config.dp.grad_sample in ("auto", "one-pass"):
        return ""
    return f"dp.grad-sample is {config.dp.grad_sample!r}, allowed with {feature}: auto, one-pass"


def never_private(config: Config, reason: str) -> str:
    """Return one line for the user: the system cannot run with ``dp.enabled``."""
    return f"dp.enabled is true, allowed with system {config.system!r}: false; {reason}"
