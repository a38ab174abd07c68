"""Find the model to export in a run's folder, and make its smallest real network."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from clients.base import ImageClient
from clients.context import NodeContext
from clients.fedavg_ft import FineTuned
from clients.task import Task
from fedprune_app import plugins
from fedprune_app.config import Config, ConfigError
from fedprune_app.core.masks import full_masks
from fedprune_app.core.named import TensorDict, Tensors, ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.core.structured import coordinate_masks, gather
from fedprune_app.data.dataset import Dataset
from fedprune_app.data.names import LOADERS
from fedprune_app.data.splits import data_config, dataset_of
from fedprune_app.engine.store import State, client_store, owner, read_tensors, state_folder
from fedprune_app.exports.file import ExportInfo, full_density, network_of
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.files import scratch_folder
from fedprune_app.models.initial import channels_of, initial_model, seed_of_builder
from fedprune_app.models.names import BUILDERS, chosen_name
from fedprune_app.models.sources import resolve_checkpoint
from fedprune_app.models.vision import computes, load_state_tensors, probe, prunable_names, state_tensors
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.reader import check_models, client_number, last_of_clients, load_run, read_info

_GLOBAL = Path("models") / "global.safetensors"
CHECKPOINT = Path("models") / "global"  # the global language model of a run, for transformers


@dataclass(frozen=True, eq=False)
class Exportable:
    """A model of a run, ready for all formats: its tensors, their network, and the full network.

    The tensors and their network are without removed channels. ``masks`` are those of the full network's tensors, False
    for removed channels.
    """

    info: ExportInfo
    payload: Payload
    network: nn.Module
    full: nn.Module
    masks: Tensors


def finished_checkpoint(folder: Path) -> Path:
    """Return the folder of a completed run's language model, after a check, or ``folder`` if it is a checkpoint."""
    if (folder / "run.json").exists():
        info = read_info(folder)
        if (status := info["status"]) != "completed":
            raise ValueError(f"run {str(folder)!r} is {status}, allowed: a completed run")
        if damages := check_models(folder, info):
            raise ValueError(damages[0])
        folder = folder / CHECKPOINT
    return resolve_checkpoint(str(folder), download=False)


def find_model(
    run: Path, client: int | str | None, *, state_dir: str = "", data_dir: str = "", trusted: Collection[str] = ()
) -> Exportable:
    """Return the personal model of ``client`` at the end of a run, or the run's global model (None).

    A client has a number, and in a simulation of owners' data a name.

    Normalisation and names of classes are those that the run recorded. Only if it did not are the data read, which must
    then match the run's as far as can be checked. Raises a one-line ``ValueError``.
    """
    info = read_info(run)
    if info["status"] != "completed":
        raise ValueError(f"run {str(run)!r} is {info['status']}, allowed: a completed run")
    prepared = prepare(of_run(info, trusted))
    config = prepared.config
    for line in plugins.changed_since(info):
        raise ValueError(f"run {str(run)!r}: {line}, allowed: the file as it was")
    if prepared.system.reads_text:
        raise ValueError(
            f"run {str(run)!r} is of {config.system}, allowed: of images; its models/ are ready as they are"
        )
    if isinstance(client, str):
        client = client_number(info.get("client_names", {}), client)
    round, digest = int(info["rounds_completed"]), ""
    if client is None:
        state = _global_state(run, info, config)
    elif issubclass(prepared.system.client, FineTuned):
        has_state = str(client) in info["state_rounds"]
        own = _client_state(run, info, config, client, state_dir)[1] if has_state else State()
        state = _fine_tuned(run, info, replace(config, data_dir=data_dir or config.data_dir), client, own)
    else:
        round, state = _client_state(run, info, config, client, state_dir)
        digest = info.get("model_digests", {}).get(str(client), "")
    return _exportable(run, config, _inputs(run, info, config, state, data_dir), client, round, state, digest)


def _inputs(run: Path, info: Values, config: Config, state: State, data_dir: str) -> ValueDict:
    """Return shape, classes and normalisation of the models' inputs, as recorded, or else from the present data.

    With them are the ``logits`` that identify the run's initial network, or None in an older run. A client's state has
    the normalisation of that client's images; run.json has it for dealt data.
    """
    model = info.get("model") or {}
    normalisation = state.meta.get("normalisation") or model.get("normalisation")
    if not isinstance(normalisation, dict):
        dataset = _same_data(run, info, config, data_dir)
        normalisation = {"mean": [*map(float, dataset.mean)], "std": [*map(float, dataset.std)]}
        model = {**model, "features": list(dataset.features)}
    fields = {
        "image-shape": model.get("image_shape"),
        "num-classes": model.get("classes"),
        "classes": model.get("class_names", []),
        "features": state.meta.get("features") or model.get("features", []),
        **{f"normalisation-{name}": values for name, values in normalisation.items()},
    }
    try:
        return {**ImageClientInfo.facts(fields), "logits": model.get("logits")}
    except ValueError as error:
        raise ValueError(f"run {str(run)!r} says of its images what cannot be: {error}") from None


