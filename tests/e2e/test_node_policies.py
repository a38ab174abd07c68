"""Nodes that decide: a deployment over gRPC with TLS whose nodes decline runs, and its transcript.

`make rehearsal` runs this and prints the transcript, as it stands in docs/data/transcripts/policies.txt.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fedprune_app.launching import simulation
from fedprune_app.launching.local import local_deployment
from fedprune_app.privacy.ledger import Ledger
from tests.e2e.deployed import DeployedRun, until
from tests.e2e.test_own_data import image_folder
from tests.models.tiny_llm import tiny_byte_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NODES = 3
OWN = {"dataset": "image-folder", "model": "cnn-small", "batch-size": 10, "min-clients": 1, "system": "fedavg"}
PRIVATE = {"dp.enabled": True, "dp.noise-multiplier": 1.0, "dp.delta": 1e-3, "dp.accuracies": "none"}


@pytest.fixture
def policies(tmp_path):
    """The policy file of each node."""
    files = [tmp_path / f"policy-{k}.toml" for k in range(NODES)]
    files[0].write_text("require-dp = true\n")
    files[1].write_text("min-noise-multiplier = 0.9\nmax-clip-norm = 5.0\n")
    files[2].write_text('allowed-systems = "fedavg"\n')
    return files


@pytest.fixture
def deployment(tmp_path, policies):
    nodes = [
        {"data-dir": str(image_folder(tmp_path / f"data-{k}", k)), "policy-file": str(policies[k])}
        for k in range(NODES)
    ]
    with local_deployment(tmp_path / "deployment", nodes) as running:
        simulation.stage_app(running.folder / "app")
        yield running


def test_three_nodes_decline_what_their_policies_do_not_bear(deployment, policies, tmp_path, transcript):
    state = deployment.folder / "node-0" / "state"
    text = "; ".join(f"node-{k}: {path.read_text().strip()}".replace("\n", ", ") for k, path in enumerate(policies))
    transcript(f"declined by policy: {NODES} nodes over gRPC with TLS, data of their own\n  {text}")

    def run(name: str, **settings) -> DeployedRun:
        started = DeployedRun.start(deployment, tmp_path / name, **{**OWN, **settings})
        ended = started.end().removeprefix("finished:")
        given = " ".join(f"{key}={value}" for key, value in settings.items())
        transcript("run " + given.replace("True", "true").replace(str(tmp_path), ""))
        info = started.info
        transcript(f"  {ended}, {len(info.get('partition') or [])} of {NODES} nodes let in")
        for line in [*info.get("clients_left_out", []), *(note for row in started.rounds for note in row["notes"])]:
            transcript(f"  {line}")
        if info.get("error"):
            transcript(f"  {info['error']}")
        return started

    def left_out(run: DeployedRun) -> list[str]:
        return sorted(reason.partition(": ")[2] for reason in run.info["clients_left_out"])

    declines = "the node declines the run: "
    by_noise = "allowed by its min-noise-multiplier"

    # open to all, and two of the three are not
    first = run("open", system="fedavg")
    assert left_out(first) == [
        f"{declines}dp.enabled is false, {by_noise}: true (error code 2)",
        f"{declines}dp.enabled is false, allowed by its require-dp: true (error code 2)",
    ]
    assert first.info["status"] == "completed"
    assert len(first.info["nodes"]) == 1

    # private enough for all
    second = run("private", system="fedavg", **PRIVATE)
    assert (second.info["status"], left_out(second)) == ("completed", [])
    assert [row["replies"] for row in second.rounds] == [NODES] * 2
    (ledger,) = (state / "ledgers").glob("*.jsonl")

    # the operator of node-0 says that it is enough; the next run names another folder for ledgers
    spent = Ledger(ledger).epsilon(1e-5)
    policies[0].write_text(f"require-dp = true\nepsilon-budget = {spent * 1.01:.4f}\n")
    transcript(f"node-0's operator: epsilon-budget = {spent * 1.01:.4f}")
    fresh = {**PRIVATE, "dp.noise-multiplier": 0.8, "dp.ledger-dir": str(tmp_path / "fresh")}
    third = run("again", system="fedavg", **fresh)
    assert left_out(third) == [f"{declines}dp.noise-multiplier is 0.8, {by_noise}: at least 0.9 (error code 2)"]
    (note,) = third.rounds[0]["notes"]
    assert "the privacy budget is" in note
    assert third.info["status"] == "completed"
    assert third.rounds[0]["replies"] == 1
    assert len(Ledger(ledger)) == 2
    assert not (tmp_path / "fresh" / ledger.name).exists()

    # nobody takes part
    last = run("nobody", system="standalone")
    assert last.info["status"] == "failed"
    assert declines in last.info["error"]
    assert len(last.info["error"].splitlines()) == 1


# --- a server that asks and never trains ------------------------------------------------------------------------------

ASKING_SERVER = """
import json, os, time
from fedprune_app.engine import wire
from fedprune_app.engine.exchange import message_to
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    request = wire.pack(None, {"run-key": "0123456789abcdef", "round": 0, "partition": 0})
    replies = grid.send_and_receive([message_to(node, request, "query", 0, 300.0) for node in nodes])
    said = [reply.error.reason if reply.has_error() else wire.fields_of(reply.content) for reply in replies]
    for fields in said:
        if isinstance(fields, dict):
            fields.pop("data-dir", None)  # the operator's name for the folder
    path = context.run_config["out-dir"] + ".json"
    with open(path + ".new", "w") as file:
        json.dump(said, file, default=str)
    os.replace(path + ".new", path)
