"""The tutorial on language models, from its texts to its sentence, with a tiny model in place of the download."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks

pytest.importorskip("gguf")

from tests.models.tiny_gguf import gguf_model, write_gguf

PAGE = [block for block in blocks() if block.page == "docs/tutorials/language-model.md"]
TEXTS, SENTENCE = (block.text for block in PAGE if block.language == "python")
COMMANDS = [command for block in PAGE if block.is_commands for command in block.commands if "fedprune" in command[0]]
RUN, HALF, CUT, TO_GGUF, IMATRIX, FORGET = (
    c for c in COMMANDS if any("runs/" in word for word in c) and "runs/opt" not in c
)
SMALLER = {"fedspallm.segment-length=512": "fedspallm.segment-length=32", "fedspallm.window=512": "fedspallm.window=32"}


@pytest.mark.full
def test_the_tutorial_ends_with_a_file_a_sentence_and_a_site_that_left(fedprune, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subprocess.run([sys.executable, "-c", TEXTS], cwd=tmp_path, check=True)
    texts = {path.name for part in ("calibration", "test") for path in (tmp_path / "texts" / part).iterdir()}
    assert texts == {"catalogue.txt", "law.txt", "manual.txt", "software.txt"}
    (model,) = [word.removeprefix("model=") for word in RUN if word.startswith("model=")]
    (tmp_path / model).parent.mkdir(parents=True)
    write_gguf(tmp_path / model, gguf_model(width=128))  # two heads that a cut leaves fill blocks of 32
    assert SMALLER.keys() <= {*RUN}
    run = [*(SMALLER.get(word, word) for word in RUN[1:]), "--engine", "inprocess"]
    alone = [*run, "only-clients=2", "--out", "runs/site-2"]
    for command in (run, HALF[1:], CUT[1:], TO_GGUF[1:], IMATRIX[1:], alone, FORGET[1:]):
        code, said = fedprune(*command)
        assert code == 0, said
    exec(SENTENCE, {})
    assert capsys.readouterr().out.startswith("The package can be installed")
    assert Path("smollm2-small.gguf").is_file()
