"""The laws that every system keeps, whatever it computes; a plug-in proves them with one line.

>>> def test_my_system():
...     check_system("my-prox", plugins="my_prox.py")

The laws are those of fedprune's own systems: a run completes and records what is declared; replies hold declared fields
alone; the same settings give the same models, with clients trained one by one or in cohorts; a run that was killed
after any round resumes to the same models and records; replies that are late, malformed, not finite, huge, for another
message or sent twice leave everything as if their clients had not been asked; after the last round every client trains
once more, those that are held out for the first time. All runs are real ones, in this process and on the embedded
digits unless ``settings`` say otherwise.
"""

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from flwr.app import Array, ArrayRecord, Error, Message, MessageType

from clients.base import Update
from clients.node import Kind as ReplyKind
from clients.node import fields_of, undeclared
from fedprune_app import client_app, server_app
from fedprune_app.config import ConfigError, Scalar, has_effect, paths_from_here, with_carrier
from fedprune_app.core import codec
from fedprune_app.core.payload import Payload
from fedprune_app.engine import exchange, simulated_grid, wire
from fedprune_app.engine.flower_private import set_answered_id
from fedprune_app.engine.simulated_grid import InProcessGrid, run_in_process
from fedprune_app.engine.store import State
from fedprune_app.files import scratch_folder
from fedprune_app.learning.training import TrainingResult
from fedprune_app.preflight.given import Given, Placement
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import System
from fedprune_app.results import declarations
from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.measures import Kind, Measures
from fedprune_app.results.recorder import write_info
from fedprune_app.terminal import Terminal

CLIENTS, ROUNDS = 5, 3
QUICK: Mapping[str, Scalar] = {
    "num-server-rounds": ROUNDS,
    "local-epochs": 1,
    "fraction-train": 1.0,
    "evaluate-every": 1,
    "shards-per-client": 3,
    "shard-size": 20,
    "learning-rate": 0.05,
}
"""These settings make quick runs in which every client takes part in every round, and is evaluated after it."""
PRIVATE: Mapping[str, Scalar] = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.delta": 1e-3}
NEEDED: Mapping[str, Mapping[str, Scalar]] = {
    "subfedavg": {"local-epochs": 2},
    "subfedavg-hy": {"model": "cnn-small-bn", "local-epochs": 2},
    "fedcr": {"model": "cnn-small-cr", "learning-rate": 0.005, "max-grad-norm": 10.0},
    "fedltp": {
        "fedltp.tickets": 1,
        "fedltp.ticket-iterations": 10,
        "steps-per-epoch": 3,
        **PRIVATE,
        "dp.count-scale": 20.0,
    },
    "dpfed": PRIVATE,
    "fedspa": PRIVATE,
    "ldp-fedp3": PRIVATE,
}
"""Settings of the systems that are private by nature, need a network of their own, or prune from two epochs on."""
LATE, MALFORMED = "2", "3"
"""The rounds in which clients misbehave: there is something to spoil before and after each."""
_ANYTHING = 10**7
_ALL_REPLY: Mapping[str, Scalar] = {"min-replies": CLIENTS}  # so that the reason ends the run if one does not
_KINDS: Mapping[str, ReplyKind] = {
    MessageType.QUERY: "introduction",
    MessageType.TRAIN: "training",
    MessageType.EVALUATE: "evaluation",
}


_OF_SERVER: Mapping[str, type] = {"state": State, "doubts": list, "expect": wire.Schema, "send": Iterable}
_OF_CLIENT: Mapping[str, type] = {
    "begin": dict,
    "train": TrainingResult,
    "local_update": Update,
    "report": dict,
    "masks": dict,
    "personal_model": dict,
    "evaluation": tuple,
}
"""What the hooks that a plug-in's system may override return."""


