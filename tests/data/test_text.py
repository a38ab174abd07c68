"""Text: who holds what, that nobody shares a segment, and what perplexity is measured on."""

from __future__ import annotations

import json

import pytest
import torch

from fedprune_app.data.dataset import FileError
from fedprune_app.data.text import (
    Document,
    calibration_documents,
    calibration_segments,
    perplexity_texts,
    stdlib_training_text,
    windows_of,
)

LENGTH = 8


def encode(words: str) -> torch.Tensor:
    return torch.tensor([int(word) for word in words.split()], dtype=torch.int64)


def numbered(count: int, segments: int, tail: int = 3) -> list[Document]:
    """Documents whose tokens all differ, so that a token tells where it is from."""
    size = segments * LENGTH + tail
    return [Document(f"d{i}", " ".join(str(i * 10_000 + j) for j in range(size))) for i in range(count)]


def dealt(documents, num_clients, count, deal="documents", seed=0, **more):
    """What each client holds; ``count`` segments, or of the clients in turn."""
    counts = [count] * num_clients if isinstance(count, int) else count
    return [
        calibration_segments(
            documents,
            encode,
            deal=deal,
            partition=k,
            num_partitions=num_clients,
            count=counts[k],
            max_segments=max(counts),
            length=LENGTH,
            seed=seed,
            **more,
        )
        for k in range(num_clients)
    ]


@pytest.mark.parametrize(
    ("deal", "num_documents", "num_clients", "count"),
    [
        ("documents", 5, 5, 6),
        ("documents", 3, 7, 3),
        ("documents", 12, 5, 9),
        ("one", 5, 4, 9),
        ("one", 3, 7, 3),
        ("segments", 4, 6, 5),
    ],
)
def test_no_two_clients_share_a_token(deal, num_documents, num_clients, count):
    shares = dealt(numbered(num_documents, segments=10), num_clients, count, deal)
    seen = torch.cat([segments.flatten() for segments, _ in shares])
    assert seen.shape == (num_clients * count * LENGTH,)
    assert len(seen.unique()) == len(seen)


@pytest.mark.parametrize("deal", ["documents", "one", "segments"])
def test_clients_of_different_numbers_of_segments_share_none(deal):
    counts = [3, 1, 5, 1]
    shares = dealt(numbered(4, segments=9), 4, counts, deal)
    assert [len(segments) for segments, _ in shares] == counts
    seen = torch.cat([segments.flatten() for segments, _ in shares])
    assert len(seen.unique()) == len(seen) == sum(counts) * LENGTH


@pytest.mark.parametrize("deal", ["documents", "one", "segments", "own"])
@pytest.mark.parametrize("num_documents", [2, 9])
def test_of_a_protected_document_the_same_segments_are_taken_however_long_the_others_are(deal, num_documents):
    """A few documents of several clients, and several of each client; one of them becomes longer, then empty."""
    documents, held = numbered(num_documents, segments=20), []
    whole = documents[-1].text
    longer = " ".join([whole, *(str(10**9 + k) for k in range(100))])
    for text in (whole, longer, ""):
        documents[-1] = Document("d", text)
        shares = dealt(documents, 4, 3, deal, most_of_document=2)
        assert all(len(names) == len(segments) <= 6 for segments, names in shares)
        assert all(names.count(name) <= 2 and len({*names}) <= 3 for _, names in shares for name in names)
        if deal != "own":  # where documents are one client's alone
            seen = torch.cat([segments.flatten() for segments, _ in shares])
            assert len(seen.unique()) == len(seen)
        pairs = [zip(names, segments.tolist(), strict=True) for segments, names in shares]
        held.append([[pair for pair in own if pair[0] != "d"] for own in pairs])
    assert held[0] == held[1] == held[2]


def test_a_client_can_be_given_one_document_alone():
    shares = dealt(numbered(6, segments=9), 4, 5, "one")
    assert [names for _, names in shares] == [["d0"], ["d1"], ["d2"], ["d3"]]
    shares = dealt(numbered(3, segments=9), 4, 4, "one")
    assert [names for _, names in shares] == [["d0"], ["d1"], ["d2"], ["d0"]]


