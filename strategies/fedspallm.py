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

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedprune_app.config import Config, ConfigError
from fedprune_app.core import rng
from fedprune_app.core.layers import assign_layers
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import require
from fedprune_app.engine.store import ResumePoint, State, VersionedStore, owner
from fedprune_app.federation.exchanges import Exchanges, Rows
from fedprune_app.federation.round import Outgoing, Round, RunContext
from fedprune_app.models.cutting import Cut
from fedprune_app.models.llm import LanguageModel, Perplexity
from fedprune_app.models.saving import PrunedLayers
from fedprune_app.results import statistics
from fedprune_app.results.measures import Reply
from fedprune_app.results.recorder import number_in, round_columns, row_of
from fedprune_app.results.similarity import MaskDistances
from fedprune_app.results.texts import OWN_TEXT
from strategies.base import FederatedStrategy, state_rounds_of
from strategies.merging import CODES, Compression, HessianMerge, MaskMerge, MeanMerge, sum_files
from strategies.pruned_model import (
    PrunedModel,
    Recovery,
    clients_with_the_model,
    layer_files,
    lost_layers,
    together,
)

_COMPARED = 64  # the first clients, whose masks of one layer are compared with each other


def check_pattern(config: Config, dense: LanguageModel) -> None:
    """Refuse a pattern that does not go into every row. Raises :class:`ConfigError`."""
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


