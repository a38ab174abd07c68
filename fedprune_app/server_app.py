"""The ServerApp: it reads the configuration, registers the clients, runs the strategy and closes the run folder."""

import hashlib
import logging
import os
from pathlib import Path
from weakref import WeakSet

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedprune_app import plugins, resuming
from fedprune_app.config import SETTING_ERROR, Config, ConfigError
from fedprune_app.core import masked_tensors
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.engine.flower_private import add_exit_handler
from fedprune_app.engine.printable import keep_logs_printable
from fedprune_app.engine.store import (
    START,
    State,
    checkpoint_store,
    exclusive,
    new_run_key,
    owner,
    run_folder,
    write_tensors,
)
from fedprune_app.federation.clients import ImageClientInfo, Roster, TextClientInfo
from fedprune_app.federation.registration import register_clients
from fedprune_app.federation.round import RunContext
from fedprune_app.files import sha256_of
from fedprune_app.launching.processes import CLIENTS_VARIABLE, notify_launcher, watch_launcher
from fedprune_app.learning.device import prepare_torch
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.preflight.prepare import Prepared, prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results import system_metrics
from fedprune_app.results.reader import marks_of, read_info
from fedprune_app.results.recorder import Recorder, Status
from fedprune_app.resuming import Choice
from fedprune_app.strategy_builders import build_strategy, other_data
from strategies.base import FederatedStrategy

