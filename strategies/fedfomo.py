"""FedFomo, the server half: each client receives a few other clients' models and reports their worth to it.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
section 3, as Dis-PFL compares with it. The client half is ``clients/fedfomo.py``.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedprune_app.core import rng
from fedprune_app.engine import wire
from fedprune_app.engine.store import State
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from strategies.gossip import Relay

_MOST_WORTH = 1e30  # no honest client comes near; sums of it over any number of rounds stay finite


class FedFomo(Relay):
    """Send each client the models that have been worth most to it so far.

    ``affinity`` holds, by receiver and candidate, the sum of the worths that the receiver has reported. The candidates
    of highest affinity are sent; with probability ``exploration``, random ones.

    As in Dis-PFL's released code the sum is over equation 3's values, negative ones included, and not over the clipped
    and normalised weights of equation 4: a client whose model did harm ranks below one that was never tried. The code
    also adds the last values of all candidates again in rounds that do not try them, where here each counts once.
    Every client trains in every round there (``fraction-train`` is 1); only its candidates are sampled.
    """

    paper_formula = "32 bits per parameter, both ways (Dis-PFL's Table 1 charges FedFomo like FedAvg)"

    def __init__(self, context: RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        size = max(self.clients) + 1 if self.clients else 0
        self.affinity = torch.zeros(size, size, dtype=torch.float64)  # (receiver, candidate)

    def expect(self, round: Round, client: int) -> wire.Schema:
        return wire.Schema.like(self.model)

    def candidates(self, round: Round, client: int) -> list[int]:
        """Return the other clients whose models this client receives; all of them have published one."""
        draw = rng.numpy_generator(self.config.seed, "candidates", client, round.number)
        candidates = [k for k in draw.permutation(sorted(self.update_rounds)).tolist() if k != client]
        if draw.random() >= self.config.fedfomo.exploration:
            candidates.sort(key=lambda k: -float(self.affinity[client, k]))  # stable: random among equals
        return sorted(candidates[: self.config.fedfomo.candidates])

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        for client in round.participants:
            yield OutgoingMessage(client, peer_updates=self.updates_of(self.candidates(round, client), round.log))

    def receive(self, round: Round, reply: Reply) -> None:
        names, worth = reply.fields.get("candidates", []), reply.fields.get("worth", [])
        if not (isinstance(names, list) and isinstance(worth, list) and len(names) == len(worth)):
            raise ValueError("fields 'candidates' and 'worth' are not lists of one length")
        are_clients = all(type(name) is int for name in names) and len(set(names)) == len(names)
        if not (are_clients and set(names) <= set(self.candidates(round, reply.client))):
            raise ValueError(f"field 'candidates' is {names!r}, allowed: those it was sent, each once")
        if not all(isinstance(value, float) and abs(value) <= _MOST_WORTH for value in worth):
            raise ValueError(f"field 'worth' is {worth!r}, allowed: numbers from -{_MOST_WORTH:g} to {_MOST_WORTH:g}")
        super().receive(round, reply)
        for name, value in zip(names, worth, strict=True):
            self.affinity[reply.client, name] += value

    def state(self) -> State:
        return State({"affinity": self.affinity}, super().state().meta)

    def restore(self, state: State) -> None:
        super().restore(state)
        self.affinity = state.tensors["affinity"]