def _kind_of_inputs(config: Config) -> str:
    """Return the kind of a run's data, for ``inputs`` of :class:`ExportInfo`."""
    if config.dataset not in LOADERS:
        return "numbers" if config.dataset == "table" else "images"
    try:
        dataset = dataset_of(replace(data_config(config), download=False))
    except ValueError:  # the plug-in's data are not here
        return "unknown"
    return "images" if dataset.train_images.dtype == np.uint8 else "numbers"


def _same_data(run: Path, info: Values, config: Config, data_dir: str) -> Dataset:
    """Return the present data, which must match the run's as far as run.json records them.

    They are needed for a global model whose clients reported no normalisation: that of a private run does not depend on
    the images, and that of a client's own data stays with the client. Raises a one-line ``ValueError`` with the
    difference.
    """
    is_own = "nodes" in info  # each client has its own data
    data = replace(data_config(config, is_own), download=False, data_dir=data_dir or config.data_dir)
    if is_own and not data.data_dir:
        hint = f"run {str(run)!r} does not say how its nodes' images became inputs"
        raise ConfigError("--data-dir", "", "a folder of a node's data", hint=hint)
    dataset, model = dataset_of(data, int(is_own)), info.get("model") or {}
    found = {
        "image_shape": list(dataset.image_shape),
        "classes": dataset.num_classes,
        "class_names": list(dataset.classes),
        "features": list(dataset.features),
        "features_digest": dataset.features_digest,
    }
    for key, value in found.items():
        recorded = model.get(key, value)
        if value != recorded:
            where = f"data-dir {data.data_dir!r}" if data.data_dir else f"dataset {data.dataset!r}"
            raise ValueError(f"{where} has {key} {value}, allowed: {recorded}, as run {str(run)!r} had")
    return dataset


def _global_state(run: Path, info: Values, config: Config) -> State:
    """Return the global model's tensors as weights; weights that are exactly 0 count as pruned."""
    if not SYSTEMS[config.system].strategy.has_global_model:
        raise _no_global_model(config)
    tensor_owner = owner("global model", str(info.get("run_key") or ""))
    tensors = read_tensors(run / _GLOBAL, round=int(info["rounds_completed"]), owner=tensor_owner).tensors
    return State({f"weights/{name}": tensor for name, tensor in tensors.items()})


def _no_global_model(config: Config) -> ConfigError:
    return ConfigError(
        "--client",
        ...,
        "a client's number",
        condition=f"with system {config.system!r} and batch-norm {config.batch_norm!r}",
        which="is not given",
        hint="no model is global as a whole",
    )


def _client_state(run: Path, info: Values, config: Config, client: int, state_dir: str) -> tuple[int, State]:
    """Return the round of the client's last accepted update, and its state after that round.

    A later state, whose reply was too late, is not used.
    """
    rounds = {int(p): int(r) for p, r in info["state_rounds"].items()}
    if client not in rounds:
        allowed = "a client that trained in this run and keeps its model, or the global model"
        raise ConfigError("--client", client, allowed, condition=f"with system {config.system!r}")
    run_key = str(info.get("run_key") or "")
    of_nodes = sorted((run / "deployment").glob(f"node-*/state/{run_key}"))  # of `fedprune deploy local`
    places = [state_folder(run, state_dir or config.state_dir, run_key), *of_nodes]
    stores = [client_store(place, client, run_key) for place in places]
    store = next((store for store in stores if rounds[client] in store.rounds()), None)
    if store is None:
        raise ConfigError(
            "--state-dir",
            stores[0].folder,
            "the run's state-dir, as it is here",
            which=f"has no state of client {client}",
            hint="or export where the client runs",
        )
    return rounds[client], store.read(rounds[client])


def _fine_tuned(run: Path, info: Values, config: Config, client: int, own: State) -> State:
    """Return the client's model after fine-tuning, which is made anew: the run tested it and kept none.

    It is made where the data are, and its accuracy must be the recorded one.
    """
    rows = last_of_clients(load_run(run), "accuracy_personal")
    accuracy = next((row["accuracy_personal"] for row in rows if row["partition"] == client), None)
    if accuracy is None or "nodes" in info or config.dp.enabled:
        raise ConfigError(
            "--client", client, "the global model", condition="for private runs, real nodes and clients without a test"
        )
    count, round = int(info["num_partitions"]), int(info["rounds_completed"])
    task = Task(round, Payload(read_tensors(run / _GLOBAL, round=round).tensors))
    with scratch_folder() as folder:
        kind = SYSTEMS[config.system].client
        assert issubclass(kind, ImageClient)
        node = kind(config, NodeContext(client, count, folder))
        tensors = node.personal_model(task, own)
        if node.test_accuracy(task, tensors) != accuracy:
            raise ValueError(f"run {str(run)!r}: client {client} has another accuracy, fine-tuned here, than it had")
    return State({f"weights/{name}": tensor for name, tensor in tensors.items()})