class BrokenLawError(AssertionError):
    """A system breaks a law; the message says which one, and how."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run is what it left in its folder."""

    folder: Path

    @property
    def info(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return content

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return self._rows("rounds.jsonl")

    @property
    def clients(self) -> list[dict[str, Any]]:
        return self._rows("clients.jsonl")

    @property
    def sha256(self) -> str:
        return str(self.info["final_sha256"])

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@dataclass(frozen=True)
class ObservedRun(FinishedRun):
    """An observed run also has the names of the fields of each reply that its server got, by kind of message."""

    replies: Mapping[str, list[set[str]]]


def check_system(
    name: str,
    *,
    plugins: str | Iterable[str] = (),
    engines: Iterable[str] = (),
    settings: Mapping[str, Scalar] | None = None,
) -> None:
    """Hold a system to all laws, in runs of five clients and three rounds.

    ``plugins`` are modules and files that register the system. ``settings`` are keys with values that the system needs
    beside :data:`QUICK`. On each of the ``engines``, such as "ray", the run has to end with the same models as in this
    process; that takes some seconds more. Raises :class:`BrokenLawError`.
    """
    files = [plugins] if isinstance(plugins, str) else list(plugins)
    with scratch_folder() as folder, simulated_grid.quiet():
        values: dict[str, Scalar] = {**(settings or {}), "system": name, "plugins": ",".join(files)}
        laws = _Laws(folder, {**QUICK, **paths_from_here(values)})
        laws.completes()
        laws.all_train_in_the_end()
        laws.replies_are_declared()
        laws.is_deterministic()
        laws.resumes()
        laws.bad_replies_change_nothing()
        for engine in engines:
            laws.is_the_same_on(engine)


# --- grids whose clients misbehave --------------------------------------------------------------------------------


def listening(grid: type[InProcessGrid], replies: dict[str, list[set[str]]]) -> type[InProcessGrid]:
    """Return ``grid``, which notes the names of the fields of every reply that is none of its misdeeds."""

    class Listening(grid):  # type: ignore[misc, valid-type]
        def pull_messages(self, message_ids: Any) -> Any:
            for reply in super().pull_messages(message_ids):
                if not reply.has_error():
                    replies[reply.metadata.message_type].append(set(wire.fields_of(reply.content)))
                yield reply

    return Listening


class Failing(InProcessGrid):
    """Clients 1 to 3 raise when they are asked to train in rounds 2 and 3: as if they had not been asked."""

    misbehaving = (1, 2, 3)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield replies, those of misbehaving clients as :meth:`bad` makes them."""
        for message_id in message_ids:
            message = self._pending.get(message_id)
            if message is None:
                continue
            partition = int(self._contexts[message.metadata.dst_node_id].node_config["partition-id"])
            is_training = message.metadata.message_type == MessageType.TRAIN
            exchanged = message.metadata.group_id
            if is_training and exchanged in (LATE, MALFORMED) and partition in self.misbehaving:
                yield from self.bad(exchanged, partition, message_id)
            else:
                yield from super().pull_messages([message_id])

    def bad(self, exchanged: str, partition: int, message_id: str) -> Iterator[Message]:
        """Yield what a misbehaving client answers in the round ``exchanged``, if it answers."""
        message = self._pending.pop(message_id)
        reply = Message(Error(2, "ValueError: no"), reply_to=message)
        set_answered_id(reply, message_id)
        yield reply

    def honest(self, message_id: str) -> Message:
        """Return the reply of a client that behaves."""
        (reply,) = InProcessGrid.pull_messages(self, [message_id])
        return reply


class Misbehaving(Failing):
    """Late in round 2, malformed in round 3.

    In round 2 client 1 answers an hour late, client 2 answers another message than it was sent, client 3 never answers.
    In round 3 client 1 sends bytes that no codec wrote, client 2 values that are not finite, client 3 huge values.
    """

    def bad(self, exchanged: str, partition: int, message_id: str) -> Iterator[Message]:
        if exchanged == MALFORMED:
            reply = self.honest(message_id)
            yield malformed(reply) if partition == 1 else _with_values(reply, math.nan if partition == 2 else 1e30)
        elif partition == 2 and message_id in self._pending:
            reply = self.honest(message_id)
            set_answered_id(reply, "1")  # of the first query, long answered
            yield reply


class Twice(InProcessGrid):
    """Every reply to a training message comes twice, in one batch."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for reply in super().pull_messages(message_ids):
            yield reply
            if reply.metadata.message_type == MessageType.TRAIN:
                yield reply


def _with_values(reply: Message, value: float) -> Message:
    """Return the reply with all its tensors full of a value; a reply without tensors says a number that is none."""
    if wire.PAYLOAD not in reply.content:
        fields: Any = reply.content["fields"]
        fields.update({"num-examples": 10**9})
        return reply
    payload = wire.payload_of(reply.content, _ANYTHING)
    tensors = {
        name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        for name, tensor in payload.tensors.items()
    }
    try:
        reply.content[wire.PAYLOAD] = wire.to_arrays(Payload(tensors, payload.masks))
    except ValueError:  # our own encoder does not write such values
        return malformed(reply)
    return reply


def malformed(reply: Message) -> Message:
    """Return the reply with bytes that no codec wrote."""
    data = b"\x93no codec wrote this" * 20
    reply.content[wire.PAYLOAD] = ArrayRecord({codec.KEY: Array("uint8", (len(data),), "fedprune.codec", data)})
    return reply


@contextmanager
def patient_clock() -> Iterator[SimpleNamespace]:
    """Let deadlines pass on a clock that moves only while the server sleeps: a busy machine makes nobody late.

    The clock is yielded, and its ``seconds`` may be set.
    """
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds: float) -> None:
        now.seconds += max(seconds, 1e-3)

    with mock.patch.object(exchange, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)):
        yield now


