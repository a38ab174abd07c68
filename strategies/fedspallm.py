"""FedSpaLLM, the server half: the mean over those who kept a weight, and masks expanded to the density asked for.

Bai, Li, Li, Zhao, Kim, "FedSpaLLM: Federated Pruning of Large Language Models", 2024: Algorithm 1, equations (5)-(8).
Where the text leaves a choice, or does not hold:

* Equation (5) divides by one scalar; each entry's own count is meant (``core.aggregate.L0Mean``).
* Ties in the expansion, which are most of it, go by smallest mean magnitude; its scope is a matrix. Nothing that all
  clients pruned comes back. Weights removed by the expansion are not made up for.
* A matrix is averaged over the clients that pruned it: equation (9) would add dense copies to the mean.
* Corollary 4.1 asks that every layer be pruned by somebody: layers are dealt by a shuffled round-robin, which begins
  with those that were never pruned. One that nobody pruned stays as it is, and the record says so.
* From round 2 on the cached dense layers of equation (9) are no longer the global model's; ``fedspallm.unsampled =
  "current"`` sends the current ones to those who do not prune them.

A round is one exchange per decoder layer. The server holds one layer's sums, and writes each new layer to its disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedprune_app.config import Config, ConfigError
from fedprune_app.core import metrics, rng
from fedprune_app.core.aggregate import L0Mean
from fedprune_app.core.layers import assign_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import require
from fedprune_app.engine.store import ResumePoint, State, VersionedStore, owner
from fedprune_app.federation.clients import TextClientInfo
from fedprune_app.federation.exchanges import Exchanges, Rows
from fedprune_app.federation.round import Outgoing, Round, RunContext
from fedprune_app.results import measures
from fedprune_app.results.measures import Reply
from strategies import perplexities
from strategies.base import FederatedStrategy, state_rounds_of
from strategies.mask_distances import MaskDistances
from strategies.merging import HessianMerge
from strategies.perplexities import Perplexity
from strategies.pruned_model import (
    DenseModel,
    PrunedModel,
    clients_with_the_model,
    layer_files,
    layer_share,
    lost_layers,
    together,
)
from strategies.recovery import Recovery


def _progress_in(folder: Path, run_key: str) -> VersionedStore:
    """Return how far a round has come, by step, as a run folder keeps it."""
    return VersionedStore(folder / "layers" / "progress", keep=2, owner=owner("progress", run_key))


_LITTLE = 0.05
"""A round that changes no greater share of the weights has done next to nothing."""
Layers = Callable[[int], Payload]
Measure = Callable[[Layers], Mapping[str, Perplexity]]
"""Perplexities, by test text, of the model with these pruned layers."""
Answer = Callable[[Layers], Mapping[str, Mapping[str, Any]]]
"""Zero-shot accuracies, by task, of the dense model and of the model with these pruned layers; none without tasks."""
Write = Callable[[Path, Layers], Mapping[str, Any]]
"""Writes the model with these pruned layers into a folder; what to record of it."""


def check_pattern(config: Config, dense: DenseModel) -> None:
    """Refuse a pattern that does not go into every row. Raises :class:`ConfigError`."""
    if not (pattern := config.fedspallm.n_of_m()):
        return
    for layer in range(dense.num_layers):
        like = dense.layer_like(layer)
        for name in dense.prunable(layer):
            if like[name].shape[1] % pattern[1]:
                raise ConfigError(
                    f"fedspallm.pattern is {config.fedspallm.pattern!r}, allowed: one whose length divides the "
                    f"{like[name].shape[1]} inputs of '{name}' in decoder layer {layer}"
                )


class FedSpaLLM(FederatedStrategy):
    """FedSpaLLM keeps its state between layers on disk: packed layers in ``layers/``, and ``progress/``."""

    headline = "perplexity_global"
    paper_formula = "16 or 32 bits per kept weight and one per mask entry up; sampled layers, dense or masked, down"

    def __init__(
        self,
        context: RunContext,
        dense: DenseModel,
        measure: Measure,
        answer_tasks: Answer,
        write: Write,
        texts: Sequence[str],
        same_inputs: Callable[[], Sequence[Sequence[str]]],
        noise_multiplier: Callable[[int], float],
    ) -> None:
        super().__init__(replace(context, clients=clients_with_the_model(context, dense)))
        self.options = self.config.fedspallm
        self.dense, self.measure, self.answer_tasks, self.write = dense, measure, answer_tasks, write
        check_pattern(self.config, dense)
        self.texts = texts  # by name; the first is what the run is judged by
        self.global_model = PrunedModel(dense, self.recorder.folder, context.run_key)
        self.progress = _progress_in(self.recorder.folder, context.run_key)
        self._number = self._layer = 0  # the round, and the layer that is being pruned
        self._receiving: list[list[int]] = []  # by layer, who is sent something in this round
        self._pruners: dict[int, list[int]] = {}
        self._mean = L0Mean(1)
        self._hessians = None if self.options.merge == "mean" else self._hessian_merge(same_inputs(), noise_multiplier)
        self._recovery: Recovery | None = None  # in a round that recovers
        self._renewed: dict[int, set[int]] = {}  # by client that lost its state, the layers that it pruned since
        self._known: dict[int, int] = {}  # by client, the pruned layers of this round that it has been sent
        self._distances = MaskDistances()
        self._by_layer: dict[str, dict[str, Any]] = {}  # what the round's record says of each layer

    def _hessian_merge(self, groups: Sequence[Sequence[str]], noise_multiplier: Callable[[int], float]) -> HessianMerge:
        """Return what makes layers of Hessians; ``noise_multiplier`` is of clients that release so many in a round."""
        like = self.dense.layer_like(0)
        sizes = {name: like[name].shape[1] for name in self.dense.prunable(0)}
        noise = noise_multiplier(self.dense.num_layers * len(groups))
        return HessianMerge(self.config, groups, sizes, noise, self.dense.device)

    def most_asked(self) -> int:
        return len(self.clients)  # a layer, which fewer may prune, needs a reply of each of these at most

    # --- the global model ---------------------------------------------------------------------------------------

    def answer(self, layer: int) -> wire.Schema:
        """Return what a reply to a layer holds: its matrices with masks, or the Hessians of their inputs."""
        if self._hessians is not None:
            sums = self._hessians.like()
            return replace(wire.Schema.like(sums), unscaled=frozenset(sums))
        return self.global_model.schema(layer)

    def model_digest(self) -> str:
        return self.global_model.digest()

    @property
    def kept_share(self) -> float:
        """Return the share of every matrix that is kept: ``density``, or the pattern's share."""
        pattern = self.options.n_of_m()
        return pattern[0] / pattern[1] if pattern else self.config.density

    # --- a round ------------------------------------------------------------------------------------------------

    def pruners(self, round: Round) -> dict[int, list[int]]:
        """Return for each layer the clients that prune it; each client prunes a share of the layers (lines 5 to 7)."""
        shares = {client: layer_share(self.config, self.clients[client]) for client in round.participants}
        draw = rng.numpy_generator(self.config.seed, "layers", round=round.number)
        assigned = assign_layers(self.dense.num_layers, shares, draw, first=self.global_model.never_pruned())
        return {layer: [k for k, own in assigned.items() if layer in own] for layer in range(self.dense.num_layers)}

    def step(self, round: int, layer: int) -> int:
        """Return the number of a layer's exchange over all rounds, from 1: clients version their state by it."""
        return (round - 1) * self.dense.num_layers + layer + 1

    def train(self, round: Round, exchanges: Exchanges) -> dict[str, Any]:
        """Exchange layer after layer (lines 5 to 20), from where an interrupted round was left."""
        if round.number > self.options.pruning_rounds(self.config):
            return self._recover(round, exchanges)
        self._number, self._pruners = round.number, self.pruners(round)
        self._receiving = [self._receivers(round, layer) for layer in self._pruners]
        self._by_layer, self._distances, self._known = {}, MaskDistances(), {}
        for layer in range(self._resume(round), self.dense.num_layers):
            started = time.monotonic()
            self._prune_layer(round, layer, exchanges)
            self._by_layer[str(layer)]["seconds"] = time.monotonic() - started
            self._save_progress(round, layer + 1)
        self._require_renewed()
        self._note_how_little_moved(round)
        return self._round_metrics(round)

    def _require_renewed(self) -> None:
        """Record a loss for each client that had lost its state, and of which this round had no reply for a layer."""
        renewed, self._renewed = self._renewed, {}
        if self.options.merge == "hessians":  # clients prune nothing, and are sent the layers that they lack
            return
        for client, layers in renewed.items():
            if missing := self._pruners.keys() - layers:
                self.context.lose(client, f"its state was lost, and it did not prune decoder layer {min(missing)} anew")

    def _recover(self, round: Round, exchanges: Exchanges) -> dict[str, Any]:
        """Clients train the kept weights of the whole model, and the server averages them: one exchange."""
        last = self.dense.num_layers - 1
        self._number, self._layer = round.number, last
        self._pruners = {layer: [] for layer in range(self.dense.num_layers)}
        self._receiving = [list(round.participants)]
        self._by_layer, self._distances, self._known = {}, MaskDistances(), {}
        self._recovery = Recovery(self.global_model, len(round.participants))
        self._show_progress(round)
        name, step = f"recovery in round {round.number}", self.step(round.number, last)
        exchange = replace(round, number=step, evaluates=self.participation.evaluates(step))
        fields = {"layer": last, "of-round": round.number, "recovers": True}
        sent = self._send_pruned(exchange, self.dense.num_layers, fields)
        exchanges.train(name, exchange, sent, self._recovery.answer.max_bytes)
        require(round.log.replies, min(self.config.min_replies, len(round.participants)), name, round.log.failures)
        for layer, new in self._recovery.layers().items():
            self._by_layer[str(layer)] = {"pruners": 0}
            self._install(round.number, layer, new)
        for layer in self.global_model.never_pruned():
            self._by_layer[str(layer)] = {"pruners": 0, "density": {}}
        self._recovery, self._known = None, {}  # clients have the layers of before
        losses = [row["recovery_loss"] for row in round.log.clients.values() if row.get("recovery_loss") is not None]
        return {**self._round_metrics(round), "recovery_loss": metrics.summary(losses).mean}

    def _note_how_little_moved(self, round: Round) -> None:
        """Say so where a later round found every layer pruned to its density already."""
        rows = self._by_layer.values()
        moved, total = (sum(row.get(key, 0) for row in rows) for key in ("moved", "weights"))
        if all("moved" in row for row in rows) and moved <= _LITTLE * total:
            said = "every layer had its density before, and only a lower density would prune more"
            round.log.say(f"round {round.number} changed {moved:,} of {total:,} weights: {said}")

    def _prune_layer(self, round: Round, layer: int, exchanges: Exchanges) -> None:
        self._layer, pruners = layer, self._pruners[layer]
        if self._hessians is None:
            largest = max((self._weight(client) for client in pruners), default=1)
            self._mean = L0Mean(max(1, len(pruners)), largest)
        receivers = self._receivers(round, layer)
        replies_before, failures_before = round.log.replies, len(round.log.failures)
        self._show_progress(round)
        if receivers:
            name = f"decoder layer {layer} in round {round.number}"
            step = self.step(round.number, layer)
            evaluates = self.participation.evaluates(step)
            exchange = replace(round, number=step, participants=tuple(receivers), evaluates=evaluates)
            exchanges.train(name, exchange, self.send(exchange), self.answer(layer).max_bytes)
            # A client whose budget does not bear the layer says so, which is no failure.
            good = round.log.replies - replies_before + len(round.log.declined.keys() & set(receivers))
            failures = round.log.failures[failures_before:]
            require(good, min(self.config.min_replies, len(receivers)), name, failures)
        self._close_layer(round, layer)

    def _receivers(self, round: Round, layer: int) -> list[int]:
        if self.options.unsampled == "current" and round.number > 1:
            return list(round.participants)
        return self._pruners[layer]

    def send(self, round: Round) -> Iterator[Outgoing]:
        """Yield the layer in work (line 8), or nothing where it is the dense layer, which clients have in their cache.

        A client whose cached layer is not the server's gets the whole layer.
        """
        if self.options.merge == "hessians":
            yield from self._send_pruned(round, self._layer, {"layer": self._layer, "of-round": self._number})
            return
        layer, pruned = self._layer, self.global_model.layer(self._layer)
        payloads = {True: pruned}  # by whether the layer is cached
        for client in round.participants:
            info = self.clients[client]
            assert isinstance(info, TextClientInfo)
            is_cached = info.layer_digests[layer] == self.dense.layer_digest(layer)
            if not is_cached and False not in payloads:
                payloads[False] = Payload({**self.dense.layer_tensors(layer), **pruned.tensors}, pruned.masks)
            fields = {"layer": layer, "of-round": self._number, "prunes": client in self._pruners[layer]}
            yield Outgoing(client, payloads[is_cached], fields=fields)

    def _send_pruned(self, round: Round, layer: int, fields: dict[str, Any] | None = None) -> Iterator[Outgoing]:
        """Yield to each participant the pruned layers before ``layer`` that it does not have yet."""
        payloads: dict[int, Payload] = {}  # by the first layer that a client does not have
        for client in round.participants:
            first = self._known.get(client, 0)
            if first not in payloads:
                payloads[first] = together({i: self.global_model.layer(i) for i in range(first, layer)})
            yield Outgoing(client, payloads[first], fields={} if fields is None else {**fields, "prunes": True})

    def expect(self, round: Round, client: int) -> wire.Schema:
        if self._recovery is not None:
            return self._recovery.answer
        return self.answer(self._layer) if client in self._pruners[self._layer] else wire.Schema.like({})

    def accept(self, round: Round, client: int, content: RecordDict) -> None:
        super().accept(round, client, content)
        self._show_progress(round, arrived=1)

    def receive(self, round: Round, client: int, update: Payload) -> None:
        """Add the reply to the layer's sums (line 17), as it comes in. All of it is checked before any of it counts."""
        if self._recovery is not None:
            self._recovery.add(update)
            return
        if update.tensors:
            self._add(client, update)
        if client in self._renewed:
            self._renewed[client].add(self._layer)

    def _add(self, client: int, update: Payload) -> None:
        if self._hessians is not None:
            self._hessians.add(update, self.clients[client].num_examples)
            self._known[client] = self._layer
            return
        self._mean.add(update, self._weight(client))
        if self._distances.compares(client, self.clients):
            self._distances.add(client, update)

    def _weight(self, client: int) -> int:
        return self.clients[client].num_examples if self.options.weights == "segments" else 1

    def _close_layer(self, round: Round, layer: int) -> None:
        """Make the new layer (lines 18 to 20)."""
        row: dict[str, Any] = {"pruners": len(self._pruners[layer]), "density": {}}
        self._by_layer[str(layer)] = row
        if self._hessians is not None and not self._hessians.is_empty:
            self._close_by_hessians(self._hessians, round, layer, row)
            return
        mean = self._mean.mean()
        if not mean.tensors:
            round.log.say(f"decoder layer {layer} was pruned by nobody in round {round.number}: it stays as it was")
            return
        entries = sum(mask.numel() for mask in mean.masks.values())
        row |= {
            "weights": entries,
            "kept_before_expansion": sum(int(mask.sum()) for mask in mean.masks.values()),
            "mask_distance": self._distances.close_layer(entries),
        }
        new = self._mean.expanded(self.kept_share, n_of_m=self.options.n_of_m(), mean=mean)
        self._install(round.number, layer, new)
        self._mean = L0Mean(1)

    def _close_by_hessians(self, sums: HessianMerge, round: Round, layer: int, row: dict[str, Any]) -> None:
        dense = self.dense.layer_tensors(layer)
        new = sums.pruned({name: dense[name] for name in self.dense.prunable(layer)})
        row["weights"] = sum(mask.numel() for mask in new.masks.values())
        self._install(round.number, layer, new)

    def _install(self, round: int, layer: int, new: Payload) -> None:
        """A layer's matrices, expanded, become the global model's."""
        before = self.global_model.layer(layer)
        if before.tensors:
            moved = sum(int((new.tensors[name] != before.tensors[name]).sum()) for name in new.tensors)
            self._by_layer[str(layer)]["moved"] = moved
        self.global_model.install(round, layer, new, self._oldest_needed(layer))
        self._by_layer[str(layer)] |= {
            "kept": new.num_kept(),
            "density": {name: float(mask.double().mean()) for name, mask in new.masks.items()},
        }

    def _oldest_needed(self, layer: int) -> int:
        """Return the version of a layer that the oldest checkpoint knows, from which a run can go on."""
        checkpoints = self.context.checkpoints
        for round in checkpoints.rounds():
            with suppress(ValueError):
                return int(checkpoints.read(round).meta["versions"][str(layer)])
        return self.global_model.versions[layer]

    def _show_progress(self, round: Round, arrived: int = 0) -> None:
        """Show layers times clients, so far. ``round`` may be a layer's exchange."""
        in_round = sum(len(receivers) for receivers in self._receiving)
        done = round.log.replies + len(round.log.failures) + arrived
        where = f"layer {self._layer + 1}/{self.dense.num_layers}"
        self.recorder.progress((self._number - 1) * in_round + done, self.config.num_server_rounds * in_round, where)

    # --- records ------------------------------------------------------------------------------------------------

    def training_row(self, round: Round, client: int, fields: wire.Fields) -> dict[str, Any]:
        before = round.log.clients.get(client, {})
        pruned = client in self._pruners[self._layer] and self.options.merge != "hessians"  # else text passes through
        error = measures.told("relative_error", fields) if pruned else 0.0
        row = measures.row_of(Reply.LAYER, fields, private=self.config.dp.enabled)
        if self._recovery is not None:
            row["recovery_loss"] = measures.told("recovery_loss", fields)
        return {
            **row,
            "seconds": None if row["seconds"] is None else before.get("seconds", 0.0) + row["seconds"],
            "layers_pruned": before.get("layers_pruned", 0) + pruned,
            "error_sum": before.get("error_sum", 0.0) + error,
        }

    def _round_metrics(self, round: Round) -> dict[str, Any]:
        rows = [row for _, row in sorted(round.log.clients.items())]
        num_pruned = sum(row.get("layers_pruned", 0) for row in rows)
        errors = sum(row.pop("error_sum", 0.0) for row in rows)
        num_weights = self.dense.num_parameters()[1]
        return {
            "loss_mean": errors / num_pruned if num_pruned else None,
            **self.budgets.columns(),
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
        """Return the numbers of kept weights in the global model; layers that nobody pruned are as they were."""
        total = 0
        for layer in range(self.dense.num_layers):
            row = self._by_layer[str(layer)]
            total += row[when] if when in row else self.global_model.num_kept(layer)
        return total

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return (down, up): dense matrices, which are cached after round 1; kept values and a bit per entry."""
        size = next(iter(self.dense.layer_like(0).values())).dtype.itemsize
        up = down = 0.0
        if round.number > self.options.pruning_rounds(self.config):
            kept = sum(self.global_model.num_kept(layer) for layer in range(self.dense.num_layers))
            return (len(round.participants) * kept * float(size),) * 2
        for layer, pruners in self._pruners.items():
            entries = sum(self.dense.layer_like(layer)[name].numel() for name in self.dense.prunable(layer))
            up += len(pruners) * entries * (size * self.kept_share + 1 / 8)
            down += len(pruners) * entries * size if round.number > 1 else 0.0
        return down, up

    def send_to_evaluate(self, round: Round) -> Iterator[Outgoing]:
        """Yield nothing but the question: each client measures its own model, the server the global one.

        With ``fedspallm.merge = "hessians"`` a client's model is the global one, of which it gets what it lacks.
        """
        if self.options.merge == "hessians":
            everybody = replace(round, participants=tuple(self.clients))
            return self._send_pruned(everybody, self.dense.num_layers)
        return Outgoing.to_each(self.clients, Payload({}))

    def evaluation_row(self, client: int, fields: wire.Fields) -> dict[str, Any]:
        own_data = self.clients[client].own_data
        has_own = self.options.measures_own
        private = self.config.dp.enabled  # then a client may not tell what it finds on its own text
        return perplexities.client_row(
            fields, self.texts, self.dense.num_layers, own_data=own_data and not private, has_own_model=has_own
        )

    def evaluation_metrics(self, round: Round, rows: Rows) -> dict[str, Any]:
        measured, dense = self.measure(self.global_model.layer), self.recorder.info["dense_perplexity"]
        num_asked = len(self.participation.evaluators(round.number))
        found = perplexities.over_clients(rows, measured, dense, self.dense.num_layers, num_asked)
        tasks = self.answer_tasks(self.global_model.layer)
        return {**found, "accuracy_by_task": tasks} if tasks else found

    def finish(self) -> None:
        """Record the distances of the clients' masks, where all of them pruned all layers in the last round."""
        clients = self._distances.clients()
        if len(clients) < 2 or any(set(clients) - set(pruners) for pruners in self._pruners.values()):
            return
        self.recorder.masks(clients, self._distances.matrix(self.dense.num_parameters()[1]))

    def write_model(self, folder: Path) -> None:
        self.recorder.annotate(final_model=dict(self.write(folder, self.global_model.layer)))

    # --- resuming -----------------------------------------------------------------------------------------------

    def state(self) -> State:
        versions = {str(layer): version for layer, version in self.global_model.versions.items()}
        everybody = self.config.fraction_train == 1 and self.config.drop_probability == 0
        prunes = not self.options.recovery_rounds or self._number < self.options.pruning_rounds(self.config)
        renewed = everybody and prunes and all(layer_share(self.config, info) == 1 for info in self.clients.values())
        return State({}, {**super().state().meta, "versions": versions, "renewed": renewed})

    def restore(self, state: State) -> None:
        super().restore(state)
        versions = state.meta["versions"]
        self.global_model.versions = {int(layer): int(version) for layer, version in versions.items()}

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """Yield the points after the finished layers of the next round, and the one after the round itself.

        Where everybody prunes all layers in every round, the next round makes anew what clients keep.
        """
        yield from cls._points_after_layers(folder, run_key, round)
        rounds, lost = state_rounds_of(meta), [*lost_layers(meta["versions"], layer_files(folder, run_key))]
        yield ResumePoint(round, rounds, tuple(lost), not lost)
        if meta["renewed"] and round < config.num_server_rounds:
            yield ResumePoint(round, rounds, tuple(lost), not lost, renews=True)

    @classmethod
    def points_before_checkpoints(cls, folder: Path, run_key: str) -> Iterator[ResumePoint]:
        yield from cls._points_after_layers(folder, run_key, 0)
        yield ResumePoint(0, {})

    @staticmethod
    def _points_after_layers(folder: Path, run_key: str, round: int) -> Iterator[ResumePoint]:
        """Yield the points after the finished layers of the round that follows ``round``, latest first."""
        layers, progress = layer_files(folder, run_key), _progress_in(folder, run_key)
        for step in reversed(progress.rounds()):
            try:
                found = progress.read(step).meta
            except ValueError as error:
                yield ResumePoint(round, {}, (str(error),), is_usable=False, step=step)
                continue
            if found["round"] == round + 1:
                state = found["state"]
                lost = [*lost_layers(state["versions"], layers)]
                yield ResumePoint(round, state_rounds_of(state), tuple(lost), not lost, step)

    def go_on_from(self, point: ResumePoint) -> None:
        self._renewed = {client: set() for client in self.state_rounds.keys() - point.state_rounds.keys()}
        self.state_rounds = dict(point.state_rounds)
        self.progress.drop_after(point.step or self.step(point.round + 1, 0) - 1)

    def _save_progress(self, round: Round, layers_done: int) -> None:
        content = {
            "round": round.number,
            "layers-done": layers_done,
            "state": self.state().meta,
            "log": {**asdict(round.log), "clients": {str(k): row for k, row in round.log.clients.items()}},
            "by-layer": self._by_layer,
            "differing": [[a, b, count] for (a, b), count in self._distances.differing.items()],
            "renewed": {str(client): sorted(layers) for client, layers in self._renewed.items()},
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
        self._distances.differing = {(a, b): count for a, b, count in found["differing"]}
        self._renewed = {int(client): set(layers) for client, layers in found.get("renewed", {}).items()}
        return int(found["layers-done"])
