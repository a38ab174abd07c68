"""Private text is parsed, tokenised and cut once in a process, and anew when it is another."""

from __future__ import annotations

import os

import pytest
import torch

from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from fedprune_app.config import parse_config
from fedprune_app.data import text as texts
from fedprune_app.learning import text_cache
from fedprune_app.models.llm import LanguageModel
from tests.models.tiny_llm import text_folder, tiny_byte_model

CLIENTS = 3


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """``counted(deal, **settings)``: a new client each time; files read and texts tokenised are counted."""
    folder = text_folder(tmp_path / "texts")
    model = tiny_byte_model(tmp_path / "model", "llama")
    count = {"read": 0, "tokenised": 0}
    honest_read, honest_encode = texts._documents, LanguageModel._encode

    def read(path):
        count["read"] += 1
        return honest_read(path)

    def encode(self, text):
        count["tokenised"] += 1
        return honest_encode(self, text)

    monkeypatch.setattr(texts, "_documents", read)
    monkeypatch.setattr(LanguageModel, "_encode", encode)
    settings = {"system": "fedspallm", "dataset": "text", "data-dir": str(folder), "model": str(model)}
    settings |= {"fedspallm.segments": 4, "fedspallm.segment-length": 24, "fedspallm.window": 32}

    def client(partition=0, num_clients=CLIENTS, **more):
        config = parse_config({**settings, **more})
        return FedSpaLLMClient(config, NodeContext(partition, num_clients, tmp_path / "state"))

    client.count, client.folder = count, folder
    return client


def expected(client):
    """What the client's segments are, cut without any memory."""
    documents = list(texts.calibration_documents("text", client.config.data_dir))
    counts = [client.options.segments] * CLIENTS
    return texts.calibration_segments(
        documents,
        lambda text: torch.tensor(list(text.encode())),
        deal=client.options.deal,
        partition=client.client_id,
        num_partitions=CLIENTS,
        count=client.num_examples,
        max_segments=max(counts),
        length=client.options.segment_length,
        seed=client.config.seed,
    )


@pytest.mark.parametrize("deal", ["segments", "documents", "one"])
def test_what_is_remembered_is_what_would_be_cut_anew(counted, deal):
    for seed in (0, 1):
        for partition in (0, 1, 2, 0, 1, 2):
            client = counted(partition, **{"fedspallm.deal": deal, "seed": seed})
            segments, names = client.segments()
            wanted, wanted_names = expected(client)
            assert torch.equal(segments, wanted)
            assert names == wanted_names


def test_the_clients_of_a_process_read_each_file_and_tokenise_each_document_once(counted):
    for _ in ("registration", "layer 0"):
        for partition in range(CLIENTS):
            counted(partition, **{"fedspallm.deal": "segments"}).segments()
    assert counted.count == {"read": 4, "tokenised": 4}


def test_segments_outlive_the_documents(counted):
    segments = [counted(partition).segments()[0] for partition in range(CLIENTS)]
    before = dict(counted.count)
    text_cache.clear_cache()
    for partition in range(CLIENTS):
        assert torch.equal(counted(partition).segments()[0], segments[partition])
    assert counted.count == before
    counted(0, seed=5).segments()
    assert counted.count["read"] > before["read"]


def test_text_that_changed_is_read_again(counted):
    before = counted(0).segments()[0]
    for path in (counted.folder / "calibration").iterdir():
        path.write_text(path.read_text()[::-1])
        os.utime(path, ns=(1, 1))
    client = counted(0)
    assert torch.equal(client.segments()[0], expected(client)[0])
    assert not torch.equal(client.segments()[0], before)


def test_a_client_with_text_of_its_own_reads_it_once(counted):
    texts = [counted(0, 0, **{"data-dir": str(counted.folder / "calibration")}) for _ in range(3)]
    first = texts[0]
    for client in texts:
        assert torch.equal(client.segments()[0], first.segments()[0])
        assert client.own_text[1] == first.own_text[1] != ""
    assert counted.count["read"] == 4
    assert not torch.equal(counted(0).segments()[0], first.segments()[0])


def test_memory_is_bounded(counted, monkeypatch):
    monkeypatch.setattr(text_cache, "_MOST_CLIENTS", 2)
    for seed in range(4):
        for partition in range(CLIENTS):
            client = counted(partition, seed=seed)
            assert torch.equal(client.segments()[0], expected(client)[0])
    assert len(text_cache._segments[client.model]) == 2
