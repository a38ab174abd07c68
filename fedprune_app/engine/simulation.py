"""The program of a simulation: without a SuperLink, so that nothing of Flower's listens on a port.

``python -m fedprune_app.engine.simulation FILE`` runs an app on Ray, with the settings in FILE, a JSON object. The
clients are on our own Grid, or in Flower's simulation: this is then equivalent to Flower's ``flwr-simulation``, which a
SuperLink starts for a run. A SuperLink's ports have no credential in simulation mode, so anyone who reaches one could
start programs as its owner.
"""

import json
import math
import os
import secrets
import shlex
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flwr.app import Context, RecordDict

from fedprune_app.core.named import ValueDict, Values
from fedprune_app.engine.flower_private import (
    NOOP_FEDERATION_ID,
    SUPERLINK_NODE_ID,
    EventType,
    Run,
    TaskIdentity,
)

_RAY_GRAIN = 1e-4  # Ray rounds to it, and a rounded part might not fit
# Flower's texts that hide the real error.
_NO_REASON = ("An error was encountered. Ending simulation.", "Simulation Runtime crashed.")


@dataclass(frozen=True)
class Workers:
    """The processes that run clients: ``processes`` on this machine's own Ray, which share its ``gpus``.

    With 0 processes they are on the user's cluster, as many as it has room for. ``gpus`` is then whether they use the
    cluster's GPUs, if it has any: each process a whole one.
    """

    processes: int
    gpus: int

    def resources(self) -> dict[str, int | float]:
        """Return the CPUs and GPUs that a process requests from Ray; for a cluster Ray must be initialised.

        Processes that share a GPU take equal parts of it, so that each fits on one GPU.
        """
        if self.processes:
            parts = math.ceil(self.processes / self.gpus) if self.gpus else 0
            return {"num_cpus": 1, "num_gpus": _RAY_GRAIN * (1 / _RAY_GRAIN // parts) if parts else 0.0}
        import ray

        cluster: Any = ray  # these functions have no types
        return {"num_cpus": 1, "num_gpus": float(self.gpus > 0 and cluster.cluster_resources().get("GPU", 0) > 0)}

    def environment(self) -> ValueDict:
        """Return Ray's runtime environment. Its own processes inherit this one's, and would start twice for another."""
        paths = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
        return with_this_python({} if self.processes else {"env_vars": {"PYTHONPATH": paths}})

    def init_args(self) -> ValueDict:
        sizes = {"num_cpus": self.processes, "num_gpus": self.gpus} if self.processes else {}
        return {"log_to_driver": False, **sizes}


def with_this_python(environment: Values | None) -> ValueDict:
    """Return Ray's runtime environment with this Python's path quoted for a shell.

    Ray passes the path of Python to a shell unquoted. With a space or a bracket in the path its processes never start,
    and Ray waits forever. A cluster has its own Python.
    """
    quoted = shlex.quote(sys.executable)
    is_needed = quoted != sys.executable and os.environ.get("RAY_ADDRESS", "local") == "local"
    return {**({"py_executable": quoted} if is_needed else {}), **(environment or {})}


def run(app: Path, config: ValueDict, num_clients: int, workers: Workers) -> None:
    """Run the Flower app in the folder ``app``, which is on Python's path, to its end on our own Grid.

    ``config`` has all keys of the run. Exceptions of the run are passed on.
    """
    import ray

    from fedprune_app.engine.ray_grid import RayGrid

    with _starting_ray(float(config["startup-seconds"])):
        ray.init(include_dashboard=False, runtime_env=workers.environment(), **workers.init_args())
    components = _components(app)
    grid = RayGrid(components["clientapp"], num_clients, config, workers.resources(), workers.processes > 0)
    grid.serve(resolve_name(components["serverapp"]))


def run_on_flower(app: Path, config: ValueDict, num_clients: int, workers: Workers) -> None:
    """Run the Flower app in the folder ``app`` to its end on Flower's own simulation; otherwise as :func:`run`."""
    import ray

    from fedprune_app.engine.flower_private import _run_simulation

    components = _components(app)
    run = Run.create_empty(secrets.randbits(64))
    run.primary_task_id = secrets.randbits(64)
    run.federation_id = NOOP_FEDERATION_ID
    run.override_config = config
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = run.primary_task_id, run.run_id, SUPERLINK_NODE_ID
    if not workers.processes:
        with _starting_ray(float(config["startup-seconds"])):
            ray.init(**workers.init_args())  # to count the resources; Flower connects again
    resources = workers.resources()
    ray.shutdown()
    os.environ.setdefault("RAY_RUNTIME_ENV_HOOK", f"fedprune_app.engine.simulation.{with_this_python.__name__}")
    _run_simulation(
        num_supernodes=num_clients,
        exit_event=EventType.FLWR_SIMULATION_RUN_LEAVE,
        server_app_attr=components["serverapp"],
        client_app_attr=components["clientapp"],
        server_app_context=Context(run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), config),
        backend_config={"client_resources": dict(resources), "init_args": workers.init_args()},
        app_dir=str(app),
        run=run,
        is_app=True,
    )


def _components(app: Path) -> Any:
    return tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]


def main() -> None:
    """Run a simulation with the settings in the file.

    If the exit code is not 0, the last line of the output is the reason.
    """
    settings = json.loads(Path(sys.argv[1]).read_text())
    try:
        runs = run_on_flower if settings["engine"] == "flower" else run
        workers = Workers(settings["workers"], settings["gpus"])
        runs(Path(settings["app"]), settings["config"], settings["num-clients"], workers)
    except Exception as error:
        cause: BaseException = error
        while str(cause) in _NO_REASON and cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        _give_up(lines[-1])


@contextmanager
def _starting_ray(seconds: float) -> Iterator[None]:
    """End this process if Ray takes longer to start, since it may wait forever; add to an error what needs no Ray."""
    advice = "; --engine inprocess runs without Ray" if os.environ.get("RAY_ADDRESS", "local") == "local" else ""
    timer = threading.Timer(seconds, _give_up, [f"Ray did not start within startup-seconds = {seconds:g}{advice}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{error}{advice}") from error
    finally:
        timer.cancel()


def _give_up(reason: str) -> None:
    """End this process at once, whatever its threads wait for, with the reason as the last line of the output."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
