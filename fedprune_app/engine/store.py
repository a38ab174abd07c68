"""Versioned state on disk, of clients and server: one safetensors file per round, written atomically.

A file ``round-00012.safetensors`` holds the state *after* round 12: tensors, and a JSON object in the file's metadata.
The metadata also name the round and the owner of the state, and have a digest of everything. A file whose content
contradicts its metadata is damaged. So is a file under the name of another round or owner.

The server records whose reply of which round it accepted, and sends each client the version to continue from. So a late
reply changes nothing, nor does a kill between a client's save and the server's checkpoint. Older versions are kept
until the server's own older checkpoints are removed.
"""

import json
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedprune_app.config import Config
from fedprune_app.core.digests import check_json, json_with_digest
from fedprune_app.core.named import TensorDict, Tensors, ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.files import locked, make_durable, replace_file
from fedprune_app.results.reader import LOCK

log = logging.getLogger("flwr.fedprune")  # a child of Flower's logger, so that `flwr log` shows it
_NAME = re.compile(r"round-(\d{5,})\.safetensors")
_KEY = "fedprune-state"  # in the file's metadata


@dataclass(frozen=True)
class State:
    """A client's or the server's state: tensors by name, and plain JSON values."""

    tensors: Tensors = field(default_factory=dict)
    meta: Values = field(default_factory=dict)

    def group(self, prefix: str) -> TensorDict:
        """Return the tensors named ``prefix/name``, by ``name``."""
        start = f"{prefix}/"
        return {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}


def grouped(**groups: Tensors) -> TensorDict:
    """Return the inverse of :meth:`State.group`: ``grouped(weights=w, masks=m)``."""
    return {f"{prefix}/{name}": t for prefix, tensors in groups.items() for name, t in tensors.items()}


def owner(name: str, run_key: str) -> str | None:
    """Return the owner of a file: ``name`` of one run.

    If the run is unknown it is None, and files of any owner are accepted.
    """
    return f"{name} of run {run_key}" if run_key else None


def write_tensors(
    path: Path,
    tensors: Tensors,
    meta: Values | None = None,
    *,
    round: int = 0,
    owner: str | None = None,
    durable: bool = True,
    private: bool = True,
) -> None:
    """Write tensors and plain JSON values as one safetensors file with its digest, atomically.

    If it is not ``durable``, it can be lost at a power cut before :func:`fedprune_app.files.make_durable`. The file is
    for its owner alone, unless it is not ``private``. Raises ``ValueError`` for values that are not JSON.
    """
    contiguous: TensorDict = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        # a tensor may have two names, and safetensors rejects shared memory
        contiguous[name] = copy.clone() if copy.data_ptr() in addresses and copy.numel() else copy
        addresses.add(copy.data_ptr())
    header = {"round": round, "owner": owner or "", "meta": dict(meta or {}), "tensors": Payload(contiguous).digest()}
    try:
        text = json.dumps(json_with_digest(header))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a state's meta cannot be written as JSON: {error}; "
            "allowed: texts, numbers, lists, and tables with texts for keys"
        ) from error
    replace_file(path, save(contiguous, metadata={_KEY: text}), durable=durable, private=private)


def read_tensors(path: Path, *, round: int | None = None, owner: str | None = None) -> State:
    """Read a file of :func:`write_tensors`, and check ``round`` and ``owner`` if given.

    Raises ``ValueError`` naming the file if it is damaged or another owner's.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        return _check_content(tensors, json.loads(metadata.get(_KEY, "{}")), round, owner)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"state file {str(path)!r} is damaged: {reason}") from None


def _check_content(tensors: Tensors, header: ValueDict, round: int | None, owner: str | None) -> State:
    check_json(header)
    if header["tensors"] != Payload(tensors).digest():
        raise ValueError("its content is not what was written")
    if round is not None and header["round"] != round:
        raise ValueError(f"it is of round {header['round']}, allowed here: {round}")
    if owner is not None and header["owner"] != owner:
        raise ValueError(f"it is the {header['owner']}, allowed here: the {owner}")
    return State(tensors, header["meta"])


@contextmanager
def exclusive(folder: Path, patience_seconds: float = 30.0) -> Iterator[None]:
    """Hold a folder for this process alone within the context.

    The operating system releases the folder when the process ends, however it ends. If another process holds the
    folder, wait. Raises ``ValueError`` if it still holds the folder after ``patience_seconds``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder / LOCK, f"uses the run folder {str(folder)!r}", patience_seconds):
            yield
    except Timeout:
        raise ValueError(f"run folder {str(folder)!r} is in use by another process") from None


