"""Scores of a model that has not changed are taken from disk; this only saves time."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedprune_app.core.seals import check_json, sealed_json
from fedprune_app.files import replace_file

Scores = dict[str, float | None]


def remembered_scores(path: Path, digest: str) -> Scores | None:
    """Return the scores in a file, if they are of what has this digest; None if not, or if it is damaged."""
    try:
        content = json.loads(path.read_text())
        check_json(content)
        return dict(content["scores"]) if content["digest"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_scores(path: Path, digest: str, scores: Mapping[str, float | None]) -> None:
    """Write scores to a file. On a full disk the file stays as it was: that need not cost an evaluation."""
    with suppress(OSError):
        content = json.dumps(sealed_json({"digest": digest, "scores": dict(scores)})).encode()
        replace_file(path, content, durable=False)
