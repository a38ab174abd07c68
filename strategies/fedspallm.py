"""FedSpaLLM, the server half: the mean over those who kept a weight, and masks expanded to the density asked for.

Bai, Li, Li, Zhao, Kim, "FedSpaLLM: Federated Pruning of Large Language Models", 2024: Algorithm 1, equations (5)-(8).
Where the text leaves a choice, or does not hold:

* Equation (5) divides by one scalar; each entry's own count is meant (``core.aggregate.L0Mean``).
* Ties in the expansion, which are most of it, go by smallest mean magnitude (``fedspallm.ties``; for ``wanda`` clients
  also send the root mean square of each matrix' inputs); its scope is a matrix (``fedspallm.expansion``). Nothing that
  all clients pruned comes back. Weights removed by the expansion are not made up for.
* A matrix is averaged over the clients that pruned it: equation (9) would add dense copies to the mean.
* Corollary 4.1 asks that every layer be pruned by somebody: layers are dealt by a shuffled round-robin, which begins
  with those that were never pruned. One that nobody pruned stays as it is, and the record says so.
* From round 2 on the cached dense layers of equation (9) are no longer the global model's; ``fedspallm.unsampled =
  "current"`` sends the current ones to those who do not prune them.

A round is one exchange per decoder layer. The server holds one layer's sums, and writes each new layer to its disk;
with ``fedspallm.expansion = "global"`` the means and counts of all layers wait there until the last is in.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedprune_app.config import Config, ConfigError
from fedprune_app.core import metrics, rng
from fedprune_app.core.aggregate import L0Mean
from fedprune_app.core.expansion import INPUT_NORMS, Cut, Votes
from fedprune_app.core.layers import assign_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import require
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.store import ResumePoint, State, VersionedStore, owner
from fedprune_app.federation.clients import ClientInfo, Roster, TextClientInfo
from fedprune_app.federation.exchanges import Exchanges, Rows
from fedprune_app.federation.registration import log_left_out
from fedprune_app.federation.round import Outgoing, Round, RunContext
from fedprune_app.results import measures
from fedprune_app.results.measures import Reply
from fedprune_app.results.texts import OWN_TEXT
from strategies.base import FederatedStrategy, state_rounds_of

log = logging.getLogger("flwr.fedprune")
_COMPARED_UP_TO = 64  # clients whose masks of one layer are compared with each other
_DENSE = 0  # the version of a layer that nobody has pruned yet


class DenseModel(Protocol):
    """The model that the run begins with, as the server has it."""

    prefix: str

    @property
    def num_layers(self) -> int: ...
    def num_parameters(self) -> tuple[int, int]: ...
    def prunable(self, layer: int) -> list[str]: ...
    def layer_like(self, layer: int) -> dict[str, Tensor]: ...
    def layer_tensors(self, layer: int) -> dict[str, Tensor]: ...
    def layer_digest(self, layer: int) -> str: ...
    def shell_digest(self) -> str: ...


class Perplexity(Protocol):
    """What was measured on one text."""

    @property
    def value(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def windows(self) -> int: ...
    @property
    def windows_in_text(self) -> int | None: ...
    @property
    def tokens(self) -> int: ...


_COUNTS = "pruned-by/"  # before a matrix' name: how many clients pruned each entry


def _packed(votes: Votes) -> Payload:
    """As one payload, for the disk."""
    most = max((int(counts.max()) for counts in votes.pruned.values()), default=0)
    dtype = torch.uint8 if most < 2**8 else torch.int32
    counts = {_COUNTS + name: each.to(dtype) for name, each in votes.pruned.items()}
    return Payload({**votes.mean.tensors, **counts}, votes.mean.masks)


def _unpacked(payload: Payload) -> Votes:
    counts = {name: payload.tensors[_COUNTS + name].int() for name in payload.masks}
    mean = {name: tensor for name, tensor in payload.tensors.items() if not name.startswith(_COUNTS)}
    return Votes(Payload(mean, payload.masks), counts)


def _on_disk(folder: Path, run_key: str) -> tuple[LayerFiles, LayerFiles, VersionedStore]:
    """The global model's layers, the means that wait for the others, and how far a round has come, by step."""
    layers = folder / "layers"
    return (
        LayerFiles(layers, owner("layer", run_key)),
        LayerFiles(layers / "pending", owner("mean", run_key)),
        VersionedStore(layers / "progress", keep=2, owner=owner("progress", run_key)),
    )