class VersionedStore:
    """The versions of one state, in a folder of their own.

    ``owner`` is whose state this is. If it is given, versions of other owners count as damaged.
    """

    def __init__(self, folder: Path, keep: int = 3, owner: str | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.owner = owner

    def path(self, round: int) -> Path:
        """Return the path of the version after ``round``, whether or not it exists."""
        return self.folder / f"round-{round:05d}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds with a version on disk, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def save(self, round: int, state: State, accepted: int | None = None, *, durable: bool = True) -> None:
        """Write the state after ``round``, and remove the versions that are no longer needed.

        ``accepted`` is the newest round that is known to count (default: ``round``). Which versions are removed depends
        on their round:

        * Up to ``accepted``, the newest ``keep`` versions are kept.
        * Between ``accepted`` and ``round`` all are removed, because their replies were late.
        * After ``round`` all are kept, because this save may itself be a late one, overtaken by newer saves.

        If it is not ``durable``, the caller syncs it before anything relies on it.
        """
        write_tensors(self.path(round), state.tensors, state.meta, round=round, owner=self.owner, durable=durable)
        accepted = round if accepted is None else accepted
        versions = self.rounds()
        accepted_rounds = [r for r in versions if r <= accepted]
        for version in accepted_rounds[: -self.keep] + [r for r in versions if accepted < r < round]:
            self.path(version).unlink(missing_ok=True)

    def drop_after(self, round: int) -> None:
        """Remove the versions after ``round``, which the run has abandoned."""
        for version in self.rounds():
            if version > round:
                self.path(version).unlink(missing_ok=True)

    def read(self, round: int) -> State:
        """Return the version after ``round``, and no other.

        Raises ``ValueError`` naming the file if the version is missing or damaged.
        """
        return read_tensors(self.path(round), round=round, owner=self.owner)

    def load(self, before: int | None = None) -> tuple[int, State] | None:
        """Return the newest readable version with its round, or None if there is none.

        With ``before`` only versions of smaller rounds count. A damaged version is skipped with a warning.
        """
        for round in reversed(self.rounds()):
            if before is not None and round >= before:
                continue
            try:
                return round, self.read(round)
            except ValueError as error:
                log.warning("%s; falling back to the version before it", error)
        return None


@dataclass(frozen=True)
class ResumePoint:
    """A point from which a run can resume: after ``round``, or after a ``step`` of the next round.

    ``state_rounds`` is the version of its state that each client then needs. ``lost`` has a line for each other file on
    the server's disk that the run needs and that is damaged or missing. ``is_usable`` is whether the run can resume
    without these. ``renews`` means that the next round rebuilds the clients' states, so that a client may have lost its
    own.
    """

    round: int
    state_rounds: Mapping[int, int]
    lost: tuple[str, ...] = ()
    is_usable: bool = True
    step: int = 0
    renews: bool = False


START = ResumePoint(0, {})


def state_folder(run: Path, state_dir: str, run_key: str) -> Path:
    """Return the folder of all clients' states: ``clients`` in the run folder, or the run's part of ``state_dir``."""
    return Path(state_dir) / run_key if state_dir else run / "clients"


def client_store(states: Path, client: int, run_key: str, keep: int = 3) -> VersionedStore:
    """Return the store of one client's states in a run, in ``states``, the folder of all clients' states."""
    return VersionedStore(states / f"{client:05d}", keep, owner(f"state of client {client}", run_key))


def make_states_durable(states: Path, clients: Iterable[int], run_key: str, round: int) -> None:
    """Sync those of the clients' states after ``round`` that are in ``states`` and were not saved durably."""
    make_durable(client_store(states, client, run_key).path(round) for client in clients)


def checkpoint_store(folder: Path, run_key: str) -> VersionedStore:
    return VersionedStore(folder / "checkpoints", owner=owner("checkpoint", run_key))


# --- folders of a run -------------------------------------------------------------------------------------------------


_RUN_KEY = re.compile(r"[0-9a-f]{16}")


def run_folder(config: Config, run_id: int) -> Path:
    """Return ``out-dir``, or the folder to resume from, or ``~/fedprune-runs/<run id>``."""
    folder = config.out_dir or config.resume_from
    return Path(folder) if folder else Path.home() / "fedprune-runs" / str(run_id)


def new_run_key() -> str:
    return secrets.token_hex(8)


def client_state_folder(config: Config, run_id: int, run_key: str) -> Path:
    """Return the folder of all clients' states: ``clients`` in the run folder, or this run's part of ``state-dir``.

    ``state-dir`` may be shared by many runs. ``run_key`` is drawn when a run starts and kept when it resumes, unlike
    Flower's run id. The server sends the key, so it is checked: ``ValueError`` for anything but 16 hexadecimal digits.
    """
    if not _RUN_KEY.fullmatch(run_key):
        raise ValueError(f"run-key is {run_key!r}, allowed: 16 hexadecimal digits")
    return state_folder(run_folder(config, run_id), config.state_dir, run_key)
