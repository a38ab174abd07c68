"""Text and language model of a run are checked before it starts, and described."""

from __future__ import annotations

import pytest

from tests.examples import full
from tests.models.tiny_llm import text_folder, tiny_byte_model

CHECK = ("check", "system=fedspallm", "dataset=text", "--clients", "2")


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """No model is trained here; ``data`` has good texts, and the cache of trained models is empty."""

    def trains(console):
        raise AssertionError("the model is trained though the texts are bad")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fedprune_app.preflight.can_start.embedded_model", trains)
    return text_folder(tmp_path / "data", size=3000)


def spoil(texts, **content):
    for path in (texts / "calibration").iterdir():
        path.write_bytes(content["calibration"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["model=nosuch"],
            "model is 'nosuch', no folder, and not in the hub cache (download=true fetches it), allow",
        ),
        (["model=empty"], "empty' cannot be read: "),
        (["fedspallm.evaluation-texts=a=nosuch.txt"], "nosuch.txt' cannot be read as a text in UTF-8"),
        (["fedspallm.segments=10000"], "client 0 of 2 finds "),
        full(["fedspallm.segment-length=129"], "sequences have 129 tokens, allowed with this model: 128"),
        full(["fedspallm.pattern=3:5", "fedspallm.block-size=125"], "fedspallm.pattern is '3:5'"),
        full(["data-dir=data/test"], "test', allowed with dataset 'text': a folder with calibration/*"),
    ],
)
@pytest.mark.parametrize("command", ["check", full("run")])
def test_a_check_and_a_run_refuse_bad_texts_and_models_before_a_model_is_trained(
    fedprune, tmp_path, command, settings, says
):
    (tmp_path / "empty").mkdir()
    place = [] if command == "check" else ["--engine", "inprocess", "--out", "a"]
    data = [] if "data-dir" in settings[0] else ["data-dir=data"]
    code, said = fedprune(command, *CHECK[1:], *place, *data, *settings)
    assert code == 2, said
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "lines",
    [
        ("systems: [fedspallm]", "datasets: [text]"),
        ("common: {system: fedspallm, dataset: text}", "search: {space: {density: [0.5]}, objective: loss_mean}"),
    ],
)
def test_a_sweep_refuses_bad_texts_before_a_model_is_trained(fedprune, texts, tmp_path, lines):
    spoil(texts, calibration=b"\xff\xfe")
    (tmp_path / "m.yaml").write_text("\n".join(["clients: 2", "seeds: [0]", *lines]))
    code, said = fedprune("sweep", "m.yaml", "data-dir=data", "--engine", "inprocess", "--out", "s")
    assert code == 2
    assert "client0.txt' cannot be read as a text in UTF-8" in said
    assert not (tmp_path / "s").exists()


def test_a_text_file_that_cannot_be_decoded_is_named_by_a_check(fedprune, texts):
    spoil(texts, calibration=b"\xff\xfe")
    code, said = fedprune(*CHECK, "data-dir=data")
    assert code == 2
    assert "client0.txt' cannot be read as a text in UTF-8" in said


def test_good_texts_pass_a_check_with_a_model_that_is_there_and_with_one_not_trained_yet(fedprune, tmp_path):
    tiny_byte_model(tmp_path / "tiny", "llama")
    for model in ("tiny", "auto"):
        code, said = fedprune(*CHECK, "data-dir=data", f"model={model}", "fedspallm.window=32")
        assert code == 0, said
    assert not (tmp_path / "cache").exists()


def test_data_of_a_language_model_are_described(fedprune, texts, capsys):
    (texts / "calibration" / "again.txt").write_text((texts / "test" / "first.txt").read_text())
    code, said = fedprune("check-data", "system=fedspallm", "dataset=text", "data-dir=data")
    assert code == 0, said
    assert "note: test text 'first' is a document of the clients too" in said


def test_what_is_in_a_folder_of_texts_is_counted_in_tokens_of_the_model(texts, tmp_path):
    from fedprune_app.config import parse_config
    from fedprune_app.preflight.describe import data_found

    model = tiny_byte_model(tmp_path / "tiny", "llama")
    settings = {"system": "fedspallm", "dataset": "text", "data-dir": str(texts), "model": str(model)}
    rows, warnings = data_found(parse_config(settings))
    sizes = sorted(len(path.read_text()) for path in (texts / "calibration").iterdir())
    median = (sizes[1] + sizes[2]) / 2
    test = len((texts / "test" / "second.txt").read_text())
    assert dict(rows) == {
        "documents": f"text: 4, of {sizes[0]:,} to {sizes[-1]:,}, median {median:,.10g} tokens",
        "segments": f"{sum(size // 64 for size in sizes)} of 64 tokens",
        "test text 'first'": f"{len((texts / 'test' / 'first.txt').read_text()) // 64} windows of 64 tokens",
        "test text 'second'": f"{test // 64} windows of 64 tokens",
    }
    assert warnings == []