class FedSpaLLM(FederatedStrategy):
    """FedSpaLLM keeps its state between layers on disk: packed layers in ``layers/``, and ``progress/``.

    ``measure(layers)`` returns the pruned model's perplexity by test text. ``write(folder, layers)`` writes the model
    into a folder, and returns what to record of it.
    """

    headline = "perplexity_global"
    paper_formula = "16 or 32 bits per kept weight and one per mask entry up; sampled layers, dense or masked, down"

    def __init__(
        self,
        context: RunContext,
        dense: LanguageModel,
        measure: Callable[[PrunedLayers], Mapping[str, Perplexity]],
        write: Callable[[Path, PrunedLayers], Mapping[str, Any]],
        texts: Sequence[str],
        same_inputs: Callable[[], Sequence[Sequence[str]]],
        noise_multiplier: Callable[[int], float],
        cut: Cut | None,
    ) -> None:
        super().__init__(replace(context, clients=clients_with_the_model(context, dense)))
        self.options, self.exchanges = self.config.fedspallm, LayerRounds
        self.dense, self.measure, self.write = dense, measure, write
        check_pattern(self.config, dense)
        self.texts = texts  # by name; the first is what the run is judged by
        self.global_model = PrunedModel(dense, self.recorder.folder, context.run_key)
        rule = MaskMerge if self.options.merge == "masks" else MeanMerge
        self.merge: MeanMerge | HessianMerge = rule(self.config, self.global_model)
        if self.options.merge == "hessians":
            groups = same_inputs()
            noise = noise_multiplier(dense.num_layers * len(groups))  # of clients that release so many in a round
            compression = Compression(self.config, dense, groups, noise * self.config.dp.clip_norm, cut)
            kept_sums = sum_files(self.recorder.folder, context.run_key)
            self.merge = HessianMerge(compression, self.clients, self.recorder.folder / CODES, kept_sums)
        self.number = self.layer = 0  # the round, and the layer that is being pruned
        self.pruners: dict[int, list[int]] = {}  # by layer
        self.recovery: Recovery | None = None  # in a round that recovers
        self._known: dict[int, int] = {}  # by client, the pruned layers of this round that it has been sent
        self.distances = MaskDistances()

    # --- a round ------------------------------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        self.number, self._known, self.distances = round.number, {}, MaskDistances()
        if round.number > self.options.pruning_rounds(self.config):
            self.layer = self.dense.num_layers - 1
            self.pruners = {}
            self.recovery = Recovery(self.global_model, len(round.participants))
        else:
            self.pruners = self.dealt(round)

    def dealt(self, round: Round) -> dict[int, list[int]]:
        """Return for each layer the clients that prune it; each client prunes a share of the layers (lines 5 to 7)."""
        shares = {k: self.clients[k].capacity or self.options.layer_share(k) for k in round.participants}
        draw = rng.numpy_generator(self.config.seed, "layers", round=round.number)
        layers_by_client = assign_layers(self.dense.num_layers, shares, draw, first=self.global_model.never_pruned())
        return {
            layer: [k for k, layers in layers_by_client.items() if layer in layers]
            for layer in range(self.dense.num_layers)
        }

    def send(self, round: Round) -> Iterator[Outgoing]:
        """Yield the layer in work (line 8), or nothing where that is dense: clients have it in their cache."""
        fields = {"layer": self.layer, "of-round": self.number}
        if self.recovery is not None:
            yield from self._send_pruned(round, self.dense.num_layers, {**fields, "prunes": True, "recovers": True})
            return
        if not self.merge.clients_prune:
            yield from self._send_pruned(round, self.options.pruned_before(self.layer), {**fields, "prunes": True})
            return
        pruned = self.global_model.layer(self.layer)
        for client in round.participants:
            yield Outgoing(client, pruned, fields={**fields, "prunes": client in self.pruners[self.layer]})

    def _send_pruned(self, round: Round, layer: int, fields: Mapping[str, Any]) -> Iterator[Outgoing]:
        """Yield to each participant the pruned layers before ``layer`` that it does not have yet."""
        payloads: dict[int, Payload] = {}  # by the first layer that a client does not have
        for client in round.participants:
            first = self._known.get(client, 0)
            if first not in payloads:
                payloads[first] = together({i: self.global_model.layer(i) for i in range(first, layer)})
            yield Outgoing(client, payloads[first], fields=fields)

    def expect(self, round: Round, client: int) -> wire.Schema:
        if self.recovery is not None:
            return self.recovery.answer
        return self.merge.answer(self.layer) if client in self.pruners[self.layer] else wire.Schema.like({})

    def receive(self, round: Round, client: int, update: Payload) -> None:
        """Add the reply to the layer's sums (line 17), as it comes in. All of it is checked before any of it counts."""
        if self.recovery is not None:
            self.recovery.add(update)
        elif update.tensors:
            self.merge.add(client, update)
            self._known[client] = self.options.pruned_before(self.layer)
            if update.masks and client in list(self.clients)[:_COMPARED]:
                self.distances.add(client, update)

    def end_layer(self, row: dict[str, Any]) -> bool:
        """Make the new layer (lines 18 to 20) if clients sent any; return whether they did.

        ``row`` is what the round's record says of the layer.
        """
        new = self.merge.made(self.layer, row)
        if not new.tensors:
            return False
        if self.merge.clients_prune:
            row["mask_distance"] = self.distances.close_layer(row["weights"])
        self._install(self.layer, new, row)
        return True

    def end_recovery(self) -> dict[str, dict[str, Any]]:
        """Make all layers of the weights that clients trained; return what the round's record says of each."""
        assert self.recovery is not None
        rows: dict[str, dict[str, Any]] = {}
        for layer, new in self.recovery.layers().items():
            rows[str(layer)] = {"pruners": 0}
            self._install(layer, new, rows[str(layer)])
        for layer in self.global_model.never_pruned():
            rows[str(layer)] = {"pruners": 0, "density": {}}
        self.recovery, self._known = None, {}  # clients have the layers of before
        return rows

    def _install(self, layer: int, payload: Payload, row: dict[str, Any]) -> None:
        previous = self.global_model.layer(layer)
        if previous.tensors:
            row["moved"] = sum(int((payload.tensors[name] != previous.tensors[name]).sum()) for name in payload.tensors)
        self.global_model.install(self.number, layer, payload, self._oldest_needed(layer))
        row |= {
            "kept": payload.num_kept(),
            "density": {name: float(mask.double().mean()) for name, mask in payload.masks.items()},
        }

    def _oldest_needed(self, layer: int) -> int:
        """Return the version of a layer that the oldest checkpoint knows, from which a run can go on."""
        checkpoints = self.context.checkpoints
        for round in checkpoints.rounds():
            with suppress(ValueError):
                return int(checkpoints.read(round).meta["versions"][str(layer)])
        return self.global_model.versions[layer]

    # --- records ------------------------------------------------------------------------------------------------

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return (down, up): dense matrices, which are cached after round 1; kept values and a bit per entry."""
        size = next(iter(self.dense.layer_like(0).values())).dtype.itemsize
        pattern = self.options.n_of_m()
        share = pattern[0] / pattern[1] if pattern else self.config.density
        up = down = 0.0
        if round.number > self.options.pruning_rounds(self.config):
            num_kept = sum(self.global_model.num_kept(layer) for layer in range(self.dense.num_layers))
            return (len(round.participants) * num_kept * float(size),) * 2
        for layer, pruners in self.pruners.items():
            entries = sum(self.dense.layer_like(layer)[name].numel() for name in self.dense.prunable(layer))
            values = 0.0 if self.options.merge == "masks" else size * share
            up += len(pruners) * entries * (values + 1 / 8)
            down += len(pruners) * entries * size if round.number > 1 else 0.0
        return down, up

    def send_to_evaluate(self, round: Round) -> Iterator[Outgoing]:
        """Yield nothing but the question: each client measures its own model, the server the global one.

        With ``fedspallm.merge = "hessians"`` a client's model is the global one, of which it gets what it lacks.
        """
        if self.merge.clients_prune:
            return Outgoing.to_each(self.clients, Payload({}))
        return self._send_pruned(replace(round, participants=tuple(self.clients)), self.dense.num_layers, {})

    def finish(self) -> None:
        """Write the model; record the distances of masks, where all clients pruned all layers in the last round."""
        folder = self.recorder.folder / "models"
        self.recorder.annotate(final_model=dict(self.write(folder, self.global_model.layer)))
        clients = self.distances.clients()
        if len(clients) < 2 or any(set(clients) - set(pruners) for pruners in self.pruners.values()):
            return
        self.recorder.masks(clients, self.distances.matrix(self.dense.num_parameters()[1]))

    def model_digest(self) -> str:
        return self.global_model.digest()

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> State:
        versions = {str(layer): version for layer, version in self.global_model.versions.items()}
        has_all_clients = self.config.fraction_train == 1 and self.config.drop_probability == 0
        is_pruning = not self.options.recovery_rounds or self.number < self.options.pruning_rounds(self.config)
        has_all_layers = all((info.capacity or self.options.layer_share(k)) == 1 for k, info in self.clients.items())
        is_renewed = has_all_clients and is_pruning and has_all_layers
        return State({}, {**super().state().meta, "versions": versions, "renewed": is_renewed})

    def restore(self, state: State) -> None:
        super().restore(state)
        versions = state.meta["versions"]
        self.global_model.versions = {int(layer): int(version) for layer, version in versions.items()}

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        """Yield the points after the finished layers of the next round, and the one after the round itself.

        Where everybody prunes all layers in every round, the next round makes anew what clients keep, who keep one
        version of their state.
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


