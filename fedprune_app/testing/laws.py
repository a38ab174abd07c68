"""The laws that every system must keep; a plug-in tests them with one line.

>>> def test_my_system():
...     check_system("my-prox", plugins="my_prox.py")

The laws are those of fedprune's own systems:

* A run completes and records only declared fields; replies have only declared fields.
* Equal settings give equal models, with clients trained one by one or in cohorts.
* A run that was killed after any round resumes to the same models and records.
* Replies that are late, malformed, not finite, huge, for another message or sent twice have no effect.
* After the last round every client trains once more, held-out clients for the first time.
* Every option is read, no pruned tensor is sent as a dense one, and no client remembers anything but its state.

All runs are real ones, in this process, by default on the embedded digits.
"""

import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from flwr.app import Message, MessageType
from torch import Tensor

from clients.base import Update
from clients.node import ReplyType as ReplyKind
from clients.node import fields_of, undeclared
from fedprune_app.config import ConfigError, Scalar, Settings, Table, has_effect, paths_from_here
from fedprune_app.core.named import Tensors
from fedprune_app.core.payload import Payload
from fedprune_app.engine import simulated_grid, wire
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.engine.store import State
from fedprune_app.files import scratch_folder
from fedprune_app.learning.training import TrainingResult
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import System
from fedprune_app.results import system_metrics
from fedprune_app.terminal import Terminal
from fedprune_app.testing.misbehaving import Failing, Misbehaving, Twice, patient_clock
from fedprune_app.testing.runs import (
    CLIENTS,
    PRIVATE,
    QUICK,
    ROUNDS,
    ObservedRun,
    cut_after,
    lasting,
    misrecorded,
    run_with,
)

_ALL_REPLY: Settings = {"min-replies": CLIENTS}  # so that a rejected reply ends the run with its reason
_KINDS: Mapping[str, ReplyKind] = {
    MessageType.QUERY: "registration",
    MessageType.TRAIN: "training",
    MessageType.EVALUATE: "evaluation",
}


_LEAVES_MODEL = type(None)  # the return type of a hook whose result is self.model
_OF_SERVER: Mapping[str, type] = {
    "state": State,
    "warnings": list,
    "expect": wire.Schema,
    "send": Iterable,
    "prepare": _LEAVES_MODEL,
    "end": _LEAVES_MODEL,
}
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
_HANDING_ON = ("/fedprune_app/config/", "dataclasses.py", "<string>")  # code that reads all options alike


class BrokenLawError(AssertionError):
    """Raised by :func:`check_system` with the law that a system breaks, and how."""


def check_system(
    name: str,
    *,
    plugins: str | Iterable[str] = (),
    engines: Iterable[str] = (),
    settings: Settings | None = None,
) -> None:
    """Check that a system keeps all laws, in runs of five clients and three rounds.

    ``plugins`` are modules and files that register the system. ``settings`` are those that the system needs besides
    :data:`QUICK`. On each of the ``engines``, such as "ray", the run must give the same models as in this process,
    which takes some seconds more. Raises :class:`BrokenLawError`.
    """
    files = [plugins] if isinstance(plugins, str) else list(plugins)
    with scratch_folder() as folder, simulated_grid.quiet():
        values: dict[str, Scalar] = {**(settings or {}), "system": name, "plugins": ",".join(files)}
        laws = _Laws(folder, {**QUICK, **paths_from_here(values)})
        laws.completes()
        laws.options_are_read()
        laws.all_train_in_the_end()
        laws.replies_are_declared()
        laws.is_deterministic()
        laws.resumes()
        laws.bad_replies_change_nothing()
        for engine in engines:
            laws.is_the_same_on(engine)


