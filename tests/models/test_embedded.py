"""The embedded model's recipe, small: trained once, cached, and a plain transformers folder."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from fedprune_app.models.embedded import Recipe, byte_tokenizer, embedded_folder, train_embedded
from fedprune_app.models.llm import LanguageModel
from fedprune_app.models.transformers import import_transformers
from fedprune_app.preflight import can_start
from tests.models.tiny_llm import perplexity

SMALL = Recipe(width=32, inner_width=48, num_layers=1, num_heads=2, length=32, batch_size=8, steps=120)
TEXTS = ["def add(a, b):\n    return a + b\n" * 40, "for i in range(10):\n    print(i)\n" * 40]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_trained_once_and_predicts_what_it_read(cache):
    losses = []
    folder = train_embedded(TEXTS, SMALL, on_step=lambda step, steps, loss: losses.append(loss))
    assert folder == embedded_folder(TEXTS, SMALL)
    assert folder.parent == cache / "fedprune"
    assert len(losses) == SMALL.steps
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    model = LanguageModel(folder)
    windows = model.encode(TEXTS[0])[:320].view(-1, 32)
    assert perplexity(model, model.layer_tensors, windows, 4).value < 10
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert train_embedded(TEXTS, SMALL, on_step=lambda *_: losses.append(0.0)) == folder
    assert len(losses) == SMALL.steps
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.full
def test_a_training_that_was_killed_goes_on_from_its_checkpoint_to_the_same_bits(cache, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(step, steps, loss):
        if step == 110:
            raise Killed

    with pytest.raises(Killed):
        train_embedded(TEXTS, SMALL, on_step=die)
    steps = []
    weights = train_embedded(TEXTS, SMALL, on_step=lambda step, *_: steps.append(step)) / "model.safetensors"
    assert steps == list(range(101, SMALL.steps + 1))
    resumed = weights.read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert (train_embedded(TEXTS, SMALL) / "model.safetensors").read_bytes() == resumed
    assert [path.name for path in (cache / "fedprune").glob(".*.safetensors")] == []


def test_a_damaged_cached_model_is_trained_anew(cache):
    recipe = Recipe(width=16, inner_width=16, num_layers=1, num_heads=2, steps=1, length=8)
    weights = train_embedded(TEXTS, recipe) / "model.safetensors"
    before = weights.read_bytes()
    for damaged in (b"", before[:-1], bytes([before[0] ^ 1]) + before[1:]):
        weights.write_bytes(damaged)
        assert train_embedded(TEXTS, recipe) / "model.safetensors" == weights
        assert weights.read_bytes() == before


def test_a_run_does_not_begin_with_a_damaged_cached_model(cache, monkeypatch):
    recipe = Recipe(width=16, inner_width=16, num_layers=1, num_heads=2, steps=1, length=8)
    monkeypatch.setattr(
        "fedprune_app.preflight.can_start.stdlib_training_text", lambda: [SimpleNamespace(text=t) for t in TEXTS]
    )
    monkeypatch.setattr(
        "fedprune_app.preflight.can_start.embedded_folder", lambda texts, _=None: embedded_folder(texts, recipe)
    )
    trained = []

    def train(texts, on_step):
        trained.append(texts)
        return train_embedded(texts, recipe, on_step)

    monkeypatch.setattr("fedprune_app.preflight.can_start.train_embedded", train)
    console = Console(quiet=True)
    weights = can_start.embedded_model(console) / "model.safetensors"
    assert can_start.embedded_model(console) == weights.parent
    assert len(trained) == 1
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    can_start.embedded_model(console)
    assert (len(trained), weights.read_bytes()) == (2, before)


def test_another_text_or_recipe_is_another_model(cache):
    folders = {embedded_folder(TEXTS, SMALL), embedded_folder(TEXTS[:1], SMALL), embedded_folder(TEXTS)}
    assert len(folders) == 3


def test_plain_transformers_load_model_and_tokenizer(cache):
    folder = train_embedded(TEXTS, Recipe(width=16, inner_width=16, num_layers=1, num_heads=2, steps=1, length=8))
    transformers = import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model(torch.tensor([tokenizer("def").input_ids])).logits.shape == (1, 3, 256)


@pytest.mark.parametrize("text", ["", "plain", "é ü 中\n\n\ttabs and\r\nlines", "\x00\x7f", "  spaces  "])
def test_tokens_are_bytes(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_too_little_text_is_said(cache):
    with pytest.raises(ValueError, match="3 bytes of text to train on"):
        train_embedded(["abc"], SMALL)
