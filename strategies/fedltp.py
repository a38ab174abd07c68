"""Fed-LTP, the server half: find a winning ticket on public data, train its sub-models, keep the best round's model.

Shi, Wei, Shen, Li, Wang, Yuan, Guo, "Efficient Federated Learning with Enhanced Privacy via Lottery Ticket Pruning in
Edge Computing", Algorithms 1 and 2. The client half is ``clients/fedltp.py``; tickets are made
at the end of this file. No code was released; where the text is silent or contradicts itself:

* P1 is the pruned share of a tensor's weights (equation 15), so ``density`` is 1 - P1. Biases stay.
* Sub-models are made once, from the magnitudes of the ticket's weights after training on public data: neither the
  sub-models nor their assignment depend on private data. Each removes a share P2 of the weights that the one before it
  kept (equation 15; equation 12 with rule 9 would remove nothing). The server's model has the structure of the first.
* When a client is first sampled, it draws a sub-model that no other client of the round has, and keeps it.
* A coordinate is averaged over those participants that have it, as in the text. Line 9 divides by all K, as if
  the others had not moved it: ``fedltp.average=participants``. Lost replies count in neither.
* Every round's model is scored *after* the round, by all clients (``fedltp.validators``; the formulas use the round's).
  A score is the share of correct predictions among the validation examples of the clients that replied. If all reply,
  the ranking is that of the sum (18); with missing replies, rounds still compare fairly.
* The model that is evaluated after a round is the best so far, which would be the final one (equation 19). While no
  score has been accepted, it is the newest one.
* Tickets from the clients' private data (Figure 8) are not offered: such a ticket is a mask that depends on the data,
  and its privacy charge is not known here.
"""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np
from torch import Tensor, nn

from fedprune_app.config import Config, ConfigError, FedLTPOptions
from fedprune_app.core import rng
from fedprune_app.core.masks import full_masks, packed, unpacked
from fedprune_app.core.payload import Payload
from fedprune_app.core.tickets import Ticket, at_level, nested_levels, selection_probabilities, ticket_masks
from fedprune_app.data.datasets import public_dataset, some_of
from fedprune_app.data.partitions import most_held_out
from fedprune_app.data.splits import data_config, public_part
from fedprune_app.engine import wire
from fedprune_app.engine.store import State, grouped
from fedprune_app.federation.clients import ImageClientInfo
from fedprune_app.federation.exchanges import exchange
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from fedprune_app.learning.device import device_of
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.learning.training import adam
from fedprune_app.models import vision
from fedprune_app.models.initial import initial_model, trains_on_one
from fedprune_app.models.names import chosen_name
from fedprune_app.results.metrics import ReplyKind
from strategies.dpfed import DPFed

_SCALES = 40  # limit of a score's noise: honest noise exceeds it with probability e^-40


