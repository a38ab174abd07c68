"""What a node's operator asks of every run wins over the run, and a run that asks for less is declined."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from clients import images
from fedprune_app import cli, client_app
from fedprune_app.config import POLICY_KEYS, parse_config
from fedprune_app.data import splits
from fedprune_app.engine import simulated_grid, wire
from fedprune_app.engine.exchange import TooFewReplies, message_to
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.preflight import node as node_module
from fedprune_app.preflight.node import node_settings, read_policy
from fedprune_app.privacy.ledger import Ledger
from tests.e2e.test_own_data import IMAGES, grid_of, image_folder
from tests.examples import full
from tests.models.tiny_llm import tiny_byte_model
from tests.refusing import refuses

KEY = "0123456789abcdef"
PRIVATE = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.delta": 1e-3}
SILENT = PRIVATE | {"dp.accuracies": "none"}  # no counts take what is left of a budget
QUICK = {"system": "fedavg", "num_server_rounds": 1, "local_epochs": 1, "fraction_train": 1.0}


@pytest.fixture
def nodes(federate, monkeypatch):
    """``nodes(node_configs, **settings)``: a finished run of nodes with these node-configs."""

    def run(node_configs, name="run", **settings):
        monkeypatch.setattr(simulated_grid, "InProcessGrid", grid_of(node_configs, range(1, len(node_configs) + 1)))
        return federate(name, len(node_configs), **{**QUICK, **settings})

    return run


def dealt(*more):
    """Node-configs of nodes that share the digits, each with more keys."""
    return [{"partition-id": k, "num-partitions": len(more), **each} for k, each in enumerate(more)]


# --- what is declined -------------------------------------------------------------------------------------------------

DECLINED = [
    ({"require-dp": True}, {}, "dp.enabled is false, allowed by its require-dp"),
    ({"epsilon-budget": 3.0, "ledger-dir": "/l"}, {}, "dp.enabled is false, allowed by its epsilon-budget"),
    ({"min-noise-multiplier": 1.0}, {}, "dp.enabled is false, allowed by its min-noise-multiplier"),
    (
        {"min-noise-multiplier": 1.1},
        PRIVATE,
        "dp.noise-multiplier is 1.0, allowed by its min-noise-multiplier",
    ),
    (
        {"max-clip-norm": 2.0},
        {**PRIVATE, "dp.clip-norm": 10.0},
        "dp.clip-norm is 10.0, allowed by its max-clip-norm",
    ),
    ({"dp-unit": "group"}, {}, "dp.enabled is false, allowed by its dp-unit"),
    ({"dp-unit": "group"}, PRIVATE, "dp.unit is 'example', allowed by its dp-unit"),
    (
        {"dp-unit": "group", "group-column": "patient"},
        {**PRIVATE, "dp.unit": "group", "dataset": "table", "group-column": "visit"},
        "group-column is 'visit', allowed by its group-column: patient",
    ),
    (
        {"dp-unit": "group"},
        {**PRIVATE, "dp.unit": "group", "dataset": "table", "group-column": "visit"},
        "group-column is 'visit', allowed by its group-column: none",
    ),
    (
        {"allowed-systems": "dispfl ditto"},
        {},
        "system is 'fedavg', allowed by its allowed-systems",
    ),
]


@pytest.mark.parametrize(("policy", "run", "said"), DECLINED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("kind", [MessageType.QUERY, MessageType.TRAIN, MessageType.EVALUATE])
@pytest.mark.parametrize("from_file", [False, True], ids=["node-config", "policy-file"])
def test_a_run_that_asks_for_less_is_declined_with_every_message_before_data_is_read(
    tmp_path, monkeypatch, policy, run, said, kind, from_file
):
    """Whichever message a server sends first."""

    def read(*_):
        raise AssertionError("data was read")

    monkeypatch.setattr(images, "dataset_of", read)
    monkeypatch.setattr(images, "client_data", read)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    config = parse_config({**IMAGES_HERE, "system": "fedavg", "out-dir": str(tmp_path / "run"), **run})
    grid = InProcessGrid(client_app.app, 1, config.to_dict())
    ((node, context),) = grid._contexts.items()
    if from_file:
        (tmp_path / "policy.toml").write_text("".join(f"{k} = {toml(v)}\n" for k, v in policy.items()))
        policy = {"policy-file": str(tmp_path / "policy.toml")}
    context.node_config = {"data-dir": str(tmp_path / "nowhere"), "state-dir": str(tmp_path / "state"), **policy}
    request = wire.pack(None, {"round": 1, "run-key": KEY, "partition": 0})
    (reply,) = grid.send_and_receive([message_to(node, request, kind, 1, 30.0)])
    assert reply.error.reason.startswith(f"PolicyError: the node declines the run: {said}")
    assert not (tmp_path / "state").exists()


IMAGES_HERE = {key.replace("_", "-"): value for key, value in IMAGES.items()}


def toml(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_a_run_that_asks_for_enough_is_taken_part_in():
    policy = {"require-dp": True, "min-noise-multiplier": 1.0, "max-clip-norm": 1.0, "allowed-systems": "ditto fedavg"}
    config, found = node_settings({**PRIVATE, "system": "fedavg"}, {"partition-id": 0, "num-partitions": 2, **policy})
    assert config.system == "fedavg"
    assert found.allowed_systems.split() == ["ditto", "fedavg"]


def test_who_declines_is_named_in_the_record_and_the_others_go_on(nodes):
    run = nodes(dealt({"require-dp": True}, {}, {"allowed-systems": "dispfl"}))
    assert run.info["status"] == "completed"
    assert [row["partition"] for row in run.info["partition"]] == [1]
    first, third = sorted(run.info["clients_left_out"])
    assert first.startswith("node 1: PolicyError: the node declines the run: dp.enabled is false")
    assert third.startswith("node 3: PolicyError: the node declines the run: system is 'fedavg'")


@pytest.mark.full
def test_the_noise_that_a_target_chooses_is_held_to_the_least_noise_too(nodes):
    target = {**PRIVATE, "dp.noise-multiplier": 0.0, "dp.target-epsilon": 50.0}
    run = nodes(dealt({"min-noise-multiplier": 0.9}, {}), **target)
    (left_out,) = run.info["clients_left_out"]
    assert re.search(r"the noise multiplier found for dp\.target-epsilon is 0\.\d+, .*min-noise-multiplier", left_out)
    assert [row["partition"] for row in run.info["partition"]] == [1]


SHARED = {
    "system": "fedspallm",
    "dataset": "stdlib",
    "fedspallm.merge": "hessians",
    "num-server-rounds": 1,
    "secure-sums": True,
    "secure-sums-threshold": 5,
    **PRIVATE,
    "dp.noise-shared-by": 4,
}


def test_a_node_relies_on_the_noise_of_others_only_where_its_operator_says_so_and_lists_them(tmp_path, monkeypatch):
    node = {"partition-id": 0, "num-partitions": 6}
    willing = {**node, "max-noise-shared-by": 4, "trusted-keys": str(tmp_path / "keys")}
    monkeypatch.setattr(node_module, "is_simulated", lambda: True)
    assert node_settings(SHARED, node)[0].dp.noise_shared_by == 4
    monkeypatch.setattr(node_module, "is_simulated", lambda: False)
    assert node_settings(SHARED, willing)[0].dp.noise_shared_by == 4
    for changed, most in (("max-noise-shared-by", 1), ("trusted-keys", 1)):
        unwilling = {key: value for key, value in willing.items() if key != changed}
        with refuses("dp.noise-shared-by", 4, allowed=f"at most {most}"):
            node_settings(SHARED, unwilling)
    with refuses("dp.noise-shared-by", 4, allowed="at most 3", condition="by its max-noise-shared-by and trusted-keys"):
        node_settings(SHARED, {**willing, "max-noise-shared-by": 3})


def test_the_least_noise_of_a_node_is_what_it_adds_itself(monkeypatch):
    monkeypatch.setattr(node_module, "is_simulated", lambda: True)
    node = {"partition-id": 0, "num-partitions": 6, "min-noise-multiplier": 0.5}
    assert node_settings(SHARED, node)[0].dp.noise_multiplier == 1.0
    with refuses("the own part of dp.noise-multiplier", 0.5, allowed="at least 0.6"):
        node_settings(SHARED, {**node, "min-noise-multiplier": 0.6})


# --- what the node says in the run's place ----------------------------------------------------------------------------


@pytest.mark.full
def test_the_budget_of_the_node_holds_at_its_own_delta_whatever_the_run_says(nodes, tmp_path):
    """At the run's delta of 0.1 the run's own budget would bear all rounds, and at the node's it bears one."""
    lax = {**PRIVATE, "dp.delta": 0.1, "dp.epsilon-budget": 1000.0}
    nodes(dealt({"ledger-dir": str(tmp_path / "one-round")}, {}), "first", **lax)
    (path,) = (tmp_path / "one-round").iterdir()
    budget = Ledger(path).epsilon(1e-5) * 1.01
    place = {"epsilon-budget": budget, "ledger-dir": str(tmp_path / "ledgers")}
    run = nodes(dealt(place, {}), **lax, num_server_rounds=3)
    asked = [{row["partition"] for row in run.clients if row["round"] == round and row["bytes_up"]} for round in (1, 3)]
    assert asked == [{0, 1}, {1}]
    (path,) = (tmp_path / "ledgers").iterdir()
    assert 0 < Ledger(path).epsilon(1e-5) <= budget
    assert Ledger(run.folder / "clients" / "00001" / "ledger.jsonl").epsilon(1e-5) > budget
    assert run.rounds[-1]["budgets_spent"] == 1