def _as_tested(run: Path, state: State, of_server: Iterable[str], prunable: Iterable[str], digest: str) -> TensorDict:
    """Return the client's model as it was tested: its own tensors, or with the server's final ones ``of_server``.

    The recorded ``digest`` tells which. Raises ``ValueError`` if it is of another model.
    """
    own, path = state.group("weights"), run / _GLOBAL
    server = read_tensors(path).tensors if path.exists() else {}
    with_server = {**own, **{name: server[name] for name in of_server if name in server}}
    if not digest:  # an older run
        return with_server
    for weights in (own, with_server, {**own, **server}):
        nonzero = {name: weights[name] != 0 for name in prunable}
        for masks in (state.group("masks"), {}, nonzero):
            if Payload(weights, masks).digest() == digest:
                return weights
    raise ValueError(f"run {str(run)!r}: the state of this client is not the model that was tested")


def _exportable(
    run: Path, config: Config, inputs: Values, client: int | None, round: int, state: State, digest: str
) -> Exportable:
    shape, classes = inputs["image_shape"], inputs["num_classes"]
    full = initial_model(config.model, config.dataset, shape, classes, init=config.init, seed=config.seed)
    if inputs["logits"] and not computes(full, shape, inputs["logits"]):
        raise ValueError(f"run {str(run)!r} had another network, though with this name and shape")
    names, prunable = list(state_tensors(full, include_buffers=True)), prunable_names(full)
    weights, kept = state.group("weights"), state.group("channels")
    kind = SYSTEMS[config.system].client
    # the tensors of a personal model that come from the final server model (LG-FedAvg's upper layers)
    of_server = kind.names_from_server(config, names, prunable, round) if issubclass(kind, ImageClient) else []
    if client is not None and not kept:  # removed channels are masked in a way of their own
        if issubclass(kind, ImageClient) and kind.test_accuracy is not ImageClient.test_accuracy:
            raise ValueError(
                f"system {config.system!r} tests more than a network's tensors, which are all that is written"
            )
        weights = _as_tested(run, state, of_server, prunable, digest)
    missing_names = [name for name in names if name not in weights]
    # if clients take only some layers of the server, its others are outdated (from LG-FedAvg's pre-training)
    if client is None and (missing_names or 0 < len(of_server) < len(names)):
        raise _no_global_model(config)
    if missing_names:
        raise ValueError(f"the state is of another model: it has no tensor '{missing_names[0]}'")
    load_state_tensors(full, weights)
    full.eval().requires_grad_(False)

    masks = state.group("masks") or state.group("fc")
    if client is None or not masks:  # also where each message brings a client its masks
        nonzero = {name: weights[name] != 0 for name in prunable}
        masks = {name: mask for name, mask in nonzero.items() if client is None or not mask.all()}
    groups = channels_of(config.model, config.dataset, shape, classes) if kept else ()
    small = gather(weights, groups, kept)
    payload = Payload.pruned({name: small[name] for name in names}, gather(masks, groups, kept))
    name = chosen_name(config.model, config.dataset)
    info = ExportInfo(
        system=config.system,
        client=None if client is None else int(client),  # from a NumPy integer, too
        round=round,
        model=os.path.basename(name),  # of 'folder/file.py:function'
        image_shape=shape,
        classes=classes,
        mean=inputs["mean"],
        std=inputs["std"],
        density=full_density(full, payload),
        channels={name: tuple(mask.nonzero().squeeze(1).tolist()) for name, mask in kept.items()},
        class_names=inputs["classes"] if inputs["classes"] != tuple(map(str, range(classes))) else (),
        image_fit=config.image_fit,
        inputs=_kind_of_inputs(config),
        features=inputs["features"],
        logits=probe(full, shape),
        seed=seed_of_builder(config.model, config.dataset, config.init, config.seed),
    )
    if kept:
        shapes = {name: weights[name].shape for name in prunable}
        channel_masks = full_masks(shapes) | coordinate_masks(groups, kept, shapes)
        masks = {name: channel_masks[name] & masks[name] if name in masks else channel_masks[name] for name in shapes}
    return Exportable(info, payload, network_of(info, payload, BUILDERS.get(name)), full, masks)
