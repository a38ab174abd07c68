"""A run goes from start to end, on any engine; its progress is shown and its outcome is checked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedprune_app import launch, plugins
from fedprune_app.config import Config, ConfigError, refused, with_carrier
from fedprune_app.engine.store import exclusive
from fedprune_app.engine.watchdog import take_refusal
from fedprune_app.errors import LaunchError, LeftGoing
from fedprune_app.files import scratch_folder
from fedprune_app.launch import Link
from fedprune_app.preflight import language_models
from fedprune_app.preflight.placement import Placement
from fedprune_app.results.recorder import write_info
from fedprune_app.running.progress import RunProgress, read_json
from fedprune_app.running.signals import ENDING, Left, leave, on_signals, stoppable


class Session:
    """A session holds what several runs share: the staged app, and one deployment.

    The deployment is started when the first run needs it.
    """

    def __init__(self, placement: Placement, console: Console) -> None:
        self.placement = placement
        self.console = console
        self._stack = ExitStack()
        self._work: Path | None = None
        self._link: Link | None = None
        self.told: set[str] = set()

    def __enter__(self) -> Session:
        # files may have changed since an earlier run of this process
        for name, method in (("fedprune_app.data.splits", "forget"), ("clients.private_text", "forget_documents")):
            if module := sys.modules.get(name):
                getattr(module, method)()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _folder(self) -> Path:
        if self._work is None:
            self._work = self._stack.enter_context(scratch_folder())
            launch.stage_app(self._work / "app")
        return self._work

    @property
    def app(self) -> Path:
        """The app is the folder of the Flower app that is run."""
        return self._folder() / "app"

    def _connect(self) -> Link:
        if self._link is None:
            if self.placement.superlink:
                self._link = Link(self.placement.superlink, os.environ)
            else:
                from fedprune_app.deploy import local_deployment

                place = self.placement.deployment or self._folder() / "deployment"
                self._link = self._stack.enter_context(local_deployment(place, self.placement.nodes)).link
        return self._link

    def check(self, config: Config) -> None:
        """Raise :class:`ConfigError` for a run that could not start, as far as this machine can tell.

        What makes a run less than its settings seem to say is printed, once in a session.
        """
        if self.placement.engine != "inprocess" or not self.placement.is_simulation:
            plugins.check_reachable(config.to_dict())
        if self.placement.num_clients < config.min_clients and not self.placement.superlink:
            raise ConfigError(
                f"min-clients is {config.min_clients}, allowed with {self.placement.num_clients} clients: at most that"
            )
        if self.placement.shares_data:
            from fedprune_app.preflight.can_start import check_startable, forget_text

            for line in check_startable(config, self.placement.num_clients):
                if line not in self.told:
                    self.told.add(line)
                    self.console.print(Text.assemble(("note:", "yellow"), f" {line}"), soft_wrap=True)
            if self.placement.engine != "inprocess":
                forget_text()

    def run(
        self,
        config: Config,
        folder: Path,
        *,
        checked: bool = False,
        once_checked: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """Run a federation to its end in ``folder`` and return its run.json.

        With ``checked`` the caller has called :meth:`check` before. The language model that the run needs is trained or
        fetched when all else is checked. ``once_checked`` is called when the run is found to be able to start, before
        anything is written.
        Raises :class:`LaunchError` with the run's own error if the run does not complete.
        """
        if not checked:
            self.check(config)
        if not self.placement.superlink:  # real nodes have models of their own
            language_models.prepare_models([config], self.console)
        if once_checked is not None:
            once_checked()
        before = _content(folder / "run.json")
        take_refusal(folder)  # remove what was left for a launcher that died before it read it
        with stoppable(), RunProgress(config, folder, self.console) as progress:
            try:
                if self.placement.engine == "inprocess":
                    self._run_here(config, progress)
                elif self.placement.is_simulation:
                    self._simulate(config, folder, progress)
                else:
                    self._run_on_nodes(config, folder, progress)
            except BaseException as error:
                self._stack.close()  # from here on nothing may write to the folder
                self._work = self._link = None
                # where run.json is unchanged, the run never began
                if not isinstance(error, LeftGoing) and _content(folder / "run.json") != before:
                    _close_folder(folder, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
                raise
        info = read_json(folder / "run.json")
        if not info and self.placement.superlink:  # the run folder is where the ServerApp ran
            return {"status": "completed", "rounds_completed": config.num_server_rounds}
        if info.get("status") != "completed":
            raise LaunchError(str(info.get("error") or "the run left no run.json"))
        return info

    def _run_here(self, config: Config, progress: RunProgress) -> None:
        from fedprune_app import client_app, server_app
        from fedprune_app.engine.inprocess import quiet, run_in_process

        with quiet(), progress.in_background():
            try:
                run_in_process(server_app.app, client_app.app, self.placement.num_clients, with_carrier(config))
            except ConfigError as error:
                raise ConfigError(refused(str(error)) or str(error)) from error
            except Exception as error:
                raise LaunchError(_one_line(error)) from error

    def _simulate(self, config: Config, folder: Path, progress: RunProgress) -> None:
        progress.say("starting clients")
        place, run_file = self.placement, folder / "run.json"
        before = launch.outcome_of(run_file)
        values, gpus = with_carrier(config), _num_gpus(config, on_cluster=bool(place.ray_address))
        num_workers = place.num_workers or gpus or os.cpu_count() or 1
        with launch.simulation(
            self.app, values, place.num_clients, num_workers, gpus, place.ray_address, place.engine
        ) as simulation:
            if not launch.wait_for(simulation, run_file, progress.update):
                raise _failure(folder, before, lambda: launch.last_line(simulation.log_file))

    def _run_on_nodes(self, config: Config, folder: Path, progress: RunProgress) -> None:
        progress.say("starting Flower")
        link, run_file = self._connect(), folder / "run.json"
        before = launch.outcome_of(run_file)
        submitted = _elsewhere if self.placement.superlink else _ours
        with submitted(link, lambda: launch.submit(link, self.app, with_carrier(config))) as run_id:
            progress.say("starting clients")
            outcome = launch.follow(link, run_id, folder, progress.update)
        if outcome != "finished:completed":
            raise _failure(folder, before, lambda: launch.failure(link, run_id))


def _failure(folder: Path, before: tuple[str, int] | None, ask_flower: Callable[[], str]) -> Exception:
    """Return the error of a run that failed.

    The error is a refused setting if there is one. Else it is what run.json says, if run.json has changed since
    ``before``, and else what Flower says.
    """
    if refusal := take_refusal(folder):
        return ConfigError(refusal)
    told = ask_flower()
    if setting := refused(told):
        return ConfigError(setting)
    run_file = folder / "run.json"
    error = read_json(run_file).get("error") if launch.outcome_of(run_file) != before else None
    return LaunchError(str(error or told))


def _num_gpus(config: Config, on_cluster: bool) -> int:
    """Return the number of this machine's GPUs that may be used; 1 for those of a cluster, however many it has."""
    if config.device == "cpu" or on_cluster:
        return int(config.device != "cpu")
    import torch

    return torch.cuda.device_count()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _close_folder(folder: Path, status: str, error: BaseException) -> None:
    """Say in run.json how a run ended whose ServerApp could not say so itself.

    The run.json of another run that still goes on is left alone.
    """
    if not (folder / "run.json").exists():
        return
    with suppress(ValueError, OSError), exclusive(folder, patience_seconds=0.5):  # the terminal tells of a full disk
        info = read_json(folder / "run.json")
        if info.get("status") == "running":
            text = "interrupted" if status == "interrupted" else _one_line(error)
            write_info(folder, info | {"status": status, "error": text})