def test_the_smaller_budget_of_run_and_node_holds(nodes, tmp_path):
    small = {**PRIVATE, "dp.delta": 1e-5, "dp.epsilon-budget": 0.5}
    with pytest.raises(TooFewReplies, match=r"the privacy budget is 0\.5 at delta 1e-05, 0 of it are spent"):
        nodes(dealt({"epsilon-budget": 6.0, "ledger-dir": str(tmp_path / "ledgers")}), **small)


@pytest.mark.parametrize("own", [{}, full({"ledger-dir": "ledgers"})], ids=["beside the state", "where the node says"])
def test_no_run_begins_a_fresh_ledger_on_a_node_of_own_data(nodes, tmp_path, own):
    """Each run has another run-key, gives the node another number and names another dp.ledger-dir."""
    mine, other = image_folder(tmp_path / "mine", 0), image_folder(tmp_path / "other", 1)
    own = {key: str(tmp_path / value) for key, value in own.items()}
    place = {"data-dir": str(mine), "state-dir": str(tmp_path / "state"), **own}
    elsewhere = {"data-dir": str(other), "state-dir": str(tmp_path / "elsewhere")}
    settings = {**IMAGES, **SILENT}
    nodes([place, elsewhere], "first", **settings, **{"dp.ledger-dir": str(tmp_path / "one")})
    (path,) = Path(own.get("ledger-dir", tmp_path / "state" / "ledgers")).glob("*.jsonl")
    spent, charges = Ledger(path).epsilon(1e-5), len(Ledger(path))
    assert charges
    place["epsilon-budget"] = spent * 1.01
    run = nodes([elsewhere, place], "again", **settings, **{"dp.ledger-dir": str(tmp_path / "two")})
    assert len(Ledger(path)) == charges
    (note,) = run.rounds[0]["notes"]
    assert note.startswith(f"client 1: the privacy budget is {spent * 1.01:g} at delta 1e-05, ")
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "two").exists()


