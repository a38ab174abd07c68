"""FedSpaLLM with differential privacy: what one segment can change, what is told, charged, refused and resumed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from clients.task import Task
from fedprune_app import client_app, server_app
from fedprune_app.config import ConfigError, parse_config
from fedprune_app.core import hessians
from fedprune_app.engine.simulated_grid import run_in_process
from fedprune_app.models.layer_pruning import input_matrices
from fedprune_app.preflight.inputs import Placement, RunInputs
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.accounting import Steps, epsilon
from fedprune_app.privacy.ledger import Ledger
from fedprune_app.testing.audit import Question, audit
from tests.conftest import Finished
from tests.models.tiny_llm import text_folder
from tests.refusing import refuses
from tests.strategies.test_fedspallm import CLIENTS, cut_off, family, llm, resumed, run, segments_of, settings, texts

__all__ = ["family", "llm", "run", "settings", "texts"]  # fixtures
PRIVATE = {"fedspallm.merge": "hessians", "dp.enabled": True, "dp.noise-multiplier": 2.0, "dp.clip-norm": 0.5}
FIELDS = {"layer": 0, "of-round": 1, "prunes": True}
RELEASES = 4  # distinct inputs of a decoder layer: attention's, its output's, the MLP's, and its last matrix'


def options(**more):
    return {key.replace(".", "_").replace("-", "_"): value for key, value in {**PRIVATE, **more}.items()}


def moments(inputs, clip_norm, by_diagonal=False):
    found = hessians.ClippedMoments(inputs.shape[-1], clip_norm=clip_norm, by_diagonal=by_diagonal)
    found.add(inputs)
    return found.matrix


# --- one segment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "width"), [(5, 9), (9, 5)])
def test_moments_are_means_over_unit_tokens_clipped_by_segment(length, width):
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, length, width, generator=draw) * torch.logspace(-3, 3, 6)[:, None, None]
    inputs[2, 1:] = inputs[2, :1]  # one direction: the norm is 1
    inputs[3, 0] = 0
    expected = torch.zeros(width, width, dtype=torch.float64)
    for segment in inputs.double():
        units = [token / token.norm() for token in segment if token.norm()]
        moment = sum(torch.outer(unit, unit) for unit in units) / length
        expected += moment * min(1.0, 0.4 / float(moment.norm()))
    torch.testing.assert_close(moments(inputs, 0.4).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [0.05, 0.3, 1.0])
def test_a_blank_in_the_place_of_a_segment_changes_the_sum_by_at_most_the_clipping_norm(clip_norm):
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(5, 7, 6, generator=draw)
    inputs[0] = 1e15 * inputs[0, :1]  # tokens in one direction have the largest norm
    inputs[1] = 1e6 * inputs[1, :1]
    for segment in range(len(inputs)):
        other = inputs.clone()
        other[segment] = 0
        moved = (moments(inputs, clip_norm) - moments(other, clip_norm)).double()
        norm = float(hessians.isometric(moved).norm())
        assert norm <= clip_norm * (1 + 1e-5)
        assert norm > 0.04


@pytest.mark.parametrize("clip_norm", [0.05, 0.3, 1.0])
def test_a_blank_in_the_place_of_a_segment_changes_a_diagonal_by_at_most_the_clipping_norm_of_diagonals(clip_norm):
    inputs = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(2))
    inputs[0] = 1e15 * torch.eye(6)[0]  # one input alone has the largest norm
    for segment in range(len(inputs)):
        other = inputs.clone()
        other[segment] = 0
        moved = moments(inputs, clip_norm, True).diagonal() - moments(other, clip_norm, True).diagonal()
        assert 0.99 * min(clip_norm, 0.4) < float(moved.double().norm()) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_segment_that_is_not_finite_adds_nothing(wrong):
    inputs = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(3))
    broken = torch.cat([inputs, inputs[:1]])
    broken[4, 2, 1] = wrong
    assert torch.equal(moments(broken, 0.3), moments(inputs, 0.3))


@pytest.mark.parametrize(("clip_norm", "group_size"), [(0.05, 1), (0.3, 1), (0.3, 3), (1.0, 16)])
def test_a_document_less_changes_a_sum_of_integers_by_at_most_the_clipping_norm_exactly(clip_norm, group_size):
    """In whole numbers, since a float could hide what is too much."""
    inputs = torch.randn(group_size, 7, 40, generator=torch.Generator().manual_seed(2))
    inputs[0] = 1e6 * inputs[0, :1]  # tokens in one direction have the largest norm
    inputs[1:] = inputs[0]
    found = hessians.IntegerMoments(40, "cpu", clip_norm, group_size)
    found.add(inputs)
    entries = found.matrix.tolist()
    squared_norm = sum((1 if i == j else 2) * entries[i][j] ** 2 for i in range(40) for j in range(i, 40))
    bound = clip_norm * 2**40
    assert (bound * (1 - 1e-6)) ** 2 < squared_norm <= bound**2
    assert not found.matrix.tril(-1).any()


def test_integer_moments_are_the_clipped_ones():
    inputs = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(2))
    inputs[3, 2, 1] = torch.nan
    found = hessians.IntegerMoments(6, "cpu", 0.3, 1)
    found.add(inputs[:2])
    found.add(inputs[2:])
    expected = moments(inputs, 0.3).double().triu()
    torch.testing.assert_close(found.matrix.double() * 2.0**-40, expected, atol=1e-6, rtol=1e-6)


def test_an_isometric_vector_has_the_matrix_norm_and_comes_back():
    matrix = torch.randn(7, 7, dtype=torch.float64)
    matrix = matrix + matrix.T
    vector = hessians.isometric(matrix)
    assert float(vector.norm()) == pytest.approx(float(matrix.norm()), rel=1e-12)
    torch.testing.assert_close(
        hessians.from_isometric(vector, 7), hessians.packed_upper(matrix), atol=1e-12, rtol=1e-12
    )


# --- the server -------------------------------------------------------------------------------------------------------


def noised(matrix, std, draw):
    vector = hessians.isometric(matrix.double())
    vector += std * torch.randn(len(vector), generator=draw, dtype=torch.float64)
    return hessians.unpacked(hessians.from_isometric(vector, len(matrix)), len(matrix))


def test_denoising_is_nearer_to_the_truth_than_what_was_sent():
    draw = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(200, 200, generator=draw, dtype=torch.float64))[0]
    values = torch.full((200,), 0.01, dtype=torch.float64)
    values[:3] = torch.tensor([20.0, 10.0, 5.0])
    truth = (basis * values) @ basis.T
    std = 0.1  # its eigenvalues end at 2
    seen = noised(truth, std, draw)
    found = hessians.denoised(seen, std).double()
    before, after = torch.linalg.eigvalsh(seen), torch.linalg.eigvalsh(found)
    assert float(after.min()) > 0
    # One that stands alone becomes √(λ² - 4τ²), the best multiple of its direction.
    assert after[-3:].tolist() == pytest.approx((before[-3:].square() - 4).sqrt().tolist(), rel=0.02)
    assert float((found - truth).norm()) < 0.3 * float((seen - truth).norm())


def test_of_pure_noise_little_is_left():
    seen = noised(torch.eye(300, dtype=torch.float64) * 1e-6, 1.0, torch.Generator().manual_seed(5))
    before = torch.linalg.eigvalsh(seen)
    after = torch.linalg.eigvalsh(hessians.denoised(seen, 1.0).double())
    assert float(after.min()) > 0
    assert float(after.max()) < 0.2 * float(before.max())


def test_without_noise_nothing_changes():
    inputs = torch.randn(50, 8, generator=torch.Generator().manual_seed(6))
    matrix = inputs.T @ inputs
    torch.testing.assert_close(hessians.denoised(matrix, 0.0), matrix, atol=1e-4, rtol=1e-5)


# --- a run ------------------------------------------------------------------------------------------------------------


def uploads(result):
    return {(m.partition, m.round): m.up for m in result.wiretap.messages if m.kind == "train"}


def test_clients_send_noised_moments_and_pay_for_each(run, tmp_path):
    result = run(**options())
    config = result.config
    client = FedSpaLLMClient(config, NodeContext(0, CLIENTS, tmp_path))
    module = client.model.layer(0, client.model.layer_tensors(0))
    ratios = {True: [], False: []}  # of the noise to its deviation, by whether the entry is on the diagonal
    for partition in range(CLIENTS):
        segments = segments_of(config, partition, CLIENTS, tmp_path)
        hidden = client.model.embed(segments, config.batch_size)
        kind = partial(hessians.ClippedMoments, clip_norm=0.5)
        expected = input_matrices(client.model, module, client.observed_matrices, hidden, config.batch_size, kind)
        sent = uploads(result)[partition, 1]
        assert sent.tensors.keys() == {hessians.HESSIAN + name for name in expected}
        assert len(expected) == RELEASES
        for name, total in expected.items():
            upper = sent.tensors[hessians.HESSIAN + name].double() * len(segments)
            noise = hessians.unpacked(upper, len(total)) - total.double()
            rows, columns = torch.triu_indices(len(total), len(total))
            ratios[True].append(noise.diagonal())
            ratios[False].append(noise[rows, columns][rows != columns] * math.sqrt(2))
    for parts in ratios.values():
        every = torch.cat(parts)
        assert float(every.std()) == pytest.approx(2.0 * 0.5, rel=4 / math.sqrt(2 * len(every)))
        assert abs(float(every.mean())) < 5 / math.sqrt(len(every))
    spent = {Steps(2.0, 1.0): 2 * RELEASES}
    for row in result.clients:
        assert row["epsilon"] == pytest.approx(epsilon(spent, config.dp.delta))
        assert row["seconds"] is None
    assert result.rounds[-1]["epsilon_max"] == pytest.approx(epsilon(spent, config.dp.delta))
    for path in result.folder.rglob("ledger.jsonl"):
        assert dict(Ledger(path).spent) == spent
    assert result.info["status"] == "completed"
    assert result.rounds[-1]["density_global"] == pytest.approx(0.5, abs=0.01)


def test_a_private_diagonal_is_noised_alone_for_the_same_price(run, tmp_path):
    result = run(**options(**{"fedspallm.hessian-form": "diagonal", "dp.clip-norm": 0.05}))
    config, noise = result.config, []
    client = FedSpaLLMClient(config, NodeContext(0, CLIENTS, tmp_path))
    module = client.model.layer(0, client.model.layer_tensors(0))
    for partition in range(CLIENTS):
        segments = segments_of(config, partition, CLIENTS, tmp_path)
        hidden = client.model.embed(segments, config.batch_size)
        kind = partial(hessians.ClippedMoments, clip_norm=0.05, by_diagonal=True)
        expected = input_matrices(client.model, module, client.observed_matrices, hidden, 4, kind)
        sent = uploads(result)[partition, 1].tensors
        for name, total in expected.items():
            assert sent[hessians.HESSIAN + name].shape == total.diagonal().shape
            noise.append(sent[hessians.HESSIAN + name].double() * len(segments) - total.diagonal().double())
    every = torch.cat(noise)
    assert float(every.std()) == pytest.approx(2.0 * 0.05, rel=5 / math.sqrt(2 * len(every)))
    assert result.rounds[-1]["epsilon_max"] == pytest.approx(epsilon({Steps(2.0, 1.0): 2 * RELEASES}, config.dp.delta))
    assert result.rounds[-1]["density_global"] == pytest.approx(0.5, abs=0.01)


def test_nothing_else_of_the_text_is_told(run):
    result = run(**options())
    for message in result.wiretap.messages:
        fields = message.told
        assert not {"documents", "relative-error", "seconds"} & fields.keys()
        assert not any(name.startswith("perplexity/") for name in fields)


def test_nobody_is_said_to_have_lost_a_ledger(run):
    """Exchanges are counted by layer and evaluations by round, so a figure by rounds would fall."""
    result = run(**options())
    assert not any(row.get("notes") for row in result.rounds)
    assert all(row.get("epsilon_paper") is None for row in result.clients)
    assert all(row["epsilon_pld"] > 0 for row in result.clients)


def test_noise_is_another_with_another_start_and_the_same_with_the_same(settings, tmp_path):
    """Two releases of one text under one noise would give their difference away."""
    sent = []
    for number, more in enumerate(({}, {}, {"fedspallm.segments": 3}, {"dp.clip-norm": 0.25}, {"seed": 1})):
        config = parse_config({**settings, **PRIVATE, **more})
        client = FedSpaLLMClient(config, NodeContext(0, CLIENTS, tmp_path / str(number)))
        payload, _ = client.answer_training(Task(1, fields=FIELDS))
        name, mean = next(iter(payload.tensors.items()))
        module = client.model.layer(0, client.model.layer_tensors(0))
        hidden = client.model.embed(client.segments()[0], config.batch_size)
        kind = partial(hessians.ClippedMoments, clip_norm=config.dp.clip_norm)
        total = input_matrices(client.model, module, client.observed_matrices, hidden, config.batch_size, kind)
        upper = hessians.packed_upper(total[name.removeprefix(hessians.HESSIAN)])
        sent.append((mean * len(hidden) - upper) / config.dp.clip_norm)
    assert torch.equal(sent[0], sent[1])
    for other in sent[2:]:
        both = torch.stack([sent[0], other])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / math.sqrt(len(other))


def test_a_target_is_kept_and_spent(run):
    result = run(**options(**{"dp.noise-multiplier": 0.0, "dp.target-epsilon": 3.0}))
    told = result.rounds[-1]["epsilon_max"]
    assert 2.9 < told <= 3.0
    assert result.rounds[-1]["budgets_spent"] == CLIENTS


def test_a_budget_that_does_not_bear_all_layers_is_not_touched(settings, tmp_path):
    wanted = {**settings, **PRIVATE, "dp.epsilon-budget": 2.5, "out-dir": str(tmp_path / "run")}
    both, one = (epsilon({Steps(2.0, 1.0): count * RELEASES}, 1e-5) for count in (2, 1))
    assert one > 2.5 or both > 2.5
    with pytest.raises(Exception, match="budget"):
        run_in_process(server_app.app, client_app.app, CLIENTS, parse_config(wanted).to_dict())
    ledgers = list((tmp_path / "run").rglob("ledger.jsonl"))
    assert len(ledgers) == CLIENTS
    assert all(not dict(Ledger(path).spent) for path in ledgers)


def test_a_client_that_declines_is_no_failure_and_the_others_prune(settings, tmp_path):
    once, twice = (epsilon({Steps(2.0, 1.0): count * 2 * RELEASES}, 1e-5) for count in (1, 2))
    wanted = {**settings, **PRIVATE, "dp.ledger-dir": str(tmp_path / "ledgers"), "min-replies": CLIENTS}
    wanted["dp.epsilon-budget"] = (once + twice) / 2
    for number in range(2):
        config = parse_config({**wanted, "out-dir": str(tmp_path / str(number))})
        run_in_process(server_app.app, client_app.app, CLIENTS, config.to_dict())
        for path in (tmp_path / "ledgers").glob("*.jsonl"):
            if not path.name.startswith("00001"):
                path.unlink()  # the next run begins anew, but for one client
    first, second = (Finished(tmp_path / str(number)) for number in range(2))
    assert second.info["status"] == "completed"
    assert (first.rounds[-1]["replies"], second.rounds[-1]["replies"]) == (2 * CLIENTS, 2 * (CLIENTS - 1))
    assert second.rounds[-1]["failures"] == 0
    assert second.rounds[-1]["density_global"] == pytest.approx(first.rounds[-1]["density_global"])
    assert [row["epsilon"] for row in second.clients] == pytest.approx([once] * CLIENTS)
    assert any("client 1" in note and "budget" in note for note in second.rounds[-1]["notes"])


def test_a_run_that_was_cut_off_goes_on_to_the_same_model_and_pays_again(run, settings, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    wanted = {**settings, **PRIVATE}
    cut_off(wanted, folder, monkeypatch)
    assert resumed(wanted, folder).sha256 == run(**options()).sha256
    assert all(sum(Ledger(path).spent.values()) == 3 * RELEASES for path in folder.rglob("ledger.jsonl"))


# --- an audit -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("unit", ["example", "group"])
@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_an_audit_bounds_a_part_of_the_claim_and_finds_noise_at_half_of_what_is_charged(settings, tmp_path, unit):
    """The model is so narrow that many canaries have no direction of their own."""
    more = {"dp.noise-multiplier": 1.0, "dp.unit": unit, "fedspallm.segments": 40, "dp.group-limit": 2}
    texts = {"data-dir": str(text_folder(tmp_path / "texts", num_documents=80, size=30))}
    asked = replace(prepare(RunInputs({**settings, **PRIVATE, **texts, **more})), placement=Placement("inprocess", 2))
    noised, half = (audit(asked, Question(noise_share=share)) for share in (1.0, 0.5))
    assert noised.canaries == 40
    assert noised.tally.steps % RELEASES == 0
    assert noised.claim == half.claim
    assert 0.2 * noised.claim < noised.bound < noised.claim
    assert not half.holds


# --- a client's own text ----------------------------------------------------------------------------------------------


@pytest.fixture
def own(settings, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"This is text number {number}, of which nobody knows more. " * 12)
    return {**settings, **PRIVATE, "data-dir": str(folder)}


def sums_of(config, folder, monkeypatch):
    """What the client releases without noise, as matrices of sums, and its segments by document."""
    monkeypatch.setattr("fedprune_app.privacy.noise.noised", lambda total, draws, std: total)
    client = FedSpaLLMClient(config, NodeContext(0, 0, folder))
    payload, _ = client.answer_training(Task(1, fields=FIELDS))
    segments, names = client.segments()
    uppers = [mean.double() * client.num_examples for mean in payload.tensors.values()]
    matrices = [hessians.unpacked(upper, math.isqrt(2 * len(upper))) for upper in uppers]
    return matrices, {name: segments[[own == name for own in names]] for name in names}


@pytest.mark.parametrize("text", ["", "short", "Wholly another text, of another length. " * 90], ids=len)
def test_one_document_changed_arbitrarily_moves_each_sum_by_at_most_the_clipping_norm_each_way(
    own, tmp_path, monkeypatch, text
):
    """Of all other documents the same segments are taken, however many the changed one has."""
    config = parse_config({**own, "dp.unit": "group", "dp.group-limit": 4, "dp.clip-norm": 0.2})
    before, kept = sums_of(config, tmp_path / "before", monkeypatch)
    assert {len(segments) for segments in kept.values()} == {4}
    changed = min(kept)
    (tmp_path / "own" / f"{changed}.txt").write_text(text)
    after, now = sums_of(config, tmp_path / "after", monkeypatch)
    assert now.keys() - {changed} == kept.keys() - {changed}
    assert all(torch.equal(now[name], kept[name]) for name in kept.keys() - {changed})
    is_blank = changed not in now
    for one, other in zip(before, after, strict=True):
        assert 0.01 < float((one - other).norm()) <= (1 if is_blank else 2) * 0.2 * (1 + 1e-4)


def test_documents_of_one_segment_are_added_as_segments_are(own, tmp_path):
    client = FedSpaLLMClient(
        parse_config({**own, "dp.unit": "group", "dp.group-limit": 1}), NodeContext(0, 0, tmp_path)
    )
    states = client.model.embed(client.segments()[0], 4)
    ((size, same),) = client.by_document_size(states).items()
    assert size == 1
    assert torch.equal(same, states)


def test_a_perplexity_on_own_text_is_told_only_where_accuracies_are_open(own, tmp_path):
    for number, accuracies in enumerate(("noised", "none", "open")):
        config = parse_config({**own, "dp.accuracies": accuracies})
        client = FedSpaLLMClient(config, NodeContext(0, 0, tmp_path / str(number)))
        client.answer_training(Task(1, fields=FIELDS))
        _, told = client.answer_evaluation(Task(1))
        assert ("perplexity/own" in told) == (accuracies == "open")


def test_a_ledger_of_own_text_is_found_again_however_segments_are_cut(own, tmp_path):
    spent = []
    for length in (24, 16):
        config = parse_config({**own, "fedspallm.segment-length": length, "seed": length})
        client = FedSpaLLMClient(config, NodeContext(0, 0, tmp_path / "state"))
        client.answer_training(Task(1, fields=FIELDS))
        spent.append(sum(client.privacy.ledger.spent.values()))
    assert spent == [RELEASES, 2 * RELEASES]
    assert len(list((tmp_path / "state").rglob("own-*.jsonl"))) == 1


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fedspallm.merge": "mean"}, ("fedspallm.merge", "mean")),
        (
            {"fedspallm.recovery-rounds": 1, "num-server-rounds": 2},
            ("fedspallm.recovery-rounds", 1),
        ),
        ({"dp.clip-norm": 2.0}, ("dp.clip-norm", 2.0)),
        ({"fedspallm.hessian-form": "int8"}, ("fedspallm.hessian-form", "int8")),
    ],
)
def test_settings_that_would_leak_are_refused(settings, more, message):
    key, value = message
    with pytest.raises(ConfigError, match=f"^{key} is '?{value}"):
        prepare(RunInputs({**settings, **PRIVATE, **more}))


def test_an_audit_of_noise_that_clients_share_is_refused(settings):
    """It would find a part of the noise that is charged."""
    shared = {"secure-sums": True, "secure-sums-threshold": 3, "dp.noise-shared-by": 2}
    asked = replace(prepare(RunInputs({**settings, **PRIVATE, **shared})), placement=Placement("inprocess", 4))
    with refuses("dp.noise-shared-by", 2, allowed="1", condition="with audit"):
        audit(asked, Question())
