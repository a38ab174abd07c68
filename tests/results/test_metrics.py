"""A number that is reported is declared once, and comes out wherever numbers are shown."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import re
import sys
from collections import Counter

import pytest
from rich.console import Console

from fedprune_app.config import parse_config
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.figures import figures
from fedprune_app.results.groups import group_runs
from fedprune_app.results.metrics import (
    ClientMetric,
    Column,
    Curve,
    Declarations,
    FieldKind,
    InLine,
    InTable,
    Recorded,
    ReplyKind,
    Title,
)
from fedprune_app.results.reader import load_run
from fedprune_app.results.recorder import from_training, number_in, recorded_of_client, round_columns, row_of
from fedprune_app.results.report import write_report
from fedprune_app.results.statistics import largest, mean, noise_of_mean
from fedprune_app.results.tables import comma_separated, final_rows
from fedprune_app.results.texts import progress_line, summary_line
from fedprune_app.running import RunProgress
from tests.conftest import tampered_app

SHARPNESS = ClientMetric(
    "sharpness",
    required=frozenset({ReplyKind.TRAINING}),
    least=0,
    most=1,
    view=Title("Sharpness"),
    columns=(
        Column(
            "sharpness_mean",
            mean,
            table=InTable("sharpness", "Sharpness (%)", 1, 100),
            view=Title("Sharp"),
            curve=Curve("sharpness", "Sharpness by round", "Mean over those that trained.", "Sharpness"),
            line=InLine("sharpness", "sharp", ".1f", 100, " %"),
        ),
        Column("sharpness_max", largest),
    ),
)


@pytest.fixture
def declared(monkeypatch):
    more = Declarations((*DECLARATIONS, SHARPNESS))
    for module in [each for each in [*sys.modules.values()] if vars(each).get("DECLARATIONS") is DECLARATIONS]:
        monkeypatch.setattr(module, "DECLARATIONS", more)


def says_sharpness(request, reply, partition):
    """Client 5 says a number that cannot be."""
    reply.content["fields"]["sharpness"] = partition / 10 if partition < 5 else 7.0
    return reply


def test_a_number_that_is_declared_is_checked_recorded_and_shown_without_another_line(
    declared, federate, caplog, tmp_path
):
    with caplog.at_level(logging.INFO):
        sharp = federate(app=tampered_app(train=says_sharpness), fraction_train=1.0, num_server_rounds=2)
    for row in sharp.rounds:
        assert row["sharpness_mean"] == pytest.approx(0.2)
        assert row["sharpness_max"] == 0.4
        assert row["failure_reasons"] == ["client 5: field 'sharpness' is 7.0, allowed: 0 to 1"]
    assert [row["sharpness"] for row in sharp.clients if row["round"] == 1] == [0, 0.1, 0.2, 0.3, 0.4, None]
    groups = group_runs([load_run(sharp.folder)])
    header, (cells,) = final_rows(groups)
    assert dict(zip(header, cells, strict=True))["Sharpness (%)"] == "20.0"
    assert "sharpness_mean" in comma_separated(groups).splitlines()[0]
    drawn = {figure.key: figure for figure in figures(groups)}
    assert drawn["sharpness"].title == "Sharpness by round"
    assert drawn["sharpness"].variants[0].traces[0]["y"] == pytest.approx([0.2, 0.2])
    assert "Sharp" in [view.name for view in drawn["accuracy-by-round"].variants]
    assert "Sharpness" in [view.name for view in drawn["clients"].variants]
    page = write_report([sharp.folder], tmp_path / "report.html").read_text()
    assert "Sharpness (%)</th>" in page
    assert "Sharpness by round</h3>" in page
    assert ", sharpness 20.0 %, " in caplog.text
    told = io.StringIO()
    config = parse_config({"system": "fedavg", "out-dir": str(sharp.folder), "num-server-rounds": 2})
    with RunProgress(config, sharp.folder, Console(file=told, width=200, force_terminal=True)):
        pass
    assert "sharp 20.0 %" in told.getvalue()


def test_every_name_is_declared_once():
    columns = [c.name for each in DECLARATIONS for c in (each.columns if isinstance(each, ClientMetric) else (each,))]
    own = [each.name for each in DECLARATIONS if isinstance(each, ClientMetric)]
    for names in (columns, own):
        assert [name for name, count in Counter(names).items() if count > 1] == []
    for reply in ReplyKind:
        fields = [(each.wire_name, each.by) for each in DECLARATIONS.in_reply(reply)]
        assert len(set(fields)) == len(fields)


def test_titles_and_keys_of_tables_and_figures_are_used_once():
    parts = [
        [getattr(column, part) for column in DECLARATIONS.columns.values() if getattr(column, part)]
        for part in ("table", "view", "curve", "lost")
    ]
    for of_part in parts:
        keys = [getattr(each, "key", None) or each.text for each in of_part]
        assert len(set(keys)) == len(keys)


def training(**changes):
    fields = {"loss": 1.5, "density": 0.5, "seconds": 2.0, "flops": 1e9, **changes}
    return {name.replace("_", "-"): value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": math.nan}, "field 'loss' is nan, allowed: -1e+100 to 1e+100"),
        ({"density": None}, "field 'density' is None, allowed: a number"),
        ({"density": 1.5}, "field 'density' is 1.5, allowed: 0 to 1"),
        ({"seconds": -1}, "field 'seconds' is -1, allowed: 0 to 1e+100"),
        ({"flops": True}, "field 'flops' is True, allowed: a number"),
        ({"accuracy_received": "high"}, "field 'accuracy-received' is 'high', allowed: a number"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_field(changes, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        row_of(ReplyKind.TRAINING, training(**changes))


def test_what_a_private_run_withholds_is_not_looked_at():
    assert row_of(ReplyKind.TRAINING, training(loss="secret"), private=True)["loss"] is None


def test_a_field_that_nobody_declared_is_not_in_the_row():
    assert "mood" not in row_of(ReplyKind.TRAINING, training(mood=1.0))


def test_a_count_is_an_integer_and_its_bound_may_depend_on_the_run():
    assert repr(number_in("pruned_layers", {"pruned-layers": 2.0}, most=2)) == "2"
    with pytest.raises(ValueError, match="field 'pruned-layers' is 3, allowed: 0 to 2"):
        number_in("pruned_layers", {"pruned-layers": 3}, most=2)


def test_numbers_by_layer_are_taken_of_the_layers_asked_for_alone():
    fields = {"density": 0.5, "inference-flops": 1.0, "density/a": 0.25, "density/c": 1.0}
    row = row_of(ReplyKind.EVALUATION, fields, layers={"b", "a"})
    assert row["density_by_layer"] == {"a": 0.25}
    with pytest.raises(ValueError, match="field 'density/a' is 2, allowed: 0 to 1"):
        row_of(ReplyKind.EVALUATION, {**fields, "density/a": 2}, layers={"a"})


def test_columns_are_taken_over_the_clients_that_have_the_number():
    rows = [
        {"accuracy_personal": 0.2, "density_by_layer": {"a": 0.2, "b": 1.0}},
        {"accuracy_personal": 0.6, "density_by_layer": {"a": 0.6}},
        {"accuracy_personal": None},
        {},
    ]
    found = round_columns(rows, ReplyKind.EVALUATION)
    assert found["accuracy_personal_mean"] == pytest.approx(0.4)
    assert found["accuracy_personal_std"] == pytest.approx(0.2)
    assert found["accuracy_personal_worst_decile"] == 0.2
    assert found["density_by_layer"] == {"a": pytest.approx(0.4), "b": 1.0}
    assert math.isnan(found["accuracy_global"])


def test_accuracies_of_some_clients_have_their_number_and_their_noise_beside_them():
    told = {"accuracy_personal": 0.2, "accuracy_global": 0.5, "accuracy_noise": 0.03}
    rows = [told, {**told, "accuracy_noise": 0.04}, {"accuracy_global": 0.5, "accuracy_noise": 0.05}]
    found = round_columns(rows, ReplyKind.EVALUATION)
    names = ("accuracy_personal_mean", "accuracy_personal_worst_decile")
    assert found["clients_by_column"] == dict.fromkeys(names, 2)
    assert "accuracy_personal_worst_decile" not in found, "the worst of noised numbers are those with the worst noise"
    assert found["noise_by_column"] == {"accuracy_personal_mean": pytest.approx(0.025)}
    assert found["accuracy_noise"] == pytest.approx(math.sqrt(50) / 300)
    assert not {"clients_by_column", "noise_by_column"} & round_columns(rows[:2], ReplyKind.EVALUATION).keys()


def test_a_number_of_training_and_evaluation_counts_when_it_is_evaluated():
    row = {"loss": 2.0, "density": 0.5, "flops": 3.0}
    assert round_columns([row, row], ReplyKind.TRAINING) == {"loss_mean": 2.0, "flops": 6.0}
    assert round_columns([row], ReplyKind.EVALUATION)["density_mean"] == 0.5
    assert round_columns([], ReplyKind.TRAINING) == {"loss_mean": None, "flops": 0}


def test_what_an_evaluation_lacks_is_taken_from_the_training_of_the_same_round():
    assert from_training({"accuracy_received": None, "density": 1.0}, {"accuracy_received": 0.5}) == {
        "accuracy_received": 0.5
    }
    assert from_training({"accuracy_received": 0.1, "density": 1.0}, {"accuracy_received": 0.5}) == {}


ROW = {"round": 2, "replies": 3, "failures": 1, "bytes_up": 1_500_000, "bytes_down": 500_000, "seconds": 1.26}
TEXT = {"perplexity_by_text": {"ptb": {"window": 128, "windows": 64, "windows_in_text": 900}}}


@pytest.mark.parametrize(
    ("numbers", "log", "terminal"),
    [
        ({}, "3 replies, 1 failures, 2.00 MB, 1.3 s", ""),
        (
            {"loss_mean": 0.5, "accuracy_personal_mean": 0.5, "accuracy_global": math.nan},
            "3 replies, 1 failures, loss 0.500, 2.00 MB, 1.3 s, personal accuracy 50.0 %",
            "personal 50.0 %  ",
        ),
        (
            {"accuracy_personal_mean": 0.5, "accuracy_global": 0.625, "accuracy_noise": 0.0333},
            "3 replies, 1 failures, 2.00 MB, 1.3 s, personal accuracy 50.0 % (noise ± 3.3), "
            "global accuracy 62.5 % (noise ± 3.3)",
            "personal 50.0 % (noise ± 3.3)  global 62.5 % (noise ± 3.3)  ",
        ),
        (
            {"epsilon_max": 2.345, "epsilon_simulated": 0.0},
            "3 replies, 1 failures, epsilon 2.35, 2.00 MB, 1.3 s",
            "ε 2.35  ",
        ),
        (
            {"epsilon_max": 2.345, "epsilon_simulated": 1.0},
            "3 replies, 1 failures, epsilon 2.35 (simulated), 2.00 MB, 1.3 s",
            "ε 2.35 (simulated)  ",
        ),
        (
            {"epsilon_max": 2.345, "epsilon_simulated": 0.25},
            "3 replies, 1 failures, epsilon 2.35 (partly simulated), 2.00 MB, 1.3 s",
            "ε 2.35 (partly simulated)  ",
        ),
        (
            {"epsilon_max": 2.345},
            "3 replies, 1 failures, epsilon 2.35 (noise unknown), 2.00 MB, 1.3 s",
            "ε 2.35 (noise unknown)  ",
        ),
        (
            {"perplexity_personal_mean": 8.0, "perplexity_global": 7.125, **TEXT},
            "3 replies, 1 failures, 2.00 MB, 1.3 s, personal perplexity 8.00 (ptb: first 64 of 900 × 128 tokens), "
            "global perplexity 7.12 (ptb: first 64 of 900 × 128 tokens)",
            "clients' own 8.00  global 7.12  (ptb: first 64 of 900 × 128 tokens)  ",
        ),
    ],
)
def test_a_round_is_told_in_one_line_of_the_numbers_that_it_has(numbers, log, terminal):
    assert summary_line({**ROW, **numbers}) == log
    recorded = {name: None if value != value else value for name, value in numbers.items()}
    assert progress_line({**ROW, **recorded}) == terminal


def test_every_epsilon_that_people_read_says_where_its_noise_is_simulated():
    epsilons = [column for name, column in DECLARATIONS.columns.items() if name.startswith("epsilon_") and column.table]
    assert len(epsilons) == 5
    for column in epsilons:
        assert column.remarked({column.name: 2.0, "epsilon_simulated": 1.0}) == " (simulated)"
        assert column.remarked({column.name: 2.0, "epsilon_simulated": 0.0}) == ""


def test_every_accuracy_that_people_read_says_how_much_of_it_is_noise():
    accuracies = [
        column for name, column in DECLARATIONS.columns.items() if name.startswith("accuracy_") and column.table
    ]
    assert len(accuracies) == 6
    for column in accuracies:
        assert column.remarked({column.name: 0.5}) == ""
        if column.needs_open:
            continue
        said = "of noised accuracies" if column.name.endswith("newcomer_mean") else "noise ± 2.0"
        assert column.remarked({column.name: 0.5, "accuracy_noise": 0.02}) == f" ({said})"


def test_the_noise_of_a_mean_falls_with_the_number_of_clients():
    assert noise_of_mean([0.3, 0.4]) == pytest.approx(0.25)
    assert noise_of_mean([0.2] * 16) == pytest.approx(0.05)
    assert noise_of_mean([]) is None


@pytest.mark.parametrize("name", ["personal", "validation", "received", "global"])
def test_an_accuracy_passes_its_bounds_by_noise_alone(name):
    fields = {"density": 1.0, "inference-flops": 1.0, f"accuracy-{name}": 1.5}
    assert row_of(ReplyKind.EVALUATION, fields, private=True)[f"accuracy_{name}"] == 1.5
    with pytest.raises(ValueError, match=f"accuracy-{name}"):
        row_of(ReplyKind.EVALUATION, fields)
    with pytest.raises(ValueError, match=f"accuracy-{name}"):
        row_of(ReplyKind.EVALUATION, fields | {f"accuracy-{name}": -1.01}, private=True)


def test_what_is_declared_as_of_the_round_alone_is_not_in_a_clients_row():
    assert recorded_of_client({"round": 1, "density": 0.5, "relative_error": 0.1}) == {"round": 1, "density": 0.5}
    assert "relative_error" not in DECLARATIONS.client_fields


def test_a_field_of_either_file_holds_one_kind_of_thing():
    kinds = DECLARATIONS.kinds
    assert sum(map(len, kinds.values())) == len(set().union(*kinds.values()))
    by_column = {"clients_by_column", "noise_by_column"}
    assert kinds[FieldKind.BY_NAME] == {"accuracy_by_class", "density_by_layer", "perplexity"} | by_column


def test_declarations_are_values_that_compare():
    assert dataclasses.replace(SHARPNESS, most=1) == SHARPNESS
    assert Declarations((Column("x", recorded=Recorded.WHERE_MEASURED),)).round_fields == ()