SIZES = [{"image_size": 0}, {"image_size": 16}, {"image_size": 8, "image_fit": "stretch"}, {"image_size": 17}]
COLUMNS = [{}, {"owner_column": "b"}, {"label_column": "c"}, {"owner_column": "c"}]


@pytest.mark.parametrize(("dataset", "runs"), [("image-folder", SIZES), full("table", COLUMNS)])
def test_no_way_to_read_the_data_begins_a_fresh_ledger_on_a_node_of_own_data(nodes, tmp_path, dataset, runs):
    """What becomes of a file, a run says: its size, or which columns are features."""
    mine = image_folder(tmp_path / "mine", 0)
    if dataset == "table":
        draw = np.random.default_rng(0)
        columns = {name: draw.normal(size=60) for name in "ab"} | {
            name: draw.integers(0, 2, 60) for name in ("c", "label")
        }
        pd.DataFrame(columns).to_csv(mine / "train.csv", index=False)
    place = {"data-dir": str(mine), "state-dir": str(tmp_path / "state"), "allowed-label-columns": "label, c"}
    settings = {**IMAGES, **SILENT, "dataset": dataset, "test_split": "holdout", "dp.noise-multiplier": 0.7}
    if dataset == "table":
        settings["model"] = "mlp-small"
    spent = []
    for number, run in enumerate(runs):
        nodes([place], f"run{number}", **settings, **run)
        (path,) = (tmp_path / "state" / "ledgers").glob("*.jsonl")
        spent.append(Ledger(path).epsilon(1e-5))
    assert spent == sorted(set(spent))  # each run adds to what the runs before it cost