@pytest.mark.parametrize("deal", ["documents", "one", "segments", "own"])
def test_segments_are_runs_of_one_document(deal):
    for segments, names in dealt(numbered(4, segments=10), 3, 4, deal):
        assert segments.shape == (4, LENGTH)
        for segment in segments:
            assert (segment[1:] - segment[:-1] == 1).all()
            assert int(segment[0]) % 10_000 % LENGTH == 0
        assert {f"d{int(segment[0]) // 10_000}" for segment in segments} == set(names)


def test_with_documents_of_ones_own_nobody_else_has_any_of_them():
    owners: dict[str, int] = {}
    for client, (_, names) in enumerate(dealt(numbered(9, segments=5), 4, 8)):
        for name in names:
            assert owners.setdefault(name, client) == client


def test_segments_of_everything_are_of_as_many_documents_as_there_are():
    for _, names in dealt(numbered(6, segments=50), 3, 4, "segments"):
        assert len(names) == 4
    for _, names in dealt(numbered(3, segments=50), 2, 9, "segments"):
        assert len(names) == 3


def test_segments_of_everything_leave_documents_unread_that_nobody_needs():
    documents = numbered(40, segments=2)
    read = []

    def encode(text):
        read.append(text)
        return torch.arange(2 * LENGTH)

    calibration_segments(
        documents,
        encode,
        deal="segments",
        partition=1,
        num_partitions=8,
        count=3,
        max_segments=4,
        length=LENGTH,
        seed=0,
    )
    assert len(read) == 7  # of the first client four, of this one three


def test_the_seed_decides_which_segments_and_nothing_else_does():
    documents = numbered(4, segments=30)
    first = dealt(documents, 2, 5)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, dealt(documents, 2, 5), strict=True))
    assert not torch.equal(first[0][0], dealt(documents, 2, 5, seed=1)[0][0])


def test_too_little_text_is_said_with_numbers():
    with pytest.raises(ValueError, match="client 0 of 1 finds 3 segments of 8 tokens of 4"):
        dealt(numbered(1, segments=3), 1, 4)
    with pytest.raises(ValueError, match="client 2 of 3 finds 1 segments"):
        dealt(numbered(1, segments=5), 3, 2, "segments")


def test_windows_lie_side_by_side_and_the_tail_is_dropped():
    assert windows_of(torch.arange(11), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="3 tokens, allowed: at least one window of 4"):
        windows_of(torch.arange(3), 4)


def test_what_clients_hold_is_neither_trained_nor_tested_on():
    private = {document.text for document in calibration_documents("stdlib", "")}
    training = {document.text for document in stdlib_training_text()}
    assert len(private) >= 16
    assert not private & training
    (tested, most), *others = perplexity_texts("stdlib", "").values()
    assert (most, others) == (0, [])
    assert sum(map(len, training)) > 3_000_000
    assert not any(document in tested for document in private | {t for t in training if t.strip()})


def test_text_files_are_documents_and_lines_of_jsonl_are_too(tmp_path):
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "b.TXT").write_text("one\ntwo\n")
    (tmp_path / "calibration" / "._b.txt").write_text("what macOS leaves")
    rows = [{"text": "x", "url": "y"}, {"text": "z"}]
    (tmp_path / "calibration" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(d.name, d.text) for d in calibration_documents("text", str(tmp_path))]
    assert found == [("a:1", "x"), ("a:2", "z"), ("b", "one\ntwo\n")]
    (tmp_path / "calibration" / "a.jsonl").write_text(f"\n{json.dumps(rows[0])}\n \n{json.dumps(rows[1])}\n\n")
    assert [(d.name, d.text) for d in calibration_documents("text", str(tmp_path))][:2] == [("a:2", "x"), ("a:4", "z")]
    for line in ("[]", '{"text": 3}', "{", "[" * 100_000):
        (tmp_path / "calibration" / "a.jsonl").write_text(f"{line}\n")
        said = r"a\.jsonl' has a line that is no object with a text .*: number 1"
        with pytest.raises(FileError, match=said):
            list(calibration_documents("text", str(tmp_path)))
    (tmp_path / "calibration" / "a.jsonl").unlink()
    (tmp_path / "calibration" / "c.txt").symlink_to("nowhere")
    with pytest.raises(FileError, match=r"c\.txt' cannot be read as a text in UTF-8: .*No such file"):
        list(calibration_documents("text", str(tmp_path)))


