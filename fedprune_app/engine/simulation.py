"""A simulation is a program of its own: there is no SuperLink, so nothing of Flower's listens anywhere.

``python -m fedprune_app.engine.simulation FILE`` runs an app on Ray, as the JSON object in FILE says. The clients are
on a Grid of our own, or on Flower's simulation: this is then what Flower's ``flwr-simulation`` does with a run that a
SuperLink gives to it. A SuperLink's ports have no credential in simulation mode, so whoever reached one could start
programs as its owner.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.common.config import get_fused_config_from_dir, get_project_config
from flwr.common.constant import RUN_ID_NUM_BYTES, SUPERLINK_NODE_ID, TASK_ID_NUM_BYTES
from flwr.server.superlink.linkstate.utils import generate_rand_int_from_bytes
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType

# Flower's words around the real error:
_NO_REASON = ("An error was encountered. Ending simulation.", "Simulation Runtime crashed.")


def run(app: Path, config: dict[str, Any], num_clients: int, backend: dict[str, Any]) -> None:
    """Run the Flower app in the folder ``app`` with a run's ``config`` to its end, on a Grid of our own.

    ``backend`` has ``init_args`` for Ray and ``client_resources``, as Flower's. Whatever ends the run is raised.
    """
    import ray
    from flwr.serverapp import ServerApp
    from flwr.supercore.object_ref import load_app

    from fedprune_app.engine.ray_grid import RayGrid

    paths = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    ray.init(include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, **backend["init_args"])
    one_machine = "address" not in backend["init_args"]
    components = get_project_config(app)["tool"]["flwr"]["app"]["components"]
    fused = get_fused_config_from_dir(app, config)
    grid = RayGrid(components["clientapp"], str(app), num_clients, fused, backend["client_resources"], one_machine)
    server_app: ServerApp = load_app(components["serverapp"], RuntimeError, app)
    grid.serve(server_app)


def run_on_flower(app: Path, config: dict[str, Any], num_clients: int, backend: dict[str, Any]) -> None:
    """Run the Flower app in the folder ``app`` with a run's ``config`` to its end, on Flower's own simulation.

    ``backend`` is Flower's: ``init_args`` for Ray and ``client_resources``. Whatever ends the run is raised.
    """
    from flwr.simulation.run_simulation import _run_simulation

    components = get_project_config(app)["tool"]["flwr"]["app"]["components"]
    run = Run.create_empty(generate_rand_int_from_bytes(RUN_ID_NUM_BYTES))
    run.primary_task_id = generate_rand_int_from_bytes(TASK_ID_NUM_BYTES)
    run.federation_id = NOOP_FEDERATION_ID
    run.override_config = config
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = run.primary_task_id, run.run_id, SUPERLINK_NODE_ID
    fused = get_fused_config_from_dir(app, config)
    _run_simulation(
        num_supernodes=num_clients,
        exit_event=EventType.FLWR_SIMULATION_RUN_LEAVE,
        server_app_attr=components["serverapp"],
        client_app_attr=components["clientapp"],
        server_app_context=Context(run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), fused),
        backend_config=backend,
        app_dir=str(app),
        run=run,
        is_app=True,
    )


def main() -> None:
    """Run what the file says.

    Where the exit code is not 0, the last line of the output is the reason.
    """
    settings = json.loads(Path(sys.argv[1]).read_text())
    try:
        runs = run_on_flower if settings["engine"] == "flower" else run
        runs(Path(settings["app"]), settings["config"], settings["num-clients"], settings["backend"])
    except Exception as error:
        cause: BaseException = error
        while str(cause) in _NO_REASON and cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        print(lines[-1], file=sys.stderr, flush=True)
        os._exit(1)  # the ServerApp's thread may still wait for clients


if __name__ == "__main__":
    main()
