"""A pack of a private run: it holds together, says nothing that it should not, and is refused where something lacks."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedprune_app import api
from fedprune_app.config import ConfigError
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.exports.file import load_model
from fedprune_app.exports.release import PAGE, SUMS, Question, confidences, release, verify
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.reader import read_info

SECRETS = ["NHS4711", "Dr-Strange", "planted-folder"]


SETTINGS = {
    "system": "fedavg",
    "dataset": "table",
    "label-column": "ill",
    "owner-column": "clinic",
    "partition": "owners",
    "group-column": "patient",
    "test-split": "holdout",
    "num-server-rounds": 2,
    "fraction-train": 1.0,
    "local-epochs": 1,
    "batch-size": 20,
    "evaluate-every": 2,
    "dp.enabled": True,
    "dp.unit": "group",
    "dp.noise-multiplier": 1.0,
    "dp.epsilon-budget": 20.0,
    "dp.secure-rng": True,
}
POLICY = "require-dp = true\nepsilon-budget = 20.0\nledger-dir = '/planted-folder/ledgers'\n"


def make_run(folder, **more):
    draw = np.random.default_rng(1)
    rows = [
        {
            "patient": f"NHS4711{patient:03d}",
            "clinic": f"Dr-Strange-{patient % 2}",
            "age": draw.normal(),
            "weight": draw.normal(),
            "ill": patient % 3 % 2,
        }
        for patient in range(160)
        for _ in range(1 + patient % 3)
    ]
    folder.mkdir()
    pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    settings = SETTINGS | {"data-dir": str(folder)} | more
    api.run(settings, out=folder / "run", clients=2, engine="inprocess", progress=False)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A private run of a table of patients whose numbers, and whose owners' names, are secret, in a secret folder."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "planted-folder")
    (folder.parent / "policy.toml").write_text(POLICY)
    return folder


@pytest.fixture
def audited(run, fedprune):
    """An audit of the run, by the command that the page names."""
    file = run.parent / "audit.json"
    if not file.exists():
        code, said = fedprune("audit", run, "--json", file)
        assert code == 0, said
    return file


@pytest.fixture
def pack(run, audited, tmp_path):
    return release(Question(run, audit=audited, policy=run.parent / "policy.toml"), tmp_path / "pack")


def texts(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def page_of(pack):
    text = re.sub(r"<style>.*?</style>", "", (pack / PAGE).read_text(), flags=re.DOTALL)
    return " ".join(unescape(re.sub("<[^>]+>", " ", text)).split())


def test_a_pack_verifies_and_has_the_epsilon_that_clients_told(pack, run):
    last = [row for row in api.load_run(run).clients if row["round"] == 2]
    assert sorted(verify(pack).values()) == pytest.approx(sorted(row["epsilon"] for row in last))
    privacy = json.loads((pack / "privacy.json").read_text())
    assert privacy["unit"] == "patient"
    assert privacy["budget_left"] == pytest.approx(20 - max(row["epsilon"] for row in last))
    assert privacy["noise"] == {"operating-system": 2}
    assert load_model(pack / "MODEL" / "model.safetensors")(torch.zeros(1, 2, 1, 1)).shape == (1, 2)


@pytest.mark.full
def test_an_audit_of_a_run_takes_other_settings_and_no_other_clients(run, fedprune, tmp_path):
    assert fedprune("audit", run, "nonsense=1")[0] == 2
    code, said = fedprune("audit", run, "--clients", "7")
    assert (code, "--clients is 7, allowed when resuming: 2" in " ".join(said.split())) == (2, True)
    file = tmp_path / "audit.json"
    code, said = fedprune("audit", run, "dp.noise-multiplier=1.1", "--json", file)
    assert code == 0, said
    other = json.loads(file.read_text())
    assert other["run"] is None
    question = Question(run, audit=file, policy=run.parent / "policy.toml")
    refused(question, tmp_path / "pack", "no-audit", "the audit is of other settings")


def test_a_clients_own_model_has_the_ledgers_of_all_clients(run, tmp_path):
    pack = release(Question(run, client=0, allowed=["no-audit", "no-policy"]), tmp_path / "pack")
    assert len(verify(pack)) == 2
    assert "A client's own model of a federated training" in page_of(pack)


def test_no_file_of_a_pack_has_a_secret(pack, run):
    secrets = [*SECRETS, os.fspath(run), str(Path.home()), "train.csv"]
    for name, content in texts(pack).items():
        assert [secret for secret in secrets if secret.encode() in content] == [], name
        if name.endswith(".safetensors"):  # noised weights may spell a short host name by chance
            content = content[: 8 + int.from_bytes(content[:8], "little")]
        assert socket.gethostname().encode() not in content, name


def test_the_page_answers_what_a_governor_asks(pack):
    page = page_of(pack)
    for answer in (
        "Had the record of one patient been blank, everything that left a site, this model included, would have been",
        "times as likely or as unlikely, with an exception of one chance in",
        "The common model of a federated training with the system “fedavg” after 2 rounds. It gives one of 2 classes",
        "2 sites trained it; the data stayed there",
        "One patient, with all of its examples: ε (0 is perfect; the smaller, the stronger) is at most",
        "This run could spend 20.0, of which",
        "Yes: every site drew it from its operating system and kept none of it, so that nobody can subtract it.",
        "this does not contradict the claim (confidence 95 %)",
        "4 updates with",
        "Two patients are protected less than one",
        "a policy of the site that overrides the run's settings: ε of all runs at most 20.0",
        "fedprune release --verify PACK",
    ):
        assert answer in page
    assert 'class="red"' not in (pack / PAGE).read_text()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("privacy.json", lambda text: text.replace('"count": ', '"count": 1')),
        ("MODEL/model.safetensors", lambda text: text[:-1] + "x"),
        ("attack/audit.json", None),
        ("more.txt", lambda text: "more"),
    ],
)
def test_a_changed_pack_does_not_verify(pack, name, change):
    path = pack / name
    if change is None:
        path.unlink()
    else:
        text = path.read_text(encoding="latin-1") if path.exists() else ""
        path.write_text(change(text), encoding="latin-1")
    with pytest.raises(ValueError, match=name):
        verify(pack)


def test_an_epsilon_that_does_not_follow_from_the_releases_does_not_verify(pack):
    path = pack / "privacy.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(path.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 2.0'))
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    (pack / SUMS).write_text((pack / SUMS).read_text().replace(before, after))
    with pytest.raises(ValueError, match="has not the ε that the pack says"):
        verify(pack)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(question, output, name, reason):
    """Refused by name; and where it is allowed, the page says so in red."""
    with pytest.raises(ValueError, match=f"{reason}.*--allow {name}"):
        release(question, output)
    assert not output.exists()
    page = (release(replace(question, allowed=[name, "no-policy"]), output) / PAGE).read_text()
    assert re.search(rf'class="red">Allowed in spite of \({name}\): .*{reason}', unescape(page))


def test_a_run_without_an_audit_or_with_a_foreign_one_is_refused(run, audited, tmp_path):
    policy = run.parent / "policy.toml"
    content = json.loads(audited.read_text())
    for number, (change, reason) in enumerate(
        [
            ({"run": "0"}, "the audit is of another run"),
            ({"settings": "0"}, "the audit is of other settings"),
            ({"holds": False}, "the audit found that the ledger is wrong"),
            ({"bound": 1e3}, "the audit found more than the ledgers have spent"),
        ]
    ):
        (tmp_path / "audit.json").write_text(json.dumps(content | change))
        question = Question(run, audit=tmp_path / "audit.json", policy=policy)
        refused(question, tmp_path / f"pack{number}", "no-audit", reason)
    refused(Question(run, policy=policy), tmp_path / "pack", "no-audit", "no audit is given")


def test_a_run_without_policy_or_without_ledgers_is_refused(run, audited, tmp_path):
    refused(Question(run, audit=audited), tmp_path / "pack", "no-policy", "no node's policy that demands privacy")
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "clients" / "00001")
    question = Question(tmp_path / "run", allowed=["no-audit", "no-policy"])
    with pytest.raises(ValueError, match="the ledgers of 1 of 2 clients are not here"):
        release(question, tmp_path / "other")
    elsewhere = replace(question, ledgers=[run / "clients" / "00001" / "ledger.jsonl"])
    both = json.loads((release(elsewhere, tmp_path / "both") / "privacy.json").read_text())["clients"]
    whole = json.loads((release(replace(question, run=run), tmp_path / "whole") / "privacy.json").read_text())[
        "clients"
    ]
    assert both == whole


def test_ledgers_of_a_run_with_more_noise_are_refused(run, tmp_path):
    other = make_run(tmp_path / "other", **{"dp.noise-multiplier": 5.0})
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "clients")
    ledgers = [other / "clients" / f"0000{client}" / "ledger.jsonl" for client in (0, 1)]
    question = Question(tmp_path / "run", ledgers=ledgers, allowed=["no-audit", "no-policy"])
    with pytest.raises(ValueError, match=r"the ledgers have spent less than the clients told: .*--allow no-ledger"):
        release(question, tmp_path / "pack")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("min-noise-multiplier = 5.0", "dp.noise-multiplier is 1.0, allowed by its min-noise-multiplier: at least 5.0"),
        ("max-clip-norm = 0.5", "dp.clip-norm is 1.0, allowed by its max-clip-norm: at most 0.5"),
        ("epsilon-budget = 0.1", r"the policy allows ε 0.1 at δ = 1e-05: .* is spent"),
    ],
)
def test_a_policy_that_the_run_breaks_is_refused(run, audited, tmp_path, rule, reason):
    (tmp_path / "policy.toml").write_text(rule)
    question = Question(run, audit=audited, policy=tmp_path / "policy.toml")
    refused(question, tmp_path / "pack", "no-policy", reason)
    assert "a policy of the site that overrides the run's settings" in page_of(tmp_path / "pack")
    assert "not shown" in page_of(tmp_path / "pack")


def test_no_digest_of_data_and_no_number_of_examples_of_groups_leaves(pack):
    for name, content in texts(pack).items():
        assert b"data_sha256" not in content, name
        assert b"n_pos" not in content, name


def test_seeded_noise_and_open_accuracies_are_refused(tmp_path):
    run = make_run(tmp_path / "seeded", **{"dp.secure-rng": False, "dp.accuracies": "open", "num-server-rounds": 1})
    allowed = ["no-audit", "no-policy", "open-accuracies"]
    with pytest.raises(ValueError, match=r"drawn from the seed, which the server knows.*--allow seeded-noise"):
        release(Question(run, allowed=allowed), tmp_path / "pack")
    with pytest.raises(ValueError, match="accuracies on private data were told without noise"):
        release(Question(run, allowed=["no-audit", "no-policy", "seeded-noise"]), tmp_path / "pack")
    pack = release(Question(run, allowed=[*allowed, "seeded-noise"]), tmp_path / "pack")
    assert (pack / PAGE).read_text().count('class="red"') == 4
    assert "This holds only against readers who do not know the run's seed" in page_of(pack)


def test_a_folder_that_exists_is_not_written_to(run, tmp_path):
    with pytest.raises(ConfigError, match="a new folder"):
        release(Question(run), tmp_path)


# --- others read it ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("cyclonedx") is None, reason="cyclonedx-python-lib is not installed")
def test_the_bill_of_materials_is_cyclonedx(pack):
    from cyclonedx.model.bom import Bom
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (pack / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    names = {component.name for component in Bom.from_json(json.loads(text)).components}
    assert {"torch", "opacus", "dp-accounting", "MODEL/model.safetensors"} <= names


@pytest.mark.skipif(importlib.util.find_spec("sacroml") is None, reason="sacroml is not installed")
def test_sacroml_opens_the_pack_and_repeats_the_attack(pack, run):
    from sacroml import metrics
    from sacroml.attacks.target import Target

    target = Target()
    target.load(str(pack / "attack"))
    assert target.dataset_name == "table"
    info = read_info(run)
    config = prepare(of_run(info, ())).config
    network = load_model(pack / "MODEL" / "model.safetensors")
    data = [client_data(data_config(config), client, 2) for client in range(2)]
    members, others = (
        np.concatenate([confidences(network, getattr(each, f"{part}_images")) for each in data])
        for part in ("train", "test")
    )
    scores = np.concatenate([members, others])
    found = metrics.get_metrics(np.stack([1 - scores, scores], 1), np.repeat([1, 0], [len(members), len(others)]))
    told = json.loads((pack / "attack" / "attack_results.json").read_text())
    ours = told["attack_experiment_logger"]["attack_instance_logger"]["instance_0"]["AUC"]
    assert ours == pytest.approx(found["AUC"], abs=0.02)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_releases_verifies_and_names_a_wrong_refusal(run, audited, fedprune, tmp_path):
    code, said = fedprune("release", run, "--audit", audited, "--policy", run.parent / "policy.toml")
    assert code == 0, said
    code, said = fedprune("release", "--verify", "pack")
    assert code == 0, said
    code, said = fedprune("release", run, "--allow", "everything", "-o", "other")
    assert code == 2
    assert "--allow is 'everything', allowed: no-ledger, seeded-noise" in said
    code, said = fedprune("release")
    assert code == 2
    assert "a run folder, or --verify" in said


@pytest.mark.full
def test_noise_that_a_target_chose_is_held_against_the_policy(tmp_path, fedprune):
    run = make_run(tmp_path / "made", **{"dp.noise-multiplier": 0.0, "dp.target-epsilon": 15.0})
    (tmp_path / "policy.toml").write_text("min-noise-multiplier = 50.0")
    question = Question(run, policy=tmp_path / "policy.toml", allowed=["no-audit"])
    with pytest.raises(ValueError, match=r"noise multiplier is .*, allowed by its min-noise-multiplier: at least 50"):
        release(question, tmp_path / "pack")
    code, said = fedprune("release", run, "--ledger", tmp_path / "none.jsonl", "-o", tmp_path / "pack")
    assert (code, "none.jsonl" in said) == (2, True), said
