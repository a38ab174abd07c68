"""Options of FedP3, LDP-FedP3, and FedCR, which uses FedP3's layer sets."""

from dataclasses import dataclass, replace
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, option, share_in_turn

_OF_FEDP3: Needs = {"system": ("fedp3",)}
_OF_BOTH: Needs = {"system": ("fedp3", "fedcr")}
# FedP3's layer sets, by the number of hidden layers that a client trains; of several numbers each client draws one.
FEDP3_COUNTS: dict[str, tuple[int, ...]] = {
    "lowerb": (1,),
    "opu2": (2,),
    "opu3": (3,),
    "opu1-2-3": (1, 2, 3),
    "opu2-3": (2, 3),
}
# FedP3's Table 1: the parts of ResNet-18 that clients leave out, in turn or at random.
FEDP3_BLOCKS: dict[str, tuple[str, ...]] = {
    "b2-b3-full": ("-layer2", "-layer3"),
    "b2-part": ("-layer2.0", "-layer2.1"),
    "b3-part": ("-layer3.0", "-layer3.1"),
}


_COUNT_CHOICES = {
    "lowerb": "1 hidden layer",
    "opu2": "2 hidden layers",
    "opu3": "3 hidden layers",
    "opu1-2-3": "1 or 2 or 3 hidden layers",
    "opu2-3": "2 or 3 hidden layers",
}


@dataclass(frozen=True)
class FedP3Options(Table):
    """Layer sets, local pruning and averaging.

    The common key ``density`` is that of the layers a client does not train (the paper's global ratio).
    """

    needs: ClassVar[Needs] = {"system": ("fedp3", "fedcr", "ldp-fedp3")}
    # Of attention's softmax over distances from the mean, as a multiple of the mean distance.
    temperature: ClassVar[float] = 1.0

    layer_set: str = option(
        "lowerb",
        "The hidden layers that a client trains in full and uploads. The last layer always belongs to them.",
        choices={
            **_COUNT_CHOICES,
            "all": "all hidden layers",
            "b2-b3-full": "of ResNet-18 all but layer2, or all but layer3",
            "b2-part": "of ResNet-18 all but layer2.0, or all but layer2.1",
            "b3-part": "of ResNet-18 all but layer3.0, or all but layer3.1",
            "capacity": "as many as a client can hold, see capacities",
            "by-hand": "the sets in the key layers",
        },
        needs=_OF_FEDP3,
    )
    assignment: str = option(
        "balanced",
        "The rule that gives layers to the clients.",
        choices={
            "balanced": "equal shares, as in the released code; mixed numbers of layers are drawn",
            "random": "each client draws once",
            "per-round": "each client draws in every round",
        },
        needs=_OF_BOTH,
    )
    layers: str = option(
        "",
        "The sets of layer-set 'by-hand' for the clients in turn: 'conv1 conv2; fc1; -conv1'. A minus means all layers "
        "but this one.",
        needs=_OF_FEDP3,
    )
    capacities: str = option(
        "",
        "The shares of the model's parameters that clients in turn can hold, with layer-set 'capacity': '0.5 0.8'."
        " Empty means the whole model.",
        needs={**_OF_FEDP3, ".layer-set": ("capacity",)},
    )
    local: str = option(
        "fixed",
        "The local pruning of the layers that a client does not train.",
        choices={
            "fixed": "no local pruning",
            "uniform": "each step keeps random weights",
            "ordered-dropout": "each step keeps the leading units",
        },
        needs=_OF_FEDP3,
    )
    local_density: float = option(
        0.9,
        "The smallest share p of weights or units that local pruning keeps. The share of a step is drawn from [p, 1].",
        above=0,
        most=1,
        needs={**_OF_FEDP3, ".local": ("uniform", "ordered-dropout")},
    )
    aggregation: str = option(
        "simple",
        "The mean of a layer over the clients that train this layer.",
        choices={
            "simple": "the plain mean",
            "weighted": "weighted by how many hidden layers a client trains",
            "weighted-with-head": "as weighted, and the last layer counts too",
            "weighted-literal": "as printed in the paper: over all clients, which shrinks layers",
            "attention": "weighted by the distance from the mean, an addition of fedprune",
        },
        needs=_OF_BOTH,
    )
    personal_head: bool = option(
        False,
        "If true, the last layer stays with the client. In the released code the last layer stays there in effect.",
        needs=_OF_FEDP3,
    )

    def check(self, common: CommonOptions) -> None:
        self.capacity_of(0)
        if (self.layer_set == "by-hand") != bool(self.layers):
            raise ConfigError(
                "fedp3.layers",
                self.layers,
                "nothing" if self.layers else "sets of layers",
                condition=f"with fedp3.layer-set {self.layer_set!r}",
            )
        if common.system == "fedcr" and self.local != "fixed":
            raise ConfigError("fedp3.local", self.local, "'fixed'", condition="with system 'fedcr'")

    def capacity_of(self, client: int) -> float:
        """Return the share of the model that ``client`` can train, if its node has no ``capacity``.

        Raises :class:`ConfigError`.
        """
        return share_in_turn("fedp3.capacities", self.capacities, client, 1.0)

    def patterns(self) -> tuple[str, ...]:
        """Return the patterns of layers for the clients in turn; empty for layer sets without named layers."""
        if self.layer_set == "by-hand":
            return tuple(part.strip() for part in self.layers.split(";"))
        return FEDP3_BLOCKS.get(self.layer_set, ())


@dataclass(frozen=True)
class FedCROptions(Table):
    """Strength of the divergence, and the layer set; names are the released code's if it has one."""

    needs: ClassVar[Needs] = {"system": ("fedcr",)}
    # The number of draws of an image's code in training, as in the released code.
    train_draws: ClassVar[int] = 15
    # The number of draws of an image's code in testing, as in the released code.
    test_draws: ClassVar[int] = 30

    beta: float = option(0.001, "The strength of the divergence between prior and encoder (β).", least=0)
    layer_set: str = option(
        "all",
        "The hidden layers that a client trains in full and sends, as in fedp3.layer-set.",
        choices={**_COUNT_CHOICES, "all": "all hidden layers"},
    )

    def as_fedp3(self, options: FedP3Options) -> FedP3Options:
        """Return FedP3's ``options`` with FedCR's layer set, and heads that stay with the clients."""
        return replace(options, layer_set=self.layer_set, layers="", personal_head=True)
