"""Which fields a client may send: a white list, so that another field is a decision and not an accident."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedprune_app.config import Config
from fedprune_app.results import own_measures

Kind = Literal["introduction", "training", "evaluation"]
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ReplyFields:
    """Reply fields are the names of the fields that a class of clients adds to what its base classes may send.

    ``introduction``, ``training`` and ``evaluation`` are the kinds of replies. A name that ends in "/" stands for all
    names that begin with it. Of all these names, those in ``withheld_when_private`` are not sent with ``dp.enabled``,
    and those in ``only_when_private`` are not sent without.
    """

    introduction: frozenset[str] = _NONE
    training: frozenset[str] = _NONE
    evaluation: frozenset[str] = _NONE
    withheld_when_private: frozenset[str] = _NONE
    only_when_private: frozenset[str] = _NONE

    def __or__(self, other: ReplyFields) -> ReplyFields:
        return ReplyFields(
            self.introduction | other.introduction,
            self.training | other.training,
            self.evaluation | other.evaluation,
            self.withheld_when_private | other.withheld_when_private,
            self.only_when_private | other.only_when_private,
        )

    def allowed(self, kind: Kind, is_private: bool) -> frozenset[str]:
        """Return the names, and the prefixes of names, that a reply of this kind may have."""
        fields_by_kind = {"introduction": self.introduction, "training": self.training, "evaluation": self.evaluation}
        return fields_by_kind[kind] - (self.withheld_when_private if is_private else self.only_when_private)


def declared(kind: type) -> ReplyFields:
    """Return what a class of clients declares, together with what all its base classes declare."""
    fields = ReplyFields()
    for base in kind.__mro__:
        fields |= vars(base).get("declares", ReplyFields())
    return fields


def fields_of(kind: type, system: str) -> ReplyFields:
    """Return which fields the replies of this class of clients may have in a run of the system."""
    measures = own_measures.of_system(system)
    return declared(kind) | ReplyFields(
        training=frozenset(measure.name for measure in measures if measure.told == "training"),
        evaluation=frozenset(measure.name for measure in measures if measure.told == "evaluation"),
        withheld_when_private=frozenset(measure.name for measure in measures if not measure.public),
    )


def check_reply(kind: type, config: Config, reply: Kind, fields: Iterable[str]) -> None:
    """Raise ``ValueError`` for a field that this class of clients does not declare in a ``reply`` of this kind."""
    allowed = fields_of(kind, config.system).allowed(reply, config.dp.enabled)
    if unknown_names := undeclared(fields, allowed):
        raise ValueError(f"field '{unknown_names[0]}' is in a reply, allowed in {reply}: {', '.join(sorted(allowed))}")


def undeclared(names: Iterable[str], allowed: frozenset[str]) -> list[str]:
    """Return those of ``names`` that are not ``allowed``, by themselves or by a prefix."""
    prefixes = tuple(name for name in allowed if name.endswith("/"))
    return [name for name in names if name not in allowed and not name.startswith(prefixes)]
