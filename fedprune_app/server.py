"""What the ServerApp is made of: where a run goes on, and the parts that depend on images or a language model.

A run that stopped goes on from the latest point from which it ends as if it had never stopped. Nothing is written
before. All that is needed is asked for and checked first: the checkpoint, the records up to it, what the system keeps
on the server's disk, and each client's state, which the client itself checks. What is damaged is named, and an earlier
point is taken. Where no point is whole, the run is refused, or it goes on with a loss that the user accepts.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from clients.fedspallm import language_model, observed_inputs, perplexities, segment_noise
from fedprune_app import plugins
from fedprune_app.config import Config, ConfigError, check_resumable
from fedprune_app.config.fedspallm import CUT
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import Answer, message_to, send_and_receive
from fedprune_app.engine.store import ResumePoint, checkpoint_store
from fedprune_app.federation.clients import ClientInfo, ImageClientInfo, Roster, TextClientInfo
from fedprune_app.federation.round import RunContext
from fedprune_app.learning.device import device_of
from fedprune_app.models.cutting import Cut
from fedprune_app.models.initial import initial_model, shared_names
from fedprune_app.models.names import chosen_name
from fedprune_app.models.saving import PrunedLayers, write_checkpoint, write_packed
from fedprune_app.models.vision import prunable_names, state_tensors
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.reader import check_models, check_records, load_run, marks_of
from strategies.base import FederatedStrategy
from strategies.fedspallm import FedSpaLLM

log = logging.getLogger("flwr.fedprune")
_NOTES = 20
# the reason why a client's state is lost, by client and round
LostStates = Mapping[int, Mapping[int, str]]


@dataclass(frozen=True)
class SavedRun:
    """The server's disk has ``points`` of a run to go on from, the latest first, and files that are ``damaged``."""

    info: Mapping[str, Any]  # run.json
    points: list[ResumePoint]
    damaged: list[str] = field(default_factory=list)
    is_complete: bool = False  # nothing is left to do or to repair


@dataclass(frozen=True)
class Choice:
    """A choice is the point that a run goes on from, which may be the run's start.

    ``notes`` and ``losses`` are for run.json: what happened, and what is lost for good.
    """

    point: ResumePoint
    notes: list[str]
    losses: list[str]


def find(folder: Path, info: Mapping[str, Any], config: Config) -> SavedRun:
    """Look through a run folder, whose run.json is ``info``, for points to go on from.

    Raises :class:`ConfigError` where ``config`` is another run's, and where no checkpoint can be read after more than
    one round.
    """
    check_resumable(info["config"], config)
    run_key = str(info["run_key"])
    strategy, checkpoints = SYSTEMS[config.system].strategy, checkpoint_store(folder, run_key)
    points: list[ResumePoint] = []
    damaged: list[str] = []
    for round in reversed(checkpoints.rounds()):
        try:
            meta = checkpoints.read(round).meta
        except ValueError as error:
            damaged.append(str(error))
            continue
        cut = check_records(folder, marks_of(meta.get("records")))
        for point in strategy.resume_points(folder, run_key, round, meta, config):
            points.append(replace(point, lost=(*cut, *point.lost)))
    if not points and info["rounds_completed"] > 1:  # a round is recorded before its checkpoint is written
        raise ConfigError(
            "folder",
            checkpoints.folder,
            "one that has",
            condition=f"when resuming after {info['rounds_completed']} rounds",
            which="has no readable checkpoint",
            hint=damaged[0] if damaged else "",
        )
    if points and points[0].round > config.num_server_rounds:
        raise ConfigError(
            "num-server-rounds", config.num_server_rounds, f"at least {points[0].round}", condition="when resuming"
        )
    if not points:
        points = list(strategy.resume_points(folder, run_key, 0, {"state-rounds": {}}, config))
    ends = points[0].round == config.num_server_rounds and info["status"] == "completed"
    problems = _spoilt_results(folder, info) if ends else []
    is_complete = ends and not (problems or damaged or points[0].lost)
    return SavedRun(info, points, [*damaged, *problems], is_complete)


def _spoilt_results(folder: Path, info: Mapping[str, Any]) -> list[str]:
    problems = []
    try:
        load_run(folder)
    except ValueError as error:
        problems.append(str(error))
    return problems + check_models(folder, info)


