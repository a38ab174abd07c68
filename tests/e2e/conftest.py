"""What end-to-end tests measure is printed when they are over, as it stands in the documentation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_FAULTS: list[tuple[str, str, str, float | None]] = []
_TRANSCRIPT: list[str] = []


@pytest.fixture
def measured() -> Callable[[str, str, str, float | None], None]:
    """``measured(fault, what happens, what is lost, seconds until it was made good)``: a row of the fault table."""
    return lambda fault, happens, lost, seconds=None: _FAULTS.append((fault, happens, lost, seconds))


@pytest.fixture
def transcript() -> Callable[[str], None]:
    """``transcript(line)``: what the rehearsal did."""
    return _TRANSCRIPT.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TRANSCRIPT:
        terminalreporter.section("rehearsal")
        terminalreporter.write_line("\n".join(_TRANSCRIPT))
    if _FAULTS:
        terminalreporter.section("faults")
        terminalreporter.write_line("| fault | what happens | lost | seconds to recover |\n| --- | --- | --- | ---: |")
        for *cells, seconds in _FAULTS:
            terminalreporter.write_line(f"| {' | '.join(cells)} | {'' if seconds is None else f'{seconds:.0f}'} |")
