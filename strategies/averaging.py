"""Systems that average their clients' models: which average ``robust`` asks for, and how much a client counts."""

import math
from collections.abc import Mapping

from torch import Tensor

from fedprune_app.config import ConfigError
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.payload import Payload
from fedprune_app.core.robust import BoundedMean, TrimmedMean
from fedprune_app.federation.round import Round, RunContext
from strategies.base import FederatedStrategy


class AveragingStrategy(FederatedStrategy):
    """The new model is the average of the replies, by default a masked mean in which all clients count alike."""

    averages = True
    by_examples = False  # whether a client counts by its number of examples

    def __init__(
        self, context: RunContext, model: Mapping[str, Tensor] | None = None, prunable: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(context, model, prunable)
        self.check_moves(len(self.participation.members))

    def averaging(self, count: int, max_weight: int = 1) -> MaskedMean | BoundedMean | TrimmedMean:
        """Return the average that ``robust`` asks for, of at most ``count`` models with the server's coordinates."""
        config = self.config
        if config.robust == "trimmed-mean":
            return TrimmedMean(config.robust_trim)
        mean = MaskedMean(count, max_weight)
        return BoundedMean(mean, self.model, config.robust_norm) if config.robust == "clip" else mean

    def weight_of(self, client: int) -> int:
        """Return how much a client counts.

        A number of examples is what the client says, so under ``robust`` all clients count alike.
        """
        return self.clients[client].num_examples if self.by_examples and self.config.robust == "none" else 1

    def check_moves(self, holders: int, of_what: str = "") -> None:
        """Refuse a robust average that would never move what so many clients hold; ``of_what`` names it in the error.

        Raises :class:`ConfigError`.
        """
        trim, count = self.config.robust_trim, min(holders, self.participation.most)
        if self.config.robust == "trimmed-mean" and trim and int(trim * count + 1e-9) < 1:
            allowed = f"{math.ceil(1000 / count) / 1000:g} to below 0.5" if count > 2 else "another value of robust"
            raise ConfigError(
                "robust-trim",
                trim,
                allowed,
                condition=f"with {count} clients a round{of_what}",
                hint="a coordinate of which no value can be left out stays where it is",
            )

    # --- the mean, which systems override ---------------------------------------------------------------------------

    def begin(self, round: Round) -> None:
        largest = max(map(self.weight_of, round.participants))
        self.mean = self.averaging(len(round.participants), max_weight=largest)

    def receive(self, round: Round, client: int, update: Payload) -> None:
        self.mean.add(update, weight=self.weight_of(client))

    def end(self, round: Round) -> None:
        self.model = self.averaged_model(round)

    def averaged_model(self, round: Round) -> dict[str, Tensor]:
        """Return the average of the replies; where nobody sent a coordinate, or too few, it is as it was."""
        model = self.mean.mean(self.model)
        if isinstance(self.mean, TrimmedMean) and (names := self.mean.stayed):
            place = "" if len(names) == len(self.model) else f" in {len(names)} of the model's tensors"
            trim = f"robust-trim {self.config.robust_trim:g}"
            round.log.say(f"too few replies for {trim} to leave any out: they move nothing{place}")
        return model
