"""Options of the baselines that the papers compare with."""

from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, option, share_in_turn


@dataclass(frozen=True)
class DittoOptions(Table):
    """Ditto as Dis-PFL compares with it: these epochs take the place of the key ``local-epochs``."""

    needs: ClassVar[Needs] = {"system": ("ditto",)}

    global_epochs: int = option(2, "The number of epochs on the global model in a round.", least=1)
    personal_epochs: int = option(3, "The number of epochs on the personal model in a round.", least=1)
    pull: float = option(0.5, "The strength that pulls the personal model towards the global model (λ).", least=0)


@dataclass(frozen=True)
class FedFomoOptions(Table):
    """Number of candidate models per client, which need validation data."""

    needs: ClassVar[Needs] = {"system": ("fedfomo",)}
    # The probability that candidates are drawn at random, not by their past weight.
    exploration: ClassVar[float] = 0.5

    candidates: int = option(10, "The number of other clients' models that a client gets in a round (M).", least=1)

    def check(self, common: CommonOptions) -> None:
        if common.system == "fedfomo" and common.validation_fraction == 0:
            raise ConfigError(
                "validation-fraction", 0.0, "above 0", condition="with system 'fedfomo', which weighs by it"
            )


@dataclass(frozen=True)
class FedProxOptions(Table):
    """Strength of the proximal term."""

    needs: ClassVar[Needs] = {"system": ("fedprox",)}

    mu: float = option(0.01, "The strength of the proximal term (μ).", least=0)


@dataclass(frozen=True)
class LGFedAvgOptions(Table):
    """Which layers are averaged, and the rounds of FedAvg that come first."""

    needs: ClassVar[Needs] = {"system": ("lg-fedavg",)}

    global_layers: int = option(
        2, "The number of last layers that the server averages. The other layers stay with each client.", least=1
    )
    pretrain_rounds: int = option(
        0,
        "The number of rounds of FedAvg that come first and count in num-server-rounds. The released script starts "
        "from FedAvg's model.",
        least=0,
    )


@dataclass(frozen=True)
class MTLOptions(Table):
    """Strength of the regulariser in our surrogate for MOCHA on networks."""

    needs: ClassVar[Needs] = {"system": ("mtl",)}
    # Added to the diagonal of the task covariance before it is inverted (ε).
    ridge: ClassVar[float] = 0.1

    strength: float = option(0.001, "The strength of the regulariser (λ).", least=0)


@dataclass(frozen=True)
class FedSPAOptions(Table):
    """Share of the trained coordinates, and the server's step."""

    needs: ClassVar[Needs] = {"system": ("fedspa",)}

    share: float = option(
        0.4, "The share of all coordinates that a client trains and sends in a round (p).", above=0, most=1
    )
    acceleration: str = option(
        "none",
        "The server's step along the mean update.",
        choices={
            "none": "the plain mean update",
            "momentum": "the running mean of mean updates",
            "adam": "as Adam steps, which want a smaller server-learning-rate",
        },
    )
    server_learning_rate: float = option(1.0, "The factor on the server's step.", above=0)


@dataclass(frozen=True)
class FjORDOptions(Table):
    """Widths of the clients' sub-networks; a node's ``capacity`` takes precedence over ``widths``."""

    needs: ClassVar[Needs] = {"system": ("fjord",)}

    widths: str = option(
        "0.2 0.4 0.6 0.8 1.0", "The shares of each layer's units that the clients, in turn, can bear (p_max)."
    )

    def check(self, common: CommonOptions) -> None:
        self.width_of(0)

    def width_of(self, client: int) -> float:
        return share_in_turn("fjord.widths", self.widths, client, 1.0)