class _Laws:
    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._count = 0
        system = prepare(RunInputs(settings)).system
        with _check_returns(system), _names_read(system.options) as self._names_read:
            self._whole = self._run(_ALL_REPLY)

    def options_are_read(self) -> None:
        prepared = prepare(RunInputs(self._settings))
        names = [field.name for field in fields(prepared.system.options) if field.name not in self._names_read]
        keys = [f"{prepared.config.system}.{name.replace('_', '-')}" for name in names]
        unread = [key for key in keys if has_effect(key, prepared.config)]
        _must(not unread, "every option that the system declares is read", f"{', '.join(unread)} is not")

    def _run(self, changes: Settings | None = None, grid: type[InProcessGrid] = InProcessGrid) -> ObservedRun:
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
        declarations = system_metrics.all_of(system)
        wrong_names = misrecorded(run.rounds, declarations.columns, declarations)
        wrong_names += misrecorded(run.clients, {"round", "partition", *declarations.of_clients}, declarations)
        _must(not wrong_names, "all that is recorded is declared", f"{', '.join(wrong_names)} is not")
        missing_names = [
            metric.name
            for metric in system_metrics.of_system(system)
            if all(row.get(metric.column) is None for row in run.rounds)
        ]
        _must(
            not missing_names, "every number that the system declares is recorded", f"{', '.join(missing_names)} is not"
        )

    def replies_are_declared(self) -> None:
        """Check that replies have only fields that the client's class declares, with and without privacy."""
        prepared = prepare(RunInputs(self._settings))
        config, client = prepared.config, prepared.system.client
        runs = {config.dp.enabled: self._whole}
        try:
            prepare(RunInputs({**self._settings, **PRIVATE}))
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
        for cohort in (0, 1):
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
        """Check that bad replies have no effect, and that a reply counts once."""
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
        """Check that a held-out client trains only after the last round, and that all others train once more."""
        config = prepare(RunInputs(self._settings)).config
        changes: dict[str, Scalar] = {"holdout-clients": 1, "last-phase": True}
        settings = {key: value for key, value in changes.items() if has_effect(key, config)}
        asked, trained, held_out = set[int](), set[int](), set[int]()

        class Watching(InProcessGrid):
            def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
                messages = list(messages)
                of_rounds = [m for m in messages if m.metadata.group_id in map(str, range(1, ROUNDS + 1))]
                asked.update(int(self._context(m).node_config["partition-id"]) for m in of_rounds)
                return super().push_messages(messages)

        for row in self._run(settings, Watching).clients:
            if row.get("accuracy_newcomer") is not None:
                held_out.add(row["partition"])
            if row.get("accuracy_last_phase") is not None:
                trained.add(row["partition"])
        asked_early = sorted(asked & held_out)
        _must(not asked_early, "a round asks no client that is held out", f"one asks client {asked_early}")
        trained |= held_out
        expected = CLIENTS if "last-phase" in settings else len(settings)
        law = "every client can train once more after the last round"
        _must(len(trained) == expected, law, f"{len(trained)} of {expected} clients did")

    def is_the_same_on(self, engine: str) -> None:
        from fedprune_app.running import run

        folder = self._folder / engine
        prepared = prepare(RunInputs({**self._settings, "out-dir": str(folder)}), Placement(engine, CLIENTS, 2))
        sha256 = run(prepared, folder, Terminal(stderr=True, quiet=True))["final_sha256"]
        _must(sha256 == self._whole.sha256, f"engine {engine!r} gives the same models", "they are others")


@contextmanager
def _check_returns(system: System) -> Iterator[None]:
    """Within the block, raise ``TypeError`` with the name of a hook that returns a wrong type."""

    def checked_hook(owner: type, name: str, kind: type) -> Callable[..., Any]:
        hook = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            known = {*vars(arguments[0]), *dir(owner)}
            value = hook(*arguments, **keywords)
            if kind is _LEAVES_MODEL:
                _check_model(arguments[0].model, f"{owner.__name__}.{name}()")
            elif not isinstance(value, kind):
                result = "nothing" if value is None else f"a value of type {type(value).__name__}"
                raise TypeError(f"{owner.__name__}.{name}() returns {result}, allowed: {kind.__name__}")
            elif isinstance(value, Update):
                _check_memory(arguments[0], known, f"{owner.__name__}.{name}()")
                _check_zeros(value.payload, arguments[0].masks(*arguments[1:]))
            return value

        return call

    with ExitStack() as stack:
        for owner, kinds in ((system.strategy, _OF_SERVER), (system.client, _OF_CLIENT)):
            for name, kind in kinds.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, checked_hook(owner, name, kind)))
        yield


@contextmanager
def _names_read(options: type[Table]) -> Iterator[set[str]]:
    """Collect the names of the options that a system's own code reads, until the block ends."""
    names = set[str]()

    def read(self: Table, name: str) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if not any(part in file for part in _HANDING_ON):
            names.add(name)
        return object.__getattribute__(self, name)

    with mock.patch.object(options, "__getattribute__", read):
        yield names


def _check_model(model: object, method: str) -> None:
    if not (isinstance(model, dict) and all(isinstance(tensor, Tensor) for tensor in model.values())):
        text = reprlib.repr(model)
        raise TypeError(f"{method} leaves self.model as {text}, allowed: a dict of tensors by name")


def _check_memory(client: object, known: Set[str], method: str) -> None:
    """Raise :class:`BrokenLawError` for attributes beside the ``known`` ones: the next message makes a new object."""
    new = ", ".join(sorted(vars(client).keys() - known))
    law = "a client object lives for one message, and what must last is in its State"
    _must(not new, law, f"{method} sets {new}; what is for this message is set in __init__")


def _check_zeros(sent: Payload, masks: Tensors) -> None:
    """Raise :class:`BrokenLawError` for a pruned tensor that is sent as if it were dense: its zeros cost bytes."""
    for name, mask in masks.items():
        is_sent = name in sent.tensors and sent.tensors[name].shape == mask.shape and name not in sent.masks
        is_pruned = is_sent and not mask.all() and not sent.tensors[name][~mask].any()
        _must(not is_pruned, "what is pruned is not sent", f"{name!r} is sent with its zeros: Payload(tensors, masks)")


def _must(holds: bool, law: str, finding: str) -> None:
    if not holds:
        raise BrokenLawError(f"{law}: {finding}")
