"""FedSpaLLM, the server half: average each weight over the clients that kept it, and expand masks to the density.

Bai, Li, Li, Zhao, Kim, "FedSpaLLM: Federated Pruning of Large Language Models", 2024: Algorithm 1, equations (5)-(8).
Where the text leaves a choice, or does not hold:

* Equation (5) divides by one scalar; each entry's own count is meant (``core.aggregate.L0Mean``).
* Most entries tie in the expansion; those of smallest mean magnitude are removed first, within one matrix. A weight
  that all clients pruned does not come back. The other weights are not adjusted for those that the expansion removes.
* A matrix is averaged over the clients that pruned it: equation (9) would add dense copies to the mean.
* Corollary 4.1 needs at least one client per layer: layers are dealt by a shuffled round-robin, which begins with those
  that were never pruned. A layer that nobody pruned is unchanged, and noted.
* From round 2 on, the cached dense layers of equation (9) are no longer the global model's; ``fedspallm.unsampled =
  "current"`` sends the current layers to the clients that do not prune them.

A round is one exchange per decoder layer. The server holds one layer's sums, and writes each new layer to disk.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedprune_app.config import Config, ConfigError
from fedprune_app.core import rng
from fedprune_app.core.hessians import HessianSum
from fedprune_app.core.layers import assign_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.store import ResumePoint, State, VersionedStore, owner
from fedprune_app.federation.exchanges import LAYER, exchange
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from fedprune_app.models.llm import LanguageModel
from fedprune_app.results import statistics
from fedprune_app.results.recorder import number_in
from fedprune_app.results.similarity import MaskDistances
from strategies.base import FederatedStrategy, state_rounds_of
from strategies.merging import MERGES
from strategies.perplexity import TextMetrics
from strategies.pruned_model import (
    PrunedModel,
    Recovery,
    clients_with_the_model,
    layer_files,
    lost_layers,
    together,
)

_COMPARED = 64  # at most so many clients' masks of a layer are compared with each other


def check_pattern(config: Config, dense: LanguageModel) -> None:
    """Raise :class:`ConfigError` for a pattern whose length does not divide every row's."""
    if not (pattern := config.fedspallm.n_of_m()):
        return
    for layer in range(dense.num_layers):
        shapes = dense.layer_like(layer)
        for name in dense.prunable(layer):
            if shapes[name].shape[1] % pattern[1]:
                raise ConfigError(
                    "fedspallm.pattern",
                    config.fedspallm.pattern,
                    f"one whose length divides the {shapes[name].shape[1]} inputs of '{name}' in decoder layer {layer}",
                )


@dataclass
class LayerRound:
    """Progress of one round through the decoder layers."""

    number: int = 0
    pruners: Mapping[int, list[int]] = field(default_factory=dict)  # by layer
    layer: int = 0  # the current one
    recovery: Recovery | None = None  # in a round that recovers
    sent: dict[int, int] = field(default_factory=dict)  # by client, the number of pruned layers of this round it has
    distances: MaskDistances = field(default_factory=MaskDistances)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # by layer, its columns in the round's record


