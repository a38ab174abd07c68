"""Choosing the point from which a stopped run resumes.

It resumes from the latest point from which it ends as if it had never stopped. Nothing is written before. Everything
needed is checked first: the checkpoint, the records up to it, the system's files on the server's disk, and each
client's state, which the client itself checks. Damaged files are reported, and an earlier point is chosen. If no point
is intact, an error is raised, unless the user accepts the loss.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedprune_app.config import Config, ConfigError, check_resumable, is_whole
from fedprune_app.core.named import Values
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import ReceivedReply, message_to, send_and_receive
from fedprune_app.engine.store import ResumePoint, checkpoint_store
from fedprune_app.federation.clients import Roster
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.reader import check_models, check_records, load_run, marks_of

_NOTES = 20
# why a client's state is lost, by client and round
LostStates = Mapping[int, Mapping[int, str]]


@dataclass(frozen=True)
class SavedRun:
    """The server's files of a stopped run: its ``points`` to resume from, latest first, and the ``damaged`` ones."""

    info: Values  # run.json
    points: list[ResumePoint]
    damaged: list[str] = field(default_factory=list)
    is_complete: bool = False  # nothing is left to do or to repair


@dataclass(frozen=True)
class Choice:
    """The point from which a run resumes, which may be its start.

    ``notes`` and ``losses`` are for run.json: events, and permanent losses.
    """

    point: ResumePoint
    notes: list[str]
    losses: list[str]


def find(folder: Path, info: Values, config: Config) -> SavedRun:
    """Search a run folder, whose run.json is ``info``, for points to resume from.

    Raises :class:`ConfigError` if ``config`` is another run's, and if no checkpoint can be read after more than one
    round.
    """
    check_resumable(info["config"], config)
    run_key = str(info["run_key"])
    strategy, checkpoints = SYSTEMS[config.system].strategy, checkpoint_store(folder, run_key)
    points: list[ResumePoint] = []
    damaged: list[str] = []
    for round in reversed(checkpoints.rounds()):
        try:
            meta = checkpoints.read(round).meta
        except ValueError as error:
            damaged.append(str(error))
            continue
        cut = check_records(folder, marks_of(meta.get("records")))
        for point in strategy.resume_points(folder, run_key, round, meta, config):
            points.append(replace(point, lost=(*cut, *point.lost)))
    if not points and info["rounds_completed"] > 1:  # a round is recorded before its checkpoint is written
        raise ConfigError(
            "folder",
            checkpoints.folder,
            "one that has",
            condition=f"when resuming after {info['rounds_completed']} rounds",
            which="has no readable checkpoint",
            hint=damaged[0] if damaged else "",
        )
    if points and points[0].round > config.num_server_rounds:
        raise ConfigError(
            "num-server-rounds", config.num_server_rounds, f"at least {points[0].round}", condition="when resuming"
        )
    if not points:
        points = list(strategy.resume_points(folder, run_key, 0, {"state-rounds": {}}, config))
    ends = is_whole(info, config) and points[0].round == info["rounds_completed"]
    problems = _spoilt_results(folder, info) if ends else []
    is_complete = ends and not (problems or damaged or points[0].lost)
    return SavedRun(info, points, [*damaged, *problems], is_complete)


def _spoilt_results(folder: Path, info: Values) -> list[str]:
    problems = []
    try:
        load_run(folder)
    except ValueError as error:
        problems.append(str(error))
    return problems + check_models(folder, info)


def request_states(
    grid: Grid, roster: Roster, run_key: str, points: list[ResumePoint], deadline_seconds: float
) -> LostStates:
    """Request from every client a check of the versions of its state that any point needs; return the lost ones."""
    versions_by_client = {k: sorted({point.state_rounds.get(k, 0) for point in points} - {0}) for k in roster}

    def questions() -> Iterator[tuple[int, Message]]:
        for client, versions in versions_by_client.items():
            if versions:
                fields = {"round": 0, "run-key": run_key, "partition": client, "states": versions}
                request, node = wire.pack(None, fields), roster[client].node_id
                yield client, message_to(node, request, MessageType.QUERY, 0, deadline_seconds)

    return {
        answer.client: _lost_versions(answer, versions_by_client[answer.client])
        for answer in send_and_receive(grid, questions(), deadline_seconds)
    }


def _lost_versions(answer: ReceivedReply, asked_versions: list[int]) -> dict[int, str]:
    try:
        if answer.content is None:
            raise ValueError(answer.error)
        fields = wire.fields_of(answer.content)
        versions, reasons = fields.get("lost-rounds"), fields.get("lost-reasons")
        if not (isinstance(versions, list) and isinstance(reasons, list)):
            raise ValueError("it does not say what it has")
        return {int(round): wire.one_line(str(reason)) for round, reason in zip(versions, reasons, strict=True)}
    except (TypeError, ValueError, OverflowError) as error:
        return dict.fromkeys(asked_versions, f"its state cannot be checked: {wire.one_line(str(error))}")


def choose(saved_run: SavedRun, lost_states: LostStates, *, accept_loss: bool) -> Choice:
    """Return the latest point without losses.

    If there is none, and with ``accept_loss``, return the latest usable point. Raises :class:`ConfigError` with the
    first loss if there is no such point either; ``accept_loss`` does not help then.
    """
    reasons = list(saved_run.damaged)
    losses = {id(point): _losses(point, lost_states) for point in saved_run.points}
    lossless_point = next((point for point in saved_run.points if point.is_usable and not losses[id(point)]), None)
    usable_point = next((point for point in saved_run.points if point.is_usable), None)
    chosen_point = lossless_point or (usable_point if accept_loss else None)
    if chosen_point is None:
        reasons += [line for point in saved_run.points for line in losses[id(point)]]
        rest_text = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise ConfigError(
            "the run",
            ...,
            "the file from a copy" + (", or accept-loss" if usable_point else ""),
            which="cannot go on to the result that it would have had",
            where=f"{reasons[0]}{rest_text}",
        )
    for point in saved_run.points[: saved_run.points.index(chosen_point)]:
        reasons += [line for line in losses[id(point)] if line not in reasons]
    num_recorded = saved_run.info["rounds_completed"]
    notes = [f"{line}; went on after round {chosen_point.round}" for line in reasons]
    if num_repeated := num_recorded - chosen_point.round:
        prefix = "" if reasons else f"round {num_recorded} left no readable checkpoint: "
        notes.append(f"{prefix}rounds repeated: {num_repeated}")
    lasting = losses[id(chosen_point)]
    if chosen_point.renews:
        state_rounds = {
            p: round for p, round in chosen_point.state_rounds.items() if round not in lost_states.get(p, {})
        }
        chosen_point = replace(chosen_point, state_rounds=state_rounds)
    return Choice(chosen_point, notes[:_NOTES], lasting)


def _losses(point: ResumePoint, lost_states: LostStates) -> list[str]:
    states = [] if point.renews else sorted(point.state_rounds.items())
    return [
        *point.lost,
        *(f"client {p}: {lost_states[p][round]}" for p, round in states if round in lost_states.get(p, {})),
    ]
