"""FedP3, the server half: each client receives its own layers in full, the others pruned, and returns only its own.

Yi, Gazagnadou, Richtárik, Lyu, "FedP3: Federated Personalized and Privacy-friendly Network Pruning under Model
Heterogeneity", ICLR 2024, Algorithm 1, lines 2 to 6, and Algorithm 3. The client half is ``clients/fedp3.py``. Where
text and released code differ:

* Layer sets L_i are dealt out evenly, contiguous clients sharing one, and stay for the run, as in the code; the text
  assigns them "randomly" (``fedp3.assignment``). Biases, norms and ResNet's projections go with the layer before them.
* All clients train and send the last layer, and the server averages it, as in the text. The code averages it but never
  loads the average (``fedp3.personal-head``, with which it does not travel).
* P_i is recomputed each round from the server's weights, as in the code. Weights of convolutions and linear layers are
  pruned; biases and norms stay dense.
* Weighted averaging is normalised over the clients of each layer; the text's coefficients, over all clients, do not sum
  to 1 (``fedp3.aggregation = "weighted-literal"``). Numbers of examples have no effect.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from torch import Tensor

from fedprune_app.config import FEDP3_COUNTS, ConfigError, FedP3Options
from fedprune_app.core import layers, rng
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.fedp3 import attention_mean
from fedprune_app.core.masks import magnitude_masks
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from strategies.base import AveragingStrategy

Assigned = tuple[tuple[str, ...], float]  # the hidden layers L_i, and the density that P_i leaves of the others


class FedP3(AveragingStrategy):
    """Average each layer over the clients that train it; a layer that nobody sent is unchanged."""

    paper_formula = (
        "32 bits per parameter: down own layers, last layer, ratio of the others; up own layers, last layer; "
        "a personal last layer does not travel"
    )

    headless: frozenset[str] = frozenset()  # tensors that belong to no layer, and are sent to all clients

    @property
    def options(self) -> FedP3Options:
        return self.config.fedp3

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.layers = layers.layers_of([n for n in self.model if n not in self.headless], self.prunable)
        self.sizes = {layer: sum(self.model[n].numel() for n in names) for layer, names in self.layers.items()}
        self.table_sizes = {layer: self._in_table(names) for layer, names in self.layers.items()}
        self.weights = {
            x: sum(self.model[n].numel() for n in names if n in self.prunable) for x, names in self.layers.items()
        }
        *self.hidden, self.head = self.layers
        if self.options.personal_head:
            self.model = {n: t for n, t in self.model.items() if n not in self.layers[self.head]}
            del self.table_sizes[self.head]  # it does not travel
        self.sends_parts = self.options.aggregation == "simple"
        self.draws = 0  # the round whose layers and pruning are drawn
        self.bytes_by_set: dict[str, list[int]] = {}  # layers → [down, up] of a client, as last measured
        # impossible assignments raise here, before anything is sent
        owned = {layer for client in self.members for layer in self.assigned(client)[0]}
        is_fixed = self.options.assignment != "per-round"
        self.unowned = [layer for layer in self.hidden if is_fixed and layer not in owned]

    def warnings(self) -> list[str]:
        doubt = f"no client owns {', '.join(self.unowned)}, so the server never changes these layers"
        return [*super().warnings(), *([doubt] if self.unowned else [])]

    def _in_table(self, names: tuple[str, ...]) -> int:
        """Count a layer's parameters as the paper's Table 4 does: biases of convolutions, but none of linear layers."""
        is_linear = any(n in self.prunable and self.model[n].dim() == 2 for n in names)
        return sum(self.model[n].numel() for n in names if not is_linear or n in self.prunable)

    # --- line 2: L_i and P_i ----------------------------------------------------------------------------------------

    def assigned(self, client: int) -> Assigned:
        """Return a client's own layers in this round, and the density of the others. Raises :class:`ConfigError`."""
        try:
            return self._assignment(client)
        except ValueError as error:
            raise ConfigError(
                "fedp3.layer-set", self.options.layer_set, which=f"does not suit client {client}", hint=str(error)
            ) from None

    def _assignment(self, client: int) -> Assigned:
        options, hidden = self.options, self.hidden
        density = self.config.density
        round = self.draws if options.assignment == "per-round" else 0
        draw = rng.numpy_generator(self.config.seed, "layers", client, round)
        is_balanced, position = options.assignment == "balanced", list(self.clients).index(client)
        first = position * len(hidden) // len(self.clients) if is_balanced else int(draw.integers(len(hidden)))
        if options.layer_set == "all":
            return tuple(hidden), density
        if options.layer_set == "capacity":
            capacity = self.clients[client].capacity or options.capacity_of(client)
            return layers.within_capacity(self.sizes, self.weights, self.head, first, density, capacity)
        if patterns := options.patterns():
            turn = position % len(patterns) if is_balanced else int(draw.integers(len(patterns)))
            return layers.matching(hidden, patterns[turn]), density
        counts = FEDP3_COUNTS[options.layer_set]
        if is_balanced and len(counts) == 1:
            return layers.consecutive(hidden, first, counts[0]), density
        return layers.drawn(hidden, counts, draw), density

    def travelling(self, own_layers: tuple[str, ...]) -> list[str]:
        """Return the names of the tensors of these hidden layers, and of the last layer if it travels."""
        return [n for layer in (*own_layers, self.head) for n in self.layers[layer] if n in self.model]

    # --- lines 4 to 6: what is sent ---------------------------------------------------------------------------------

    def pruned_for(self, assignment: Assigned) -> Payload:
        """Return ``W^l`` for the layers l ∈ L_i and the last one, and ``P_i ⊙ W^l`` for the others."""
        own_layers, density = assignment
        dense_names = {*self.travelling(own_layers), *self.layers[self.head]}
        weights = {n: t for n, t in self.model.items() if n in self.prunable and n not in dense_names}
        if density == 1 or not weights:
            return Payload(self.model)
        masks = magnitude_masks(weights, density)
        return Payload(self.model | {n: weights[n].where(mask, 0) for n, mask in masks.items()}, masks)

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield clients of equal layer sets in a row, so that each payload is made and encoded once."""
        for assignment, clients in groupby(sorted(round.participants, key=self.assigned), key=self.assigned):
            # members of a secure sum receive one model, and prune it as the server would
            payload = Payload(self.model) if self.config.secure_sums else self.pruned_for(assignment)
            yield from OutgoingMessage.to_each(tuple(clients), payload, **self.fields(assignment))

    def fields(self, assignment: Assigned) -> dict[str, Any]:
        return {"layers": list(assignment[0]), "density": assignment[1]}

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield the dense model for each client, which prunes it as at the start of its training."""
        payload = Payload(self.model)
        for client in self.clients:
            yield OutgoingMessage(client, payload, fields=self.fields(self.assigned(client)))

    # --- line 14, Algorithm 3 ---------------------------------------------------------------------------------------

    def expect(self, round: Round, client: int) -> Schema:
        own_layers, _ = self.assigned(client)
        return Schema.like({name: self.model[name] for name in self.travelling(own_layers)})

    def begin(self, round: Round) -> None:
        self.draws = round.number
        self.mean = MaskedMean(len(round.participants), max_weight=len(self.layers))
        self.kept: dict[int, Payload] = {}  # attention needs all replies at once
        self.contributed = dict.fromkeys(self.layers, 0)  # Σ N_i over the clients of each layer

    def num_layers(self, client: int) -> int:
        """Return N_i, the number of layers that weighted averaging counts."""
        return len(self.assigned(client)[0]) + (self.options.aggregation == "weighted-with-head")

    def receive(self, round: Round, reply: Reply) -> None:
        if self.options.aggregation == "attention":
            self.kept[reply.client] = reply.update
            return
        weight = 1 if self.options.aggregation == "simple" else self.num_layers(reply.client)
        self.mean.add(reply.update, weight)
        for layer in (*self.assigned(reply.client)[0], self.head):
            self.contributed[layer] += weight

    def end(self, round: Round) -> None:
        if self.options.aggregation == "attention":
            self.model |= self._attention()
        else:
            super().end(round)
        if self.options.aggregation == "weighted-literal":
            total = sum(self.num_layers(client) for client in self.members)
            for layer, weight in self.contributed.items():
                if weight:
                    self.model |= {n: self.model[n] * (weight / total) for n in self.layers[layer] if n in self.model}
        for client, row in sorted(round.log.clients.items()):  # sorted, so that the order of replies has no effect
            layer_set = " ".join(self.assigned(client)[0])
            if row["bytes_up"] and client not in round.log.declined:
                self.bytes_by_set[layer_set] = [row["bytes_down"], row["bytes_up"]]

    def _attention(self) -> dict[str, Tensor]:
        averages: dict[str, Tensor] = {}
        for names in self.layers.values():
            senders = [self.kept[k].tensors for k in sorted(self.kept) if names[0] in self.kept[k].tensors]
            if senders:
                means = attention_mean([[tensors[n] for n in names] for tensors in senders], self.options.temperature)
                averages |= dict(zip(names, means, strict=True))
        return averages

    # --- what it costs ----------------------------------------------------------------------------------------------

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return the bytes of appendix B.5, which counts neither masks nor biases of linear layers."""
        down = up = 0.0
        sizes = self.table_sizes
        for client in round.participants:
            own_layers, density = self.assigned(client)
            full_layers = {*own_layers, self.head}
            down += 4 * layers.deployed(sizes, sizes, full_layers, density)
            up += 4 * layers.deployed(sizes, sizes, full_layers, 0.0)
        return down, up

    def finish(self) -> None:
        """Record what a client of each layer set receives and sends in a round: Figure 6, measured."""
        if self.bytes_by_set:
            up = [num_bytes for _, num_bytes in self.bytes_by_set.values()]
            sets = {
                layer_set: {"bytes_down": d, "bytes_up": u} for layer_set, (d, u) in sorted(self.bytes_by_set.items())
            }
            self.recorder.annotate(bytes_by_layer_set=sets, largest_over_smallest_upload=max(up) / min(up))

    def state(self) -> State:
        state = super().state()
        return State(state.tensors, {**state.meta, "round": self.draws, "bytes-by-set": self.bytes_by_set})

    def restore(self, state: State) -> None:
        super().restore(state)
        self.draws = int(state.meta["round"])
        self.bytes_by_set = {layer_set: list(sizes) for layer_set, sizes in state.meta["bytes-by-set"].items()}