# --- runs ---------------------------------------------------------------------------------------------------------


def run_with(
    values: Mapping[str, Any], folder: Path, grid: type[InProcessGrid] = InProcessGrid, clients: int = CLIENTS
) -> ObservedRun:
    """Run a federation with the settings ``values`` in this process, on ``grid``, in ``folder``."""
    config = prepare(Given({**values, "out-dir": str(folder)})).config
    replies: dict[str, list[set[str]]] = defaultdict(list)
    with mock.patch.object(simulated_grid, "InProcessGrid", listening(grid, replies)):
        run_in_process(server_app.app, client_app.app, clients, with_carrier(config))
    return ObservedRun(folder, replies)


def cut_after(whole: FinishedRun, round: int, folder: Path) -> Path:
    """Copy a run's folder as a kill leaves it: checkpoints end with ``round``, and clients are ahead of them."""
    copy = Path(shutil.copytree(whole.folder, folder))
    for later in range(round + 1, ROUNDS + 1):
        (copy / "checkpoints" / f"round-{later:05d}.safetensors").unlink()
    write_info(copy, {**whole.info, "status": "running", "final_sha256": None})
    return copy


def lasting(recorded: Any) -> Any:
    """Return records without times, without what a message weighs (one of its fields is a time), and without epsilons.

    A private round that is repeated is charged twice.
    """
    if isinstance(recorded, list):
        return [lasting(entry) for entry in recorded]
    if not isinstance(recorded, dict):
        return recorded
    return {key: lasting(entry) for key, entry in recorded.items() if not re.search("seconds|bytes|epsilon", key)}


def misrecorded(rows: Iterable[Mapping[str, Any]], columns: Iterable[str], declared: Measures = MEASURES) -> list[str]:
    """Return the names in recorded ``rows`` that are not declared as ``columns``, or not of the declared kind."""
    kinds = {name: kind for kind, names in declared.kinds.items() for name in names}
    names = set(columns)
    return sorted(
        {name for row in rows for name, value in row.items() if name not in names or not _is_one(value, kinds[name])}
    )


def _is_one(value: Any, kind: Kind) -> bool:
    if kind is Kind.NUMBER:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if kind is Kind.TEXTS:
        return all(isinstance(text, str) for text in value)
    inner = Kind.NUMBER if kind is Kind.BY_NAME else Kind.BY_NAME
    return isinstance(value, dict) and all(_is_one(item, inner) for item in value.values())