def ask_for_states(
    grid: Grid, roster: Roster, run_key: str, points: list[ResumePoint], deadline_seconds: float
) -> LostStates:
    """Have every client check the versions of its state that any of the points needs; return those that are lost."""
    versions_by_client = {k: sorted({point.state_rounds.get(k, 0) for point in points} - {0}) for k in roster}

    def questions() -> Iterator[tuple[int, Message]]:
        for client, versions in versions_by_client.items():
            if versions:
                fields = {"round": 0, "run-key": run_key, "partition": client, "states": versions}
                request, node = wire.pack(None, fields), roster[client].node_id
                yield client, message_to(node, request, MessageType.QUERY, 0, deadline_seconds)

    return {
        answer.client: _lost_versions(answer, versions_by_client[answer.client])
        for answer in send_and_receive(grid, questions(), deadline_seconds)
    }


def _lost_versions(answer: Answer, asked_versions: list[int]) -> dict[int, str]:
    try:
        if answer.content is None:
            raise ValueError(answer.error)
        fields = wire.fields_of(answer.content)
        versions, reasons = fields.get("lost-rounds"), fields.get("lost-reasons")
        if not (isinstance(versions, list) and isinstance(reasons, list)):
            raise ValueError("it does not say what it has")
        return {int(round): wire.one_line(str(reason)) for round, reason in zip(versions, reasons, strict=True)}
    except (TypeError, ValueError) as error:
        return dict.fromkeys(asked_versions, f"its state cannot be checked: {wire.one_line(str(error))}")


def choose(saved_run: SavedRun, lost_states: LostStates, *, accept_loss: bool) -> Choice:
    """Return the latest point to which nothing is missing.

    Where there is none, and with ``accept_loss``, the latest point that can be used at all is returned. Raises
    :class:`ConfigError` with the first loss where there is no such point either; ``accept_loss`` is no help then.
    """
    reasons = list(saved_run.damaged)
    losses = {id(point): _losses(point, lost_states) for point in saved_run.points}
    lossless_point = next((point for point in saved_run.points if point.is_usable and not losses[id(point)]), None)
    usable_point = next((point for point in saved_run.points if point.is_usable), None)
    chosen_point = lossless_point or (usable_point if accept_loss else None)
    if chosen_point is None:
        reasons += [line for point in saved_run.points for line in losses[id(point)]]
        rest_text = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise ConfigError(
            "the run",
            ...,
            "the file from a copy" + (", or accept-loss" if usable_point else ""),
            which="cannot go on to the result that it would have had",
            where=f"{reasons[0]}{rest_text}",
        )
    for point in saved_run.points[: saved_run.points.index(chosen_point)]:
        reasons += [line for line in losses[id(point)] if line not in reasons]
    num_recorded = saved_run.info["rounds_completed"]
    notes = [f"{line}; went on after round {chosen_point.round}" for line in reasons]
    if num_repeated := num_recorded - chosen_point.round:
        prefix = "" if reasons else f"round {num_recorded} left no readable checkpoint: "
        notes.append(f"{prefix}rounds repeated: {num_repeated}")
    lasting = losses[id(chosen_point)]
    if chosen_point.renews:
        state_rounds = {
            p: round for p, round in chosen_point.state_rounds.items() if round not in lost_states.get(p, {})
        }
        chosen_point = replace(chosen_point, state_rounds=state_rounds)
    return Choice(chosen_point, notes[:_NOTES], lasting)


def _losses(point: ResumePoint, lost_states: LostStates) -> list[str]:
    states = [] if point.renews else sorted(point.state_rounds.items())
    return [
        *point.lost,
        *(f"client {p}: {lost_states[p][round]}" for p, round in states if round in lost_states.get(p, {})),
    ]


# --- images or a language model ---------------------------------------------------------------------------------------


Build = Callable[[RunContext], FederatedStrategy]
CLIENT_INFOS: dict[str, type[ClientInfo]] = {"images": ImageClientInfo, "text": TextClientInfo}


def image_strategy(context: RunContext) -> FederatedStrategy:
    """Build the system's strategy over the common initial network."""
    config, first = context.config, next(iter(context.clients.values()))
    assert isinstance(first, ImageClientInfo)
    model = initial_model(
        config.model, config.dataset, first.image_shape, first.num_classes, init=config.init, seed=config.seed
    )
    facts = _facts_of_data(context)
    tensors = state_tensors(model, include_buffers=True)
    layers = hashlib.sha256(repr([(name, *tensor.shape) for name, tensor in sorted(tensors.items())]).encode())
    _require_same_network(context, layers.hexdigest())
    shared = {name: tensors[name] for name in shared_names(model, config.batch_norm)}
    if config.batch_norm == "local" and len(shared) == len(tensors) and not config.resume_from:
        raise ConfigError("batch-norm", "local", "averaged", condition="with a model that has no BatchNorm layer")
    if digest := _digest_of_data(context):
        context.recorder.annotate(data_sha256=digest)
    context.recorder.annotate(
        model={
            "name": chosen_name(config.model, config.dataset),
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers_sha256": layers.hexdigest(),
            "classes": first.num_classes,
            "image_shape": list(first.image_shape),
            **({"class_names": list(first.classes)} if first.classes else {}),
            **facts,
        }
    )
    return SYSTEMS[config.system].strategy(context, shared, frozenset(prunable_names(model)))