@pytest.mark.full
def test_parts_of_a_nodes_own_images_are_drawn_by_a_secret_of_the_node(nodes, tmp_path, monkeypatch):
    """A server knows its seed. If the seed drew parts, numbers of many runs would say which images there are."""
    place = {"data-dir": str(image_folder(tmp_path / "mine", 0, per_class=40)), "state-dir": str(tmp_path / "state")}
    secret = tmp_path / "state" / "ledgers" / "split.secret"

    def num_examples(seed):
        (row,) = nodes([place], f"run{len(list(tmp_path.iterdir()))}", **IMAGES, **SILENT, seed=seed).clients
        return row["num_examples"]

    assert len({num_examples(seed) for seed in range(3)}) == 1
    assert secret.stat().st_mode & 0o777 == 0o600
    taught, labels_of = [], splits._split_indices

    def noting(*arguments):
        taught.append(labels_of(*arguments)["train"].tolist())
        return labels_of(*arguments)

    monkeypatch.setattr(splits, "_split_indices", noting)
    told, parts = set(), set()
    for digit in "012":
        secret.write_text(digit * 64)
        taught.clear()
        told |= {num_examples(0), num_examples(1)}
        parts |= (trained := {*map(tuple, taught)})
        assert len(trained) == 1
    assert (len(told), len(parts)) == (1, 3)
    secret.write_text("short")
    with pytest.raises(TooFewReplies, match="the node cannot do this with data of its own"):
        num_examples(0)


NODE_RUN = {"system": "fedavg", "model": "mlp4", "dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.clip-norm": 1.0}


