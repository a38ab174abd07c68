"""What end-to-end tests measure and show is printed when they are over, as it stands in the documentation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_FAULTS = ["| fault | what happens | lost | seconds to recover |", "| --- | --- | --- | ---: |"]
_TRANSCRIPT: list[str] = []
_HEAD = len(_FAULTS)


@pytest.fixture
def measured() -> Callable[..., None]:
    """``measured(fault, what happens, what is lost, seconds until it was made good)``: a row of the fault table."""

    def add(fault: str, happens: str, lost: str, seconds: float | None = None) -> None:
        _FAULTS.append(f"| {fault} | {happens} | {lost} | {'' if seconds is None else format(seconds, '.0f')} |")

    return add


@pytest.fixture
def transcript() -> Callable[[str], None]:
    """``transcript(line)``: what the rehearsal did."""
    return _TRANSCRIPT.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for title, lines in (("rehearsal", _TRANSCRIPT), ("faults", _FAULTS[_HEAD:] and _FAULTS)):
        if lines:
            terminalreporter.section(title)
            terminalreporter.write_line("\n".join(lines))