"""
BOUND = {"require-dp": True, "epsilon-budget": 0.01}
FIXED_LINE = "the node cannot do this with data of its own; the node's log says why"


def with_one_word(folder, known):
    """A model whose tokenizer makes a token of one word alone; of an id that no model has, it fails at that word."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "HIV": 1 if known else 10**6}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("HIV"), "removed", invert=True)
    tokenizer.save(str(tiny_byte_model(folder, "llama") / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def ask(tmp_path):
    """``ask(**settings)``: what two nodes tell a server that only asks. One record of theirs is another in each world.

    Either is a row of a table, and a text. The server knows neither folder.
    """
    nodes = []
    for positives in (3, 4):
        folder, draw = tmp_path / f"world-{positives}", np.random.default_rng(1)
        folder.mkdir()
        columns = {"age": draw.integers(20, 90, 400), "hiv": (np.arange(400) < positives).astype(int)}
        pd.DataFrame({**columns, "label": draw.choice(["a", "b"], 400)}).to_csv(folder / "train.csv", index=False)
        for patient in range(4):
            word = "HIV positive" if patient == positives else "not ill"
            (folder / f"patient{patient}.txt").write_text(f"The patient is {word}. " * 9)
        nodes.append({"data-dir": str(folder), **BOUND})
    with local_deployment(tmp_path / "deployment", nodes) as running:
        app = simulation.stage_app(running.folder / "asking", ("asking_server:app", "fedprune_app.client_app:app"))
        (app / "asking_server.py").write_text(ASKING_SERVER)

        def told(**settings):
            out = tmp_path / f"said-{len(list(tmp_path.glob('said-*')))}"
            run = DeployedRun.start(running, out, "asking", **PRIVATE, **settings)
            path = out.with_name(out.name + ".json")
            until(path.exists)
            said = json.loads(path.read_text())
            assert len(said) == len(nodes), run.run_id
            return [
                {k: v for k, v in each.items() if k != "data-dir"} if isinstance(each, dict) else each for each in said
            ]

        yield told
        for path in running.folder.glob("node-*/state/ledgers/*.jsonl"):
            assert not Ledger(path).spent, "nothing that was told is charged"


def test_a_server_that_only_asks_cannot_tell_of_which_world_a_private_node_is(ask, tmp_path, transcript):
    """Nothing is charged for what nodes say first. So it must not depend on a single record."""
    transcript("asked by a server that does not train: 2 nodes over gRPC with TLS, whose data differ in one record")
    table = {"system": "fedavg", "dataset": "table", "model": "mlp4", "test-split": "holdout", "test-fraction": 0.01}
    told = []
    for share, ignored in ((0.01, "age"), (0.5, ""), (0.99, "age")):
        settings = {"validation-fraction": share, "ignore-columns": ignored}
        one, other = ask(**table, **settings)
        assert one == other
        told.append(one["num-examples"])
        transcript(f"  validation-fraction={share} ignore-columns='{ignored}': {told[-1]} training examples, both")
    assert told == [392, 198, 4]

    text = {"system": "fedspallm", "dataset": "text", "fedspallm.merge": "hessians", "fedspallm.segment-length": 1}
    for known in (True, False):
        model = with_one_word(tmp_path / f"model-{known}", known)
        one, other = ask(**text, **{"model": str(model), "fedspallm.segments": 10**6, "num-server-rounds": 1})
        assert one == other
        assert one["num-examples"] == 10**6
        transcript(f"  a tokenizer that {'counts' if known else 'fails at'} a word: 1,000,000 segments, both")

    # what fails, fails in one line
    one, other = ask(**table, **{"owner-column": "ward"})
    assert one == other
    assert FIXED_LINE in one