@pytest.fixture
def introduced():
    """``introduced(folder, state, policy, **run)``: what a node of own data says first, bounded by an ε of 0.01.

    Or the error that leaves it.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def introduce(folder, state, policy=None, **run):
        node = {"data-dir": str(folder), "state-dir": str(state), "require-dp": True, "epsilon-budget": 0.01}
        node |= policy or {}
        context = Context(1, 7, node, RecordDict(), {**NODE_RUN, **run})
        message = Message(wire.pack(None, {"partition": 0, "run-key": KEY, "round": 0}), 1, "query")
        try:
            return wire.fields_of(client_app.app(message, context).content)
        except ValueError as error:
            return str(error)

    return introduce


SHARES = [0.01, 0.2, 0.5, 0.8, 0.99]


@pytest.mark.full
def test_the_numbers_of_a_private_node_do_not_count_rows_that_a_run_makes_equal(introduced, tmp_path):
    """Rows without the ignored column are equal but for who is positive: 3 rows in one world, and 4 in the other."""
    told = []
    for positives in (3, 4):
        folder, draw = tmp_path / f"own-{positives}", np.random.default_rng(1)
        folder.mkdir()
        columns = {"age": draw.integers(20, 90, 400), "hiv": (np.arange(400) < positives).astype(int)}
        pd.DataFrame({**columns, "label": draw.choice(["a", "b"], 400)}).to_csv(folder / "train.csv", index=False)
        run = {"dataset": "table", "ignore-columns": "age", "test-split": "holdout", "test-fraction": 0.01}
        state = tmp_path / f"state-{positives}"
        told.append([introduced(folder, state, **run, **{"validation-fraction": s})["num-examples"] for s in SHARES])
    assert told[0] == told[1] == [392, 317, 198, 79, 4]


@pytest.mark.full
def test_the_numbers_of_a_private_node_do_not_count_the_rows_of_a_patient(introduced, tmp_path):
    """A patient has one row in one world, and 150 in the other, in which these rows are in the test table too."""
    told = []
    for visits in (1, 150):
        folder, draw = tmp_path / f"own-{visits}", np.random.default_rng(1)
        folder.mkdir()
        patients = [f"p{k % 40}" for k in range(200)] + ["target"] * visits
        frame = pd.DataFrame({"age": draw.integers(20, 90, len(patients)), "patient": patients})
        frame["label"] = ["a", "b"] * (len(frame) // 2) + ["a"] * (len(frame) % 2)
        frame.to_csv(folder / "train.csv", index=False)
        others = frame[:20].assign(patient=[f"q{k}" for k in range(20)])
        pd.concat([others, *([frame[-99:]] if visits > 1 else [])]).to_csv(folder / "test.csv", index=False)
        run = {"dataset": "table", "dp.unit": "group", "group-column": "patient", "test-split": "holdout"}
        state = tmp_path / f"state-{visits}"
        told.append([introduced(folder, state, **run, **{"validation-fraction": s})["num-examples"] for s in SHARES])
    assert told[0] == told[1] == [41, 33, 21, 8, 1]


@pytest.mark.full
def test_the_numbers_of_a_private_node_do_not_count_images_that_a_run_makes_equal(introduced, tmp_path):
    """Of 2 x 2 pixels a face is one of 31 equal images, and a blank is another one."""
    face = np.zeros((8, 8), np.uint8)
    face[2:6, 2:6] = 255
    told = []
    for name, target in {"person": face, "blank": np.full((8, 8), 100, np.uint8)}.items():
        for label in "ab":
            folder = tmp_path / name / "train" / label
            folder.mkdir(parents=True)
            for i in range(8):
                Image.fromarray(np.full((8, 8), 100 + 100 * (i % 2), np.uint8)).save(folder / f"{i}.png")
        Image.fromarray(target).save(tmp_path / name / "train" / "a" / "x.png")
        run = {"dataset": "image-folder", "image-size": 2, "image-fit": "stretch", "test-fraction": 0.1}
        run |= {"test-split": "holdout"}
        state = tmp_path / f"state-{name}"
        told.append(
            [introduced(tmp_path / name, state, **run, **{"validation-fraction": s})["num-examples"] for s in SHARES]
        )
    assert told[0] == told[1] == [15, 12, 7, 3, 1]


def test_a_private_node_does_not_count_a_word_for_a_server_that_brings_the_tokenizer(introduced, tmp_path):
    """A tokenizer that knows one word alone makes as many segments of one token as there are such words."""
    model, said = tiny_byte_model(tmp_path / "model", "llama"), []
    for words in (0, 3):
        folder = tmp_path / f"own-{words}"
        folder.mkdir()
        for name in "ab":
            (folder / f"{name}.txt").write_text("x" * words)
        run = {"system": "fedspallm", "dataset": "text", "model": str(model), "dp.accuracies": "none"}
        run |= {"fedspallm.merge": "hessians", "fedspallm.segments": 10**6, "fedspallm.segment-length": 1}
        run |= {"num-server-rounds": 1}
        said.append(introduced(folder, tmp_path / f"state-{words}", **run))
    assert said[0] == said[1]
    assert said[0]["num-examples"] == 10**6


TEXT_RUN = {"system": "fedspallm", "dataset": "text", "dp.accuracies": "none", "num-server-rounds": 1}
TEXT_RUN |= {"fedspallm.merge": "hessians", "fedspallm.segments": 2, "fedspallm.segment-length": 8}


def test_a_node_opens_the_models_of_the_digests_that_its_operator_allows(introduced, tmp_path, caplog):
    """A tokenizer of a stranger's is another model, though its weights are the same."""
    models = [tiny_byte_model(tmp_path / name, "llama") for name in ("mine", "theirs")]
    tokenizer = models[1] / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    (tmp_path / "own").mkdir()
    for name in "ab":
        (tmp_path / "own" / f"{name}.txt").write_text("The patient is well. " * 9)

    def said(model, *digests):
        policy = {"allowed-models": " ".join(digests)}
        return introduced(tmp_path / "own", tmp_path / "state", policy, **TEXT_RUN, model=str(model))

    def declined(model):
        return f"the node declines the run: model is {str(model)!r}, allowed by its allowed-models: SHA-256 "

    command = "LC_ALL=C; sha256sum * | sha256sum"
    printed = subprocess.run(["bash", "-c", command], cwd=models[0], capture_output=True, check=True).stdout
    digest = printed.decode().split()[0]
    assert said(models[0], "0" * 64) == declined(models[0]) + "0" * 64
    assert f"model {str(models[0])!r} has the SHA-256 {digest}" in caplog.text
    assert said(models[0], "0" * 64, digest)["num-examples"] == 2
    assert said(models[1], digest) == declined(models[1]) + digest


