"""The loop over a run's rounds on the server, from the first one or from the point of resumption."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedprune_app.config import has_effect
from fedprune_app.engine.exchange import TooFewReplies, require
from fedprune_app.engine.store import State, make_states_durable, state_folder
from fedprune_app.federation.evaluation import evaluate, last_phase, newcomers
from fedprune_app.federation.round import Channel, Round
from fedprune_app.results.texts import summary_line

if TYPE_CHECKING:  # only the hooks of the base class: nothing here knows a system
    from strategies.base import FederatedStrategy

log = logging.getLogger("flwr.fedprune")
NOTES_KEPT = REASONS_KEPT = 20  # per round, in the record


def run(strategy: FederatedStrategy, grid: Grid, num_rounds: int, rounds_completed: int = 0) -> None:
    """Run the rounds after ``rounds_completed`` up to ``num_rounds``; record each and save a checkpoint.

    Raises :class:`TooFewReplies` if a round has fewer than ``min-replies`` valid replies.
    """
    context, participation = strategy.context, strategy.participation
    config = context.config
    if not rounds_completed:
        context.recorder.note(strategy.warnings())
        strategy.prepare()
    channel = Channel(grid, context, strategy.budgets, strategy.state_rounds, strategy.declarations)
    last_round: Round | None = None
    for number in range(rounds_completed + 1, num_rounds + 1):
        if not participation.eligible(number):
            log.info("too few clients can pay for a round: %d rounds of %d", number - 1, num_rounds)
            break
        start = time.monotonic()

        # 1. Sample the participants.
        changes = participation.look_for(grid.get_node_ids())
        last_round = round = replace(participation.round(number), channel=channel)
        for line in changes:
            round.log.add_note(line)
        strategy.begin(round)

        # 2. and 3. Send to them, and receive their replies as they arrive.
        strategy.train(round)
        num_good = round.log.replies + len(round.log.declined)
        require(num_good, config.min_replies, f"round {number}", round.log.failures)

        # 4. Close the round: the new model.
        if round.log.replies:
            strategy.end(round)
        columns = {**strategy.traffic(round), **strategy.metrics.training_columns(round), **strategy.budgets.columns()}
        columns = {**exchange_columns(round), **columns, **round.log.columns}
        row: dict[str, Any] = {"round": number, "seconds": time.monotonic() - start, **columns}

        # 5. Have clients evaluate.
        was_last = participation.is_last(number)
        if round.evaluates or was_last:
            row |= _evaluate(strategy, round)
            if participation.is_last(number) and not was_last and config.evaluate_clients:
                row |= _evaluate(strategy, round)  # it has spent the last budgets: now all clients are asked
        failure = row.pop("failure", None)
        state = strategy.state()  # before local phases, of which no longer run knows
        if participation.is_last(number):
            if participation.holdouts:
                row |= newcomers(strategy, round)
            if has_effect("last-phase", config) and config.last_phase:
                row |= last_phase(strategy, round)

        # 6. Record, 7. save a checkpoint. If the run dies between them, it drops the record and repeats the round.
        _record(strategy, round, row)
        _make_states_durable(strategy, number)
        marks = context.recorder.marks  # ends of the records that belong to the checkpoint
        digests = {str(k): digest for k, digest in strategy.digests.items()}
        # the budgets are those after local phases, which spend
        meta = {**state.meta, **strategy.budgets.state(), "records": marks, "digests": digests}
        context.checkpoints.save(number, State(state.tensors, meta))
        if failure is not None:  # a resumed run does not repeat the round: its privacy is charged already
            raise failure
        log.info("round %d/%d: %s", number, num_rounds, summary_line(row, strategy.declarations))

    _require_somebody(strategy, last_round)
    for client in sorted(strategy.clients.keys() - strategy.digests.keys()):
        context.mark_lost(client, "final_sha256 is without its final model, of which it did not tell")
    strategy.finish()


def _evaluate(strategy: FederatedStrategy, round: Round) -> dict[str, Any]:
    start = time.monotonic()
    return {**evaluate(strategy, round), "evaluation_seconds": time.monotonic() - start}


def exchange_columns(round: Round) -> dict[str, Any]:
    return {
        "replies": round.log.replies,
        "failures": len(round.log.failures),
        "stragglers": round.log.stragglers,
        "failure_reasons": round.log.failures[:REASONS_KEPT],
        "bytes_up": round.log.bytes_up,
        "bytes_down": round.log.bytes_down,
        "dropped": len(round.dropped),
    }


def _record(strategy: FederatedStrategy, round: Round, row: Mapping[str, Any]) -> None:
    recorder = strategy.context.recorder
    if (noise := strategy.budgets.noise()) and noise != recorder.info.get("noise"):
        recorder.annotate(noise=noise)
    recorder.clients(
        {"round": round.number, "partition": client, **columns} for client, columns in sorted(round.log.clients.items())
    )
    recorder.round({**row, "notes": round.log.notes[:NOTES_KEPT]})


def _make_states_durable(strategy: FederatedStrategy, round: int) -> None:
    """Flush this machine's client states of the round to disk, before a checkpoint depends on them.

    Simulated clients leave this to the server; nodes of a deployment do it themselves.
    """
    context = strategy.context
    states = state_folder(context.recorder.folder, context.config.state_dir, context.run_key)
    clients = [client for client, state_round in strategy.state_rounds.items() if state_round == round]
    make_states_durable(states, clients, context.run_key, round)


def _require_somebody(strategy: FederatedStrategy, last_round: Round | None) -> None:
    """Raise :class:`TooFewReplies`, with the first reason, if no client of a private run ever trained."""
    if strategy.context.config.dp.enabled and not strategy.state_rounds:
        reasons = last_round.log.declined.values() if last_round else ()
        first = next(iter(reasons), "none was asked")
        raise TooFewReplies(f"no client could afford to train; first reason: {first}")
