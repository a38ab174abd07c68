"""The ledger of a client's releases, on the client's own disk: written before they leave, never deleted.

The file's first line identifies the client's data. One line per release follows. A line is ``<check> {json}``. The
check covers the line before it too, so a line missing from the middle is detected. A line without its end was being
written at a power cut. Its release never left, and the line is dropped. Any other damage is an error, because the
charges are then unknown.
"""

import base64
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from fedprune_app.files import appending, locked, make_private_folder
from fedprune_app.privacy import accounting
from fedprune_app.privacy.accounting import Laplace, Release, Spent, Steps, affords, total


class Overspent(ValueError):
    """Raised for a release that would exceed the budget.

    Nothing was written, and the release must not leave. The text is one line for the user.
    """


@dataclass(frozen=True)
class Budget:
    """The largest ``epsilon`` of all releases together, at ``delta``."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Data:
    """The identity of a client's data: its records, independent of their names and places.

    * ``identity``: a digest of all records' digests.
    * ``size``: the number of records.
    * ``unit``: the protected unit, an example or a group. A ledger has releases of one unit.
    * ``about``: a few words for readers of the file.
    * ``records``: short digests of the records, if the data may change with time. Other data that share a record with
      these continue the same ledger, because the shared record pays for the releases of both. Without them, other data
      raise an error.
    * ``joins``: these data continue whatever ledger exists, and are noted in it. The ledger then keeps no digests of
      their records.
    """

    identity: str
    size: int
    about: str
    records: frozenset[bytes] = frozenset()
    joins: bool = False
    unit: str = "example"

    @classmethod
    def of(
        cls,
        digests: Iterable[bytes],
        about: str,
        *,
        may_change: bool = False,
        joins: bool = False,
        unit: str = "example",
    ) -> Self:
        """Return the data that consist of the records with these digests, in any order."""
        sorted_digests = sorted(digests)
        records = frozenset(digest[:_SHORT] for digest in sorted_digests) if may_change else frozenset()
        identity = hashlib.sha256(b"".join(sorted_digests)).hexdigest()
        return cls(identity, len(sorted_digests), about, records, joins, unit)


_SHORT = 8  # bytes of a record's digest in a file: two of 10^5 records share them by chance in one of 10^9 ledgers


class Ledger:
    """The releases of one client's data and their charges, in the file ``path``, or in memory if ``path`` is None.

    Several processes may use the same file: each charge is made under a lock, after reading the other processes'
    charges. ``accountant`` is ``pld`` or ``rdp``. No charge exceeds any of the ``budgets``. ``data`` are those that the
    ledger must have; None reads a ledger of any data. Raises ``ValueError`` for a damaged file, and for a ledger of
    other data.

    >>> ledger = Ledger(budgets=[Budget(epsilon=2.0, delta=1e-5)])
    >>> ledger.charge_laplace(scale=1.0, sensitivity=1.0)
    >>> round(ledger.epsilon(delta=1e-5), 2)
    1.0
    >>> ledger.affords({Laplace(scale=1.0, sensitivity=2.0): 1})
    False
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        accountant: str = "pld",
        budgets: Sequence[Budget] = (),
        data: Data | None = None,
    ) -> None:
        self.path = path
        self.accountant = accountant
        self.budgets = tuple(budgets)
        self._spent: Counter[Release] = Counter()
        self._charges = 0
        self._data: list[Data] = []  # the data of these releases: the first and, if they may change, later ones
        self._lines = 0
        self._check = ""  # the check of the last line
        self._offset = 0  # where the next line begins
        if path is not None:
            _make_durable(path)
            with self._locked(fcntl.LOCK_SH if data is None else fcntl.LOCK_EX) as file:
                if data is not None:
                    self._require_data(data, file)

    def __len__(self) -> int:
        return self._charges

    def shares(self, data: Data) -> bool:
        """Return whether the ledger has a record of ``data``, which then pays for all of the ledger's releases."""
        return any(part.records & data.records for part in self._data)

    @property
    def spent(self) -> Spent:
        return Counter(self._spent)

    def charge_steps(self, noise_multiplier: float, sample_rate: float, steps: int, note: str = "") -> None:
        """Charge ``steps`` steps of DP-SGD, see :class:`accounting.Steps`; ``note`` is for readers of the file.

        The charge is on disk when this method returns. Raises :class:`Overspent` and writes nothing if the charge would
        exceed a budget. Raises ``ValueError`` for numbers out of range.
        """
        if steps < 0:
            raise ValueError(f"steps is {steps}, allowed: at least 0")
        self._charge(Steps(noise_multiplier, sample_rate), steps, note)

    def charge_laplace(self, scale: float, sensitivity: float, note: str = "") -> None:
        """Charge one number with Laplace noise, see :class:`accounting.Laplace`; otherwise as :meth:`charge_steps`."""
        self._charge(Laplace(scale, sensitivity), 1, note)

    def epsilon(self, delta: float, accountant: str = "") -> float:
        """Return the ε at ``delta`` of all charges so far, by the ledger's accountant or another one."""
        return accounting.epsilon(self._spent, delta, accountant or self.accountant)

    def affords(self, releases: Spent) -> bool:
        """Return whether ``releases`` would stay within every budget; True without a budget."""
        return self._exceeded_budget(releases) is None

    def require(self, releases: Spent) -> None:
        if budget := self._exceeded_budget(releases):
            raise Overspent(
                f"the privacy budget is {budget.epsilon:g} at delta {budget.delta:g}, {self.epsilon(budget.delta):.4g} "
                f"of it are spent, and this would make it "
                f"{accounting.epsilon(total(self._spent, releases), budget.delta, self.accountant):.4g}"
            )

    def __copy__(self) -> Self:
        """Return a ledger in memory with this one's charges, to compute the cost of further releases."""
        duplicate = type(self)(accountant=self.accountant, budgets=self.budgets)
        duplicate._spent, duplicate._charges = Counter(self._spent), self._charges
        return duplicate

    # --- the file -------------------------------------------------------------------------------------------------

    def _charge(self, release: Release, count: int, note: str) -> None:
        if self.path is None:
            self.require({release: count})
            self._spent[release] += count
            self._charges += 1
            return
        with self._locked(fcntl.LOCK_EX) as file:
            self.require({release: count})
            kind = "steps" if isinstance(release, Steps) else "laplace"
            self._append({"kind": kind, **vars(release), "count": count, "what": note}, file)

    def _append(self, entry: Mapping[str, object], file: BinaryIO) -> None:
        text = json.dumps(entry)
        line = f"{_check(self._check, text)} {text}\n".encode()
        file.truncate(self._offset)  # a torn last line
        file.seek(self._offset)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
        self._read_line(line)

    def _require_data(self, data: Data, file: BinaryIO) -> None:
        """Bind a new ledger to ``data``; raise ``ValueError`` for an old one of other data or another unit."""
        if self._data and self._data[0].unit != data.unit:
            raise ValueError(
                f"ledger '{self.path}' protects each {self._data[0].unit}, allowed: the same dp.unit and group-column, "
                f"or no ledger; this run protects each {data.unit}"
            )
        if any(part.identity == data.identity for part in self._data):
            return
        if self._lines and not (self._data and (data.joins or self.shares(data))):
            origin = (
                f"of other data ({self._data[0].about})" if self._data else "of data that its first line does not name"
            )
            raise ValueError(
                f"ledger '{self.path}' is {origin}, allowed: a ledger of these data ({data.about}), or none"
            )
        known_records = data.records if data.joins else frozenset[bytes]().union(*(part.records for part in self._data))
        records = base64.b64encode(b"".join(sorted(data.records - known_records))).decode()
        entry = {"kind": "data", "unit": data.unit, "identity": data.identity, "size": data.size}
        self._append({**entry, "about": data.about, "records": records}, file)

    def _exceeded_budget(self, releases: Spent) -> Budget | None:
        totals = total(self._spent, releases)
        return next((b for b in self.budgets if not affords(totals, b.delta, b.epsilon, self.accountant)), None)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[BinaryIO]:
        """Yield the locked file, after reading the lines of other processes."""
        assert self.path is not None
        try:
            with self.path.open("r+b") as file:
                fcntl.flock(file, kind)
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:
                    raise ValueError(f"ledger '{self.path}' has become shorter: what was spent is not known")
                file.seek(self._offset)
                for line in file.readlines():
                    if line.endswith(b"\n"):
                        self._read_line(line)
                yield file
        except OSError as error:  # errors such as that of a full disk do not name the file
            error.filename = error.filename or str(self.path)
            raise

    def _read_line(self, line: bytes) -> None:
        try:
            check, text = line.decode().rstrip("\n").split(" ", 1)
            if check != _check(self._check, text):
                raise ValueError("its check is wrong")
            entry = json.loads(text)
            if entry["kind"] == "data":
                self._data.append(_data(entry))
            else:
                release, count = _release(entry)
                self._spent[release] += count
                self._charges += 1
        except (ValueError, KeyError, TypeError) as error:
            place = f"ledger '{self.path}' line {self._lines + 1}"
            raise ValueError(f"{place} is damaged ({error}): what was spent is not known") from None
        self._lines += 1
        self._check = check
        self._offset += len(line)


