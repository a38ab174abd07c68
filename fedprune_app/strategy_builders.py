"""Building a run's strategy from its clients' reports: over images, or over a language model."""

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fedprune_app import plugins
from fedprune_app.config import ConfigError
from fedprune_app.core.named import ValueDict
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.round import RunContext
from fedprune_app.learning.device import device_of
from fedprune_app.learning.language_models import check_same_model, check_start_token, language_model, told_perplexities
from fedprune_app.models.initial import initial_model, shared_names
from fedprune_app.models.names import chosen_name
from fedprune_app.models.vision import probe, prunable_names, state_tensors
from fedprune_app.registry import SYSTEMS
from strategies.base import FederatedStrategy
from strategies.fedspallm import FedSpaLLM


def build_strategy(context: RunContext) -> FederatedStrategy:
    build = text_strategy if SYSTEMS[context.config.system].reads_text else image_strategy
    return build(context)


def image_strategy(context: RunContext) -> FederatedStrategy:
    """Build the system's strategy over the common initial network."""
    config, first = context.config, next(iter(context.clients.values()))
    assert isinstance(first, ImageClientInfo)
    model = initial_model(
        config.model, config.dataset, first.image_shape, first.num_classes, init=config.init, seed=config.seed
    )
    facts = _facts_of_data(context)
    with suppress(Exception):  # a network that fails on its images says so in its first step
        facts["logits"] = probe(model, first.image_shape)
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
    """Raise :class:`ConfigError` if a resumed run's network has other layers, because its code has changed."""
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
    """Return the error for a resumed run whose clients have other data than at its start."""
    return ConfigError(
        "the clients' data",
        ...,
        "the same clients and data",
        condition="when resuming",
        which="is not what it was when the run began",
        hint=difference,
    )


def _majority(context: RunContext, fact: Callable[[ImageClientInfo], Any]) -> Any:
    """Return a fact as most clients report it, so that a single deviating client changes nothing."""
    told = [fact(info) for info in context.clients.values() if isinstance(info, ImageClientInfo)]
    ((value, _),) = Counter(told).most_common(1)
    return value


def _facts_of_data(context: RunContext) -> ValueDict:
    """Return the facts of the data for run.json's entry of the model, which an export needs.

    These are the normalisation of images, and a table's columns or a digest of them; facts that clients do not report
    are left out. Raises :class:`ConfigError` if a resumed run has other columns, or another order.
    """
    means, stds = _majority(context, lambda info: (info.mean, info.std))
    features, digest = _majority(context, lambda info: (info.features, info.features_digest))
    columns = {key: value for key, value in (("features", list(features)), ("features_digest", digest)) if value}
    recorded = context.recorder.info.get("model") or {}
    if any(recorded.get(key, value) != value for key, value in columns.items()):
        raise other_data("the columns of the tables differ, or their order")
    return columns | ({"normalisation": {"mean": list(means), "std": list(stds)}} if means else {})


def _digest_of_data(context: RunContext) -> str:
    """Return the digest of the dealt data that most clients report; empty if none do.

    Raises :class:`ConfigError` if a resumed run has other data, even with the same labels.
    """
    digest: str = _majority(context, lambda info: info.data_sha256)
    if digest and context.recorder.info.get("data_sha256", digest) != digest:
        raise other_data("its digest differs")
    return digest


def text_strategy(context: RunContext) -> FederatedStrategy:
    """Build the strategy over a dense language model on this machine."""
    config, recorder = context.config, context.recorder
    model = language_model(config, device_of(config))
    check_same_model(model, recorder.info)
    parameters, prunable = model.num_parameters()
    recorder.annotate(
        model={
            "name": str(model.folder.name) if config.model == "auto" else config.model,
            "parameters": parameters,
            "prunable": prunable,
            "layers": model.num_layers,
            "dtype": str(model.dtype).removeprefix("torch."),
            "sha256": model.digest(),
        },
    )
    if "dense_perplexity" not in recorder.info:
        check_start_token(config, model)
        recorder.annotate(dense_perplexity=told_perplexities(config, model))
    return FedSpaLLM(context, model)