def test_a_tokenizer_that_fails_at_a_word_leaves_out_its_document_in_a_private_run(introduced, tmp_path, caplog):
    """An error would tell whether the word is there."""
    model, said = tiny_byte_model(tmp_path / "model", "llama"), []
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "HIV": 10**6}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    for word in ("ill", "HIV"):
        folder = tmp_path / f"own-{word}"
        folder.mkdir()
        for name in "ab":
            (folder / f"{name}.txt").write_text(f"{word} " * 9)
        said.append(introduced(folder, tmp_path / f"state-{word}", **TEXT_RUN, model=str(model)))
    assert said[0] == said[1]
    assert said[0]["num-examples"] == 2
    assert "the tokenizer fails" in caplog.text


def test_the_digest_of_a_folder_that_a_run_names_stays_on_the_node(introduced, tmp_path):
    """Who guesses what is in a private file could check the guess."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("HIV positive")
    folder = str(tmp_path / "own")
    said = introduced(folder, tmp_path / "state", {"allowed-models": "none"}, **TEXT_RUN, model=folder)
    assert said == f"the node declines the run: model is {folder!r}, allowed by its allowed-models: SHA-256 none"


def test_a_node_downloads_nothing_where_its_operator_says_so():
    run, node = {"dataset": "mnist", "data-dir": "/data"}, {"partition-id": 0, "num-partitions": 2, "data-dir": "/data"}
    for settings in (run, {"system": "fedspallm", "dataset": "text", "model": "facebook/opt-125m"}):
        assert node_settings({**settings, "download": True}, node)[0].download
        assert not node_settings(settings, {**node, "downloads": False})[0].download
        with refuses("download", True, condition="downloads", where="declines the run"):
            node_settings({**settings, "download": True}, {**node, "downloads": False})


def test_no_error_of_a_node_with_data_of_its_own_says_what_is_in_them(introduced, tmp_path, caplog):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.csv").write_text("age,label\n3,hiv\n4,hiv\n")
    said = introduced(tmp_path / "own", tmp_path / "state", dataset="table", **{"test-split": "holdout"})
    assert said == "the node cannot do this with data of its own; the node's log says why"
    assert "has one label, 'hiv'" in caplog.text


def test_a_private_node_whose_examples_are_all_held_out_trains_and_scores_as_any_other(nodes, tmp_path):
    """Which parts are empty is as secret as which examples are in them: blanks are in their place."""
    mine = str(image_folder(tmp_path / "mine", 0, per_class=1))
    rows, empty = set(), set()
    for digit in "01234":
        secret = tmp_path / digit / "ledgers" / "split.secret"
        secret.parent.mkdir(parents=True)
        secret.write_text(digit * 64)
        shares = {"validation_fraction": 0.6, "test_fraction": 0.6}
        place = {"data-dir": mine, "state-dir": str(tmp_path / digit)}
        (row,) = nodes([place], f"run{digit}", **IMAGES, **PRIVATE, **shares).clients
        rows.add((row["epsilon"], row["num_examples"], row["accuracy_noise"], row["accuracy_personal"] is None))
        config = splits.DataConfig("image-folder", mine, is_own=True, private=True, split_secret=secret.read_text())
        counts = splits.label_counts(replace(config, **shares), 0, 1)
        empty |= {part for part, numbers in counts.items() if not sum(numbers)}
    assert "train" in empty
    assert len(rows) == 1


def test_a_run_that_began_with_other_parts_of_a_nodes_data_does_not_go_on(nodes, tmp_path, monkeypatch):
    place = {"data-dir": str(image_folder(tmp_path / "mine", 0)), "state-dir": str(tmp_path / "state")}
    monkeypatch.setattr(images, "PARTS_DRAWN", 1)
    nodes([place], **IMAGES, **SILENT)
    monkeypatch.setattr(images, "PARTS_DRAWN", 2)
    with pytest.raises(Exception, match="drew other parts"):
        nodes([place], **IMAGES, **SILENT, num_server_rounds=2, resume_from=str(tmp_path / "run"))


@pytest.mark.parametrize("private", [full({}), SILENT])
def test_a_run_does_not_go_on_with_other_data_of_a_node(nodes, tmp_path, private):
    """The number of images is the same, so that nothing else tells."""
    mine = tmp_path / "mine"
    place = {"data-dir": str(image_folder(mine, 0)), "state-dir": str(tmp_path / "state")}
    nodes([place], **IMAGES, **private)
    shutil.rmtree(mine)
    image_folder(mine, 1)
    splits.clear_cache()
    with pytest.raises(Exception, match=r"own data have changed since the run began|data is not what it was"):
        nodes([place], **IMAGES, **private, num_server_rounds=2, resume_from=str(tmp_path / "run"))


def test_a_private_run_may_take_as_labels_only_what_the_operator_of_a_table_allows():
    node, run = {"data-dir": "/data", "state-dir": "/state"}, {"dataset": "table", "system": "fedavg", **PRIVATE}
    with refuses("label-column", "income", condition="allowed-label-columns", where="declines the run"):
        node_settings({**run, "label-column": "income"}, node)
    allowing = {**node, "allowed-label-columns": "income, label"}
    assert node_settings({**run, "label-column": "income"}, allowing)[0].label_column == "income"
    assert node_settings(run, node)[0].label_column == "label"
    open_run = {"dataset": "table", "system": "fedavg", "label-column": "income"}
    assert node_settings(open_run, node)[0].label_column == "income"


@pytest.mark.full
def test_a_run_that_deals_anew_begins_no_fresh_ledger_on_a_node_with_a_budget(nodes, tmp_path):
    """Whoever starts runs chooses the dealing, so a node's budget counts what all dealings cost."""
    place = {"ledger-dir": str(tmp_path / "ledgers")}
    nodes(dealt({**place, "epsilon-budget": 100.0}, {}), "first", **SILENT)
    (path,) = (tmp_path / "ledgers").iterdir()
    spent, charges = Ledger(path).epsilon(1e-5), len(Ledger(path))
    run = nodes(dealt({**place, "epsilon-budget": spent * 1.01}, {}), "again", **SILENT, seed=1)
    assert list((tmp_path / "ledgers").iterdir()) == [path]
    assert len(Ledger(path)) == charges
    assert run.rounds[0]["replies"] == 1


