"""What somebody without a secret tries at the ports of a run; the tests start it as another user.

``python strangers.py ports PORT...`` prints a JSON object: what each port answers to calls of Ray's and Flower's.
``python strangers.py ray HOST:PORT MARK`` has a function run at that Ray, which writes the file MARK.
``python strangers.py flwr HOST:PORT FOLDER [CA]`` submits an app to a SuperLink there, which writes FOLDER/mark.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PYPROJECT = """
[project]
name = "stranger"
version = "1.0.0"
description = "somebody else's"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "stranger:server"
clientapp = "stranger:client"
"""
APP = """
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    Path({mark!r}).touch()
"""
RPCS = {
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.CoreWorkerService/NumPendingTasks",
}


def answers(port: str) -> list[str]:
    import grpc
    import httpx

    found = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        for method in RPCS:
            try:
                channel.unary_unary(method)(b"", timeout=1000)
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)
    try:
        found.add(str(httpx.get(f"http://127.0.0.1:{port}/health", timeout=1000, trust_env=False).status_code))
    except httpx.HTTPError:
        found.add("no HTTP")
    return sorted(found)


def run_on_ray(address: str, mark: str) -> None:
    if address.startswith("127."):
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or Ray looks for it on another interface
    os.environ["RAY_NUM_REDIS_GET_RETRIES"] = "3"  # seconds until Ray gives up
    import ray

    ray.init(address=address, log_to_driver=False)

    @ray.remote(num_cpus=0)
    def intrude() -> None:
        Path(mark).touch()

    ray.get(intrude.remote(), timeout=1000)


def submit(address: str, folder: Path, ca: str = "") -> None:
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "stranger.py").write_text(APP.format(mark=str(folder / "mark")))
    trust = f'root-certificates = "{ca}"' if ca else "insecure = true"
    (folder / "config.toml").write_text(f'[superlink.there]\naddress = "{address}"\n{trust}\n')
    os.environ |= {"FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    from flwr.cli.app import app as flwr  # this program may not be one that another user can start

    flwr(["run", str(app), "there"])


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "ports":
        print(json.dumps({port: answers(port) for port in arguments}))
    elif what == "ray":
        run_on_ray(*arguments)
    else:
        submit(arguments[0], Path(arguments[1]), *arguments[2:])
