"""What a secure sum costs: CPU time of a client and of the server, and bytes of a client, by clients and numbers.

All members and the server run in this process, one after the other, and each member's time is its own. ``lost`` members
send nothing after their shares, so that the server recovers their mask keys. Bytes are of the addends, 8 a number, and
of all other fields. Example: ``python benchmarks/secure_sums.py --numbers 1000000 --clients 4 16 64``.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedprune_app.engine.secure_aggregation import INPUT, OPEN, STAGES, Identity, Member, SecureSum, body_of

COLUMNS = ("clients", "numbers", "lost", "client_cpu_ms", "server_cpu_ms", "client_bytes_up", "bytes_per_float32")


def measure(num_clients: int, numbers: int, lost: int, folder: Path) -> dict[str, object]:
    """One row: the means over the members that stay."""
    members = [Member(folder / f"{k}.json", folder / f"{k}.txt", k, 0, Identity()) for k in range(num_clients)]
    server = SecureSum("the benchmark", 0, list(range(num_clients)))
    addends = np.random.default_rng(0).integers(0, 2**64, (2, numbers), dtype=np.uint64)
    client_seconds, server_seconds, sent = 0.0, 0.0, 0
    for stage in STAGES:
        for k in [k for k in server.members if not (stage == INPUT and k >= num_clients - lost)]:
            start = time.process_time()
            message = server.message(stage, k)
            middle = time.process_time()
            if stage == INPUT:
                words, _ = members[k].masked(message, addends[k % 2].copy(), "")
            else:
                reply = members[k].answer(message)
            end = time.process_time()
            if stage == INPUT:
                server.add(k, words)
                sent += words.nbytes
            else:
                server.take(stage, k, body_of(reply, stage))
                sent += sum(map(len, reply.values()))
            client_seconds += end - middle
            server_seconds += middle - start + time.process_time() - end
        if stage != OPEN:
            server.close(stage, [])
    start = time.process_time()
    total = server.unmasked()
    server_seconds += time.process_time() - start
    expected = sum((addends[k % 2] for k in server.survivors), np.zeros(numbers, dtype=np.uint64))
    assert (total == expected).all()
    stayed = num_clients - lost
    figures = (1e3 * client_seconds / stayed, 1e3 * server_seconds, sent / stayed, sent / stayed / (4 * numbers))
    return dict(
        zip(COLUMNS, (num_clients, numbers, lost, *(float(f"{figure:.4g}") for figure in figures)), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--numbers", type=int, default=1_000_000)
    options = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, COLUMNS)
    writer.writeheader()
    for num_clients in options.clients:
        for lost in (0, num_clients // 4):
            with tempfile.TemporaryDirectory() as folder:
                writer.writerow(measure(num_clients, options.numbers, lost, Path(folder)))


if __name__ == "__main__":
    main()
