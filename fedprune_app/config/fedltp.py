"""Options of Fed-LTP: tickets from public data, sub-models, and the scores of rounds."""

from dataclasses import dataclass
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, NoneOf, PathKind, execution_option, option

_PUBLIC_SHARE = 0.2
# The need of options that make tickets or choose one.
_TICKETS: Needs = {".tickets": NoneOf((0,))}


@dataclass(frozen=True)
class FedLTPOptions(Table):
    """How tickets are made, which sub-models clients train, and which clients score rounds.

    The common key ``density`` is the share of each weight tensor that a ticket keeps (1 - P1). The key
    ``dp.count-scale`` is the scale of the noise on validation scores (λ_val).
    """

    needs: ClassVar[Needs] = {"system": ("fedltp",)}
    # The number of public images in a training step of a ticket, as in Frankle and Carbin.
    ticket_batch_size: ClassVar[int] = 60
    # The learning rate on public data, as in the text.
    ticket_learning_rate: ClassVar[float] = 1.2e-3

    public_dataset: str = option(
        "",
        "The server's public dataset. Empty means a share of the dataset that no client gets.",
        needs=_TICKETS,
    )
    public_data_dir: str = execution_option(
        "",
        "The folder of the public data, on the server.",
        kind=PathKind.FOLDER,
        needs=_TICKETS,
    )
    public_samples: int = option(
        0,
        "The number of public images that are used, drawn with their label law. 0 means all of them.",
        least=0,
        needs=_TICKETS,
    )
    tickets: int = option(
        3,
        "The number of winning tickets to choose from (M). 0 means that the unpruned initial network takes the "
        "ticket's place.",
        least=0,
    )
    ticket_iterations: int = option(
        1000, "The number of training steps of a ticket on public data (k).", least=1, needs=_TICKETS
    )
    rule: str = option(
        "quantile",
        "The weights that a ticket keeps in each tensor.",
        choices={
            "quantile": "the share density of the weights, the largest ones",
            "relative-threshold": "weights above (1 - density) times the largest",
        },
        needs=_TICKETS,
    )
    start: str = option(
        "rewind",
        "The values that clients start from.",
        choices={
            "rewind": "the ticket's before its training",
            "trained": "the ticket's after its training",
            "random": "values drawn anew",
        },
        needs=_TICKETS,
    )
    pruning: str = option(
        "one-shot",
        "The sub-models of the ticket that clients get.",
        choices={
            "one-shot": "all clients get the ticket",
            "iterative": "each client keeps one of nested sub-models, as many as clients take part in a round",
        },
    )
    further_pruned: float = option(
        0.1,
        "The share of the survivors that each nested sub-model loses (P2).",
        least=0,
        below=1,
        needs={".pruning": ("iterative",)},
    )
    average: str = option(
        "holders",
        "The clients of a round over which each coordinate's update is averaged.",
        choices={
            "holders": "those whose sub-model has the coordinate, as the paper's text says",
            "participants": "all of the round, as line 9 of Algorithm 2 is printed",
        },
    )
    validators: str = option(
        "all",
        "The clients that score each round's model. The model of the best round is the final one.",
        choices={
            "all": "all clients",
            "selected": "the clients of the round",
            "none": "no client; the model of the last round is the final one",
        },
    )

    def check(self, common: CommonOptions) -> None:
        if common.system == "fedltp" and self.validators != "none" and common.validation_fraction == 0:
            raise ConfigError(
                "validation-fraction", 0.0, "above 0", condition=f"with fedltp.validators {self.validators!r}"
            )


def public_share(system: object, tickets: object, public_dataset: object) -> float:
    """Return the default of ``public-fraction``: the share of training images that tickets of ``system`` need."""
    return _PUBLIC_SHARE if system == "fedltp" and tickets and not public_dataset else 0.0
