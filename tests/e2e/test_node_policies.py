"""Nodes that decide: a deployment over gRPC with TLS whose nodes decline runs, and its transcript.

`make rehearsal` runs this and prints the transcript, as it stands in docs/data/transcripts/policies.txt.
"""

from __future__ import annotations

import pytest

from fedprune_app.launching import simulation
from fedprune_app.launching.local import local_deployment
from fedprune_app.privacy.ledger import Ledger
from tests.e2e.deployed import DeployedRun
from tests.e2e.test_own_data import image_folder

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
