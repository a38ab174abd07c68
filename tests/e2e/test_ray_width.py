"""How many clients of a simulation train at a time is the number of Ray's CPUs, whatever this machine has."""

from __future__ import annotations

import json

import pytest

from fedprune_app.config import DEFAULTS
from fedprune_app.launching import simulation

WIDE = 10

SERVER = """
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < context.run_config["wide"]:
        time.sleep(0.1)
    messages = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in nodes]
    replies = list(grid.send_and_receive(messages))
    seen = [reply.content["seen"]["others"] for reply in replies]
    (Path(__file__).parent / "seen.json").write_text(json.dumps(seen))
"""
CLIENT = """
'''Each client waits until as many others have started, and says how many it saw.'''
import time
from pathlib import Path

from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    started = Path(__file__).parent / "started"
    started.mkdir(exist_ok=True)
    (started / str(context.node_id)).touch()
    deadline = time.monotonic() + context.run_config["patience"]
    while (others := len(list(started.iterdir()))) < context.run_config["wide"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return Message(RecordDict({"seen": MetricRecord({"others": others})}), reply_to=message)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpus", [0, 3])
def test_ten_clients_are_at_work_at_once_on_a_ray_of_ten_cpus(gpus, tmp_path):
    """Ray believes in the GPUs that it is told of."""
    app = simulation.stage_app(tmp_path / "app", ("meeting_server:app", "meeting_client:app"))
    (app / "meeting_server.py").write_text(SERVER)
    (app / "meeting_client.py").write_text(CLIENT)
    config = {"wide": WIDE, "patience": 300}
    with (app / "pyproject.toml").open("a") as file:
        file.writelines(f"{key} = {value}\n" for key, value in config.items())
    with simulation.started(app, {**DEFAULTS, **config}, num_clients=WIDE, num_workers=WIDE, gpus=gpus) as started:
        completed = simulation.wait_for(started, tmp_path / "run.json", lambda: None)
        assert completed, started.log_file.read_text()
    assert json.loads((app / "seen.json").read_text()) == [WIDE] * WIDE
