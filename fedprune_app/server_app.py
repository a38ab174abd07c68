"""The ServerApp: read the configuration, meet the clients, run the system's strategy, close the run folder."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedprune_app.config import Config, ConfigError, parse_config
from fedprune_app.core.payload import Payload
from fedprune_app.engine import rounds, wire
from fedprune_app.engine.lifeline import end_with_launcher
from fedprune_app.engine.store import State, VersionedStore, exclusive, write_tensors
from fedprune_app.models.initial import AUTO, initial_model, shared_names
from fedprune_app.models.vision import prunable_names, state_tensors
from fedprune_app.registry import SYSTEMS, check_names
from fedprune_app.results.reader import read_info
from fedprune_app.results.recorder import Recorder
from fedprune_app.run_folder import new_run_key, run_folder

log = logging.getLogger("flwr.fedprune")
app = ServerApp()

_MAY_CHANGE_ON_RESUME = {
    "num-server-rounds",
    "evaluate-every",
    "deadline-seconds",
    "startup-seconds",
    "min-replies",
    "out-dir",
    "state-dir",
    "resume-from",
    "data-dir",
    "download",
    "tracking",
}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation from start, or from the checkpoint in ``resume-from``, to its last round."""
    end_with_launcher()
    # A wrong setting raises here, before anything is written.
    config = check_names(parse_config(context.run_config))
    torch.set_num_threads(config.num_threads)
    folder = run_folder(config, context.run_id)
    log.info("run folder: %s", folder)
    with exclusive(folder):
        _run(grid, config, folder)


def _run(grid: Grid, config: Config, folder: Path) -> None:
    recorder = Recorder(folder, tensorboard=config.tracking == "tensorboard")
    checkpoints = VersionedStore(folder / "checkpoints")
    checkpoint = _resume(config, recorder, checkpoints) if config.resume_from else None
    system = SYSTEMS[config.system]
    if checkpoint is None and not config.resume_from:
        extra = {"headline": system.strategy.headline, "run_key": new_run_key()}
        recorder.start(config.to_dict(), config.seed, extra)
    run_key = str(read_info(folder)["run_key"])
    try:
        roster = rounds.gather_roster(grid, config.startup_seconds, run_key)
        first = next(iter(roster.values()))
        model = initial_model(
            config.model,
            config.dataset,
            first.image_shape,
            first.num_classes,
            init=config.init,
            seed=config.seed,
        )
        tensors = state_tensors(model, include_buffers=True)
        shared = {name: tensors[name] for name in shared_names(model, config.batch_norm)}
        recorder.annotate(
            paper_bytes_formula=system.strategy.paper_formula,
            partition=[{"partition": p, **peer.label_counts} for p, peer in roster.items()],
            model={
                "name": AUTO[config.dataset] if config.model == "auto" else config.model,
                "parameters": sum(p.numel() for p in model.parameters()),
                "classes": first.num_classes,
            },
        )
        prunable = frozenset(prunable_names(model))
        strategy = system.strategy(config, shared, prunable, roster, recorder, checkpoints, run_key)
        completed = 0
        if checkpoint is not None:
            completed, state = checkpoint
            strategy.restore(state)
        strategy.start(
            grid=grid,
            initial_arrays=wire.to_arrays(Payload(strategy.model)),
            num_rounds=config.num_server_rounds,
            timeout=config.deadline_seconds,
            rounds_completed=completed,
        )
        write_tensors(folder / "models" / "global.safetensors", strategy.model)
        recorder.finish("completed", final_sha256=strategy.final_sha256())
    except (KeyboardInterrupt, SystemExit):
        recorder.finish("interrupted", error="interrupted")
        raise
    except BaseException as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        recorder.finish("failed", error=text[-1])
        raise


def _resume(config: Config, recorder: Recorder, checkpoints: VersionedStore) -> tuple[int, State] | None:
    """Reopen the run folder; its newest readable checkpoint, or None to begin again from round 1."""
    before = read_info(recorder.folder)["config"]
    now = config.to_dict()
    for key in sorted(now.keys() - _MAY_CHANGE_ON_RESUME):
        if before.get(key) != now[key]:
            raise ConfigError(f"{key} is {now[key]!r}, allowed when resuming: {before.get(key)!r}, as the run began")
    checkpoint = checkpoints.load()
    completed = checkpoint[0] if checkpoint else 0
    if completed > config.num_server_rounds:
        raise ConfigError(
            f"num-server-rounds is {config.num_server_rounds}, allowed when resuming: at least {completed}"
        )
    recorder.resume(completed)
    log.info("resuming after round %d", completed)
    return checkpoint