class FedLTP(DPFed):
    """Private averaging of one sub-model, or of as many nested ones as a round has participants."""

    paper_formula = "32 bits per parameter times the mean retention rate p, both ways"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.levels: dict[str, Tensor] = {}  # of each weight, the number of sub-models that have it
        self.drawn: dict[int, int] = {}  # by client, its sub-model, from 1
        self.best: tuple[int, float] = (0, -1.0)  # round and score
        self.best_model = self.model
        iterative = self.options.pruning == "iterative"
        self.num_models = self.participation.most if iterative else 1
        self.models = range(1, self.num_models + 1)  # their numbers
        self.further_pruned = self.options.further_pruned if iterative else 0.0

    @property
    def options(self) -> FedLTPOptions:
        return self.config.fedltp

    # --- line 2: the ticket and its sub-models ----------------------------------------------------------------------

    def find_ticket(self) -> Ticket:
        first = next(iter(self.clients.values()))
        assert isinstance(first, ImageClientInfo)
        return winning_ticket(self.config, first.image_shape, first.num_classes)

    def prepare(self) -> None:
        ticket = self.find_ticket()
        self.levels = nested_levels(ticket.trained, ticket.masks, self.num_models, self.further_pruned)
        start = {name: ticket.start[name] for name in self.model}
        self.model = dict(Payload.pruned(start, self.masks(1)).tensors)
        self.best_model = self.model
        self.recorder.annotate(ticket={**ticket.about, "retention": self.retention()})

    def masks(self, model: int) -> dict[str, Tensor]:
        return at_level(self.levels, model)

    def retention(self) -> list[float]:
        """Return the share of the weights that each sub-model keeps (p^i)."""
        size = sum(level.numel() for level in self.levels.values())
        return [sum(int(mask.count_nonzero()) for mask in self.masks(i).values()) / size for i in self.models]

    # --- lines 4, 5 and 30 to 38: each client's sub-model -----------------------------------------------------------

    def begin(self, round: Round) -> None:
        super().begin(round)
        used_models = {self.drawn[client] for client in round.participants if client in self.drawn}
        draw = rng.numpy_generator(self.config.seed, "model shuffle", round=round.number)
        free_models = iter(draw.permutation([model for model in self.models if model not in used_models]).tolist())
        for client in round.participants:
            if client not in self.drawn:
                self.drawn[client] = int(next(free_models, 1))  # none is free where more clients take part at the end

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        """Yield clients of equal sub-models in a row, so that each payload is made and encoded once."""
        of_client = self.drawn.__getitem__
        for model, clients in groupby(sorted(round.participants, key=of_client), key=of_client):
            yield from OutgoingMessage.to_each(clients, Payload.pruned(self.model, self.masks(model)))

    # --- line 9 -----------------------------------------------------------------------------------------------------

    def expect(self, round: Round, client: int) -> wire.Schema:
        """Return the schema of the values at the client's coordinates; the server knows their positions."""
        return wire.Schema.like(packed(self.model, self.masks(self.drawn[client])))

    def receive(self, round: Round, reply: Reply) -> None:
        masks = self.masks(self.drawn[reply.client])
        tensors = unpacked(reply.update.tensors, masks, self.model)  # coordinates that the client lacks did not move
        reply.update = Payload(tensors, masks if self.options.average == "holders" else self.masks(1))
        super().receive(round, reply)

    # --- equations 17 to 19: validation -----------------------------------------------------------------------------

    def end(self, round: Round) -> None:
        super().end(round)
        if self.options.validators == "none":
            self.best, self.best_model = (round.number, 0.0), self.model
        else:
            self._validate(round)

    def _validate(self, round: Round) -> None:
        """Request scores of the new model, and keep the model if its score is the best so far."""
        up_before, down_before = round.log.bytes_up, round.log.bytes_down
        scores: list[tuple[int, int]] = []  # (noised) number of correct predictions, number of examples

        name = f"validation after round {round.number}"
        for reply in exchange(round, self._questions(round), name=name, kind=ReplyKind.EVALUATION):
            with round.log.rejecting(reply):
                scores.append(self._score(reply))
        score = None
        if scores:
            score = sum(correct for correct, _ in scores) / sum(total for _, total in scores)
            if self.best[0] == 0 or score > self.best[1]:
                self.best, self.best_model = (round.number, score), self.model
        elif self.best[0] == 0:
            self.best_model = self.model
            round.log.add_note("no score of any round was accepted so far, so the newest model is evaluated and kept")
        round.log.columns |= {
            "validations": len(scores),
            "validation_score": score,
            "validation_bytes_up": round.log.bytes_up - up_before,
            "validation_bytes_down": round.log.bytes_down - down_before,
            "best_round": self.best[0],
        }

    def _questions(self, round: Round) -> Iterator[OutgoingMessage]:
        eligible = [k for k in self.participation.eligible(round.number) if k not in round.dropped]
        clients = round.participants if self.options.validators == "selected" else eligible
        return OutgoingMessage.to_each(clients, Payload(self.model, self.masks(1)), asks="score")

    def _score(self, reply: Reply) -> tuple[int, int]:
        """Return a client's (noised) number of correct predictions and its number of examples.

        Raises ``ValueError`` for numbers out of range, which rejects the reply.
        """
        share = self.config.validation_fraction
        info = self.clients[reply.client]
        limit = most_held_out(info.num_examples, share)  # num_examples counts only the examples to train on
        if info.own_data or self.config.dp.enabled:  # examples are drawn independently: ten deviations more
            mean = share / (1 - share) * info.num_examples
            limit = int(mean + 10 * math.sqrt(mean / (1 - share)) + 10)
        num_examples = int(wire.number(reply.fields, "num-validation", 1, limit))
        noise = _SCALES * self.config.dp.count_scale if self.config.dp.enabled else 0.0
        score = int(wire.number(reply.fields, "score", 0 - noise, num_examples + noise))
        return score, num_examples

    def send_to_evaluate(self, round: Round) -> Iterator[OutgoingMessage]:
        return OutgoingMessage.to_each(self.clients, Payload(self.best_model, self.masks(1)))

    def finish(self) -> None:
        self.model = self.best_model
        self.recorder.annotate(best_round=self.best[0])

    # --- what it costs, resume --------------------------------------------------------------------------------------

    def paper_bytes(self, round: Round) -> tuple[float, float]:
        """Return ``p · d · 32`` bits with the mean retention p (16) and d parameters; scores are not counted there."""
        size = sum(tensor.numel() for tensor in self.model.values())
        num_bytes = 4.0 * len(round.participants) * size * sum(self.retention()) / self.num_models
        return num_bytes, num_bytes

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


