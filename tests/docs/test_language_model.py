"""The tutorial on language models, from its texts to its sentence, with a tiny model in place of the download."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks, spans

pytest.importorskip("gguf")

from tests.models.tiny_gguf import gguf_model, write_gguf

PAGE = [block for block in blocks() if block.page == "docs/tutorials/language-model.md"]
TEXTS, SENTENCE = (block.text for block in PAGE if block.language == "python")
PRUNE, TO_GGUF = (c for block in PAGE if block.is_commands for c in block.commands if "runs/smollm2" in c)
(EXPORT,) = (span.commands[0] for span in spans() if span.text.startswith("fedprune export runs/smollm2"))
SMALLER = {"fedspallm.segment-length=512": "fedspallm.segment-length=32", "fedspallm.window=512": "fedspallm.window=32"}


@pytest.mark.full
def test_the_tutorial_ends_with_a_sentence_and_a_packed_model(fedprune, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subprocess.run([sys.executable, "-c", TEXTS], cwd=tmp_path, check=True)
    texts = {path.name for part in ("calibration", "test") for path in (tmp_path / "texts" / part).iterdir()}
    assert texts == {"catalogue.txt", "law.txt", "manual.txt", "software.txt"}
    (model,) = [word.removeprefix("model=") for word in PRUNE if word.startswith("model=")]
    (tmp_path / model).parent.mkdir(parents=True)
    write_gguf(tmp_path / model, gguf_model())
    assert SMALLER.keys() <= {*PRUNE}
    code, said = fedprune(*(SMALLER.get(word, word) for word in PRUNE[1:]), "--engine", "inprocess")
    assert code == 0, said
    exec(SENTENCE, {})
    assert capsys.readouterr().out.startswith("The package can be installed")
    code, said = fedprune(*EXPORT[1:])
    assert code == 0, said
    assert (Path(EXPORT[-1]) / "packed.json").is_file()
    code, said = fedprune(*TO_GGUF[1:])
    assert code == 0, said
    assert Path("smollm2.gguf").is_file()
