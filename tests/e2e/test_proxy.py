"""Behind a proxy, as on most clusters: what runs on this machine is not looked for through it."""

from __future__ import annotations

import pytest

from fedprune_app.launching.local import local_deployment


def behind_a_dead_proxy(patch: pytest.MonkeyPatch) -> None:
    """Whoever asks the proxy gets no answer, and nothing is excepted from it."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        patch.setenv(name, "http://127.0.0.1:9")
        patch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        patch.delenv(name, raising=False)


@pytest.mark.programs
def test_a_deployment_starts_and_its_nodes_connect_behind_a_proxy(monkeypatch, tmp_path):
    """A simulation does, too: ``tests/e2e/test_strangers.py``."""
    behind_a_dead_proxy(monkeypatch)
    with local_deployment(tmp_path, [{"partition-id": 0, "num-partitions": 1}]) as running:
        assert [node["status"] for node in running._nodes()] == ["online"]