def test_a_budget_without_a_place_for_its_ledger_is_refused():
    with refuses("epsilon-budget", 3.0, condition="ledger-dir"):
        node_settings(PRIVATE, {"partition-id": 0, "num-partitions": 2, "epsilon-budget": 3.0})


def test_the_ledger_of_a_node_is_where_its_operator_says():
    run = {"dp.ledger-dir": "/theirs"}
    part = {"partition-id": 0, "num-partitions": 2, "state-dir": "/state"}
    own = {"data-dir": "/data", "state-dir": "/state"}

    def place(node_config):
        return node_settings(run, node_config)[0].dp.ledger_dir

    assert place(part) == "/theirs", "a part of shared data, and no policy"
    assert place({**part, "ledger-dir": "/mine"}) == "/mine"
    assert place(own) == "/state/ledgers"
    assert place({**own, "ledger-dir": "/mine"}) == "/mine"


def test_a_node_that_asks_for_privacy_tells_no_open_accuracies(nodes):
    run = nodes(dealt({"require-dp": True}, {}), **PRIVATE, **{"dp.accuracies": "open"})
    told = {row["partition"]: row["accuracy_personal"] for row in run.clients}
    assert told[0] is None
    assert 0 <= told[1] <= 1


# --- what a policy may hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("requre-dp = true", ("requre-dp", True)),
        ("require-dp = 1", ("require-dp", 1)),
        ("epsilon-budget = -1", ("epsilon-budget", -1.0)),
        ("budget-delta = 1.0", ("budget-delta", 1.0)),
        ('ledger-dir = "ledgers"', ("ledger-dir", "ledgers")),
        ('allowed-systems = ["fedavg"]', ("allowed-systems", ["fedavg"])),
        ('allowed-systems = "fedavg fedafg"', ("allowed-systems", "fedafg")),
        ("require-dp = ", ("config file",)),
        ("partition-id = 3", ("partition-id", 3)),
    ],
)
def test_a_wrong_policy_file_is_one_line_and_answers_nothing(tmp_path, policy, said):
    (tmp_path / "policy.toml").write_text(policy)
    with refuses(*said):
        read_policy({"policy-file": str(tmp_path / "policy.toml")})


