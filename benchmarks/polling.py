"""What a round of messages costs over gRPC with our round loop, and with Flower's ``Grid.send_and_receive``.

A deployment on this machine (TLS, node keys, a process for each message, as on real machines), whose clients send back
what they get, at once: all that is left is the platform, and how soon the server sees a reply. ``send_and_receive``,
with which FedAvg in Flower runs its rounds, asks for replies every 3 seconds; rounds with it and with
``engine.exchange.send_and_receive`` take turns, in one ServerApp. Printed: the seconds of a round, and ours over
Flower's; ours over the floor, the time at which the last reply was made (all processes read one clock); and how often
either asked.

Example: ``python benchmarks/polling.py --rounds 8``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

_DEADLINE = 300.0
_KINDS = ("exchange", "send_and_receive")
client = ClientApp()
server = ServerApp()


# --- what runs in the deployment --------------------------------------------------------------------------------------


@client.train()
def echo(message: Message, context: Context) -> Message:
    return Message(
        RecordDict({"arrays": message.content["arrays"], "fields": ConfigRecord({"replied-at": time.time()})}),
        reply_to=message,
    )


class Counting:
    """Counts how often a Grid asks its SuperLink for replies."""

    def __init__(self, grid: Grid) -> None:
        self.pulls = 0
        client = grid._runtime_client  # type: ignore[attr-defined]
        self._ask = client.PullMessages
        client.PullMessages = self._counted

    def _counted(self, request: Any) -> Any:
        self.pulls += 1
        return self._ask(request)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds of either kind in turn; one line of JSON each into ``out-dir``."""
    from fedprune_app.engine import wire
    from fedprune_app.engine.exchange import message_to, send_and_receive

    counting = Counting(grid)
    out = Path(str(context.run_config["out-dir"]))
    num_values = int(context.run_config["shard-size"])  # a setting that can tell us, nothing more
    arrays = np.random.default_rng(0).standard_normal(num_values, np.float32)
    nodes: list[int] = []
    while len(nodes) < int(context.run_config["min-clients"]):
        nodes = sorted(grid.get_node_ids())
        time.sleep(0.2)
    rows = []
    for number in range(2 * int(context.run_config["num-server-rounds"])):
        kind = _KINDS[number % 2]
        record = RecordDict({"arrays": ArrayRecord([arrays])})
        messages = [(node, message_to(node, record, MessageType.TRAIN, number, _DEADLINE)) for node in nodes]
        counting.pulls, started, at = 0, time.monotonic(), time.time()
        if kind == "exchange":
            answers = send_and_receive(grid, messages, _DEADLINE, reply_bytes=arrays.nbytes)
            contents = [answer.content for answer in answers]
        else:
            replies = grid.send_and_receive([message for _, message in messages], timeout=_DEADLINE)
            contents = [reply.content for reply in replies if reply.has_content()]
        seconds = time.monotonic() - started
        made = [float(wire.fields_of(content)["replied-at"]) - at for content in contents if content is not None]
        row = {"kind": kind, "seconds": seconds, "floor": max(made), "replies": len(made), "pulls": counting.pulls}
        rows.append(row)
    (out / "rows.json.new").write_text(json.dumps(rows))
    (out / "rows.json.new").rename(out / "rows.json")


# --- the benchmark ----------------------------------------------------------------------------------------------------


def measure(num_nodes: int, num_rounds: int, values: int) -> list[dict[str, Any]]:
    """A row for each round."""
    from fedprune_app.config import parse_config
    from fedprune_app.launching import simulation
    from fedprune_app.launching.local import local_deployment

    with tempfile.TemporaryDirectory(prefix="fedprune-polling-") as name:
        folder = Path(name)
        app = simulation.stage_app(folder / "app", ("polling:server", "polling:client"))
        shutil.copy(__file__, app / "polling.py")
        nodes = [{"partition-id": k, "num-partitions": num_nodes} for k in range(num_nodes)]
        with local_deployment(folder / "deployment", nodes) as deployment:
            settings = {"num-server-rounds": num_rounds, "shard-size": values, "min-clients": num_nodes}
            config = parse_config({**settings, "out-dir": str(folder)})
            run_id = simulation.submit(deployment.link, app, config.to_dict())
            deadline = time.monotonic() + 2 * num_rounds * _DEADLINE
            while not (folder / "rows.json").exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"the run did not end: {simulation.failure(deployment.link, run_id)}")
                time.sleep(0.5)
            rows = json.loads((folder / "rows.json").read_text())
    if any(row["replies"] != num_nodes for row in rows):
        raise SystemExit("a reply is missing")
    return list(rows)


def report(rows: list[dict[str, Any]]) -> None:
    """A table, without the first round of either kind."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    for column in ("", "s a round, median", "least", "most", "of it after the last reply was made", "asked"):
        table.add_column(column, justify="right" if column else "left")
    medians = {}
    for kind in _KINDS:
        own = [row for row in rows if row["kind"] == kind][1:]
        seconds = [row["seconds"] for row in own]
        medians[kind] = statistics.median(seconds)
        waits = statistics.median(row["seconds"] - row["floor"] for row in own)
        asked = statistics.median(row["pulls"] for row in own)
        numbers = (medians[kind], min(seconds), max(seconds), waits)
        table.add_row(kind, *(f"{number:.2f}" for number in numbers), f"{asked:.0f}")
    console = Console(width=110)
    console.print(table)
    floor = statistics.median(row["floor"] for row in rows[2:])
    ratio = medians["exchange"] / medians["send_and_receive"]
    console.print(f"ours / Flower's: {ratio:.3f}; ours / floor ({floor:.2f} s): {medians['exchange'] / floor:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3, help="SuperNodes")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of either kind, the first of which is left out")
    parser.add_argument("--values", type=int, default=62_006, help="numbers in a message")
    options = parser.parse_args()
    report(measure(options.nodes, options.rounds, options.values))
