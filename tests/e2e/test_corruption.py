"""Damaged run folders: a run that goes on, a report and an export are what they would have been, or name the file."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedprune_app import client_app, server_app
from fedprune_app.config import parse_config
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.exports.find import find_model
from fedprune_app.results.reader import Run, load_run
from tests.conftest import Finished, tampered_app, wrapped_app
from tests.refusing import refuses
from tests.strategies.conftest import TINY

CLIENTS, ROUNDS = 4, 4
MORE = {
    "subfedavg": {"local-epochs": 2, "subfedavg.mask-distance": 0.0},
    "fedavg": {},
    "dispfl": {"dispfl.neighbours": 2, "dispfl.annealing-rounds": 9},
    "fedfomo": {},
    "fedltp": {"fedltp.tickets": 1, "fedltp.ticket-iterations": 10, "steps-per-epoch": 4, "seed": 1},
}
NOT_OURS = (".lock", "progress.json")


def federate(system: str, folder: Path, app: ClientApp = client_app.app, **more: object) -> Finished:
    settings = {**TINY, "local-epochs": 1, "system": system, "num-server-rounds": ROUNDS, **MORE[system], **more}
    config = parse_config({**settings, "out-dir": str(folder)})
    run_in_process(server_app.app, app, CLIENTS, config.to_dict())
    return Finished(folder)


def cut_off(message: Message, context: Context, honest: Callable[..., Message]) -> Message:
    """In the last round nobody is there any more."""
    if message.content["fields"]["round"] == ROUNDS:
        raise ConnectionError("cut off")
    return honest(message, context)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(system)``: the folders of a run of all rounds, and of the same run stopped a round before its end."""
    made = {}

    def of(system: str) -> tuple[Path, Path]:
        if system not in made:
            root = tmp_path_factory.mktemp(system)
            federate(system, root / "whole")
            with pytest.raises(TooFewReplies):
                federate(system, root / "cut", wrapped_app(cut_off))
            made[system] = root / "whole", root / "cut"
        return made[system]

    return of


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, others: list[Path], draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, others: list[Path], draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def zero(path: Path, others: list[Path], draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 8, 512)))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def append(path: Path, others: list[Path], draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.choice((b"\0" * 40, b"garbage\n", b'{"round": 2}\n')))


def delete(path: Path, others: list[Path], draw: random.Random) -> None:
    path.unlink()


def replace(path: Path, others: list[Path], draw: random.Random) -> None:
    """By another round's, or another client's: whole in itself, and an older one under a newer name, say."""
    alike = [other for other in others if other.suffix == path.suffix and other != path]
    if alike:
        path.write_bytes(draw.choice(alike).read_bytes())
    else:
        flip(path, others, draw)


def swap(path: Path, others: list[Path], draw: random.Random) -> None:
    alike = [other for other in others if other.parent == path.parent and other.suffix == path.suffix]
    other = draw.choice(alike)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def cut_lines(path: Path, others: list[Path], draw: random.Random) -> None:
    """Whole lines are missing from the end, or from anywhere, of a file of lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) < 2:
        truncate(path, others, draw)
        return
    del lines[draw.choice((len(lines) - 1, draw.randrange(len(lines)))) :][: draw.choice((1, len(lines)))]
    kept = list(lines)
    kept.pop(draw.randrange(len(kept)))
    path.write_bytes(b"".join(kept))


DAMAGE = (flip, truncate, zero, append, delete, replace, swap, cut_lines)


def damage(folder: Path, draw: random.Random) -> tuple[str, list[Path]]:
    """Damage one file of a run folder, of every kind of file equally often; how, and which files have changed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_OURS)
    files = [path for path in files if path.stat().st_size]
    kinds = sorted({_kind(path, folder) for path in files})
    kind = draw.choice(kinds)
    path = draw.choice([path for path in files if _kind(path, folder) == kind])
    how = draw.choice(DAMAGE)
    before = {each: each.read_bytes() for each in files}
    how(path, files, draw)
    changed = [each for each in files if not each.exists() or each.read_bytes() != before[each]]
    return f"{how.__name__} of {path.relative_to(folder)}", changed


def _kind(path: Path, folder: Path) -> str:
    first = path.relative_to(folder).parts[0]
    return f"{first} {path.suffix}"


# --- what is made of it -----------------------------------------------------------------------------------------------


def timeless(run: Run) -> tuple[object, ...]:
    rows = [{key: value for key, value in row.items() if "seconds" not in key} for row in (*run.rounds, *run.clients)]
    return rows, run.info["final_sha256"], run.masks and run.masks.distance.tolist()


def resumed(folder: Path, system: str) -> object:
    federate(system, folder, **{"resume-from": str(folder)})
    return timeless(load_run(folder))


def outcome(use: Callable[[], object], expected: object, changed: list[Path], folder: Path) -> str:
    """``same``, ``named`` (refused with a line that names a damaged file), or ``marked``; else this fails."""
    try:
        if use() == expected:
            return "same"
    except ValueError as error:
        text = str(error)
        assert "\n" not in text
        assert any(path.name in text or str(path.parent) in text for path in changed), text
        return "named"
    info = Finished(folder).info
    marks = " ".join([*info.get("notes", []), *info.get("losses", [])])
    assert any(path.name in marks for path in changed), "another result in silence"
    return "marked"