def _lost_layers(versions: Mapping[str, int], files: LayerFiles) -> Iterator[str]:
    """What is wrong with these versions of layers: a line for each that is damaged or missing."""
    for layer, version in versions.items():
        if version != _DENSE:
            try:
                files.check(int(layer), int(version))
            except ValueError as error:
                yield str(error)


def _first_differing(ones: Sequence[str], others: Sequence[str]) -> int | None:
    return next((i for i, (one, other) in enumerate(zip(ones, others, strict=True)) if one != other), None)


def _share(config: Config, info: ClientInfo) -> float:
    """Return the share of the layers that the client prunes in a round."""
    return info.capacity or config.fedspallm.layer_share(info.id)


def _with_the_model(context: RunContext, dense: DenseModel) -> Roster:
    """Return the clients whose dense model is the server's; name the others in the record.

    A decoder layer may differ where the client is sent it: with a share of 1 it is sent all of them. Raises
    :class:`ConfigError` where nobody is left.
    """
    config = context.config
    digests = [dense.layer_digest(layer) for layer in range(dense.num_layers)]
    found: Roster = {}
    reasons = []
    for client, info in context.clients.items():
        assert isinstance(info, TextClientInfo)
        if len(info.layer_digests) != len(digests):
            reasons.append(
                f"client {client} has a model of {len(info.layer_digests)} layers, the server's has {len(digests)}"
            )
        elif info.shell_digest != dense.shell_digest():
            reasons.append(f"client {client} has other embeddings or norms than the server's model")
        elif _share(config, info) < 1 and (differing := _first_differing(info.layer_digests, digests)) is not None:
            reasons.append(f"client {client} has another decoder layer {differing} than the server's model")
        else:
            found[client] = info
    log_left_out(reasons)
    if reasons:
        before = context.recorder.info.get("clients_left_out", [])
        context.recorder.annotate(clients_left_out=[*before, *reasons])
    if len(found) < max(1, config.min_clients):
        raise ConfigError(f"{len(found)} of {len(context.clients)} clients have the model of the server: {reasons[0]}")
    return found


Layers = Callable[[int], Payload]
Measure = Callable[[Layers], Mapping[str, Perplexity]]
"""Perplexities, by test text, of the model with these pruned layers."""
Write = Callable[[Path, Layers], Mapping[str, Any]]
"""Writes the model with these pruned layers into a folder; what to record of it."""


