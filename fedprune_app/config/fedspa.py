"""Fed-SPA: random coordinates and an accelerated server."""

from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import Table
from fedprune_app.config.options import Needs, option


@dataclass(frozen=True)
class FedSPAOptions(Table):
    """These options are Fed-SPA's."""

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