def ledger_of(data: Data, folder: Path) -> Path:
    """Return the ledger in ``folder`` that shares a record with ``data``, which may change; else a new one for them.

    Data that join continue the folder's only ledger, whatever its records: a run decides how files become records, so
    it could otherwise start a fresh ledger. Raises ``ValueError`` if the ledger is ambiguous, because each record's
    releases must be in one. Concurrent calls run one after the other.
    """
    make_private_folder(folder)
    with locked(folder / ".ledgers.lock", "looks for the ledger of its data"):
        path = _found(data, folder)
        Ledger(path, data=data)
    return path


def _found(data: Data, folder: Path) -> Path:
    ledgers = sorted(folder.glob(f"{_OWN}*.jsonl"))
    paths = [path for path in ledgers if Ledger(path).shares(data)]
    if len(paths) > 1 or (data.joins and not paths and len(ledgers) > 1):
        names = ", ".join(f"'{path}'" for path in paths or ledgers)
        place = "are in the ledgers" if paths else "are in none of the ledgers"
        raise ValueError(f"the client's data {place} {names}, allowed: all of them in one ledger")
    if data.joins and not paths:
        paths = ledgers
    return paths[0] if paths else folder / f"{_OWN}{data.identity[:16]}.jsonl"


_OWN = "own-"


