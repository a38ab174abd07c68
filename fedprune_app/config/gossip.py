"""Options of Dis-PFL and D-PSGD, whose clients exchange models with their neighbours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.options import Needs, option, share_in_turn


@dataclass(frozen=True)
class GossipOptions(Table):
    """Base class for decentralised systems: the topology, and where neighbours' models are averaged."""

    topology: str = option(
        "random",
        "The rule that says from which clients a client receives models.",
        choices={
            "random": "from neighbours drawn every round; each client sends to as many",
            "random-in": "from neighbours that each client draws every round; some clients send to more",
            "ring": "from the clients before and after",
            "full": "from all other clients",
            "exponential": "from the clients 1, 2, 4, 8, ... places before",
        },
    )
    neighbours: int = option(
        10,
        "The number of clients that a client receives from in a round, with the random topologies.",
        least=1,
        needs={".topology": ("random", "random-in")},
    )
    gossip: str = option(
        "server",
        "The place where the neighbours' models are averaged.",
        choices={
            "server": "the relaying server averages them",
            "client": "each client averages them; the relay forwards them unread",
        },
    )

    @property
    def trains_alone(self) -> bool:
        """Whether a client that drops out of a round still trains, alone."""
        return False


@dataclass(frozen=True)
class DisPFLOptions(GossipOptions):
    """Densities, the search of masks, and dropped clients.

    The common key ``density`` is every client's, unless ``densities`` or a node's ``capacity`` is set.
    """

    needs: ClassVar[Needs] = {"system": ("dispfl",)}

    densities: str = option(
        "",
        "The densities of the clients in turn: '0.2 0.4 0.6 0.8 1.0'. Empty means that every client has the key "
        "density.",
    )
    prune_rate: float = option(
        0.5,
        "The share of each layer's weights that is replaced in round 1 (α₀). The share falls in later rounds.",
        least=0,
        most=1,
    )
    annealing_rounds: int = option(
        0,
        "The number of rounds over which prune-rate falls to 0. 0 means num-server-rounds; the run then cannot be "
        "resumed for another number of rounds.",
        least=0,
    )
    growth: str = option(
        "gradient",
        "The rule that chooses which weights grow again.",
        choices={
            "gradient": "the weights with the largest gradients",
            "random": "random weights, as in the released scripts",
        },
    )
    dropped: str = option(
        "absent",
        "The behaviour of a client that drops out of a round.",
        choices={
            "absent": "the client does nothing",
            "trains-alone": (
                "the client trains alone; with the random topologies and the ring its old model is still served, as in "
                "the released code"
            ),
        },
    )

    @property
    def trains_alone(self) -> bool:
        return self.dropped == "trains-alone"

    def check(self, common: CommonOptions) -> None:
        self.density_of(0, common.density)

    def fixed_on_resume(self, common: CommonOptions) -> Mapping[str, str]:
        """Fix the number of rounds if the prune rate is annealed over all of them."""
        if common.system == "dispfl" and self.prune_rate and not self.annealing_rounds:
            reason = "dispfl.prune-rate falls over these rounds, unless a run begins with dispfl.annealing-rounds"
            return {"num-server-rounds": reason}
        return {}

    def density_of(self, client: int, default: float) -> float:
        return share_in_turn("dispfl.densities", self.densities, client, default)


@dataclass(frozen=True)
class DPSGDOptions(GossipOptions):
    """Density of the fixed mask, for D-PSGD and D-PSGD-FT."""

    needs: ClassVar[Needs] = {"system": ("dpsgd", "dpsgd-ft")}

    density: float = option(
        1.0, "The share of each weight tensor that a fixed random mask keeps, the same one for all.", above=0, most=1
    )