def test_a_policy_file_that_is_missing_or_contradicts_the_node_config_is_one_line(tmp_path):
    path = tmp_path / "policy.toml"
    with refuses("config file", path, where="policy-file"):
        read_policy({"policy-file": str(path)})
    with refuses("policy-file", "policy.toml", where="node-config"):
        read_policy({"policy-file": "policy.toml"})
    path.write_text("require-dp = false\n")
    with refuses("require-dp", True, which=str(path)):
        read_policy({"policy-file": str(path), "require-dp": True})


def test_a_policy_file_and_the_node_config_hold_together(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("max-clip-norm = 2\n")
    policy = read_policy({"policy-file": str(path), "require-dp": True, "data-dir": "/data"})
    assert (policy.require_dp, policy.max_clip_norm) == (True, 2.0)
    path.write_text("max-clip-norm = 1\n")
    assert read_policy({"policy-file": str(path)}).max_clip_norm == 1.0


@pytest.mark.full
def test_a_private_rehearsal_says_where_noise_of_shared_data_comes_from(fedprune, monkeypatch, tmp_path):
    """Nodes with data or a policy of their own, and runs that are not private, are told nothing."""
    started = []
    monkeypatch.setattr(cli.deploying, "run_once", lambda prepared, *_: started.append(prepared.placement))
    (tmp_path / "a.toml").write_text("require-dp = true\n")
    (tmp_path / "data").mkdir()
    private = ["deploy", "local", "--nodes", "1", "--out", "run"]
    private += ["system=fedavg", "dp.enabled=true", "dp.noise-multiplier=1.0"]
    for arguments in (
        private,
        [*private, "dp.secure-rng=true"],
        [*private, "--policies", "a.toml"],
        [*private, "--data-dirs", "data", "dataset=image-folder"],
        ["deploy", "local", "--nodes", "1", "--out", "run"],
    ):
        assert fedprune(*arguments) == (0, "")
    assert [placement.nodes[0].get("secure-rng") for placement in started] == [False, True, None, None, None]


def test_a_rehearsal_gives_each_node_its_policy(fedprune, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(cli.deploying, "run_once", lambda prepared, *_: started.append(prepared.placement))
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text("require-dp = true\n")
    assert fedprune("deploy", "local", "--policies", "a.toml, b.toml", "--out", "run") == (0, "")
    (placement,) = started
    assert [node["policy-file"] for node in placement.nodes] == [str(tmp_path / f"{name}.toml") for name in "ab"]
    code, said = fedprune("deploy", "local", "--policies", "a.toml", "--nodes", "3", "--out", "run")
    assert (code, "--policies has 1 entries" in said) == (2, True)
    code, said = fedprune("deploy", "local", "--policies", "c.toml", "--out", "run")
    assert (code, len(said.splitlines())) == (2, 1)
    assert f"policy-file: config file is '{tmp_path / 'c.toml'}'" in said


def test_every_key_of_a_policy_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    for key in ("policy-file", *POLICY_KEYS):
        assert f"\n* `{key}`: " in page, key


def test_the_documented_policy_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    (tmp_path / "policy.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    policy = read_policy({"policy-file": str(tmp_path / "policy.toml")})
    assert policy.require_dp
    assert policy.allowed_systems.split() == ["fedavg", "dispfl", "ditto"]
