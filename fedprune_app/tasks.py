"""What a run is about, images or a language model: the server's parts that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from clients.fedspallm import language_model, perplexities
from fedprune_app.config import Config
from fedprune_app.engine.rounds import ImagePeer, Peer, Roster, TextPeer
from fedprune_app.engine.store import VersionedStore
from fedprune_app.learning.device import device_of
from fedprune_app.models.initial import chosen_name, initial_model, shared_names
from fedprune_app.models.saving import PrunedLayers, write_checkpoint, write_packed
from fedprune_app.models.vision import prunable_names, state_tensors
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.recorder import Recorder
from fedprune_app.tickets import winning_ticket
from strategies.base import FederatedStrategy
from strategies.fedltp import FedLTP
from strategies.fedspallm import FedSpaLLM

Build = Callable[[Config, Roster, Recorder, VersionedStore, str], FederatedStrategy]
PEERS: dict[str, type[Peer]] = {"images": ImagePeer, "text": TextPeer}


def image_strategy(
    config: Config, roster: Roster, recorder: Recorder, checkpoints: VersionedStore, run_key: str
) -> FederatedStrategy:
    """The system's strategy over the common initial network."""
    first = next(iter(roster.values()))
    assert isinstance(first, ImagePeer)
    model = initial_model(
        config.model, config.dataset, first.image_shape, first.num_classes, init=config.init, seed=config.seed
    )
    tensors = state_tensors(model, include_buffers=True)
    shared = {name: tensors[name] for name in shared_names(model, config.batch_norm)}
    recorder.annotate(
        model={
            "name": chosen_name(config.model, config.dataset),
            "parameters": sum(p.numel() for p in model.parameters()),
            "classes": first.num_classes,
        }
    )
    prunable = frozenset(prunable_names(model))
    strategy, more = SYSTEMS[config.system].strategy, {}
    if strategy is FedLTP:
        more["find_ticket"] = partial(winning_ticket, config, first.image_shape, first.num_classes, model)
    return strategy(config, shared, prunable, roster, recorder, checkpoints, run_key, **more)


def text_strategy(
    config: Config, roster: Roster, recorder: Recorder, checkpoints: VersionedStore, run_key: str
) -> FederatedStrategy:
    """The strategy over a dense language model on this machine."""
    model = language_model(config, device_of(config))

    def measure(layers: PrunedLayers) -> Mapping[str, Any]:
        return perplexities(config, model, lambda layer: layers(layer).tensors)

    def write(folder: Path, layers: PrunedLayers) -> Mapping[str, Any]:
        return {
            "checkpoint_bytes": write_checkpoint(model, layers, folder / "global"),
            "packed_bytes": write_packed(model, layers, folder / "global-packed"),
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
        found = perplexities(config, model, lambda layer: {})
        recorder.annotate(
            dense_perplexity={
                name: {
                    "value": p.value,
                    "window": p.window,
                    "windows": p.windows,
                    "windows_in_text": p.windows_in_text,
                    "tokens": p.tokens,
                }
                for name, p in found.items()
            }
        )
    texts = list(recorder.info["dense_perplexity"])
    return FedSpaLLM(config, model, measure, write, texts, roster, recorder, checkpoints, run_key)


BUILDS: dict[str, Build] = {"images": image_strategy, "text": text_strategy}
