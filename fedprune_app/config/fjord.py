"""FjORD: nested sub-networks of different widths."""

from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.lists import share_in_turn
from fedprune_app.config.options import Needs, option


@dataclass(frozen=True)
class FjORDOptions(Table):
    """These options are FjORD's; a node's ``capacity`` goes before ``widths``."""

    needs: ClassVar[Needs] = {"system": ("fjord",)}

    widths: str = option(
        "0.2 0.4 0.6 0.8 1.0", "The shares of each layer's units that the clients, in turn, can bear (p_max)."
    )

    def check(self, common: CommonOptions) -> None:
        self.width_of(0)

    def width_of(self, client: int) -> float:
        return share_in_turn("fjord.widths", self.widths, client, 1.0)
