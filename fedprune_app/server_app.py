"""The ServerApp: read the configuration, meet the clients, run the system's strategy, close the run folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.exit import add_exit_handler

from fedprune_app.config import Config, ConfigError, check_resumable, parse_config, refusal
from fedprune_app.core.payload import Payload
from fedprune_app.engine import rounds, wire
from fedprune_app.engine.lifeline import end_with_launcher
from fedprune_app.engine.store import State, VersionedStore, exclusive
from fedprune_app.registry import SYSTEMS, check_names
from fedprune_app.results.reader import read_info
from fedprune_app.results.recorder import Recorder, Status
from fedprune_app.run_folder import new_run_key, run_folder
from fedprune_app.tasks import BUILDS, PEERS

log = logging.getLogger("flwr.fedprune")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation from start, or from the checkpoint in ``resume-from``, to its last round."""
    end_with_launcher()
    try:
        # A wrong setting raises here, before anything is written.
        config = check_names(parse_config(context.run_config))
        torch.set_num_threads(config.num_threads)
        folder = run_folder(config, context.run_id)
        log.info("run folder: %s", folder)
        with exclusive(folder):
            _run(grid, config, folder)
    except ConfigError as error:
        raise refusal(error) from error


def _run(grid: Grid, config: Config, folder: Path) -> None:
    recorder = Recorder(folder, tensorboard=config.tracking == "tensorboard")
    checkpoints = VersionedStore(folder / "checkpoints")
    system = SYSTEMS[config.system]
    before = read_info(folder) if config.resume_from else {}
    checkpoint = _checkpoint(config, before, checkpoints) if before else None
    completed = checkpoint[0] if checkpoint else 0
    if before and before["status"] == "completed" and completed == config.num_server_rounds:
        log.info("the run in %s is complete", folder)
        return
    if before:
        recorder.resume(completed)
        recorder.annotate(config={**config.to_dict(), "resume-from": ""})  # the next time goes on from these
        checkpoints.drop_after(completed)
        log.info("resuming after round %d", completed)
        if lost := before["rounds_completed"] - completed:
            text = f"round {before['rounds_completed']} left no readable checkpoint: rounds repeated: {lost}"
            log.warning("%s", text)
            recorder.annotate(notes=[*before.get("notes", []), text])
    else:
        recorder.start(config.to_dict(), config.seed, {"headline": system.strategy.headline, "run_key": new_run_key()})
    # Flower's own end, on a signal or a SuperLink that has given the run up, may leave no time for the clauses below.
    add_exit_handler(lambda: _close(recorder, "interrupted", "interrupted"), run_before_force_exit=True)
    try:
        run_key = str(read_info(folder)["run_key"])
        numbers = {int(node): int(partition) for node, partition in before.get("nodes", {}).items()}
        roster, left_out = rounds.gather_roster(
            grid,
            config.startup_seconds,
            run_key,
            PEERS[system.data],
            least=max(config.min_clients, len(before.get("partition") or [])),
            numbers=numbers or None,
            say=recorder.waiting,
        )
        recorder.done_waiting()
        partition = [{"partition": p, **peer.description()} for p, peer in roster.items()]
        if before.get("partition") not in (None, partition):
            clients, now = len(before["partition"]), len(partition)
            raise ConfigError(
                f"the clients' data is not what it was when the run began ({clients} clients, now {now}), "
                "allowed when resuming: the same clients and data"
            )
        if any(peer.own_data for peer in roster.values()):  # who is who is not in the data, as with partition-ids
            recorder.annotate(nodes={str(peer.node_id): p for p, peer in roster.items()})
        recorder.annotate(
            paper_bytes_formula=system.strategy.paper_formula, partition=partition, clients_left_out=left_out
        )
        strategy = BUILDS[system.data](config, roster, recorder, checkpoints, run_key)
        if checkpoint is not None:
            strategy.restore(checkpoint[1])
        strategy.start(
            grid=grid,
            initial_arrays=wire.to_arrays(Payload(strategy.model)),
            num_rounds=config.num_server_rounds,
            timeout=config.deadline_seconds,
            rounds_completed=completed,
        )
        strategy.write_model(folder / "models")
        recorder.finish("completed", final_sha256=strategy.final_sha256())
    except (KeyboardInterrupt, SystemExit):
        _close(recorder, "interrupted", "interrupted")
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _close(recorder, "failed", lines[-1])
        raise


def _close(recorder: Recorder, status: Status, error: str) -> None:
    """Say in run.json how the run ended, once; on a full disk it cannot be said there, and must not hide the error."""
    if not recorder.is_open:
        return
    try:
        recorder.finish(status, error=error)
    except OSError as full:
        log.error("run.json does not say how the run ended: %s", full)


def _checkpoint(config: Config, before: Mapping[str, Any], checkpoints: VersionedStore) -> tuple[int, State] | None:
    """The newest readable checkpoint of the run to resume, or None where it had not finished a round."""
    check_resumable(before["config"], config)
    checkpoint = checkpoints.load()
    if checkpoint is None and before["rounds_completed"] > 1:  # a round is recorded before its checkpoint is written
        raise ConfigError(
            f"{str(checkpoints.folder)!r} has no readable checkpoint, allowed when resuming after "
            f"{before['rounds_completed']} rounds: at least one"
        )
    if checkpoint and checkpoint[0] > config.num_server_rounds:
        asked = config.num_server_rounds
        raise ConfigError(f"num-server-rounds is {asked}, allowed when resuming: at least {checkpoint[0]}")
    return checkpoint
