"""What is recorded of a round and its clients, beside the numbers that ``results/declarations.py`` declares."""

import reprlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedprune_app.engine import wire
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.round import Round, RoundLog
from fedprune_app.results.measures import Measures, Reply
from fedprune_app.results.rows import round_columns

_REASONS_KEPT = 20  # per round, in the record


def of_training(round: Round, budgets: Budgets, declared: Measures) -> dict[str, Any]:
    """Return the columns of a round's training, over the clients that trained; ``declared`` are all numbers."""
    rows = [row for _, row in sorted(round.log.clients.items())]
    return {**round_columns(rows, Reply.TRAINING, declared=declared), **budgets.columns()}


def of_exchange(round: Round) -> dict[str, Any]:
    return {
        "replies": round.log.replies,
        "failures": len(round.log.failures),
        "stragglers": round.log.stragglers,
        "failure_reasons": round.log.failures[:_REASONS_KEPT],
        "bytes_up": round.log.bytes_up,
        "bytes_down": round.log.bytes_down,
        "dropped": len(round.dropped),
    }


def dense_bytes(model: Mapping[str, Tensor]) -> float:
    """Return the bytes of all parameters of a model at 32 bits each."""
    return 4.0 * sum(tensor.numel() for tensor in model.values() if tensor.is_floating_point())


def star_traffic(log: RoundLog, paper_bytes: tuple[float, float]) -> dict[str, Any]:
    """Return who carried how much in a star, whose server is the busiest node; ``paper_bytes`` are (down, up)."""
    paper_down, paper_up = paper_bytes
    node_bytes = [max(row["bytes_up"], row["bytes_down"]) for row in log.clients.values()]
    return {
        "busiest_node_bytes": max(log.bytes_up, log.bytes_down),
        "node_bytes_mean": sum(node_bytes) / max(len(node_bytes), 1),
        "paper_bytes_down": paper_down,
        "paper_bytes_up": paper_up,
        "paper_busiest_bytes": max(paper_down, paper_up),
    }


def digest_in(fields: wire.Fields) -> str:
    """Return the digest of the client's model. Raises ``ValueError`` for what is none."""
    digest = fields.get("digest")
    if not (isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
        raise ValueError(f"field 'digest' is {reprlib.repr(digest)}, allowed: 64 hexadecimal digits")
    return digest