class FedSpaLLM(FederatedStrategy):
    """Its state between layers is on disk: ``layers/``, one packed file per layer and round, and ``progress/``."""

    headline = "perplexity_global"
    paper_formula = "16 or 32 bits per kept weight and one per mask entry up; sampled layers, dense or masked, down"

    def __init__(
        self, context: RunContext, dense: DenseModel, measure: Measure, write: Write, texts: Sequence[str]
    ) -> None:
        super().__init__(replace(context, clients=_with_the_model(context, dense)))
        self.options = self.config.fedspallm
        self.dense, self.measure, self.write = dense, measure, write
        self._check_pattern()
        self.texts = texts  # by name; the first is what the run is judged by
        self.layers, self.pending, self.progress = _on_disk(self.recorder.folder, context.run_key)
        self.versions = dict.fromkeys(range(dense.num_layers), _DENSE)  # layer -> round that wrote it
        self._number = self._layer = 0  # the round, and the layer that is being pruned
        self._receiving: list[list[int]] = []  # by layer, who is sent something in this round
        self._pruners: dict[int, list[int]] = {}
        self._mean = L0Mean(1)
        self._masks: dict[int, np.ndarray[Any, Any]] = {}  # of the layer in work, by client, a bit per entry
        self._by_layer: dict[str, dict[str, Any]] = {}  # what the round's record says of each layer
        self._differing: dict[tuple[int, int], int] = {}

    def _check_pattern(self) -> None:
        """Refuse a pattern that does not go into every row. Raises :class:`ConfigError`."""
        if not (pattern := self.options.n_of_m()):
            return
        for layer in range(self.dense.num_layers):
            like = self.dense.layer_like(layer)
            for name in self.dense.prunable(layer):
                if like[name].shape[1] % pattern[1]:
                    raise ConfigError(
                        f"fedspallm.pattern is {self.options.pattern!r}, allowed: one whose length divides the "
                        f"{like[name].shape[1]} inputs of '{name}' in decoder layer {layer}"
                    )

    # --- the global model ---------------------------------------------------------------------------------------

    def global_layer(self, layer: int) -> Payload:
        """The current matrices of a layer with their masks; empty while they are the dense model's."""
        if self.versions[layer] == _DENSE:
            return Payload({})
        return self.layers.load(layer, self.versions[layer], self.schema(layer).max_bytes)

    def schema(self, layer: int) -> wire.Schema:
        """A layer's matrices, each with a mask."""
        like, names = self.dense.layer_like(layer), self.dense.prunable(layer)
        return wire.Schema.like({name: like[name] for name in names}, frozenset(names))

    def answer(self, layer: int) -> wire.Schema:
        """What those who prune a layer reply: :meth:`schema`, and the norms of its inputs where ties go by them."""
        like, names = self.dense.layer_like(layer), self.dense.prunable(layer)
        tensors = {name: like[name] for name in names}
        if self.options.ties == "wanda":
            tensors |= {INPUT_NORMS + name: torch.empty(like[name].shape[1], device="meta") for name in names}
        return wire.Schema.like(tensors, frozenset(names))

    def model_digest(self) -> str:
        total = hashlib.sha256(self.dense.shell_digest().encode())
        for layer in range(self.dense.num_layers):
            current = self.global_layer(layer)
            total.update((current.digest() if current.tensors else self.dense.layer_digest(layer)).encode())
        return total.hexdigest()

    @property
    def kept_share(self) -> float:
        """Of every matrix, what is kept: ``density``, or what the pattern says in its place."""
        pattern = self.options.n_of_m()
        return pattern[0] / pattern[1] if pattern else self.config.density

    # --- a round ------------------------------------------------------------------------------------------------

    def pruners(self, round: Round) -> dict[int, list[int]]:
        """Lines 5 to 7: for each layer the clients that prune it, each client a share of the layers."""
        shares = {client: _share(self.config, self.clients[client]) for client in round.participants}
        never_pruned = [layer for layer, version in self.versions.items() if version == _DENSE]
        draw = rng.numpy_generator(self.config.seed, "layers", round=round.number)
        assigned = assign_layers(self.dense.num_layers, shares, draw, first=never_pruned)
        return {layer: [k for k, own in assigned.items() if layer in own] for layer in range(self.dense.num_layers)}

    def step(self, round: int, layer: int) -> int:
        """Return the number of a layer's exchange over all rounds, from 1: clients version their state by it."""
        return (round - 1) * self.dense.num_layers + layer + 1

    def train(self, round: Round, exchanges: Exchanges) -> dict[str, Any]:
        """Lines 5 to 20, layer after layer, from where an interrupted round was left."""
        self._number, self._pruners = round.number, self.pruners(round)
        self._receiving = [self._receivers(round, layer) for layer in self._pruners]
        self._by_layer, self._differing = {}, {}
        for layer in range(self._resume(round), self.dense.num_layers):
            started = time.monotonic()
            self._prune_layer(round, layer, exchanges)
            self._by_layer[str(layer)]["seconds"] = time.monotonic() - started
            self._save_progress(round, layer + 1)
        if self.options.expansion == "global":
            self._expand_together(round.number)
        return self._round_metrics(round)

    def _prune_layer(self, round: Round, layer: int, exchanges: Exchanges) -> None:
        self._layer, pruners = layer, self._pruners[layer]
        largest = max((self._weight(client) for client in pruners), default=1)
        self._mean = L0Mean(max(1, len(pruners)), largest)
        self._masks = {}
        receivers = self._receivers(round, layer)
        replies_before, failures_before = round.log.replies, len(round.log.failures)
        self._show_progress(round)
        if receivers:
            name = f"decoder layer {layer} in round {round.number}"
            step = self.step(round.number, layer)
            evaluates = self.participation.evaluates(step)
            exchange = replace(round, number=step, participants=tuple(receivers), evaluates=evaluates)
            exchanges.train(name, exchange, self.send_layer(round, receivers), self.answer(layer).max_bytes)
            good, failures = round.log.replies - replies_before, round.log.failures[failures_before:]
            require(good, min(self.config.min_replies, len(receivers)), name, failures)
        self._close_layer(round, layer)

    def _receivers(self, round: Round, layer: int) -> list[int]:
        if self.options.unsampled == "current" and round.number > 1:
            return list(round.participants)
        return self._pruners[layer]

    def send(self, round: Round) -> Iterator[Outgoing]:
        return self.send_layer(round, self._receivers(round, self._layer))

    def send_layer(self, round: Round, receivers: Sequence[int]) -> Iterator[Outgoing]:
        """Line 8: the layer in work; nothing while it is the dense one, which clients have in their cache.

        A client whose cached layer is not the server's gets the whole layer.
        """
        layer, pruned = self._layer, self.global_layer(self._layer)
        payloads = {True: pruned}  # by whether the layer is cached
        for client in receivers:
            info = self.clients[client]
            assert isinstance(info, TextClientInfo)
            is_cached = info.layer_digests[layer] == self.dense.layer_digest(layer)
            if not is_cached and False not in payloads:
                payloads[False] = Payload({**self.dense.layer_tensors(layer), **pruned.tensors}, pruned.masks)
            fields = {"layer": layer, "of-round": round.number, "prunes": client in self._pruners[layer]}
            yield Outgoing(client, payloads[is_cached], fields=fields)

    def expect(self, round: Round, client: int) -> wire.Schema:
        return self.answer(self._layer) if client in self._pruners[self._layer] else wire.Schema.like({})

    def accept(self, round: Round, client: int, content: RecordDict) -> None:
        super().accept(round, client, content)
        self._show_progress(round, arrived=1)

    def receive(self, round: Round, client: int, update: Payload) -> None:
        """Line 17, streamed: the reply is added to the layer's sums."""
        if not update.tensors:
            return
        self._mean.add(update, self._weight(client))
        if client in list(self.clients)[:_COMPARED_UP_TO]:
            flat = np.concatenate([update.masks[name].numpy().reshape(-1) for name in sorted(update.masks)])
            self._masks[client] = np.packbits(flat)

    def _weight(self, client: int) -> int:
        return self.clients[client].num_examples if self.options.weights == "segments" else 1

    def _close_layer(self, round: Round, layer: int) -> None:
        """Lines 18 to 20."""
        row: dict[str, Any] = {"pruners": len(self._pruners[layer]), "density": {}}
        self._by_layer[str(layer)] = row
        mean = self._mean.mean()
        if not mean.tensors:
            note = f"decoder layer {layer} was pruned by nobody in round {round.number}: it stays as it was"
            round.log.notes.append(note)
            log.warning("%s", note)
            return
        entries = sum(mask.numel() for mask in mean.masks.values())
        row |= {
            "weights": entries,
            "kept_before_expansion": sum(int(mask.sum()) for mask in mean.masks.values()),
            "mask_distance": self._compare_masks(entries),
        }
        if self.options.expansion == "global":
            self.pending.save(layer, round.number, _packed(self._mean.votes()))
            self.pending.drop_before(layer, round.number)
        else:
            new = mean
            if self.options.expansion != "none":
                scope = "matrix" if self.options.expansion == "matrix" else "payload"
                pattern = self.options.n_of_m()
                new = self._mean.expanded(self.kept_share, n_of_m=pattern, ties=self.options.ties, scope=scope)
            self._install(round.number, layer, new)
        self._mean = L0Mean(1)

    def _install(self, round: int, layer: int, new: Payload) -> None:
        """A layer's matrices, expanded, become the global model's."""
        new = Payload({name: new.tensors[name] for name in new.masks}, new.masks)
        self.layers.save(layer, round, new)
        self.layers.drop_before(layer, self._oldest_needed(layer))
        self.versions[layer] = round
        self._by_layer[str(layer)] |= {
            "kept": new.num_kept(),
            "density": {name: float(mask.double().mean()) for name, mask in new.masks.items()},
        }

    def _oldest_needed(self, layer: int) -> int:
        """The version of a layer that the oldest checkpoint knows: if later ones are damaged, a run goes on there."""
        checkpoints = self.context.checkpoints
        for round in checkpoints.rounds():
            with suppress(ValueError):
                return int(checkpoints.read(round).meta["versions"][str(layer)])
        return self.versions[layer]

    def _expand_together(self, round: int) -> None:
        """Lines 18 to 20 with all matrices as one; may be begun again, since the means stay until the next round."""
        waiting = [layer for layer in range(self.dense.num_layers) if "weights" in self._by_layer[str(layer)]]

        def votes(layer: int) -> Votes:
            return _unpacked(self.pending.load(layer, round, 8 * self.answer(layer).max_bytes))

        cut = Cut(lambda: map(votes, waiting), self.config.density, self.options.ties)
        for layer in waiting:
            self._install(round, layer, cut.applied(votes(layer)))

    def _show_progress(self, round: Round, arrived: int = 0) -> None:
        """Show layers times clients, so far. ``round`` may be a layer's exchange."""
        in_round = sum(len(receivers) for receivers in self._receiving)
        done = round.log.replies + len(round.log.failures) + arrived
        where = f"layer {self._layer + 1}/{self.dense.num_layers}"
        self.recorder.progress((self._number - 1) * in_round + done, self.config.num_server_rounds * in_round, where)

    def _compare_masks(self, num_entries: int) -> float | None:
        """Mean share of entries that one client keeps and another does not; its parts are summed over the layers."""
        shares = []
        for a, b in itertools.combinations(sorted(self._masks), 2):
            differing = int(np.bitwise_count(self._masks[a] ^ self._masks[b]).sum(dtype=np.int64))
            self._differing[a, b] = self._differing.get((a, b), 0) + differing
            shares.append(differing / num_entries)
        self._masks = {}
        return sum(shares) / len(shares) if shares else None

    # --- records ------------------------------------------------------------------------------------------------

    def training_row(self, round: Round, client: int, fields: wire.Fields) -> dict[str, Any]:
        before = round.log.clients.get(client, {})
        pruned = client in self._pruners[self._layer]  # the others pass their text through it
        error = measures.told("relative_error", fields) if pruned else 0.0
        row = measures.row_of(Reply.LAYER, fields)
        return {
            **row,
            "seconds": before.get("seconds", 0.0) + row["seconds"],
            "layers_pruned": before.get("layers_pruned", 0) + pruned,
            "error_sum": before.get("error_sum", 0.0) + error,
        }

    def _round_metrics(self, round: Round) -> dict[str, Any]:
        rows = [row for _, row in sorted(round.log.clients.items())]
        num_pruned = sum(row.get("layers_pruned", 0) for row in rows)
        errors = sum(row.pop("error_sum", 0.0) for row in rows)
        num_weights = self.dense.num_parameters()[1]
        return {
            **self.exchanged(round),
            "loss_mean": errors / num_pruned if num_pruned else None,
            "density_global": self._kept("kept") / num_weights,
            "density_before_expansion": self._kept("kept_before_expansion") / num_weights,
            "density_by_layer": {
                f"{self.dense.prefix}.{layer}.{name}": density
                for layer, row in self._by_layer.items()
                for name, density in row["density"].items()
            },
            "layers": {
                layer: {key: value for key, value in row.items() if key != "density"}
                for layer, row in self._by_layer.items()
            },
        }

    def _kept(self, when: str) -> int:
        """Kept weights of the global model's matrices; layers that nobody pruned in this round are as they were."""
        total = 0
        for layer in range(self.dense.num_layers):
            row = self._by_layer[str(layer)]
            if when in row:
                total += row[when]
            elif self.versions[layer] == _DENSE:
                total += sum(shape.numel() for shape in self.schema(layer).shapes.values())
            else:
                total += self.global_layer(layer).num_kept()
        return total

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """(down, up): dense matrices down, cached in round 1; kept values and a bit per entry up."""
        size = next(iter(self.dense.layer_like(0).values())).dtype.itemsize
        up = down = 0.0
        for layer, pruners in self._pruners.items():
            entries = sum(self.dense.layer_like(layer)[name].numel() for name in self.dense.prunable(layer))
            up += len(pruners) * entries * (size * self.kept_share + 1 / 8)
            down += len(pruners) * entries * size if round.number > 1 else 0.0
        return down, up

    def send_to_evaluate(self, round: Round) -> Iterator[Outgoing]:
        """Yield nothing but the question: each client measures its own model, the server the global one."""
        return self.broadcast(self.clients, Payload({}))

    def evaluation_row(self, client: int, fields: wire.Fields) -> dict[str, Any]:
        """Its perplexities on the server's test texts; of a client with a text of its own, on that alone."""
        start = "perplexity/"
        has_own = self.clients[client].own_data or start + OWN_TEXT in fields
        names = [OWN_TEXT] if has_own else sorted(name for name in self.texts if start + name in fields)
        judged = OWN_TEXT if has_own else self.texts[0]
        if start + judged not in fields:
            raise ValueError(f"the evaluation has no field '{start}{judged}'")
        found = {name: measures.told("perplexity", fields, about=name) for name in names}
        windows = ("windows", "windows_in_text") if has_own else ()
        return {
            **measures.row_of(Reply.PERPLEXITY, fields),
            "pruned_layers": measures.told("pruned_layers", fields, most=self.dense.num_layers),
            "perplexity_personal": found[judged],
            "perplexity": found,
            **{name: measures.told(name, fields) for name in windows},
        }

    def evaluation_metrics(self, round: Round, rows: Rows) -> dict[str, Any]:
        """Own models count where all layers are pruned: part of a dense model is no standalone result.

        Clients' own texts are an entry by themselves: no other model was measured on them.
        """
        by_text: dict[str, dict[str, Any]] = {}
        whole = [row for row in rows.values() if row["pruned_layers"] == self.dense.num_layers]
        dense = self.recorder.info["dense_perplexity"]
        for name, found in self.measure(self.global_layer).items():
            by_text[name] = {
                "dense": dense[name]["value"],
                "global": found.value,
                **self._of_clients(whole, name),
                "window": found.window,
                "windows": found.windows,
                "windows_in_text": found.windows_in_text,
                "tokens": found.tokens,
            }
        first = by_text[self.texts[0]]
        if with_own := [row for row in whole if OWN_TEXT in row["perplexity"]]:
            windows = sum(row["windows"] for row in with_own)
            by_text[OWN_TEXT] = {
                **self._of_clients(with_own, OWN_TEXT),
                "window": first["window"],
                "windows": windows,
                "windows_in_text": sum(row["windows_in_text"] for row in with_own),
                "tokens": windows * first["window"],
            }
        return {
            **measures.over_clients(rows.values(), Reply.PERPLEXITY),
            "perplexity_global": first["global"],
            "perplexity_personal_mean": first["personal_mean"],
            "personal_models": len(whole),
            "perplexity_personal_std": first["personal_std"],
            "perplexity_by_text": by_text,
        }

    @staticmethod
    def _of_clients(rows: Sequence[Mapping[str, Any]], text: str) -> dict[str, float]:
        """Mean and spread of the clients' own models on a text, of those that measured it."""
        found = metrics.summary([row["perplexity"][text] for row in rows if text in row["perplexity"]])
        return {"personal_mean": found.mean, "personal_std": found.std}

    def finish(self) -> None:
        """The distance of the clients' masks, where all pruned all layers in the last round."""
        entries = self.dense.num_parameters()[1]
        clients = sorted({client for pair in self._differing for client in pair})
        if len(clients) < 2 or any(set(clients) - set(pruners) for pruners in self._pruners.values()):
            return
        distance = np.zeros((len(clients), len(clients)))
        for (i, a), (j, b) in itertools.combinations(enumerate(clients), 2):
            distance[i, j] = distance[j, i] = self._differing[a, b] / entries
        self.recorder.masks(clients, distance)

    def write_model(self, folder: Path) -> None:
        self.recorder.annotate(final_model=dict(self.write(folder, self.global_layer)))
        shutil.rmtree(self.pending.folder, ignore_errors=True)

    # --- resuming -----------------------------------------------------------------------------------------------

    def state(self) -> State:
        versions = {str(layer): version for layer, version in self.versions.items()}
        everybody = self.config.fraction_train == 1 and self.config.drop_probability == 0
        renewed = everybody and all(_share(self.config, info) == 1 for info in self.clients.values())
        return State({}, {**super().state().meta, "versions": versions, "renewed": renewed})

    def restore(self, state: State) -> None:
        super().restore(state)
        self.versions = {int(layer): int(version) for layer, version in state.meta["versions"].items()}

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """After the layers of the next round that are finished, and after the round itself.

        Where everybody prunes all layers in every round, a round needs nothing of what clients kept of those before.
        """
        layers, pending, progress = _on_disk(folder, run_key)
        for step in reversed(progress.rounds()):
            try:
                found = progress.read(step).meta
            except ValueError as error:
                yield ResumePoint(round, {}, (str(error),), is_usable=False, step=step)
                continue
            if found["round"] == round + 1:
                state = found["state"]
                lost = [*_lost_layers(state["versions"], layers)]
                waiting = {layer: round + 1 for layer, row in found["by-layer"].items() if "weights" in row}
                lost += _lost_layers(waiting, pending) if found["waits"] else ()
                yield ResumePoint(round, state_rounds_of(state), tuple(lost), not lost, step)
        lost = [*_lost_layers(meta["versions"], layers)]
        yield ResumePoint(round, state_rounds_of(meta), tuple(lost), not lost)
        if meta["renewed"] and round < config.num_server_rounds:  # then the next round needs no client's state
            yield ResumePoint(round, {}, tuple(lost), not lost)

    def go_on_from(self, point: ResumePoint) -> None:
        self.state_rounds = dict(point.state_rounds)
        self.progress.drop_after(point.step or self.step(point.round + 1, 0) - 1)

    def _save_progress(self, round: Round, layers_done: int) -> None:
        content = {
            "round": round.number,
            "layers-done": layers_done,
            "waits": self.options.expansion == "global",  # for the means of all layers
            "state": self.state().meta,
            "log": {**asdict(round.log), "clients": {str(k): row for k, row in round.log.clients.items()}},
            "by-layer": self._by_layer,
            "differing": [[a, b, count] for (a, b), count in self._differing.items()],
        }
        self.progress.save(self.step(round.number, layers_done - 1), State({}, content))

    def _resume(self, round: Round) -> int:
        """Restore what was known of the layers of this round that were finished before an interruption; how many."""
        newest = self.progress.load()
        if newest is None or newest[1].meta["round"] != round.number:
            return 0
        found = newest[1].meta
        self.restore(State({}, found["state"]))
        vars(round.log).update({**found["log"], "clients": {int(k): row for k, row in found["log"]["clients"].items()}})
        self._by_layer = found["by-layer"]
        self._differing = {(a, b): count for a, b, count in found["differing"]}
        return int(found["layers-done"])
