"""Models whose tokenizer begins each text with a start token."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from fedprune_app.config import ConfigError, parse_config
from fedprune_app.learning import language_models
from fedprune_app.learning.language_models import check_start_token, evaluation_windows, language_model
from fedprune_app.models.embedded import byte_tokenizer
from tests.models.tiny_llm import text_folder, tiny_byte_model

START = 7


@pytest.fixture
def config_of(tmp_path):
    folder = tiny_byte_model(tmp_path / "model", "llama")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", START)]
    )
    tokenizer.save_pretrained(folder)
    texts = text_folder(tmp_path / "texts")
    common = {"system": "fedspallm", "dataset": "text", "model": str(folder), "data-dir": str(texts)}
    common |= {"fedspallm.segments": 4, "fedspallm.segment-length": 16, "fedspallm.window": 16}
    return lambda **more: parse_config({**common, **more})


def test_every_segment_and_window_begins_with_the_start_token_in_place_of_its_first(config_of, tmp_path):
    plain, started = config_of(), config_of(**{"fedspallm.start-token": True})
    model = language_model(plain)
    for before, after in zip(*(evaluation_windows(each, model)[1].values() for each in (plain, started)), strict=True):
        assert before[0, 0] == START  # as the tokenizer has it
        assert not (before[1:, 0] == START).any()
        assert (after[:, 0] == START).all()
        assert torch.equal(before[:, 1:], after[:, 1:])
    of_client = [FedSpaLLMClient(each, NodeContext(0, 2, tmp_path)).segments()[0] for each in (plain, started)]
    assert (of_client[1][:, 0] == START).all()
    assert torch.equal(of_client[0][:, 1:], of_client[1][:, 1:])


def test_a_model_that_is_another_without_its_start_token_is_refused(config_of, monkeypatch):
    model = language_model(config_of())
    monkeypatch.setattr(language_models, "_FACTOR", 1000.0)
    check_start_token(config_of(), model)
    monkeypatch.setattr(language_models, "_FACTOR", 0.0)
    with pytest.raises(
        ConfigError, match=r"^fedspallm.start-token is false, allowed: true: a window of first then has "
    ):
        check_start_token(config_of(), model)
    check_start_token(config_of(**{"fedspallm.start-token": True}), model)


def test_a_tokenizer_without_a_start_token_leaves_windows_as_they_are(tmp_path):
    model = language_model(parse_config({"system": "fedspallm", "model": str(tiny_byte_model(tmp_path, "llama"))}))
    windows = torch.arange(12).view(3, 4)
    assert torch.equal(model.started(windows), windows)
