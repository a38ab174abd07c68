"""FedSpaLLM's global model on the server: the dense model, its pruned layers by round on disk, and recovery."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedprune_app.config import ConfigError
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.store import owner
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.clients import Roster, TextClientInfo
from fedprune_app.federation.registration import log_left_out
from fedprune_app.federation.round import RunContext
from fedprune_app.models.cutting import Cut
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.saving import write_checkpoint, write_packed

DENSE = 0  # the version of a layer that nobody has pruned yet


class PrunedModel:
    """The global model of a run: each decoder layer is dense, or the version of the round that pruned it last.

    The folder ``layers`` has one packed file per pruned layer and round. Kept sums of Hessians are in ``sums``, and
    rounded matrices in ``models/codes``.
    """

    def __init__(self, dense: LanguageModel, folder: Path, run_key: str) -> None:
        self.dense = dense
        self.files = layer_files(folder, run_key)
        self.sums = LayerFiles(folder / "sums", owner("sums", run_key))
        self.models = folder / "models"
        self.codes = self.models / "codes"
        self.versions = dict.fromkeys(range(dense.num_layers), DENSE)  # by layer, the round that wrote it

    def layer(self, layer: int) -> Payload:
        """Return the current matrices of a layer with their masks; an empty payload while the layer is dense."""
        if self.versions[layer] == DENSE:
            return Payload({})
        return self.files.load(layer, self.versions[layer], self.schema(layer).max_bytes)

    def schema(self, layer: int) -> Schema:
        """Return the schema of a pruned layer: its matrices, each with a mask."""
        shapes, names = self.dense.layer_like(layer), self.dense.prunable(layer)
        return Schema.like({name: shapes[name] for name in names}, frozenset(names))

    def never_pruned(self) -> list[int]:
        return [layer for layer, version in self.versions.items() if version == DENSE]

    def num_kept(self, layer: int) -> int:
        if self.versions[layer] == DENSE:
            return sum(shape.numel() for shape in self.schema(layer).shapes.values())
        return self.layer(layer).num_kept()

    def digest(self) -> str:
        """Return one SHA-256 over all layers and the parts that are never pruned."""
        return self.dense.digest(self.layer)

    def write(self, cut: Cut | None) -> dict[str, int]:
        """Write the model into the run's folder, narrowed by ``cut``; return the bytes of its weights."""
        # a layer that no client's budget allowed to observe is still dense
        removed = cut if all(self.layer(layer).masks for layer in self.versions) else None
        return {
            "checkpoint_bytes": write_checkpoint(self.dense, self.layer, self.models / "global", removed),
            "packed_bytes": write_packed(self.dense, self.layer, self.models / "global-packed", removed),
        }

    def install(self, round: int, layer: int, payload: Payload, oldest_needed: int) -> None:
        """Make ``payload`` the current layer; delete versions before ``oldest_needed``."""
        self.files.save(layer, round, payload)
        self.files.drop_before(layer, oldest_needed)
        self.versions[layer] = round


def layer_files(folder: Path, run_key: str) -> LayerFiles:
    return LayerFiles(folder / "layers", owner("layer", run_key))


def together(layers: Mapping[int, Payload]) -> Payload:
    """Return one payload of several decoder layers; each matrix name is prefixed by its layer's number."""
    prefixed_layers = [(f"{number}/", layer) for number, layer in layers.items()]
    return Payload(
        {prefix + name: tensor for prefix, layer in prefixed_layers for name, tensor in layer.tensors.items()},
        {prefix + name: mask for prefix, layer in prefixed_layers for name, mask in layer.masks.items()},
    )


def lost_layers(versions: Mapping[str, int], files: LayerFiles) -> Iterator[str]:
    """Yield a line for each of these layer versions that is damaged or missing."""
    for layer, version in versions.items():
        if version != DENSE:
            try:
                files.check(int(layer), int(version))
            except ValueError as error:
                yield str(error)


# --- who has the model --------------------------------------------------------------------------------------------


def clients_with_the_model(context: RunContext, dense: LanguageModel) -> Roster:
    """Return the clients whose dense model is the server's; record the others with the reason.

    Raises :class:`ConfigError` if too few are left.
    """
    config = context.config
    layer_digests = tuple(dense.layer_digest(layer) for layer in range(dense.num_layers))
    roster: Roster = {}
    reasons = []
    for client, info in context.clients.items():
        assert isinstance(info, TextClientInfo)
        if (info.shell_digest, info.layer_digests) == (dense.shell_digest(), layer_digests):
            roster[client] = info
        else:
            reasons.append(f"client {client} has another dense model than the server")
    log_left_out(reasons)
    if reasons:
        old_reasons = context.recorder.info.get("clients_left_out", [])
        context.recorder.annotate(clients_left_out=[*old_reasons, *reasons])
    if len(roster) < max(1, config.min_clients):
        raise ConfigError(
            "model",
            config.model,
            which=f"is that of {len(roster)} of {len(context.clients)} clients alone",
            hint=reasons[0],
        )
    return roster


class Recovery:
    """Averages the kept weights that clients have retrained, in one exchange for the whole model.

    The sums of all kept weights are in memory. At most ``num_clients`` replies are added.
    """

    def __init__(self, model: PrunedModel, num_clients: int) -> None:
        self._model, self._mean = model, MaskedMean(max(1, num_clients), 1)
        self._layers = [layer for layer in range(model.dense.num_layers) if layer not in model.never_pruned()]
        self.answer = Schema.like(dict(self._kept_weights()))

    def _kept_weights(self) -> list[tuple[str, Tensor]]:
        """Return the shapes of a reply, as meta tensors: the kept weights of each matrix, in the mask's order."""
        return [
            (f"{layer}/{name}", torch.empty(int(mask.sum()), dtype=pruned.tensors[name].dtype, device="meta"))
            for layer in self._layers
            for pruned in [self._model.layer(layer)]
            for name, mask in pruned.masks.items()
        ]

    def add(self, update: Payload) -> None:
        self._mean.add(update, 1)

    def layers(self) -> dict[int, Payload]:
        """Return the pruned layers, with the mean of the clients' weights."""
        means, payloads = self._mean.mixed(), {}
        for layer in self._layers:
            payload = self._model.layer(layer)
            tensors = {}
            for name, mask in payload.masks.items():
                tensors[name] = torch.zeros_like(payload.tensors[name])
                tensors[name][mask] = means[f"{layer}/{name}"].to(tensors[name].dtype)
            payloads[layer] = Payload.pruned(tensors, payload.masks)
        return payloads
