"""Fed-LTP, the server half: a winning ticket from public data, its sub-models to the clients, the best round's model.

Shi, Wei, Shen, Li, Wang, Yuan, Guo, "Efficient Federated Learning with Enhanced Privacy via Lottery Ticket Pruning in
Edge Computing", Algorithms 1 and 2. The client half is ``clients/fedltp.py``; tickets are made in
``fedprune_app/tickets.py``. No code was released; where the text is silent or contradicts itself:

* P1 is the pruned share of a tensor's weights (equation 15), so ``density`` is 1 - P1. Biases stay.
* Sub-models are made once, from the magnitudes of the ticket's weights as public data trained them: neither they nor
  who gets which depend on anything private. Each has a P2 share of the survivors less than the one before it
  (equation 15; equation 12 with rule 9 would remove nothing), the server's model has the structure of the first.
* A client keeps the sub-model that it drew when it was first sampled, among those that nobody else in the round has.
* A coordinate is averaged over those participants that have it, as the text says; line 9 divides by all.
* Every round's model is scored *after* the round, by all clients (``fedltp.validators``; the formulas say the round's).
  A score is the share of correct predictions among the validation examples of those who answered: with equal answers
  the order is that of the sum (18), and rounds with missing answers compare fairly. Under ``robust`` it is the mean of
  the clients' own shares: how many examples a client has is what it says.
* The model that is evaluated after a round is the best so far, which would be the final one (equation 19).
* Tickets that clients make of their private data (Figure 8) are not offered: such a ticket is a mask that depends on
  the data, and nothing here could say what its release costs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from fedprune_app.config import FedLTPOptions
from fedprune_app.core import rng
from fedprune_app.core.masks import packed, unpacked
from fedprune_app.core.payload import Payload
from fedprune_app.core.tickets import Ticket, at_level, nested_levels
from fedprune_app.engine import rounds, wire
from fedprune_app.engine.rounds import Answer, Peer
from fedprune_app.engine.store import State, grouped
from fedprune_app.engine.wire import Schema
from strategies.base import Contents
from strategies.dpfed import DPFed

log = logging.getLogger("flwr.fedprune")
_SCALES = 40  # how far noise may take a score: beyond with probability e^-40, or by a client that makes it up


class FedLTP(DPFed):
    """One sub-model for all, or as many nested ones as clients take part in a round."""

    paper_formula = "32 bits per parameter times the mean retention rate p, both ways"

    def __init__(self, *arguments: Any, find_ticket: Callable[[], Ticket], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.find_ticket = find_ticket
        self.levels: dict[str, Tensor] = {}  # how many sub-models have each weight
        self.drawn: dict[int, int] = {}  # partition -> its sub-model, from 1
        self.best: tuple[int, float] = (0, -1.0)  # round and score
        self.best_model = self.model
        iterative = self.options.pruning == "iterative"
        self.num_models = max(int(self.config.fraction_train * len(self.roster) + 1e-9), 1) if iterative else 1
        self.further_pruned = self.options.further_pruned if iterative else 0.0

    @property
    def options(self) -> FedLTPOptions:
        return self.config.fedltp

    # --- line 2: the ticket and its sub-models ----------------------------------------------------------------------

    def prepare(self) -> None:
        ticket = self.find_ticket()
        self.levels = nested_levels(ticket.trained, ticket.masks, self.num_models, self.further_pruned)
        start = {name: ticket.start[name] for name in self.model}
        self.model = dict(Payload.pruned(start, self.masks(1)).tensors)
        self.best_model = self.model
        self.recorder.annotate(ticket={**ticket.about, "retention": self.retention()})

    @property
    def models(self) -> range:
        return range(1, self.num_models + 1)

    def masks(self, model: int) -> dict[str, Tensor]:
        return at_level(self.levels, model)

    def retention(self) -> list[float]:
        """The share of the weights that each sub-model keeps (p^i)."""
        size = sum(level.numel() for level in self.levels.values())
        return [sum(int(mask.count_nonzero()) for mask in self.masks(i).values()) / size for i in self.models]

    # --- lines 4, 5 and 30 to 38: who gets which --------------------------------------------------------------------

    def open_round(self, round: int, participants: list[int]) -> None:
        super().open_round(round, participants)
        self.participants = participants
        taken = {self.drawn[partition] for partition in participants if partition in self.drawn}
        draw = rng.numpy_generator(self.config.seed, "model shuffle", round=round)
        free = iter(draw.permutation([model for model in self.models if model not in taken]).tolist())
        for partition in participants:
            if partition not in self.drawn:
                self.drawn[partition] = int(next(free)) if self.num_models > 1 else 1

    def plan(self, round: int, participants: list[int]) -> Mapping[int, Payload]:
        made = {i: Payload.pruned(self.model, self.masks(i)) for i in {self.drawn[k] for k in participants}}
        return {partition: made[self.drawn[partition]] for partition in participants}

    # --- line 9 -----------------------------------------------------------------------------------------------------

    def reply_schema(self, partition: int) -> Schema:
        """The values of the coordinates that the client has; their places are known here."""
        return Schema.like(packed(self.model, self.masks(self.drawn.get(partition, 1))))

    def reply_bytes(self, participants: list[int]) -> int:
        """The first sub-model has all that the others have; to pack each takes time."""
        return Schema.like(packed(self.model, self.masks(1))).max_bytes

    def accept(self, peer: Peer, update: Payload) -> None:
        masks = self.masks(self.drawn[peer.partition])
        super().accept(peer, Payload(unpacked(update.tensors, masks, self.model), masks))

    # --- equations 17 to 19: validation -----------------------------------------------------------------------------

    def after_round(self, grid: Grid, round: int, timeout: float) -> dict[str, Any]:
        """Ask for the new model's scores, and keep the model if they are the best so far."""
        if self.options.validators == "none":
            self.best, self.best_model = (round, 0.0), self.model
            return {}
        before = self.log.bytes_up, self.log.bytes_down
        shares: list[float] = []
        correct = examples = answers = 0
        for answer in rounds.exchange(grid, self._by_partition(self._questions(round)), timeout):
            self.log.count(answer)
            row = self.log.clients.setdefault(answer.partition, {"bytes_up": 0, "bytes_down": 0})
            row["bytes_up"] += answer.bytes_up
            row["bytes_down"] += answer.bytes_down
            try:
                if self.declines(round, answer):
                    continue
                score, num_examples = self._score(round, answer)
            except ValueError as error:
                self.log.fail(f"validation after round {round}", answer, str(error))
                continue
            correct, examples, answers = correct + score, examples + num_examples, answers + 1
            shares.append(min(max(score / num_examples, 0.0), 1.0))
        told: dict[str, Any] = {"validations": answers, "validation_score": None}
        if examples:
            by_client = math.fsum(shares) / answers  # in whatever order they came
            told["validation_score"] = score_now = correct / examples if self.config.robust == "none" else by_client
            if self.best[0] == 0 or score_now > self.best[1]:
                self.best, self.best_model = (round, score_now), self.model
        up, down = self.log.bytes_up - before[0], self.log.bytes_down - before[1]
        told |= {"validation_bytes_up": up, "validation_bytes_down": down, "best_round": self.best[0]}
        return {**self.exchanged(round, len(self.participants)), **told}

    def _questions(self, round: int) -> Iterator[Message]:
        absent = self.dropped(round)
        everybody = [partition for partition in self.willing(round) if partition not in absent]
        asked = self.participants if self.options.validators == "selected" else everybody
        arrays = wire.to_arrays(Payload(self.model, self.masks(1)))
        contents: Iterator[tuple[int, Contents]] = ((k, Contents(arrays, fields={"asks": "score"})) for k in asked)
        return self._messages(contents, round, MessageType.EVALUATE)

    def _score(self, round: int, answer: Answer) -> tuple[int, int]:
        """A client's (noised) number of correct predictions, and of how many. ``ValueError`` refuses it."""
        if answer.content is None:
            raise ValueError(answer.error)
        fields, share = wire.fields_of(answer.content), self.config.validation_fraction
        most = int((share * self.roster[answer.partition].num_examples + 0.5) / (1 - share))  # of val + train
        num_examples = int(wire.number(fields, "num-validation", 1, max(1, most)))
        noise = _SCALES * self.config.dp.count_scale if self.config.dp.enabled else 0.0
        score = int(wire.number(fields, "score", 0 - noise, num_examples + noise))
        self.log.clients[answer.partition] |= self._privacy_of(answer.partition, fields, round)
        return score, num_examples

    def evaluation_payload(self) -> Payload:
        return Payload(self.best_model, self.masks(1))

    def finish(self) -> None:
        """The final model is the best round's."""
        self.model = self.best_model
        self.recorder.annotate(best_round=self.best[0])

    # --- what it costs, resume --------------------------------------------------------------------------------------

    def paper_bytes(self, num_participants: int) -> tuple[float, float]:
        """``p · d · 32`` bits with the mean p (16) and the dense d; validation is not counted there."""
        size = sum(tensor.numel() for tensor in self.model.values())
        sent = 4.0 * num_participants * size * sum(self.retention()) / self.num_models
        return sent, sent

    def state(self) -> State:
        state = super().state()
        meta = {"drawn": {str(k): i for k, i in sorted(self.drawn.items())}, "best": list(self.best)}
        best = {name: tensor.clone() for name, tensor in self.best_model.items()}  # a file holds no tensor twice
        return State({**state.tensors, **grouped(best=best, levels=self.levels)}, {**state.meta, **meta})

    def restore(self, state: State) -> None:
        super().restore(state)
        levels, best = state.group("levels"), state.group("best")
        self.levels = {name: levels[name] for name in self.model if name in levels}
        self.best_model = {name: best[name] for name in self.model}
        self.drawn = {int(k): int(i) for k, i in state.meta["drawn"].items()}
        round, score = state.meta["best"]
        self.best = int(round), float(score)
