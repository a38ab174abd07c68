"""A run is about images or a language model: this module has the server's parts that depend on which of the two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median_low
from typing import Any

from clients.fedspallm import language_model, observed_inputs, perplexities, segment_noise
from fedprune_app.config import ConfigError
from fedprune_app.config.fedspallm import CUT
from fedprune_app.engine.simulated import is_simulated
from fedprune_app.federation.clients import ClientInfo, ImageClientInfo, TextClientInfo
from fedprune_app.federation.round import RunContext
from fedprune_app.learning.device import device_of
from fedprune_app.models.cutting import Cut
from fedprune_app.models.initial import initial_model, shared_names
from fedprune_app.models.names import chosen_name
from fedprune_app.models.saving import PrunedLayers, write_checkpoint, write_packed
from fedprune_app.models.vision import prunable_names, state_tensors
from fedprune_app.models.zero_shot import accuracies
from fedprune_app.registry import SYSTEMS
from strategies.base import FederatedStrategy
from strategies.fedspallm import FedSpaLLM

Build = Callable[[RunContext], FederatedStrategy]
CLIENT_INFOS: dict[str, type[ClientInfo]] = {"images": ImageClientInfo, "text": TextClientInfo}


def image_strategy(context: RunContext) -> FederatedStrategy:
    """Build the system's strategy over the common initial network."""
    config, first = context.config, next(iter(context.clients.values()))
    assert isinstance(first, ImageClientInfo)
    model = initial_model(
        config.model, config.dataset, first.image_shape, first.num_classes, init=config.init, seed=config.seed
    )
    columns, normalisation = _columns(context), _normalisation(context)
    tensors = state_tensors(model, include_buffers=True)
    shared = {name: tensors[name] for name in shared_names(model, config.batch_norm)}
    if config.batch_norm == "local" and len(shared) == len(tensors) and not config.resume_from:
        raise ConfigError("batch-norm", "local", "averaged", condition="with a model that has no BatchNorm layer")
    if digest := _digest_of_data(context):
        context.recorder.annotate(data_sha256=digest)
    context.recorder.annotate(
        model={
            "name": chosen_name(config.model, config.dataset),
            "parameters": sum(p.numel() for p in model.parameters()),
            "classes": first.num_classes,
            "image_shape": list(first.image_shape),
            **({"class_names": list(first.classes)} if first.classes else {}),
            **columns,
            **({"normalisation": normalisation} if normalisation else {}),
        }
    )
    prunable = frozenset(prunable_names(model))
    return SYSTEMS[config.system].strategy(context, shared, prunable)


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


def _normalisation(context: RunContext) -> dict[str, list[float]]:
    """Return the mean and the standard deviation by channel with which the clients normalise their images.

    The result is empty where clients do not tell them. All clients of dealt data have the same ones. The median over
    clients is taken, so that a client that says something else changes nothing. Raises :class:`ConfigError` where a
    run is resumed with other ones: its models would then have seen the images in two ways.
    """
    infos = [info for info in context.clients.values() if isinstance(info, ImageClientInfo) and info.mean]
    if not infos:
        return {}
    means, stds = zip(*(info.mean for info in infos), strict=True), zip(*(info.std for info in infos), strict=True)
    normalisation = {
        name: [median_low(numbers) for numbers in values] for name, values in (("mean", means), ("std", stds))
    }
    recorded_normalisation = (context.recorder.info.get("model") or {}).get("normalisation") or normalisation
    pairs = [
        pair
        for name in normalisation
        for pair in zip_longest(recorded_normalisation[name], normalisation[name], fillvalue=math.inf)
    ]
    if not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-9) for pair in pairs):
        raise other_data("the mean and deviation of the images differ")
    return normalisation


def _columns(context: RunContext) -> dict[str, Any]:
    """Return what run.json tells of a table's columns: their names, or a digest of them where clients keep the names.

    They are what most clients tell, so that a single client cannot make a table of images. Raises
    :class:`ConfigError` where a run is resumed with other columns, or with the same ones in another order.
    """
    infos = [info for info in context.clients.values() if isinstance(info, ImageClientInfo)]
    ((names, digest), _), *_ = Counter((info.features, info.features_digest) for info in infos).most_common(1)
    columns = {key: value for key, value in (("features", list(names)), ("features_digest", digest)) if value}
    model = context.recorder.info.get("model") or {}
    if any(model.get(key, value) != value for key, value in columns.items()):
        raise other_data("the columns of the tables differ, or their order")
    return columns


def _digest_of_data(context: RunContext) -> str:
    """Return the digest of the dealt data that most clients tell; empty where clients tell none.

    Raises :class:`ConfigError` where a run is resumed with other data, which may have the same labels.
    """
    infos = [info for info in context.clients.values() if isinstance(info, ImageClientInfo)]
    ((digest, _),) = Counter(info.data_sha256 for info in infos).most_common(1)
    if is_simulated() and len({info.data_sha256 for info in infos}) > 1:
        raise ConfigError(
            "dataset",
            context.config.dataset,
            "a dataset that is the same each time, such as a function that draws by a seed of its own",
            which="is other data for some clients",
        )
    recorded_digest = context.recorder.info.get("data_sha256") or digest
    if digest and recorded_digest != digest:
        raise other_data("its digest differs")
    return digest


def text_strategy(context: RunContext) -> FederatedStrategy:
    """Build the strategy over a dense language model on this machine."""
    config, recorder = context.config, context.recorder
    model, options = language_model(config, device_of(config)), config.fedspallm
    cut = Cut(model, config.density) if options.pattern == CUT else None

    def measure(layers: PrunedLayers) -> Mapping[str, Any]:
        return perplexities(config, model, lambda layer: layers(layer).tensors)

    tasks = config.fedspallm.tasks()
    task_accuracies = partial(accuracies, model, tasks=tasks, batch_size=config.batch_size, download=config.download)

    def answer_tasks(layers: PrunedLayers) -> Mapping[str, Mapping[str, Any]]:
        results = task_accuracies(lambda layer: layers(layer).tensors) if tasks else {}
        dense = recorder.info.get("dense_accuracy", {})
        return {
            n: {"dense": dense[n], "global": result.value, "examples": result.examples} for n, result in results.items()
        }

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
    if tasks and "dense_accuracy" not in recorder.info:  # before anything is pruned: a task may be refused
        dense = task_accuracies(lambda layer: {})
        recorder.annotate(dense_accuracy={name: result.value for name, result in dense.items()})
    texts = list(recorder.info["dense_perplexity"])
    noise = partial(segment_noise, config)
    inputs = partial(observed_inputs, config, model)
    return FedSpaLLM(context, model, measure, answer_tasks, write, texts, inputs, noise, cut)


BUILDS: dict[str, Build] = {"images": image_strategy, "text": text_strategy}
