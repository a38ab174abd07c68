"""Names of what a run records: shares in [0, 1], bytes, seconds and counts; null where not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUND_FIELDS = (
    "round",
    "seconds",
    "replies",  # clients that trained and whose reply was used
    "failures",
    "stragglers",
    "dropped",  # sampled clients that dropped out of the round
    "bytes_up",  # training messages, as serialised
    "bytes_down",
    "evaluation_bytes_up",
    "evaluation_bytes_down",
    "peer_bytes",  # what all clients sent one another; null in a star
    "busiest_node_bytes",  # heavier direction of the busiest node: a star's server, else a client
    "node_bytes_mean",  # heavier direction of a client, mean over those that took part
    "paper_bytes_up",  # what the paper's own formula charges for the round
    "paper_bytes_down",
    "paper_busiest_bytes",  # what it charges the busiest node, one direction
    "accuracy_personal_mean",
    "accuracy_personal_std",
    "accuracy_personal_worst_decile",
    "accuracy_received_mean",
    "accuracy_validation_mean",
    "accuracy_global",
    "perplexity_personal_mean",  # language models: on the run's first test text, others are in perplexity_by_text
    "perplexity_personal_std",
    "personal_models",  # over how many clients these are: those whose own model has every layer pruned
    "perplexity_global",
    "loss_mean",
    "density_mean",
    "channel_density_mean",  # share of convolution channels left; null where none are removed
    "inference_flops_mean",  # one example's forward pass through the personal model, each layer times its density
    "density_global",  # of the global model's prunable weights, where it is pruned
    "density_before_expansion",  # the same before the server expanded its masks
    "density_by_layer",  # name -> mean density
    "flops",  # sum over the clients that trained
    "epsilon_max",  # over all clients, what each has spent of its privacy so far; null without dp.enabled
    "epsilon_second_max",  # the same at dp.second-delta
    "epsilon_paper_max",  # Fed-LTP's printed formula, which is no guarantee
    "validation_score",  # Fed-LTP: (noised) share of correct predictions that the round is judged by
    "validations",  # clients that told a score
    "validation_bytes_up",  # within bytes_up
    "validation_bytes_down",
    "best_round",  # by validation_score, so far: the round whose model is evaluated, and final
    "budgets_spent",  # clients that take part no more, because their privacy budget would not bear it
)
CLIENT_FIELDS = (
    "round",
    "partition",
    "num_examples",
    "accuracy_personal",
    "accuracy_received",
    "accuracy_validation",
    "perplexity_personal",
    "pruned_layers",  # of its own model
    "density",
    "channel_density",
    "inference_flops",
    "bytes_up",
    "bytes_down",
    "epsilon",
    "epsilon_second",
    "epsilon_paper",
    "seconds",
)
OWN_TEXT = "own"
"""In place of a test text's name: every client has measured its own model on its own text."""
HEADLINES = ("accuracy_personal_mean", "accuracy_global", "perplexity_global")
STATUSES = ("running", "completed", "failed", "interrupted")


def windows_of_text(text: str, found: Mapping[str, Any]) -> str:
    """What a perplexity was measured on, windows by length: ``ptb: 64 × 128 tokens``, ``ptb: first 64 of 900 × ...``.

    Of clients' own texts, the windows of all clients.
    """
    windows, there_are = found.get("windows"), found.get("windows_in_text")
    some = f"first {windows} of {there_are}" if windows and there_are and there_are > windows else windows
    return f"{'own texts' if text == OWN_TEXT else text}: {some} × {found.get('window')} tokens"


def own_models(round: int) -> str:
    """What the mean over the clients' own language models is after a round.

    The papers' standalone baseline knows nothing of other clients. From the second round on a client prunes what the
    server made of all clients' layers.
    """
    return "standalone" if round == 1 else "clients' own"


def tested_on(row: Mapping[str, Any]) -> str:
    """The same of the text that a round's ``perplexity_global`` is about, the first; empty where it has none."""
    return next((windows_of_text(text, found) for text, found in (row.get("perplexity_by_text") or {}).items()), "")