class LayerRounds(Exchanges):
    """The exchanges of a run whose rounds go through the decoder layers of a model, one after the other."""

    strategy: FedSpaLLM

    def __init__(self, strategy: FedSpaLLM, grid: Grid) -> None:
        super().__init__(strategy, grid)
        context, point = strategy.context, strategy.context.point
        self.dense, self.config, self.recorder = strategy.dense, context.config, context.recorder
        self.progress = _progress_store(context.recorder.folder, context.run_key)
        self.progress.drop_after(point.step or self.step(point.round + 1, 0) - 1)
        self._by_layer: dict[str, dict[str, Any]] = {}  # what the round's record says of each layer
        self._renewed = strategy.state_rounds.keys() - point.state_rounds.keys()  # clients that lost their state
        strategy.state_rounds = dict(point.state_rounds)

    def step(self, round: int, layer: int) -> int:
        """Return the number of a layer's exchange over all rounds, from 1: clients version their state by it."""
        return (round - 1) * self.dense.num_layers + layer + 1

    def train_round(self, round: Round) -> dict[str, Any]:
        """Exchange layer after layer (lines 5 to 20), from where an interrupted round was left."""
        self._by_layer = {}
        if self.strategy.recovery is not None:
            return self._recover(round)
        has_all_receivers = self.strategy.options.unsampled == "current" and round.number > 1
        for layer in range(self._resume(round), self.dense.num_layers):
            start = time.monotonic()
            self._prune_layer(round, layer, round.participants if has_all_receivers else self.strategy.pruners[layer])
            self._by_layer[str(layer)]["seconds"] = time.monotonic() - start
            self._save_progress(round, layer + 1)
        self._require_renewed(round)
        return self._columns(round)

    def _prune_layer(self, round: Round, layer: int, receivers: Collection[int]) -> None:
        replies_before, failures_before = round.log.replies, len(round.log.failures)
        self.strategy.layer = layer
        self.strategy.merge.begin(layer, self.strategy.pruners[layer])
        self._show_progress()
        if receivers:
            name = f"decoder layer {layer} in round {round.number}"
            self._exchange(name, round, layer, receivers)
            # A client whose budget does not bear the layer says so, which is no failure.
            num_good = round.log.replies - replies_before + len(round.log.declined.keys() & set(receivers))
            failures = round.log.failures[failures_before:]
            require(num_good, min(self.config.min_replies, len(receivers)), name, failures)
        row = self._by_layer[str(layer)] = {"pruners": len(self.strategy.pruners[layer]), "density": {}}
        if not self.strategy.end_layer(row):
            round.log.say(f"decoder layer {layer} was pruned by nobody in round {round.number}: it stays as it was")

    def _exchange(self, name: str, round: Round, layer: int, receivers: Collection[int]) -> None:
        strategy, step = self.strategy, self.step(round.number, layer)
        evaluates = strategy.participation.evaluates(step)
        exchange = replace(round, number=step, participants=tuple(receivers), evaluates=evaluates)
        self.train(name, exchange, strategy.send(exchange), strategy.reply_bytes(exchange))

    def _require_renewed(self, round: Round) -> None:
        """Record a loss for each client that had lost its state, and has not pruned all layers anew."""
        for client in self._renewed if self.strategy.merge.clients_prune else ():  # others are sent what they lack
            pruned = round.log.clients.get(client, {}).get("layers_pruned", 0)
            if pruned < self.dense.num_layers:
                line = f"its state was lost, and it pruned {pruned} of {self.dense.num_layers} decoder layers anew"
                self.strategy.context.lose(client, line)
        self._renewed = set()

    def _recover(self, round: Round) -> dict[str, Any]:
        """Clients train the kept weights of the whole model, and the server averages them: one exchange."""
        self._show_progress()
        name = f"recovery in round {round.number}"
        self._exchange(name, round, self.strategy.layer, round.participants)
        require(round.log.replies, min(self.config.min_replies, len(round.participants)), name, round.log.failures)
        self._by_layer = self.strategy.end_recovery()
        losses = [row["recovery_loss"] for row in round.log.clients.values() if row.get("recovery_loss") is not None]
        return {**self._columns(round), "recovery_loss": statistics.summary(losses).mean}

    def _show_progress(self) -> None:
        layer, num_layers = self.strategy.layer, self.dense.num_layers
        num_done = self.step(self.strategy.number, layer) - 1
        total = self.config.num_server_rounds * num_layers
        self.recorder.progress(num_done, total, f"layer {layer + 1}/{num_layers}")

    # --- what is recorded ---------------------------------------------------------------------------------------

    def training_row(self, round: Round, client: int, fields: wire.Fields) -> dict[str, Any]:
        strategy, last_row = self.strategy, round.log.clients.get(client, {})
        pruners = strategy.pruners.get(strategy.layer, ()) if strategy.merge.clients_prune else ()
        has_pruned = client in pruners  # else text passes through
        error = number_in("relative_error", fields) if has_pruned else 0.0
        row = row_of(Reply.LAYER, fields, private=self.config.dp.enabled)
        if strategy.recovery is not None:
            row["recovery_loss"] = number_in("recovery_loss", fields)
        return {
            **row,
            "seconds": None if row["seconds"] is None else last_row.get("seconds", 0.0) + row["seconds"],
            "layers_pruned": last_row.get("layers_pruned", 0) + has_pruned,
            "error_sum": last_row.get("error_sum", 0.0) + error,
        }

    def _columns(self, round: Round) -> dict[str, Any]:
        rows = [row for _, row in sorted(round.log.clients.items())]
        num_pruned = sum(row.get("layers_pruned", 0) for row in rows)
        errors = sum(row.pop("error_sum", 0.0) for row in rows)
        num_weights = self.dense.num_parameters()[1]
        return {
            "loss_mean": errors / num_pruned if num_pruned else None,
            **self.strategy.budgets.columns(),
            "density_global": self._num_kept("kept") / num_weights,
            "density_before_expansion": self._num_kept("kept_before_expansion") / num_weights,
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

    def _num_kept(self, key: str) -> int:
        num_kept = self.strategy.global_model.num_kept  # of layers that nobody pruned, which are as they were
        return sum(row[key] if key in row else num_kept(int(layer)) for layer, row in self._by_layer.items())

    def evaluation_row(self, client: int, fields: wire.Fields) -> dict[str, Any]:
        strategy = self.strategy
        # with privacy a client may not tell what it finds on its own text
        own_data = strategy.clients[client].own_data and not self.config.dp.enabled
        has_own = strategy.options.merge != "hessians"
        layers = self.dense.num_layers
        return client_row(fields, strategy.texts, layers, own_data=own_data, has_own_model=has_own)

    def evaluation_metrics(self, round: Round, rows: Rows) -> dict[str, Any]:
        strategy, layers = self.strategy, self.strategy.global_model.layer
        results, dense = strategy.measure(layers), self.recorder.info["dense_perplexity"]
        num_asked = len(strategy.participation.evaluators(round.number))
        return over_clients(rows, results, dense, self.dense.num_layers, num_asked)

    # --- resuming -----------------------------------------------------------------------------------------------

    def _save_progress(self, round: Round, layers_done: int) -> None:
        content = {
            "round": round.number,
            "layers-done": layers_done,
            "state": self.strategy.state().meta,
            "log": {**asdict(round.log), "clients": {str(k): row for k, row in round.log.clients.items()}},
            "by-layer": self._by_layer,
            "differing": [[a, b, count] for (a, b), count in self.strategy.distances.differing.items()],
            "renewed": sorted(self._renewed),
        }
        self.progress.save(self.step(round.number, layers_done - 1), State({}, content))

    def _resume(self, round: Round) -> int:
        """Restore what was known of the layers of this round that were finished before an interruption; how many."""
        latest = self.progress.load()
        if latest is None or latest[1].meta["round"] != round.number:
            return 0
        content = latest[1].meta
        self.strategy.restore(State({}, content["state"]))
        vars(round.log).update(
            {**content["log"], "clients": {int(k): row for k, row in content["log"]["clients"].items()}}
        )
        self._by_layer = content["by-layer"]
        self.strategy.distances.differing = {(a, b): count for a, b, count in content["differing"]}
        self._renewed = set(content["renewed"])
        return int(content["layers-done"])


# --- what is recorded of an evaluation --------------------------------------------------------------------------------


def client_row(
    fields: wire.Fields, texts: Sequence[str], num_layers: int, *, own_data: bool, has_own_model: bool = True
) -> dict[str, Any]:
    """Check a client's perplexities on the server's test ``texts``; return the columns of its row.

    A client with a text of its own tells of that text alone. A client that measures no model of its own tells
    of no other text. ``ValueError`` names a field that cannot be.
    """
    prefix = "perplexity/"
    has_own = own_data or prefix + OWN_TEXT in fields
    names = [OWN_TEXT] if has_own else sorted(name for name in texts if prefix + name in fields)
    main_text = OWN_TEXT if has_own else texts[0]
    if prefix + main_text not in fields and (has_own or has_own_model):
        raise ValueError(f"the evaluation has no field '{prefix}{main_text}'")
    values = {name: number_in("perplexity", fields, about=name) for name in names}
    windows = ("windows", "windows_in_text") if has_own else ()
    return {
        **row_of(Reply.PERPLEXITY, fields),
        "pruned_layers": number_in("pruned_layers", fields, most=num_layers),
        "perplexity_personal": values.get(main_text),
        "perplexity": values,
        **{name: number_in(name, fields) for name in windows},
    }


def over_clients(
    rows: Rows,
    global_model: Mapping[str, Perplexity],
    dense: Mapping[str, Mapping[str, Any]],
    num_layers: int,
    num_asked: int,
) -> dict[str, Any]:
    """Return the columns of an evaluation; the first text of ``dense`` is the one that the run is judged by.

    Own models count where all layers are pruned: part of a dense model is no standalone result. Clients' own texts are
    an entry by themselves, since no other model was measured on them. ``dense`` has what the dense model measured.
    ``num_asked`` clients were asked, of whom some may not have answered.
    """
    complete_rows = [row for row in rows.values() if row["pruned_layers"] == num_layers and row["perplexity"]]
    by_text: dict[str, dict[str, Any]] = {}
    for name, perplexity in global_model.items():
        by_text[name] = {
            "dense": dense[name]["value"],
            "global": perplexity.value,
            **_client_summary(complete_rows, name),
            "asked": num_asked,
            "window": perplexity.window,
            "windows": perplexity.windows,
            "windows_in_text": perplexity.windows_in_text,
            "tokens": perplexity.window * perplexity.windows,
        }
    first = by_text[next(iter(dense))]
    if own_rows := [row for row in complete_rows if OWN_TEXT in row["perplexity"]]:
        windows = sum(row["windows"] for row in own_rows)
        by_text[OWN_TEXT] = {
            **_client_summary(own_rows, OWN_TEXT),
            "asked": num_asked,
            "window": first["window"],
            "windows": windows,
            "windows_in_text": sum(row["windows_in_text"] for row in own_rows),
            "tokens": windows * first["window"],
        }
    return {
        **round_columns(rows.values(), Reply.PERPLEXITY),
        "perplexity_global": first["global"],
        "perplexity_personal_mean": first["personal_mean"],
        "personal_models": len(complete_rows),
        "perplexity_personal_std": first["personal_std"],
        "perplexity_by_text": by_text,
    }


def _client_summary(rows: Sequence[Mapping[str, Any]], text: str) -> dict[str, float]:
    values = [row["perplexity"][text] for row in rows if text in row["perplexity"]]
    summary = statistics.summary(values)
    return {"personal_mean": summary.mean, "personal_std": summary.std, "personal_models": len(values)}