def test_known_corpora_are_joined_as_the_papers_do(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "wikitext-2.txt").write_text(" \n = A = \n \n b\x0bc\u2028d \n")
    (tmp_path / "test" / "ptb.txt").write_text(" no it \n was n't \n")
    (tmp_path / "test" / "c4.jsonl").write_text("".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(1200)))
    (tmp_path / "test" / "mine.txt").write_text("as\nit is\n")
    assert perplexity_texts("text", str(tmp_path)) == {
        "c4": (" ".join(f"t{i}" for i in range(1100)), 256),
        "mine": ("as\nit is\n", 0),
        "ptb": ("no it was n't", 0),
        "wikitext-2": ("\n\n = A = \n\n\n\n\n b\x0bc\u2028d \n", 0),
    }


def test_a_file_that_is_no_text_is_named(tmp_path):
    for part in ("calibration", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "latin.txt").write_bytes("\u00e9t\u00e9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt' cannot be read as a text in UTF-8: .* position 0"):
        list(calibration_documents("text", str(tmp_path)))
    with pytest.raises(ValueError, match=r"latin\.txt' cannot be read as a text in UTF-8"):
        perplexity_texts("text", str(tmp_path))


def test_half_a_surrogate_pair_in_a_jsonl_is_named_with_its_line(tmp_path):
    (tmp_path / "calibration").mkdir()
    path = tmp_path / "calibration" / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "cut \\ud83d"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl' has a line that is no object with a text .*: number 2"):
        list(calibration_documents("text", str(tmp_path)))


def test_a_mark_of_byte_order_is_no_part_of_a_text(tmp_path):
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "calibration" / "b.txt").write_bytes(b"\xef\xbb\xbftwo")
    assert [each.text for each in calibration_documents("text", str(tmp_path))] == ["one", "two"]


def test_two_test_texts_of_one_name_are_refused(tmp_path):
    (tmp_path / "test").mkdir()
    for name in ("t.txt", "t.jsonl"):
        (tmp_path / "test" / name).write_text('{"text": "words"}')
    with pytest.raises(ValueError, match=r"test text 't' is given twice, allowed: another name for '.*t\.txt'"):
        perplexity_texts("text", str(tmp_path))


def test_more_texts_come_after_the_datasets_own_and_are_joined_by_name(tmp_path):
    (tmp_path / "x.tokens").write_text(" no it \n was n't \n")
    more = {"ptb": tmp_path / "x.tokens", "mine": tmp_path / "x.tokens"}
    found = perplexity_texts("stdlib", "", more)
    assert list(found) == ["stdlib", "ptb", "mine"]
    assert (found["ptb"], found["mine"]) == (("no it was n't", 0), (" no it \n was n't \n", 0))
    with pytest.raises(ValueError, match="cannot be read as a text in UTF-8"):
        perplexity_texts("stdlib", "", {"ptb": tmp_path})
    with pytest.raises(ValueError, match="test text 'stdlib' is given twice"):
        perplexity_texts("stdlib", "", {"stdlib": tmp_path / "x.tokens"})


@pytest.mark.parametrize("part", ["calibration", "test"])
def test_a_folder_without_text_is_named(tmp_path, part):
    read = {"calibration": calibration_documents, "test": perplexity_texts}
    for folder in ("", str(tmp_path)):
        with pytest.raises(
            ValueError, match=f"data-dir is '{folder}', allowed with dataset 'text': a folder with {part}"
        ):
            list(read[part]("text", folder))