def _data(entry: Mapping[str, str]) -> Data:
    records = base64.b64decode(entry["records"], validate=True)
    if len(records) % _SHORT:
        raise ValueError("a digest is cut")
    digests = frozenset(records[i : i + _SHORT] for i in range(0, len(records), _SHORT))
    unit = str(entry.get("unit", "example"))  # earlier versions had no other unit
    return Data(str(entry["identity"]), int(entry["size"]), str(entry["about"]), digests, unit=unit)


def _release(entry: Mapping[str, float | str]) -> tuple[Release, int]:
    count = int(entry["count"])
    if count < 0:
        raise ValueError("a negative count")
    if entry["kind"] == "steps":
        return Steps(float(entry["noise_multiplier"]), float(entry["sample_rate"])), count
    if entry["kind"] == "laplace":
        return Laplace(float(entry["scale"]), float(entry["sensitivity"])), count
    raise ValueError(f"kind {entry['kind']!r}")


def _check(previous: str, text: str) -> str:
    return hashlib.sha256(f"{previous} {text}".encode()).hexdigest()[:16]


def _make_durable(path: Path) -> None:
    """Create a missing file and its folders, so that their names survive a power cut."""
    if path.exists():
        return
    make_private_folder(path.parent)
    appending(path, 0o600).close()
    for folder in path.parents:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except PermissionError:  # a folder above the user's own, which existed before
            break
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
