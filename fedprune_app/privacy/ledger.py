"""A ledger keeps a client's releases of its data, on the client's own disk: written before they leave, never forgotten.

The file has one line per release, ``<check> {json}``. The check covers the line before it too, so a line that goes
missing from the middle is noticed. A line without its end was being written when the power went. Its release never
left, and the line is dropped. Any other damage is an error, for then nobody knows what was spent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from fedprune_app.files import appending
from fedprune_app.privacy import accounting
from fedprune_app.privacy.accounting import Laplace, Release, Spent, Steps, total


class Overspent(ValueError):
    """A release would pass the budget.

    Nothing was written, and the release must not leave. The text is one line for the user.
    """


@dataclass(frozen=True)
class Budget:
    """A budget allows at most ``epsilon`` at ``delta``."""

    epsilon: float
    delta: float


class Ledger:
    """A ledger holds the releases of one client's data, in the file ``path``, or in memory if ``path`` is None.

    Several processes may hold the same file: each charge is made under a lock, after reading the other processes'
    charges. ``accountant`` is ``pld`` or ``rdp``. With a ``budget`` no charge passes it. Raises ``ValueError`` for a
    damaged file.

    >>> ledger = Ledger(budget=Budget(epsilon=2.0, delta=1e-5))
    >>> ledger.charge_laplace(scale=1.0, sensitivity=1.0)
    >>> round(ledger.epsilon(delta=1e-5), 2)
    1.0
    >>> ledger.affords({Laplace(scale=1.0, sensitivity=2.0): 1})
    False
    """

    def __init__(self, path: Path | None = None, *, accountant: str = "pld", budget: Budget | None = None) -> None:
        self.path = path
        self.accountant = accountant
        self.budget = budget
        self._spent: Counter[Release] = Counter()
        self._lines = 0
        self._check = ""  # the check of the last line
        self._offset = 0  # where the next line begins
        if path is not None:
            _make_durable(path)
            with self._locked(fcntl.LOCK_SH):
                pass

    def __len__(self) -> int:
        """Return how many charges there were."""
        return self._lines

    @property
    def spent(self) -> Spent:
        """Return how often each kind of release was made."""
        return Counter(self._spent)

    def charge_steps(self, noise_multiplier: float, sample_rate: float, steps: int, what: str = "") -> None:
        """Charge ``steps`` steps of DP-SGD, see :class:`accounting.Steps`; ``what`` is a note for readers of the file.

        The charge is on disk when this method returns. Raises :class:`Overspent` and writes nothing where the charge
        would pass the budget. Raises ``ValueError`` for numbers out of range.
        """
        if steps < 0:
            raise ValueError(f"steps is {steps}, allowed: at least 0")
        self._charge(Steps(noise_multiplier, sample_rate), steps, what)

    def charge_laplace(self, scale: float, sensitivity: float, what: str = "") -> None:
        """Charge one number with Laplace noise, see :class:`accounting.Laplace`; otherwise as :meth:`charge_steps`."""
        self._charge(Laplace(scale, sensitivity), 1, what)

    def epsilon(self, delta: float, accountant: str = "") -> float:
        """Return the ε at ``delta`` of all charges so far together, by the ledger's accountant or another one."""
        return accounting.epsilon(self._spent, delta, accountant or self.accountant)

    def affords(self, more: Spent) -> bool:
        """Return whether ``more`` would stay within the budget; True without a budget."""
        if self.budget is None:
            return True
        spent = total(self._spent, more)
        return accounting.affords(spent, self.budget.delta, self.budget.epsilon, self.accountant)

    def require(self, more: Spent) -> None:
        """Raise :class:`Overspent` where ``more`` would pass the budget."""
        if not self.affords(more):
            assert self.budget is not None
            raise Overspent(
                f"the privacy budget is {self.budget.epsilon:g} at delta {self.budget.delta:g}, "
                f"{self.epsilon(self.budget.delta):.4g} of it are spent, and this would make it {self._cost(more):.4g}"
            )

    def __copy__(self) -> Self:
        """Return a ledger in memory that begins with this one's charges, to try out the cost of further releases."""
        other = type(self)(accountant=self.accountant, budget=self.budget)
        other._spent, other._lines = Counter(self._spent), self._lines
        return other

    # --- the file -------------------------------------------------------------------------------------------------

    def _charge(self, release: Release, count: int, what: str) -> None:
        if self.path is None:
            self.require({release: count})
            self._spent[release] += count
            self._lines += 1
            return
        with self._locked(fcntl.LOCK_EX) as file:
            self.require({release: count})
            line = _line(self._check, release, count, what)
            file.truncate(self._offset)  # a torn last line
            file.seek(self._offset)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            self._take_in(line)

    def _cost(self, more: Spent) -> float:
        assert self.budget is not None
        return accounting.epsilon(total(self._spent, more), self.budget.delta, self.accountant)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[BinaryIO]:
        """Give the locked file, after reading the lines that other processes have written."""
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
                        self._take_in(line)
                yield file
        except OSError as error:  # errors such as that of a full disk do not name the file
            error.filename = error.filename or str(self.path)
            raise

    def _take_in(self, line: bytes) -> None:
        try:
            check, text = line.decode().rstrip("\n").split(" ", 1)
            if check != _check(self._check, text):
                raise ValueError("its check is wrong")
            release, count = _release(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            where = f"ledger '{self.path}' line {self._lines + 1}"
            raise ValueError(f"{where} is damaged ({error}): what was spent is not known") from None
        self._spent[release] += count
        self._lines += 1
        self._check = check
        self._offset += len(line)


def _line(previous: str, release: Release, count: int, what: str) -> bytes:
    kind = "steps" if isinstance(release, Steps) else "laplace"
    entry = {"kind": kind, **vars(release), "count": count, "what": what}
    text = json.dumps(entry)
    return f"{_check(previous, text)} {text}\n".encode()


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
    """Make an empty file where there is none, and its folders, so that a power cut does not take their names away."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    appending(path).close()
    for folder in path.parents:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except PermissionError:  # a folder above the user's own ones, which was there before
            break
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
