"""A Hugging Face hub on this machine: as much of its protocol as its own client and transformers ask for."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """One repository: its branches' files, and what was asked for."""

    repository: str
    branches: Mapping[str, Mapping[str, bytes]]
    url: str = ""
    seconds: float = 0.0  # that it takes over a question for pull requests
    asked: list[str] = field(default_factory=list)

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process whose hub this is."""
        return {
            **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }

    def sha(self, branch: str) -> str:
        return hashlib.sha1(branch.encode()).hexdigest()

    def branch(self, revision: str) -> str | None:
        return next((name for name in self.branches if revision in (name, self.sha(name))), None)


def _answer(hub: Hub, path: str) -> tuple[int, bytes, dict[str, str]]:
    api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"

    def told(value: object) -> tuple[int, bytes, dict[str, str]]:
        return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}

    missing = 404, b"{}", {"X-Error-Code": "EntryNotFound"}
    if path.startswith(files):
        revision, _, name = path.removeprefix(files).rpartition("/")
        branch = hub.branch(revision)
        content = hub.branches[branch].get(name) if branch else None
        if branch is None or content is None:
            return missing
        return 200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": hub.sha(branch)}
    kind, _, revision = path.removeprefix(api).strip("/").partition("/")
    if not path.startswith(api):
        return missing
    if kind == "discussions":
        time.sleep(hub.seconds)
        pull = {
            "num": 1,
            "title": "Adding `safetensors` variant of this model",
            "author": {"name": "SFconvertbot"},
            "createdAt": "2023-01-01T00:00:00.000Z",
            "status": "open",
            "repo": {"name": hub.repository, "type": "model"},
            "isPullRequest": True,
        }
        return told({"discussions": [pull] * ("refs/pr/1" in hub.branches), "count": 1, "start": 0})
    branch = hub.branch(revision or "main")
    if branch is None and kind == "tree":  # of a folder that is not there
        return missing
    if branch is None:
        return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
    if kind == "commits":
        shas = [hub.sha(branch), *([hub.sha("main")] if branch != "main" else [])]
        about = {"title": "", "message": "", "date": "2023-01-01T00:00:00.000Z", "authors": []}
        return told([{"id": sha, **about} for sha in shas])
    if kind == "tree":
        return told(
            [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.branches[branch].items()
            ]
        )
    names = [{"rfilename": name} for name in hub.branches[branch]]
    return told(
        {"id": hub.repository, "modelId": hub.repository, "sha": hub.sha(branch), "private": False, "siblings": names}
    )


@contextmanager
def local_hub(repository: str, branches: Mapping[str, Mapping[str, bytes]], seconds: float = 0.0) -> Iterator[Hub]:
    """A hub of one repository, by branch the content of each file."""
    hub = Hub(repository, branches, seconds=seconds)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            status, content, headers = _answer(hub, path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