class FedSpaLLM(FederatedStrategy):
    """Federated pruning of a language model, one decoder layer after another.

    The state between layers is on disk: packed layers in ``layers/``, and ``layers/progress/``.
    """

    headline = "perplexity_global"
    paper_formula = "16 or 32 bits per kept weight and one per mask entry up; sampled layers, dense or masked, down"

    def __init__(self, context: RunContext, dense: LanguageModel) -> None:
        super().__init__(replace(context, clients=clients_with_the_model(context, dense)))
        self.options, self.dense = self.config.fedspallm, dense
        check_pattern(self.config, dense)
        self.global_model = PrunedModel(dense, self.recorder.folder, context.run_key)
        self.merge = MERGES[self.options.merge](self.config, self.global_model)
        self.metrics = TextMetrics(self.context, self.global_model, self.participation)
        self.work = LayerRound()
        self.progress = _progress_store(self.recorder.folder, context.run_key)
        self.lost_clients: set[int] = set()  # clients that lost their state and must prune all layers again

    # --- a round ------------------------------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        if not self.work.number:
            self._restore_progress()
        self.work = LayerRound(round.number)
        if round.number > self.options.pruning_rounds(self.config):
            self.work.layer = self.dense.num_layers - 1
            self.work.recovery = Recovery(self.global_model, len(round.participants))
        else:
            self.work.pruners = self.dealt(round)

    def dealt(self, round: Round) -> dict[int, list[int]]:
        """Return by layer the clients that prune it; each client prunes a share of the layers (lines 5 to 7)."""
        shares = {k: self.clients[k].capacity or self.options.layer_share(k) for k in round.participants}
        draw = rng.numpy_generator(self.config.seed, "layers", round=round.number)
        layers_by_client = assign_layers(self.dense.num_layers, shares, draw, first=self.global_model.never_pruned())
        return {
            layer: [k for k, layers in layers_by_client.items() if layer in layers]
            for layer in range(self.dense.num_layers)
        }

    def train(self, round: Round) -> None:
        """Prune layer after layer (lines 5 to 20), after those that an interrupted round finished; or recover."""
        work = self.work
        if work.recovery is not None:
            self._exchange(round, f"recovery in round {round.number}", round.participants)
            self._end_recovery(work.recovery)
            losses = [row["recovery_loss"] for row in round.log.clients.values() if "recovery_loss" in row]
            round.log.columns |= {**self._columns(round), "recovery_loss": statistics.summary(losses).mean}
            return
        has_all_receivers = self.options.unsampled == "current" and round.number > 1
        for layer in range(self._resume(round), self.dense.num_layers):
            start = time.monotonic()
            work.layer = layer
            row: dict[str, Any] = {"pruners": len(work.pruners[layer]), "density": {}}
            work.rows[str(layer)] = row
            self.merge.begin(layer, work.pruners[layer])
            if receivers := round.participants if has_all_receivers else work.pruners[layer]:
                self._exchange(round, f"decoder layer {layer} in round {round.number}", receivers)
            new_layer = self.merge.merged(layer, row)  # lines 18 to 20
            if not new_layer.tensors:
                round.log.add_note(
                    f"decoder layer {layer} was pruned by nobody in round {round.number}: it stays as it was"
                )
            else:
                if self.merge.clients_prune:
                    row["mask_distance"] = work.distances.close_layer(row["weights"])
                self._install(layer, new_layer)
            row["seconds"] = time.monotonic() - start
            self._save_progress(round)
        self._require_renewed(round)
        round.log.columns |= self._columns(round)

    def _exchange(self, round: Round, name: str, receivers: Collection[int]) -> None:
        """Have clients process the current layer.

        ``number`` counts layers over all rounds here, since clients version their states by it.
        """
        work, step = self.work, self.step(round.number, self.work.layer)
        total, num_layers = self.config.num_server_rounds * self.dense.num_layers, self.dense.num_layers
        self.recorder.progress(step - 1, total, f"layer {work.layer + 1}/{num_layers}")
        evaluates = self.participation.evaluates(step)
        step_round = replace(round, number=step, participants=tuple(receivers), evaluates=evaluates)
        least, sent = min(self.config.min_replies, len(receivers)), self.send(step_round)
        replies = exchange(step_round, sent, self.expect, name=name, kind=LAYER, least=least, into=HessianSum)
        for reply in replies:
            with round.log.rejecting(reply):
                for client, row in reply.by_client.items():
                    row |= self._added_up(client, row, reply.fields, round.log.clients[client])
                self.receive(step_round, reply)

    def step(self, round: int, layer: int) -> int:
        """Return the number of a layer's exchange over all rounds, from 1."""
        return (round - 1) * self.dense.num_layers + layer + 1

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield the current layer (line 8), or an empty payload while it is dense: clients have cached it."""
        work = self.work
        fields = {"layer": work.layer, "of-round": work.number}
        if work.recovery is not None:
            yield from self._send_pruned(round, self.dense.num_layers, {**fields, "prunes": True, "recovers": True})
            return
        if not self.merge.clients_prune:
            yield from self._send_pruned(round, self.options.pruned_before(work.layer), {**fields, "prunes": True})
            return
        pruned = self.global_model.layer(work.layer)
        for client in round.participants:
            yield OutgoingMessage(client, pruned, fields={**fields, "prunes": client in work.pruners[work.layer]})

    def _send_pruned(self, round: Round, layer: int, fields: Mapping[str, Any]) -> Iterator[OutgoingMessage]:
        """Yield for each participant the pruned layers before ``layer`` that it does not have yet."""
        payloads: dict[int, Payload] = {}  # by the first layer that a client lacks
        for client in round.participants:
            first = self.work.sent.get(client, 0)
            if first not in payloads:
                payloads[first] = together({i: self.global_model.layer(i) for i in range(first, layer)})
            yield OutgoingMessage(client, payloads[first], fields=fields)

    def expect(self, round: Round, client: int) -> wire.Schema:
        work = self.work
        if work.recovery is not None:
            return work.recovery.answer
        return self.merge.answer(work.layer) if client in work.pruners[work.layer] else wire.Schema.like({})

    def receive(self, round: Round, reply: Reply) -> None:
        """Add the reply to the layer's sums (line 17). All of it is checked before any of it is added."""
        work, client, update = self.work, reply.client, reply.update
        if work.recovery is not None:
            work.recovery.add(update)
        elif update.tensors:
            self.merge.add(update, reply.num_examples)
            work.sent |= dict.fromkeys(reply.by_client, self.options.pruned_before(work.layer))
            if update.masks and client in list(self.clients)[:_COMPARED]:
                work.distances.add(client, update)

    def _end_recovery(self, recovery: Recovery) -> None:
        """Make all layers from the weights that clients trained."""
        work = self.work
        work.rows = {str(layer): {"pruners": 0, "density": {}} for layer in self.global_model.versions}
        for layer, new_layer in recovery.layers().items():
            self._install(layer, new_layer)
        work.recovery, work.sent = None, {}  # clients still have the layers from before the recovery

    def _install(self, layer: int, payload: Payload) -> None:
        previous, row = self.global_model.layer(layer), self.work.rows[str(layer)]
        if previous.tensors:
            row["moved"] = sum(int((payload.tensors[name] != previous.tensors[name]).sum()) for name in payload.tensors)
        self.global_model.install(self.work.number, layer, payload, self._oldest_needed(layer))
        row |= {
            "kept": payload.num_kept(),
            "density": {name: float(mask.double().mean()) for name, mask in payload.masks.items()},
        }

    def _oldest_needed(self, layer: int) -> int:
        """Return the version of a layer in the oldest readable checkpoint, since a run may resume from that."""
        checkpoints = self.context.checkpoints
        for round in checkpoints.rounds():
            with suppress(ValueError):
                return int(checkpoints.read(round).meta["versions"][str(layer)])
        return self.global_model.versions[layer]

    # --- records ------------------------------------------------------------------------------------------------

    def _added_up(
        self, client: int, row: Mapping[str, Any], fields: wire.Fields, earlier: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the columns of a client's row that are sums over its layers; ``earlier`` is its row so far."""
        pruners = self.work.pruners.get(self.work.layer, ()) if self.merge.clients_prune else ()
        has_pruned = client in pruners  # other clients only pass their text through the layer
        error = number_in("relative_error", fields) if has_pruned else 0.0
        seconds = row["seconds"]
        recovery = {"recovery_loss": number_in("recovery_loss", fields)} if self.work.recovery else {}
        return {
            **recovery,
            "seconds": None if seconds is None else earlier.get("seconds", 0.0) + seconds,
            "layers_pruned": earlier.get("layers_pruned", 0) + has_pruned,
            "error_sum": earlier.get("error_sum", 0.0) + error,
        }

    def _columns(self, round: Round) -> dict[str, Any]:
        rows = [row for _, row in sorted(round.log.clients.items())]
        num_pruned = sum(row.get("layers_pruned", 0) for row in rows)
        errors = sum(row.pop("error_sum", 0.0) for row in rows)
        num_weights = self.dense.num_parameters()[1]
        layers = self.work.rows
        return {
            "loss_mean": errors / num_pruned if num_pruned else None,
            "density_global": self._num_kept("kept") / num_weights,
            "density_before_expansion": self._num_kept("kept_before_expansion") / num_weights,
            "density_by_layer": {
                f"{self.dense.prefix}.{layer}.{name}": density
                for layer, row in layers.items()
                for name, density in row["density"].items()
            },
            "layers": {
                layer: {key: value for key, value in row.items() if key != "density"} for layer, row in layers.items()
            },
        }

    def _num_kept(self, key: str) -> int:
        num_kept = self.global_model.num_kept  # for layers that nobody pruned in this round
        return sum(row[key] if key in row else num_kept(int(layer)) for layer, row in self.work.rows.items())

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return (down, up): dense matrices, which clients have cached in round 1; kept values and a bit per entry."""
        size = next(iter(self.dense.layer_like(0).values())).dtype.itemsize
        pattern = self.options.n_of_m()
        share = pattern[0] / pattern[1] if pattern else self.config.density
        up = down = 0.0
        if round.number > self.options.pruning_rounds(self.config):
            num_kept = sum(self.global_model.num_kept(layer) for layer in range(self.dense.num_layers))
            return (len(round.participants) * num_kept * float(size),) * 2
        for layer, pruners in self.work.pruners.items():
            entries = sum(self.dense.layer_like(layer)[name].numel() for name in self.dense.prunable(layer))
            values = 0.0 if self.options.merge == "masks" else size * share
            up += len(pruners) * entries * (values + 1 / 8)
            down += len(pruners) * entries * size if round.number > 1 else 0.0
        return down, up

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield empty messages: each client evaluates its own model, the server the global one.

        With ``fedspallm.merge = "hessians"`` a client evaluates the global model, and receives the layers it lacks.
        """
        if self.merge.clients_prune:
            return OutgoingMessage.to_each(self.clients, Payload({}))
        return self._send_pruned(replace(round, participants=tuple(self.clients)), self.dense.num_layers, {})

    def finish(self) -> None:
        """Write the model; record the distances of masks if all clients pruned all layers in the last round."""
        self.recorder.annotate(final_model=self.global_model.write(self.merge.cut))
        clients = self.work.distances.clients()
        if len(clients) < 2 or any(set(clients) - set(pruners) for pruners in self.work.pruners.values()):
            return
        self.recorder.masks(clients, self.work.distances.matrix(self.dense.num_parameters()[1]))

    def model_digest(self) -> str:
        return self.global_model.digest()

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> State:
        versions = {str(layer): version for layer, version in self.global_model.versions.items()}
        has_all_clients = self.config.fraction_train == 1 and self.config.drop_probability == 0
        is_pruning = not self.options.recovery_rounds or self.work.number < self.options.pruning_rounds(self.config)
        has_all_layers = all((info.capacity or self.options.layer_share(k)) == 1 for k, info in self.clients.items())
        is_renewed = has_all_clients and is_pruning and has_all_layers
        return State({}, {**super().state().meta, "versions": versions, "renewed": is_renewed})

    def restore(self, state: State) -> None:
        super().restore(state)
        versions = state.meta["versions"]
        self.global_model.versions = {int(layer): int(version) for layer, version in versions.items()}

    def _restore_progress(self) -> None:
        """Restore the point from which the run resumes; clients whose state was lost begin anew."""
        point = self.context.point
        self.progress.drop_after(point.step or self.step(point.round + 1, 0) - 1)
        self.lost_clients = self.state_rounds.keys() - point.state_rounds.keys()
        for client in self.lost_clients:
            del self.state_rounds[client]
        self.state_rounds |= point.state_rounds

    def _require_renewed(self, round: Round) -> None:
        """Record a loss for each client that had lost its state and has not pruned all layers anew."""
        for client in self.lost_clients if self.merge.clients_prune else ():  # else clients are sent what they lack
            pruned = round.log.clients.get(client, {}).get("layers_pruned", 0)
            if pruned < self.dense.num_layers:
                line = f"its state was lost, and it pruned {pruned} of {self.dense.num_layers} decoder layers anew"
                self.context.mark_lost(client, line)
        self.lost_clients = set()

    def _save_progress(self, round: Round) -> None:
        work = self.work
        content = {
            "round": round.number,
            "layers-done": work.layer + 1,
            "state": self.state().meta,
            "log": asdict(round.log),
            "by-layer": work.rows,
            "differing": [[a, b, count] for (a, b), count in work.distances.differing.items()],
            "renewed": sorted(self.lost_clients),
        }
        self.progress.save(self.step(round.number, work.layer), State({}, content))

    def _resume(self, round: Round) -> int:
        """Restore the layers of this round that were finished before an interruption; return their number."""
        latest = self.progress.load()
        if latest is None or latest[1].meta["round"] != round.number:
            return 0
        content, work = latest[1].meta, self.work
        self.restore(State({}, content["state"]))
        by_client = {
            name: {int(k): value for k, value in content["log"][name].items()} for name in ("clients", "declined")
        }
        vars(round.log).update(content["log"] | by_client)
        work.rows = content["by-layer"]
        work.distances.differing = {(a, b): count for a, b, count in content["differing"]}
        self.lost_clients = set(content["renewed"])
        return int(content["layers-done"])

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """Yield the points after the finished layers of the next round, and the one after the round itself.

        Clients keep one version of their state. Where all clients prune all layers in every round, the next round makes
        that state anew.
        """
        yield from _points_after_layers(folder, run_key, round)
        rounds, files = state_rounds_of(meta), layer_files(folder, run_key)
        losses = tuple(lost_layers(meta.get("versions", {}), files))  # before round 1 nothing can be lost
        yield ResumePoint(round, rounds, losses, not losses)
        if meta.get("renewed") and round < config.num_server_rounds:
            yield ResumePoint(round, rounds, losses, not losses, renews=True)


def _progress_store(folder: Path, run_key: str) -> VersionedStore:
    return VersionedStore(folder / "layers" / "progress", keep=2, owner=owner("progress", run_key))


def _points_after_layers(folder: Path, run_key: str, round: int) -> Iterator[ResumePoint]:
    """Yield the points after the finished layers of the round that follows ``round``, latest first."""
    layers, progress = layer_files(folder, run_key), _progress_store(folder, run_key)
    for step in reversed(progress.rounds()):
        try:
            content = progress.read(step).meta
        except ValueError as error:
            yield ResumePoint(round, {}, (str(error),), is_usable=False, step=step)
            continue
        if content["round"] == round + 1:
            state = content["state"]
            losses = tuple(lost_layers(state["versions"], layers))
            yield ResumePoint(round, state_rounds_of(state), losses, not losses, step)