@contextmanager
def _ours(link: Link, submit: Callable[[], str]) -> Iterator[str]:
    """Submit a run to a SuperLink of our own, and stop the run when we stop following it, for whatever reason."""
    run_id = submit()
    try:
        yield run_id
    except BaseException:
        with suppress(LaunchError):
            launch.stop_run(link, run_id)
        raise


@contextmanager
def _elsewhere(link: Link, submit: Callable[[], str]) -> Iterator[str]:
    """Submit a run to machines that are not ours; Ctrl-C stops the run, and whatever else ends this process does not.

    Raises :class:`LeftGoing` where the run is left going. Signals wait while the run is being submitted: without its id
    the run could not be stopped.
    """
    came: list[int] = []
    with on_signals(ENDING, leave):
        with on_signals((signal.SIGINT, *ENDING), lambda number, frame: came.append(number)):
            run_id = submit()
        see = f"`flwr ls {link.name} --run-id {run_id}` shows it, `flwr stop {run_id} {link.name}` stops it"
        try:
            for number in came:
                signal.raise_signal(number)
            yield run_id
        except KeyboardInterrupt:
            try:
                launch.stop_run(link, run_id)
            except (LaunchError, KeyboardInterrupt, Left) as error:
                raise LeftGoing(f"{_one_line(error)}; run {run_id} may still go on: {see}") from None
            raise
        except (Left, Exception) as error:
            raise LeftGoing(f"{_one_line(error)}; run {run_id} was left going: {see}") from error
