"""What end-to-end tests measure is printed as it comes, and together at the end as it stands in the documentation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_FAULTS = "faults"
_TRANSCRIPT = "rehearsal"
_HEAD = ["| fault | what happens | lost | seconds to recover |", "| --- | --- | --- | ---: |"]
_lines: dict[str, list[str]] = {_FAULTS: [], _TRANSCRIPT: []}


@pytest.fixture
def measured(pytestconfig: pytest.Config) -> Callable[..., None]:
    """``measured(fault, what happens, what is lost, seconds until it was made good)``: a row of the fault table."""

    def add(fault: str, happens: str, lost: str, seconds: float | None = None) -> None:
        number = "" if seconds is None else f"{seconds:.0f}"
        _say(pytestconfig, _FAULTS, f"| {fault} | {happens} | {lost} | {number} |")

    return add


@pytest.fixture
def transcript(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """``transcript(line)``: what the rehearsal did."""
    return lambda line: _say(pytestconfig, _TRANSCRIPT, line)


def _say(config: pytest.Config, section: str, line: str) -> None:
    _lines[section].append(line)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reporter.ensure_newline()
    reporter.write_line(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for section, lines in _lines.items():
        if lines:
            terminalreporter.section(section)
            terminalreporter.write_line("\n".join([*(_HEAD if section == _FAULTS else []), *lines]))