log = logging.getLogger("flwr.fedprune")


def winning_ticket(config: Config, shape: tuple[int, int, int], num_classes: int) -> Ticket:
    """Train and prune ``fedltp.tickets`` networks on public data and draw one, for images of ``shape``.

    A ticket's score is that of the trained and pruned network on its training images. Raises :class:`ConfigError` if
    the public data have another number of classes.
    """
    options = config.fedltp
    model = initial_model(config.model, config.dataset, shape, num_classes, init=config.init, seed=config.seed)
    initial = vision.state_tensors(model, include_buffers=True)
    weights = vision.prunable_names(model)
    if not options.tickets:
        masks = full_masks({name: initial[name].shape for name in weights})
        return Ticket(initial, initial, masks, {"tickets": 0, "public_images": 0})
    start_time = time.monotonic()
    images, labels, public_classes = public_images(config, shape, num_classes)
    if public_classes != num_classes:
        raise ConfigError(
            "fedltp.public-dataset",
            options.public_dataset,
            f"one of {num_classes}, as the private data",
            which=f"has {public_classes} classes",
        )
    network = chosen_name(config.model, config.dataset)
    public_network = config.model, config.dataset, shape, public_classes
    tickets, counts = [], []
    for j in range(options.tickets):
        draw = rng.generator(config.seed, "ticket", j)
        model = vision.build_model(network, shape, public_classes, rng=draw, init=config.init)
        start_tensors = vision.state_tensors(model, include_buffers=True)  # w_0
        _train(config, model, images, labels, j, skips_lone=not trains_on_one(*public_network))
        trained_tensors = vision.state_tensors(model, include_buffers=True)  # w_j
        masks = ticket_masks({name: trained_tensors[name] for name in weights}, config.density, options.rule)
        vision.load_state_tensors(model, Payload.pruned(trained_tensors, masks).tensors)
        counts.append(evaluate(model, images, labels, device=device_of(config)).correct)
        tickets.append((start_tensors, trained_tensors, masks))
        log.info("ticket %d: %d of %d public images", j, counts[-1], len(labels))
    probabilities = selection_probabilities(counts, len(labels))
    index = int(rng.numpy_generator(config.seed, "ticket selection").choice(len(tickets), p=np.array(probabilities)))
    start_tensors, trained_tensors, masks = tickets[index]
    start = {"rewind": start_tensors, "trained": trained_tensors, "random": dict(initial)}[options.start]
    about = {
        "tickets": options.tickets,
        "public_images": len(labels),
        "correct": counts,
        "probabilities": probabilities,
        "chosen": index,
        "seconds": time.monotonic() - start_time,
    }
    return Ticket(start, trained_tensors, masks, about)


def _train(config: Config, model: nn.Module, images: Tensor, labels: Tensor, ticket: int, *, skips_lone: bool) -> None:
    """Train for k steps: line 4 of the algorithm.

    The text's learning rate is 1.2e-3, which Frankle and Carbin use with Adam.
    """
    options = config.fedltp
    sgd = SGD(
        options.ticket_learning_rate,
        momentum=0.0,
        batch_size=options.ticket_batch_size,
        steps_per_epoch=options.ticket_iterations,
        skips_lone=skips_lone,
    )
    draw = rng.generator(config.seed, "ticket training", ticket)
    result = train(model, images, labels, sgd, rng=draw, adjust_gradients=adam(), device=device_of(config))
    if result.diverged:
        raise ConfigError(
            "model",
            config.model,
            f"one whose training on public data does not diverge (loss {result.loss_mean})",
        )


def public_images(config: Config, shape: tuple[int, int, int], num_classes: int) -> tuple[Tensor, Tensor, int]:
    """Return the public images, their labels, and the number of their classes.

    They are a separate dataset in the shape of the private one, or the part of the private dataset that no client has.
    """
    options = config.fedltp
    if options.public_dataset:
        folder, samples = options.public_data_dir, options.public_samples
        return public_dataset(options.public_dataset, folder, shape, samples, config.seed, config.download)
    images, labels = public_part(data_config(config))
    indices = some_of(labels.numpy(), options.public_samples, config.seed)
    return images[indices], labels[indices], num_classes
