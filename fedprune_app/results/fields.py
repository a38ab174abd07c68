"""Names of what a run records: shares in [0, 1], bytes, seconds and counts; null where not measured."""

from __future__ import annotations

ROUND_FIELDS = (
    "round",
    "seconds",
    "replies",
    "failures",
    "stragglers",
    "bytes_up",  # training messages, as serialised
    "bytes_down",
    "evaluation_bytes_up",
    "evaluation_bytes_down",
    "busiest_node_bytes",
    "paper_bytes_up",  # what the paper's own formula charges for the round
    "paper_bytes_down",
    "accuracy_personal_mean",
    "accuracy_personal_std",
    "accuracy_personal_worst_decile",
    "accuracy_received_mean",
    "accuracy_validation_mean",
    "accuracy_global",
    "loss_mean",
    "density_mean",
    "density_by_layer",  # name -> mean density
    "flops",
    "epsilon_max",
)
CLIENT_FIELDS = (
    "round",
    "partition",
    "num_examples",
    "accuracy_personal",
    "accuracy_received",
    "accuracy_validation",
    "density",
    "bytes_up",
    "bytes_down",
    "epsilon",
    "seconds",
)
HEADLINES = ("accuracy_personal_mean", "accuracy_global")
STATUSES = ("running", "completed", "failed", "interrupted")
