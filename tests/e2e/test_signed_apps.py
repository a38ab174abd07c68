"""SuperNodes that run signed apps alone (Flower's ``--trusted-entities``), and a hub of this test's own to sign for."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_disk

import fedprune_app
from fedprune_app.config import parse_config
from fedprune_app.launching import processes
from tests.e2e.deployed import SETTINGS, DeployedRun, in_process_sha256, nodes_with_the_app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    # Flower's build of an app, called in this process.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]

APP = f"@fedprune/fedprune=={fedprune_app.__version__}"
KEY_ID = "fpk_00000000-0000-0000-0000-000000000001"


def signature(key: Ed25519PrivateKey, fab: bytes) -> dict:
    """What `flwr app review` sends to the hub, and the hub gives to SuperLinks."""
    signed_at = int(time.time())
    signed = key.sign(signed_at.to_bytes(8, "big") + hashlib.sha256(fab).digest())
    text = base64.urlsafe_b64encode(signed).decode().rstrip("=")
    return {"public_key_id": KEY_ID, "signature": text, "signed_at": signed_at}


@contextmanager
def hub():
    """A hub that has one app: ``shelf["fab"]``, with ``shelf["verifications"]``."""
    shelf: dict = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = {"fab_url": f"{shelf['url']}/app.fab", "verifications": shelf["verifications"]}
            self.answer(json.dumps(answer).encode())

        def do_GET(self) -> None:
            self.answer(shelf["fab"])

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        shelf["url"] = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield shelf
        finally:
            server.shutdown()
            thread.join()


def test_a_node_with_trusted_entities_runs_what_they_signed_and_nothing_else(tmp_path, monkeypatch):
    trusted, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = trusted.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "trusted.yaml").write_text(f"{KEY_ID}: {public}\n")
    tool = processes.tool
    script = tmp_path / "trusting-supernode"
    script.write_text(f'#!/bin/sh\nexec {tool("flower-supernode")} "$@" --trusted-entities {tmp_path}/trusted.yaml\n')
    script.chmod(0o755)
    monkeypatch.setattr(processes, "tool", lambda name: str(script) if name == "flower-supernode" else tool(name))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with hub() as shelf:
        monkeypatch.setenv("FLWR_SUPERGRID_API_URL", shelf["url"])
        with nodes_with_the_app(tmp_path / "deployment", 1) as deployment:
            app = deployment.folder / "app"
            fab = build_fab_from_disk(app)
            (app / "clients" / "__init__.py").write_text("CHANGED = True\n")
            changed = build_fab_from_disk(app)

            def run(name: str, source: Path) -> DeployedRun:
                config = parse_config({**SETTINGS, "out-dir": str(tmp_path / name)}).to_dict()
                return DeployedRun(
                    deployment, tmp_path / name, config, processes.submit(deployment.link, source, config)
                )

            def refusal(name: str, source: Path) -> str:
                refused = run(name, source)
                assert refused.end() == "finished:failed"
                return processes.failure(deployment.link, refused.run_id)

            assert "The FAB could not be verified" in refusal("from a folder", app)
            for name, content, found in (
                ("a stranger's", fab, [signature(stranger, fab)]),
                ("changed", changed, [signature(trusted, fab)]),
                ("unsigned", fab, []),
            ):
                shelf.update(fab=content, verifications=found)
                assert "The FAB could not be verified" in refusal(name, Path(APP))
            shelf.update(fab=fab, verifications=[signature(trusted, fab)])
            signed = run("signed", Path(APP))
            assert signed.finish()["final_sha256"] == in_process_sha256(signed.config, tmp_path / "here", 1)
            said = deployment.log_file("node-0").read_text()
    assert said.count("App verification is not supported by the connected SuperLink") == 1, "an app from a folder"
    assert said.count("FAB verification failed") == 3
