"""Options of Sub-FedAvg, Un and Hy, as in the paper's section 4 and the released code."""

from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, option

_OF_UN: Needs = {"system": ("subfedavg",)}
_OF_HY: Needs = {"system": ("subfedavg-hy",)}


@dataclass(frozen=True)
class SubFedAvgOptions(Table):
    """When and how far clients of ``subfedavg`` and ``subfedavg-hy`` prune."""

    needs: ClassVar[Needs] = {"system": ("subfedavg", "subfedavg-hy")}
    # The largest percentage that Un's last step before the target prunes, as in the released code.
    final_step_cap: ClassVar[float] = 5.0
    # The share of a layer's scales, smallest first, whose channels Hy removes in one step, as in the released code.
    channel_fraction: ClassVar[float] = 0.45
    # The share of a layer's channels that Hy never removes, as in the released code.
    channel_floor: ClassVar[float] = 0.5

    target_rate: float = option(50.0, "The percentage of all parameters that is pruned in the end.", least=0, below=100)
    prune_step: float = option(
        10.0, "The percentage of the remaining weights that one step prunes (r_us).", above=0, below=100
    )
    accuracy_threshold: float = option(
        50.0,
        "The accuracy, in percent, below which a client does not prune.",
        least=0,
        most=100,
        needs={".gate-split": ("validation", "test")},
    )
    mask_distance: float = option(
        1e-4,
        "The distance between the masks after the first and the last epoch above which a client prunes.",
        least=0,
        most=1,
        needs=_OF_UN,
    )
    fc_mask_distance: float = option(
        5e-4,
        "The distance between the masks of linear layers after the first and the "
        "last epoch above which a client of subfedavg-hy prunes them.",
        least=0,
        most=1,
        needs=_OF_HY,
    )
    channel_distance: float = option(
        0.01,
        "The distance between the channel masks after the first and the last epoch "
        "above which a client of subfedavg-hy removes channels.",
        least=0,
        most=1,
        needs=_OF_HY,
    )
    gate_split: str = option(
        "validation",
        "The data whose accuracy decides whether a client prunes.",
        choices={
            "validation": "the client's validation data",
            "test": "the client's test data, as in the released code",
            "none": "no data; accuracy does not decide",
        },
    )

    def check(self, common: CommonOptions) -> None:
        for key, percentage in (("target-rate", self.target_rate), ("accuracy-threshold", self.accuracy_threshold)):
            if 0 < percentage < 1:
                raise ConfigError(
                    f"subfedavg.{key}",
                    percentage,
                    "0, or a percentage from 1",
                    hint=f"{100 * percentage:g} is meant?",
                )
        prunes = self.target_rate > 0 or common.system == "subfedavg-hy"  # which removes channels at any target
        asks_validation = common.system in ("subfedavg", "subfedavg-hy") and self.gate_split == "validation"
        if asks_validation and common.validation_fraction == 0 and prunes:
            raise ConfigError("validation-fraction", 0.0, "above 0", condition="with subfedavg.gate-split 'validation'")
