"""How much memory a pass over hidden states takes, told by the operating system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from fedprune_app.models import llm
from fedprune_app.models.layer_pruning import Pruner, prune_layer
from fedprune_app.models.llm import LanguageModel
from tests.models.tiny_llm import perplexity, tiny_checkpoint, tokens

SEQUENCES, LENGTH, WIDTH = 32768, 64, 16
SIZE = SEQUENCES * LENGTH * WIDTH * 4  # 128 MiB, against which little else counts
pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")]


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.fixture
def peak():
    """``peak(what)``: what it returns, and the most memory it took beyond what was there, in hidden states."""

    def measured(what):
        ctypes.CDLL(None).malloc_trim(0)  # what is free would else be taken again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        result = what()
        return result, (status("VmHWM") - before) / SIZE

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak cannot be reset here")
    return measured


@pytest.fixture
def model(tmp_path):
    return LanguageModel(tiny_checkpoint(tmp_path, "opt", num_layers=2))


def test_a_pass_over_hidden_states_takes_no_second_copy_of_them(model, peak):
    ids = tokens(SEQUENCES, LENGTH)
    hidden, taken = peak(lambda: model.embed(ids, 512))
    assert 1 <= taken < 1.7
    module = model.layer(0, model.layer_tensors(0))
    pruned, taken = peak(lambda: prune_layer(model, 0, module, hidden, Pruner(), 512))
    assert 1 <= taken < 1.7
    assert pruned.hidden.data_ptr() != hidden.data_ptr()
    del pruned
    after, taken = peak(lambda: model.pass_through(module, hidden, 512))
    assert taken < 0.7
    assert after.data_ptr() == hidden.data_ptr()


def test_perplexity_holds_the_hidden_states_once(model, peak, monkeypatch):
    monkeypatch.setattr(llm, "_LOGITS", 2**18)  # which are nothing beside a real model's states, here they would count
    found, taken = peak(lambda: perplexity(model, model.layer_tensors, tokens(SEQUENCES, LENGTH), 512))
    assert 1 <= taken < 1.7  # the windows' ids are there too
    assert found.windows == SEQUENCES


def test_in_place_is_bit_for_bit_what_a_copy_was(model):
    ids = tokens(7, 20)
    hidden = model.embed(ids, 3)
    assert torch.equal(hidden, torch.cat([model.embed(part, 3) for part in torch.split(ids, 3)]))
    module = model.layer(1, model.layer_tensors(1))
    expected = torch.cat(list(model.run(module, hidden, 3)))
    assert torch.equal(model.pass_through(module, hidden, 3), expected)