def _require_same_network(context: RunContext, layers: str) -> None:
    """Raise :class:`ConfigError` where a run is resumed with a network of other layers, as its code has changed."""
    info = context.recorder.info
    if (info.get("model") or {}).get("layers_sha256", layers) != layers:
        changed = plugins.changed(context.config.to_dict(), info.get("plugins", {}))
        raise ConfigError(
            "model",
            context.config.model,
            "the network that the run began with",
            condition="when resuming",
            which="has other layers now",
            hint="; ".join(changed.values()),
        )


def other_data(difference: str) -> ConfigError:
    """Return the error of a resumed run whose clients do not have the data that it began with."""
    return ConfigError(
        "the clients' data",
        ...,
        "the same clients and data",
        condition="when resuming",
        which="is not what it was when the run began",
        hint=difference,
    )


def _as_most_tell(context: RunContext, fact: Callable[[ImageClientInfo], Any]) -> Any:
    """Return a fact as most clients tell it, so that a single client that says something else changes nothing."""
    told = [fact(info) for info in context.clients.values() if isinstance(info, ImageClientInfo)]
    ((value, _),) = Counter(told).most_common(1)
    return value


def _facts_of_data(context: RunContext) -> dict[str, Any]:
    """Return what run.json tells of the data with the model, which are the facts that an export needs.

    These are how images are normalised, and a table's columns or a digest of them; what clients do not tell is left
    out. Raises :class:`ConfigError` where a run is resumed with other columns, or with the same ones in another order.
    """
    means, stds = _as_most_tell(context, lambda info: (info.mean, info.std))
    features, digest = _as_most_tell(context, lambda info: (info.features, info.features_digest))
    columns = {key: value for key, value in (("features", list(features)), ("features_digest", digest)) if value}
    recorded = context.recorder.info.get("model") or {}
    if any(recorded.get(key, value) != value for key, value in columns.items()):
        raise other_data("the columns of the tables differ, or their order")
    return columns | ({"normalisation": {"mean": list(means), "std": list(stds)}} if means else {})


def _digest_of_data(context: RunContext) -> str:
    """Return the digest of the dealt data that most clients tell; empty where clients tell none.

    Raises :class:`ConfigError` where a run is resumed with other data, which may have the same labels.
    """
    digest: str = _as_most_tell(context, lambda info: info.data_sha256)
    if digest and context.recorder.info.get("data_sha256", digest) != digest:
        raise other_data("its digest differs")
    return digest


def text_strategy(context: RunContext) -> FederatedStrategy:
    """Build the strategy over a dense language model on this machine."""
    config, recorder = context.config, context.recorder
    model, options = language_model(config, device_of(config)), config.fedspallm
    cut = Cut(model, config.density) if options.pattern == CUT else None

    def measure(layers: PrunedLayers) -> Mapping[str, Any]:
        return perplexities(config, model, lambda layer: layers(layer).tensors)

    def write(folder: Path, layers: PrunedLayers) -> Mapping[str, Any]:
        # a layer that nobody could afford to observe is whole
        removed = cut if all(layers(layer).masks for layer in range(model.num_layers)) else None
        return {
            "checkpoint_bytes": write_checkpoint(model, layers, folder / "global", removed),
            "packed_bytes": write_packed(model, layers, folder / "global-packed", removed),
        }

    parameters, prunable = model.num_parameters()
    recorder.annotate(
        model={
            "name": str(model.folder.name) if config.model == "auto" else config.model,
            "parameters": parameters,
            "prunable": prunable,
            "layers": model.num_layers,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
    )
    if "dense_perplexity" not in recorder.info:
        dense_perplexities = perplexities(config, model, None)
        recorder.annotate(
            dense_perplexity={
                name: {
                    "value": p.value,
                    "window": p.window,
                    "windows": p.windows,
                    "windows_in_text": p.windows_in_text,
                    "tokens": p.window * p.windows,
                }
                for name, p in dense_perplexities.items()
            }
        )
    return FedSpaLLM(
        context,
        model,
        measure,
        write,
        list(recorder.info["dense_perplexity"]),
        partial(observed_inputs, config, model),
        partial(segment_noise, config),
        cut,
    )


BUILDS: dict[str, Build] = {"images": image_strategy, "text": text_strategy}