def try_out(runs, system: str, seed: int, root: Path, uses: tuple[str, ...]) -> list[tuple[str, str]]:
    whole, cut = runs(system)
    results = timeless(load_run(whole))
    clients = sorted(map(int, load_run(whole).info["state_rounds"]))[:2]

    def exported(folder: Path) -> list[str]:
        return [find_model(folder, client).payload.digest() for client in clients]

    found = []
    for use in uses:
        draw = random.Random(f"{system} {seed}")
        folder = root / f"{system}-{seed}-{use}"
        shutil.copytree(cut if use == "resume" else whole, folder)
        how, changed = damage(folder, draw)
        calls: dict[str, Callable[[], object]] = {
            "resume": lambda folder=folder: resumed(folder, system),
            "finished": lambda folder=folder: resumed(folder, system),
            "report": lambda folder=folder: timeless(load_run(folder)),
            "export": lambda folder=folder: exported(folder),
        }
        expected = exported(whole) if use == "export" else results
        try:
            found.append((use, outcome(calls[use], expected, changed, folder)))
        except BaseException as error:
            raise AssertionError(f"{use} after {how} (seed {seed}): {type(error).__name__}: {error}") from error
        shutil.rmtree(folder)
    return found


@pytest.mark.full
@pytest.mark.parametrize("use", ["resume", "report", "export"])
def test_no_damage_to_a_run_folder_passes_in_silence(runs, tmp_path, use):
    """A sample of what the slow test does."""
    for seed in range(6 if use == "resume" else 17):
        try_out(runs, "dispfl", seed, tmp_path, (use,))


@pytest.mark.slow
@pytest.mark.parametrize("system", MORE)
def test_no_damage_of_five_hundred_passes_in_silence(runs, tmp_path, system):
    """A hundred damaged folders of each of five systems, each resumed, reported and exported."""
    counts = Counter(
        outcome
        for seed in range(100)
        for outcome in try_out(runs, system, seed, tmp_path, ("resume", "finished", "report", "export"))
    )
    print(system, dict(sorted(counts.items())))
    assert not any(kind == "marked" for _, kind in counts)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, clients: int, match: str, app: ClientApp = client_app.app, **more: object) -> None:
    """The server meets the clients, refuses to go on, and leaves the completed run as it was."""
    before, info = contents(folder), Finished(folder).info
    assert info["status"] == "completed"
    again = {"num-server-rounds": 9, "resume-from": str(folder), "out-dir": str(folder)}
    config = parse_config({**info["config"], **again, **more})
    with pytest.raises((ValueError, TooFewReplies), match=match):
        run_in_process(server_app.app, app, clients, config.to_dict())
    assert contents(folder) == before


def test_resuming_with_more_clients_changes_nothing_on_disk(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs("dispfl")[0], folder)
    refused(folder, 6, r"4 clients, and now 6")
    refused(folder, 3, r"3 of the 4 clients", **{"startup-seconds": 0.1})
    assert find_model(folder, sorted(map(int, Finished(folder).info["state_rounds"]))[0]), "still exportable"


def test_resuming_without_the_data_changes_nothing_on_disk(runs, tmp_path):
    def away(request: Message, reply: Message, partition: int) -> Message:
        raise FileNotFoundError("the disk with the data is not there")

    folder = tmp_path / "run"
    shutil.copytree(runs("dispfl")[0], folder)
    refused(folder, CLIENTS, "no client could start: .*the disk with the data", app=tampered_app(query=away))


def test_what_is_lost_is_said_before_the_run_goes_on_and_in_run_json(runs, tmp_path):
    whole, cut = runs("subfedavg")
    folder = tmp_path / "run"
    shutil.copytree(cut, folder)
    partition = sorted(Finished(whole).info["state_rounds"])[0]
    for path in (folder / "clients" / f"{int(partition):05d}").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = contents(folder)
    with refuses("the run", where=f"client {partition}: state file", allowed="accept-loss"):
        resumed(folder, "subfedavg")
    assert contents(folder) == before
    info = federate("subfedavg", folder, **{"resume-from": str(folder), "accept-loss": True}).info
    assert info["status"] == "completed"
    assert info["losses"][0].startswith(f"client {partition}: state file")
    assert "losses" not in Finished(whole).info


def test_a_state_that_is_damaged_while_a_run_goes_on_marks_the_run(tmp_path):
    """Nobody resumed it, so nobody was asked: the client goes on from what it has, and run.json says so."""

    def spoil(message, context, honest):
        fields, partition = message.content["fields"], context.node_config["partition-id"]
        if (fields["round"], partition) == (2, 1):
            (path,) = (tmp_path / "run" / "clients" / "00001").glob("*.safetensors")
            path.write_bytes(path.read_bytes()[:-1])
        return honest(message, context)

    settings = {**TINY, "system": "subfedavg", "num-server-rounds": 2, "fraction-train": 1.0, "local-epochs": 1}
    config = parse_config({**settings, "out-dir": str(tmp_path / "run")})
    run_in_process(server_app.app, wrapped_app(spoil), CLIENTS, config.to_dict())
    assert Finished(tmp_path / "run").info["losses"] == ["client 1: the state of round 1 is lost, began anew"]