class _Laws:
    def __init__(self, folder: Path, settings: Mapping[str, Scalar]) -> None:
        self._folder = folder
        self._settings = settings
        self._count = 0
        with _check_returns(prepare(Given(settings)).system):
            self._whole = self._run(_ALL_REPLY)

    def _run(
        self, changes: Mapping[str, Scalar] | None = None, grid: type[InProcessGrid] = InProcessGrid
    ) -> ObservedRun:
        self._count += 1
        values = {**self._settings, **(changes or {})}
        folder = Path(str(values.get("resume-from") or self._folder / str(self._count)))
        return run_with(values, folder, grid)

    def completes(self) -> None:
        run = self._whole
        _must(run.info["status"] == "completed", "a run completes", f"its status is {run.info['status']!r}")
        evaluated = {row["partition"] for row in run.clients if row["round"] == ROUNDS}
        _must(
            evaluated == set(range(CLIENTS)), "all clients are evaluated in the end", f"only {sorted(evaluated)} were"
        )
        system = str(self._settings["system"])
        measures = declarations.all_of(system)
        wrong_names = misrecorded(run.rounds, measures.columns, measures)
        wrong_names += misrecorded(run.clients, {"round", "partition", *measures.of_clients}, measures)
        _must(not wrong_names, "all that is recorded is declared", f"{', '.join(wrong_names)} is not")
        missing_names = [
            measure.name
            for measure in declarations.of_system(system)
            if all(row.get(measure.column) is None for row in run.rounds)
        ]
        _must(
            not missing_names, "every number that the system declares is recorded", f"{', '.join(missing_names)} is not"
        )

    def replies_are_declared(self) -> None:
        """Check that replies hold what the client's class declares; a private client's as much as any other's."""
        prepared = prepare(Given(self._settings))
        config, client = prepared.config, prepared.system.client
        runs = {config.dp.enabled: self._whole}
        try:
            prepare(Given({**self._settings, **PRIVATE}))
        except ConfigError:  # it cannot be private
            runs[False] = self._whole
        else:
            runs[True] = self._whole if config.dp.enabled else self._run({**_ALL_REPLY, **PRIVATE})
        for is_private, run in runs.items():
            for kind, replies in run.replies.items():
                allowed = fields_of(client, config.system).allowed(_KINDS[kind], is_private)
                wrong_names = undeclared(set().union(*replies), allowed)
                _must(
                    not wrong_names,
                    f"a reply of {_KINDS[kind]} holds declared fields",
                    f"{', '.join(wrong_names)} is not",
                )

    def is_deterministic(self) -> None:
        for cohort in (0, 2):
            sha256 = self._run({"cohort": cohort}).sha256
            _must(sha256 == self._whole.sha256, "the same settings give the same models", f"not with cohort={cohort}")

    def resumes(self) -> None:
        for round in range(1, ROUNDS):
            cut = cut_after(self._whole, round, self._folder / f"cut-{round}")
            resumed = self._run({"resume-from": str(cut)})
            law = f"a run killed after round {round} resumes to the same"
            _must(
                resumed.sha256 == self._whole.sha256, law, "its models are others: state() and restore() lose something"
            )
            for name in ("rounds", "clients"):
                is_same = lasting(getattr(resumed, name)) == lasting(getattr(self._whole, name))
                _must(is_same, law, f"{name}.jsonl is another")

    def bad_replies_change_nothing(self) -> None:
        """Bad replies leave everything as if their clients had not been asked, and a reply counts once."""
        settings: dict[str, Scalar] = {"deadline-seconds": 5.0, "evaluate-every": ROUNDS}
        with patient_clock():
            without, with_bad = (self._run(settings, grid) for grid in (Failing, Misbehaving))
        law = "bad replies leave everything as if their clients had not been asked"
        failures = [[row["failures"] for row in run.rounds] for run in (without, with_bad)]
        _must(failures[0] == failures[1], law, f"{failures[1]} replies a round are refused, of {failures[0]}")
        _must(with_bad.sha256 == without.sha256, law, "the models are others")
        _must(
            self._run(grid=Twice).sha256 == self._whole.sha256,
            "a reply that comes twice counts once",
            "the models are others",
        )

    def all_train_in_the_end(self) -> None:
        """After the last round a client that is held out trains, and all others do; a round may not ask the former."""
        config = prepare(Given(self._settings)).config
        changes: dict[str, Scalar] = {"holdout-clients": 1, "last-phase": True}
        settings = {key: value for key, value in changes.items() if has_effect(key, config)}
        trained: set[int] = set()
        for row in self._run(settings).clients:
            if any(row.get(column) is not None for column in ("accuracy_newcomer", "accuracy_last_phase")):
                trained.add(row["partition"])
        expected = CLIENTS if "last-phase" in settings else len(settings)
        law = "every client can train once more after the last round"
        _must(len(trained) == expected, law, f"{len(trained)} of {expected} clients did")

    def is_the_same_on(self, engine: str) -> None:
        from fedprune_app.running import run

        folder = self._folder / engine
        prepared = prepare(Given({**self._settings, "out-dir": str(folder)}), Placement(engine, CLIENTS, 2))
        sha256 = run(prepared, folder, Terminal(stderr=True, quiet=True))["final_sha256"]
        _must(sha256 == self._whole.sha256, f"engine {engine!r} gives the same models", "they are others")


@contextmanager
def _check_returns(system: System) -> Iterator[None]:
    """Let a hook that returns another type than it should raise ``TypeError`` with its name, until the block ends."""

    def checked_hook(owner: type, name: str, kind: type) -> Callable[..., Any]:
        hook = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            value = hook(*arguments, **keywords)
            if not isinstance(value, kind):
                result = "nothing" if value is None else f"a value of type {type(value).__name__}"
                raise TypeError(f"{owner.__name__}.{name}() returns {result}, allowed: {kind.__name__}")
            return value

        return call

    with ExitStack() as stack:
        for owner, kinds in ((system.strategy, _OF_SERVER), (system.client, _OF_CLIENT)):
            for name, kind in kinds.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, checked_hook(owner, name, kind)))
        yield


def _must(holds: bool, law: str, finding: str) -> None:
    if not holds:
        raise BrokenLawError(f"{law}: {finding}")
