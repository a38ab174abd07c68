"""The progress of a run is read from its folder, and shown as a live bar or a line for each round."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from fedprune_app.config import Config
from fedprune_app.launching.processes import read_json
from fedprune_app.results.texts import progress_line


class RunProgress:
    """The progress of a run is what its folder says, as a live bar: round, accuracy, bytes, time left."""

    def __init__(self, config: Config, folder: Path, console: Console) -> None:
        self._folder = folder
        self._file = folder / "rounds.jsonl"
        self._counts_rounds = True
        self._offset = self._file.stat().st_size if config.resume_from and self._file.exists() else 0
        self._accuracy = ""
        self._bytes = 0
        self._is_live = console.is_terminal or console.is_jupyter
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            TextColumn("{task.fields[failed]}", style="yellow", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not self._is_live,  # a log gets a line per round instead
        )
        self._console, self._system, self._rounds = console, config.system, config.num_server_rounds
        self._task = self._bar.add_task(config.system, total=config.num_server_rounds, said="starting", failed="")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.update()
        self._bar.stop()

    def say(self, text: str) -> None:
        self._bar.update(self._task, said=text)

    def update(self) -> None:
        """Show the rounds that were written since the last call.

        Where the system tells the progress of the current round, that is shown too.
        """
        state = read_json(self._folder / "progress.json")
        if "done" in state:
            self._counts_rounds = False
            said = f"{state['text']}  {self._accuracy}"
            self._bar.update(self._task, completed=state["done"], total=state["total"], said=said)
        elif state:
            self.say(str(state.get("text")))
        try:
            with self._file.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # a resumed run writes a new file, without lost rounds
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._show(json.loads(line))

    def _show(self, row: Mapping[str, Any]) -> None:
        self._bytes += (row.get("bytes_up") or 0) + (row.get("bytes_down") or 0)
        if numbers := progress_line(row):
            self._accuracy = numbers
        failed = f"{row['failures']} failed" if row.get("failures") else ""
        text = f"{self._accuracy}{self._bytes / 1e6:.1f} MB"
        completed = row["round"] if self._counts_rounds else None  # None leaves it as it is
        self._bar.update(self._task, completed=completed, said=text, failed=failed)
        if not self._is_live:
            line = f"{self._system}: round {row['round']} of {self._rounds}  {text}  {failed}".rstrip()
            self._console.print(line, soft_wrap=True)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Keep the bar alive while this thread runs the federation."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.2):
                self.update()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
