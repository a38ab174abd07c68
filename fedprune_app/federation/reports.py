"""What clients report of their training and evaluation: checked, put into rows, and brought together over clients."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from fedprune_app.core import metrics
from fedprune_app.engine import wire
from fedprune_app.federation.budgets import Budgets
from fedprune_app.federation.round import Round, RoundLog

_REASONS_KEPT = 20  # per round, in the record


def training_row(fields: wire.Fields, *, private: bool) -> dict[str, Any]:
    """Check what a client says of its training; return the columns of its row."""
    row = {
        "loss": None if private else wire.number(fields, "loss"),
        "density": wire.number(fields, "density", 0, 1),
        "seconds": wire.number(fields, "seconds", 0),
        "flops": wire.number(fields, "flops", 0),
    }
    if "accuracy-received" in fields:  # where it is tested before training, not by an evaluation message
        row["accuracy_received"] = wire.number(fields, "accuracy-received", 0, 1)
    return row


def of_training(round: Round, budgets: Budgets) -> dict[str, Any]:
    """Return the columns of a round's training, over the clients that trained."""
    trained = [row for _, row in sorted(round.log.clients.items()) if "loss" in row]
    private = budgets.enabled
    return {
        "loss_mean": None if private else sum(row["loss"] for row in trained) / len(trained),
        **budgets.columns(),
        "flops": sum(row["flops"] for row in trained),
    }


def of_exchange(round: Round) -> dict[str, Any]:
    """Return the columns of a round's exchange: replies, failures, bytes."""
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
    heavier = [max(row["bytes_up"], row["bytes_down"]) for row in log.clients.values()]
    return {
        "busiest_node_bytes": max(log.bytes_up, log.bytes_down),
        "node_bytes_mean": sum(heavier) / max(len(heavier), 1),
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


def evaluation_row(fields: wire.Fields, prunable: Collection[str]) -> dict[str, Any]:
    """Check what a client says of its evaluation; return the columns of its row."""

    def share(name: str) -> float | None:
        return wire.number(fields, name, 0, 1) if name in fields else None

    layers = {
        name: wire.number(fields, f"density/{name}", 0, 1) for name in sorted(prunable) if f"density/{name}" in fields
    }
    return {
        "accuracy_personal": share("accuracy-personal"),
        "accuracy_received": share("accuracy-received"),
        "accuracy_global": share("accuracy-global"),
        "accuracy_validation": share("accuracy-validation"),
        "density": wire.number(fields, "density", 0, 1),
        "channel_density": share("channel-density"),
        "inference_flops": wire.number(fields, "inference-flops", 0),
        "layers": layers,
    }


def of_evaluation(round: Round, rows: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of an evaluation: mean, spread and worst decile over the clients' rows, which change."""
    layers: dict[str, list[float]] = {}
    for row in rows.values():
        for name, density in row.pop("layers").items():
            layers.setdefault(name, []).append(density)
    for client, row in rows.items():
        if row["accuracy_received"] is None:
            row["accuracy_received"] = round.log.clients.get(client, {}).get("accuracy_received")

    def over_clients(name: str) -> metrics.Summary:
        return metrics.summary([row[name] for row in rows.values() if row[name] is not None])

    personal = over_clients("accuracy_personal")
    return {
        "accuracy_personal_mean": personal.mean,
        "accuracy_personal_std": personal.std,
        "accuracy_personal_worst_decile": personal.worst_decile,
        "accuracy_received_mean": over_clients("accuracy_received").mean,
        "accuracy_global": over_clients("accuracy_global").mean,
        "accuracy_validation_mean": over_clients("accuracy_validation").mean,
        "density_mean": over_clients("density").mean,
        "channel_density_mean": over_clients("channel_density").mean,
        "inference_flops_mean": over_clients("inference_flops").mean,
        "density_by_layer": {name: sum(values) / len(values) for name, values in layers.items()},
    }
