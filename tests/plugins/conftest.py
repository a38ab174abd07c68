"""What the tests of plug-ins share: the files of docs/extend.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    assert FILES.keys() == {"half.py", "mine.py", "my_prox.py", "server_momentum.py", "drift.py", "test_my_prox.py"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


QUICK = ("num-server-rounds=1", "--clients", "4", "--engine", "inprocess")


PRIVATELY = ("dp.enabled=true", "dp.noise-multiplier=1", "dp.delta=0.001")