log = logging.getLogger("flwr.fedprune")
app = ServerApp()
_at_work: WeakSet[Recorder] = WeakSet()  # a process may run many federations


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation from its start, or from the checkpoint in ``resume-from``, to its last round."""
    keep_logs_printable()
    watch_launcher()
    folder = None
    try:
        # A wrong setting raises here, before anything is written.
        prepared = prepare(RunInputs(context.run_config))
        config = prepared.config
        prepare_torch(config)
        masked_tensors.use_threads(os.cpu_count() or 1)
        folder = run_folder(config, context.run_id)
        log.info("run folder: %s", folder)
        with exclusive(folder):
            _run(grid, prepared, folder)
    except ConfigError as error:
        if folder is not None:
            notify_launcher(folder, str(error))
        # `flwr run` shows Flower's traceback after this line; our own commands show only the error, without warnings
        log.warning("this setting is refused: %s", error)
        error.mark = SETTING_ERROR
        raise


def _run(grid: Grid, prepared: Prepared, folder: Path) -> None:
    config, system = prepared.config, prepared.system
    recorder = Recorder(folder, tracking=config.tracking)
    saved_run = None
    if config.resume_from:
        saved_run = resuming.find(folder, read_info(folder), config)
        if saved_run.is_complete:
            log.info("the run in %s is complete", folder)
            return
        recorder.reopen()
    else:
        values = config.to_dict()
        code: ValueDict = {"plugins": plugins.described(values)}
        if metrics := system_metrics.described(config.system):
            code["measures"] = metrics
        facts = {"headline": system.strategy.headline, "run_key": new_run_key(), "num_partitions": _num_simulated(grid)}
        recorder.start(values, config.seed, facts | code)
    _at_work.add(recorder)
    try:
        run_key, earlier_info = str(recorder.info["run_key"]), saved_run.info if saved_run else {}
        checkpoints = checkpoint_store(folder, run_key)
        roster = _gather(grid, config, recorder, earlier_info)
        choice, point, state = None, START, None
        if saved_run is not None:
            lost_states = resuming.request_states(grid, roster, run_key, saved_run.points, config.startup_seconds)
            choice = resuming.choose(saved_run, lost_states, accept_loss=config.accept_loss)
            point = choice.point
            state = checkpoints.read(point.round) if point.round else None
        strategy = build_strategy(RunContext(config, roster, recorder, checkpoints, run_key, point))
        if choice is not None:
            # nothing is written before this line: a run that cannot resume is not changed
            _continue_record(recorder, config, earlier_info, choice, state)
            checkpoints.drop_after(point.round)
            if state is not None:
                strategy.restore(state)
                strategy.digests = {int(k): digest for k, digest in state.meta.get("digests", {}).items()}
        for line in prepared.notes:
            log.warning("%s", line)
        with plugins.located():
            strategy.run(grid, rounds_completed=point.round)
        models = folder / "models"
        _write_model(strategy, models)
        files = [path for path in sorted(models.rglob("*")) if path.is_file()]
        digests = {str(path.relative_to(models)): sha256_of(path) for path in files}
        recorder.annotate(model_files=digests, state_rounds=strategy.state_rounds, model_digests=dict(strategy.digests))
        recorder.finish("completed", final_sha256=_final_sha256(strategy))
    except (KeyboardInterrupt, SystemExit):
        _close(recorder, "interrupted", "interrupted")
        raise
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _close(recorder, "failed", lines[-1])
        raise


def _final_sha256(strategy: FederatedStrategy) -> str:
    """Return one hash over all final models: the server's, then the clients' in ascending order."""
    digests = [strategy.model_digest()] if strategy.has_global_model else []
    digests += [strategy.digests.get(client, "missing") for client in strategy.clients]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _write_model(strategy: FederatedStrategy, folder: Path) -> None:
    """Write the server's final model into the run's folder of models."""
    if strategy.has_global_model and strategy.model:
        round = int(strategy.recorder.info["rounds_completed"])
        owner_name = owner("global model", strategy.context.run_key)
        write_tensors(folder / "global.safetensors", strategy.model, round=round, owner=owner_name, private=False)


def _num_simulated(grid: Grid) -> int | None:
    """Return the number of clients of a simulation, or None for real nodes.

    A run that stops before its clients have registered resumes with as many.
    """
    return int(getattr(grid, "num_nodes", 0) or os.environ.get(CLIENTS_VARIABLE, 0)) or None


def _gather(grid: Grid, config: Config, recorder: Recorder, earlier_info: Values) -> Roster:
    """Return the registered clients of the run.

    A resumed run must have the same clients with the same data, otherwise :class:`ConfigError` is raised. Additional
    clients are left out, as are those that ``only-clients`` does not name.
    """
    system = SYSTEMS[config.system]
    numbers = {int(node): int(client) for node, client in earlier_info.get("nodes", {}).items()}
    ids = {int(client["partition"]) for client in earlier_info.get("partition") or []} or config.chosen_clients()
    if ids and config.min_clients > len(ids):
        raise ConfigError(
            "min-clients", config.min_clients, "at most that", condition=f"when resuming {len(ids)} clients"
        )
    try:
        roster, left_out = register_clients(
            grid,
            config.startup_seconds,
            str(recorder.info["run_key"]),
            TextClientInfo if system.reads_text else ImageClientInfo,
            min_clients=len(ids) or config.min_clients,
            numbers=numbers or None,
            ids=ids or None,
            notify=recorder.waiting,
        )
    finally:
        recorder.done_waiting()
    partition = [{"partition": k, **info.description()} for k, info in roster.items()]
    num_partitions = max(info.num_partitions for info in roster.values())  # all report the same
    old_partition, old_number = earlier_info.get("partition"), earlier_info.get("num_partitions") or num_partitions
    if old_partition is not None and (old_partition != partition or old_number != num_partitions):
        then, now = old_number or len(ids), num_partitions or len(partition)
        raise other_data(f"there were {then} clients, and now {now}" if then != now else "")
    capacities = {str(k): info.capacity for k, info in roster.items() if info.capacity is not None}
    if (began_with := earlier_info.get("capacities", capacities)) != capacities:
        raise ConfigError("capacities", capacities, f"{began_with}, as the run began", condition="when resuming")
    recorder.annotate(capacities=capacities)
    if names := {str(k): name for k, info in roster.items() if (name := info.name)}:
        recorder.annotate(client_names=names)
    recorder.annotate(num_partitions=num_partitions or None)  # nodes with their own data have no such number
    # without partition ids nothing else maps clients to data
    if any(info.own_data for info in roster.values()):
        recorder.annotate(nodes={str(info.node_id): k for k, info in roster.items()})
    if config.dp.enabled:
        protected = "training" if config.dp.accuracies == "open" else "all"
        recorder.annotate(protected_examples=protected, protected_unit=config.protected_unit)
    recorder.annotate(paper_bytes_formula=system.strategy.paper_formula, partition=partition, clients_left_out=left_out)
    return roster


def _continue_record(
    recorder: Recorder, config: Config, earlier_info: Values, choice: Choice, state: State | None
) -> None:
    """Reopen the run folder: from this call on the run differs from the stopped one."""
    values = config.to_dict()
    changes: ValueDict = {"config": {**values, "resume-from": "", "accept-loss": False}}
    if metrics := system_metrics.described(config.system):
        changes["measures"] = metrics
    changed_plugins = plugins.changed(values, earlier_info.get("plugins", {}))
    notes = [*choice.notes, *changed_plugins.values()]
    if changed_plugins:
        code = plugins.described(values)
        change = {"round": choice.point.round, **{name: code[name] for name in changed_plugins}}
        changes["plugins_since"] = [*earlier_info.get("plugins_since", []), change]
    if notes:
        changes["notes"] = [*earlier_info.get("notes", []), *notes]
    if choice.losses:
        changes["losses"] = [*earlier_info.get("losses", []), *choice.losses]
    recorder.annotate(**changes)
    recorder.resume(choice.point.round, marks_of(state.meta.get("records") if state else None))
    log.info("resuming after round %d", choice.point.round)
    for line in (*notes, *choice.losses):
        log.warning("%s", line)


def _close(recorder: Recorder, status: Status, error: str) -> None:
    """Record in run.json how the run ended, once.

    On a full disk run.json cannot be written, which must not hide the run's own error.
    """
    if not recorder.is_open:
        return
    try:
        recorder.finish(status, error=error)
    except OSError as full:
        log.error("run.json does not say how the run ended: %s", full)


def _close_all() -> None:
    for recorder in list(_at_work):
        _close(recorder, "interrupted", "interrupted")


# Flower calls it before it ends the process on a signal, which may leave no time for anything else
add_exit_handler(_close_all, run_before_force_exit=True)
