"""A run from start to end, on any engine, in its own folder: progress is shown, and the outcome checked."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from fedprune_app.config import Config, ConfigError, refused, with_carrier
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.engine.store import exclusive
from fedprune_app.errors import LaunchError, RunDetached
from fedprune_app.files import point_to, scratch_folder
from fedprune_app.launching import processes, simulation
from fedprune_app.launching.processes import Link, read_json, read_setting_error
from fedprune_app.preflight import can_start
from fedprune_app.preflight.inputs import Placement
from fedprune_app.preflight.prepare import Prepared
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.ownership import mark
from fedprune_app.results.reader import read_rows
from fedprune_app.results.recorder import write_info
from fedprune_app.results.texts import progress_line


class RunProgress:
    """A live bar of a run's progress, read from its folder: round, accuracy, bytes, time left."""

    def __init__(
        self, config: Config, folder: Path, console: Console, on_round: Callable[[Values], object] | None = None
    ) -> None:
        self._folder = folder
        self._on_round = on_round
        self._file = folder / "rounds.jsonl"
        self._counts_rounds = True
        self._offset = self._file.stat().st_size if config.resume_from and self._file.exists() else 0
        self._accuracy = ""
        self._bytes = 0.0
        if self._offset:
            self._bytes = sum(_bytes_of(row) for row in read_rows(self._file))
        self._is_live = console.is_terminal or console.is_jupyter
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24 if console.width > 100 else 8),
            MofNCompleteColumn(),
            # all other columns stay whole in a narrow terminal
            TextColumn("{task.fields[said]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
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

    def set_status(self, text: str) -> None:
        self._bar.update(self._task, said=text)

    def update(self) -> None:
        """Show the rounds that were written since the last call, and the progress of the current round if reported."""
        state = read_json(self._folder / "progress.json")
        if "done" in state:
            self._counts_rounds = False
            said = f"{state['text']}  {self._accuracy}"
            self._bar.update(self._task, completed=state["done"], total=state["total"], said=said)
        elif state:
            self.set_status(str(state.get("text")))
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

    def _show(self, row: Values) -> None:
        self._bytes += _bytes_of(row)
        if numbers := progress_line(row):
            self._accuracy = numbers
        elif self._accuracy and "(round " not in self._accuracy:
            self._accuracy = f"{self._accuracy.rstrip()} (round {row['round'] - 1})  "
        failed = f"{row['failures']} failed" if row.get("failures") else ""
        text = f"{self._accuracy}{self._bytes / 1e6:.1f} MB"
        for line in row.get("notes") or ():
            if line.endswith(("heartbeat", "is back")):
                self._console.print(Text.assemble(("note:", "yellow"), f" {line}"), soft_wrap=True)
        completed = row["round"] if self._counts_rounds else None  # None keeps the old value
        self._bar.update(self._task, completed=completed, said=text, failed=failed)
        if not self._is_live:
            line = f"{self._system}: round {row['round']} of {self._rounds}  {text}  {failed}".rstrip()
            self._console.print(line, soft_wrap=True)
        if self._on_round is not None:
            self._on_round(row)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Update the bar while this thread runs the federation."""
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


def _bytes_of(row: Values) -> float:
    return float(row.get("bytes_up") or 0) + float(row.get("bytes_down") or 0)


def run(
    prepared: Prepared,
    folder: Path,
    console: Console,
    link: Path | None = None,
    on_round: Callable[[Values], object] | None = None,
) -> ValueDict:
    with Session(console) as session:
        return session.run(prepared, folder, link, on_round)


class Session(ExitStack):
    """Resources shared by several runs: the staged app, and one deployment, started when first needed."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self._work: Path | None = None
        self._link: Link | None = None
        self._printed_notes: set[str] = set()

    def _folder(self) -> Path:
        if self._work is None:
            self._work = self.enter_context(scratch_folder())
            simulation.stage_app(self._work / "app")
        return self._work

    @property
    def app(self) -> Path:
        return self._folder() / "app"

    def _connect(self, placement: Placement) -> Link:
        if self._link is None:
            if placement.superlink:
                self._link = Link(placement.superlink, os.environ)
            else:
                from fedprune_app.launching.local import local_deployment

                place = placement.deployment or self._folder() / "deployment"
                started = f"starting a SuperLink and {len(placement.nodes)} nodes; their logs: {place}/*/log.txt"
                self.console.print(started, soft_wrap=True)
                self._link = self.enter_context(local_deployment(place, placement.nodes)).link
        return self._link

    def show_notes(self, notes: Iterable[str]) -> None:
        """Print notes on a run, each once per session."""
        for line in notes:
            if line not in self._printed_notes:
                self._printed_notes.add(line)
                self.console.print(Text.assemble(("note:", "yellow"), f" {line}"), soft_wrap=True)

    def run(
        self,
        prepared: Prepared,
        folder: Path,
        link: Path | None = None,
        on_round: Callable[[Values], object] | None = None,
    ) -> ValueDict:
        """Run a federation to its end in ``folder`` and return its run.json; no settings are checked any more.

        The language model that the run needs is first trained or downloaded. ``link`` then points to the folder. Each
        row of rounds.jsonl is passed to ``on_round``.
        Raises :class:`LaunchError` with the run's own error if the run does not complete.
        """
        config, place = prepared.config, prepared.placement
        self.show_notes(prepared.notes)
        if not place.superlink:  # real nodes have their own models
            can_start.prepare_models([config], self.console)
        if place.deployment is not None:
            mark(folder, "run")  # the deployment writes there before the run does
        if link is not None:
            point_to(link, folder)
        earlier_info = read_json(folder / "run.json")
        read_setting_error(folder)  # discard an error left for a launcher that died
        with on_signals(ENDING, interrupt), RunProgress(config, folder, self.console, on_round) as progress:
            try:
                if not place.is_simulation:
                    self._run_on_nodes(prepared, folder, progress)
                elif place.engine == "inprocess":
                    self._run_here(prepared, progress)
                else:
                    self._simulate(prepared, folder, progress)
            except BaseException as error:
                self.close()  # from here on nothing may write to the folder
                self._work = self._link = None
                # if run.json is unchanged, the run never started
                if not isinstance(error, RunDetached) and read_json(folder / "run.json") != earlier_info:
                    _close_folder(folder, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
                raise
        info = read_json(folder / "run.json")
        if place.superlink and info == earlier_info:  # the run folder is on the ServerApp's machine
            return {"status": "completed", "rounds_completed": config.num_server_rounds}
        if info.get("status") != "completed":
            raise LaunchError(str(info.get("error") or "the run left no run.json"))
        return info

    def _run_here(self, prepared: Prepared, progress: RunProgress) -> None:
        from fedprune_app import client_app, server_app
        from fedprune_app.engine.simulated_grid import quiet, run_in_process

        with quiet(), progress.in_background():
            try:
                values = with_carrier(prepared.config)
                run_in_process(server_app.app, client_app.app, prepared.placement.clients, values)
            except ConfigError as error:
                error.mark = ""
                raise
            except Exception as error:
                raise LaunchError(_one_line(error)) from error

    def _simulate(self, prepared: Prepared, folder: Path, progress: RunProgress) -> None:
        progress.set_status("starting clients")
        config, place, run_file = prepared.config, prepared.placement, folder / "run.json"
        earlier_outcome = processes.outcome_of(run_file)
        values, gpus = with_carrier(config), _num_gpus(config, on_cluster=bool(place.ray_address))
        num_workers = place.num_workers or _default_workers(config, gpus)
        with simulation.started(
            self.app, values, place.clients, num_workers, gpus, place.ray_address, place.engine
        ) as simulated_run:
            if not simulation.wait_for(simulated_run, run_file, progress.update):
                raise _failure(folder, earlier_outcome, lambda: processes.last_line(simulated_run.log_file))

    def _run_on_nodes(self, prepared: Prepared, folder: Path, progress: RunProgress) -> None:
        progress.set_status("starting Flower")
        place, run_file = prepared.placement, folder / "run.json"
        link = self._connect(place)
        earlier_outcome = processes.outcome_of(run_file)
        submission = _remote_submission if place.superlink else _own_submission
        with submission(link, lambda: processes.submit(link, self.app, with_carrier(prepared.config))) as run_id:
            progress.set_status("starting clients")
            status = processes.follow(link, run_id, folder, progress.update)
        if status != "finished:completed":
            raise _failure(folder, earlier_outcome, lambda: processes.failure(link, run_id))


def _failure(folder: Path, earlier_outcome: tuple[str, int] | None, ask_flower: Callable[[], str]) -> Exception:
    """Return the error of a run that failed.

    It is a rejected setting if there is one. Otherwise it is the error in run.json, if run.json has changed since
    ``earlier_outcome``, or else Flower's.
    """
    if refusal := read_setting_error(folder):
        return ConfigError(refusal)
    message = ask_flower()
    if setting := refused(message):
        return ConfigError(setting)
    run_file = folder / "run.json"
    error = read_json(run_file).get("error") if processes.outcome_of(run_file) != earlier_outcome else None
    return LaunchError(str(error or message))


_PROCESSES_PER_GPU = 8


def _default_workers(config: Config, gpus: int) -> int:
    """Return the default number of processes that run clients.

    A client's work in addition to training (encoding, averages, files) takes a core longer than ResNet-18's training
    takes a GPU. So processes share a GPU, except for language models, where each process would hold a layer there.
    """
    cores = os.cpu_count() or 1
    return min(cores, gpus * (1 if SYSTEMS[config.system].reads_text else _PROCESSES_PER_GPU)) or cores


def _num_gpus(config: Config, on_cluster: bool) -> int:
    if config.device == "cpu" or on_cluster:
        return int(config.device != "cpu")
    import torch

    return torch.cuda.device_count()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _close_folder(folder: Path, status: str, error: BaseException) -> None:
    """Record in run.json how a run ended whose ServerApp could not do so.

    The run.json of another run that is still running is not changed.
    """
    with suppress(ValueError, OSError), exclusive(folder, patience_seconds=0.5):  # the terminal reports a full disk
        info = read_json(folder / "run.json")
        if info.get("status") == "running":
            text = "interrupted" if status == "interrupted" else _one_line(error)
            write_info(folder, info | {"status": status, "error": text})


@contextmanager
def _own_submission(link: Link, submit: Callable[[], str]) -> Iterator[str]:
    """Submit a run to our own SuperLink, and stop the run when this process stops following it, for any reason."""
    run_id = submit()
    try:
        yield run_id
    except BaseException:
        with suppress(LaunchError):
            processes.stop_run(link, run_id)
        raise


@contextmanager
def _remote_submission(link: Link, submit: Callable[[], str]) -> Iterator[str]:
    """Submit a run to remote machines; Ctrl-C stops the run, and any other end of this process does not.

    Raises :class:`RunDetached` if the run continues without this process. Signals are deferred during submission:
    without its id the run could not be stopped.
    """
    numbers: list[int] = []
    with on_signals(ENDING, leave):
        with on_signals((signal.SIGINT, *ENDING), lambda number, frame: numbers.append(number)):
            run_id = submit()
        advice = f"`flwr ls {link.name} --run-id {run_id}` shows it, `flwr stop {run_id} {link.name}` stops it"
        try:
            for number in numbers:
                signal.raise_signal(number)
            yield run_id
        except KeyboardInterrupt:
            try:
                processes.stop_run(link, run_id)
            except (LaunchError, KeyboardInterrupt, Left) as error:
                raise RunDetached(f"{_one_line(error)}; run {run_id} may still go on: {advice}") from None
            raise
        except (Left, Exception) as error:
            raise RunDetached(f"{_one_line(error)}; run {run_id} was left going: {advice}") from error


ENDING = (signal.SIGTERM, signal.SIGHUP)


class Left(BaseException):
    """Raised by a signal that ends this process, but not the run."""


def leave(number: int, frame: FrameType | None) -> None:
    raise Left(f"{signal.Signals(number).name} came")


def interrupt(number: int, frame: FrameType | None) -> None:
    """End a run as Ctrl-C does, so that no process is left."""
    raise KeyboardInterrupt


@contextmanager
def on_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals ``numbers`` with ``handler`` within the context.

    A signal that this process was started to ignore (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled_numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_handlers = {number: signal.signal(number, handler) for number in handled_numbers}
    try:
        yield
    finally:
        for number, previous in earlier_handlers.items():
            signal.signal(number, previous)
