from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from scipy.stats import ttest_1samp

from fedprune_app.config import OPTIONS
from fedprune_app.results.columns import best_on_validation, columns, paper_bytes
from fedprune_app.results.groups import Statistic, differing_settings, group_runs
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.tables import (
    comma_separated,
    final_rows,
    latex_text,
    paper_rows,
    statistics_of,
    table_text,
    write_tables,
)
from tests.refusing import refuses


def run(
    system: str = "a", seed: int = 0, accuracy: float = 0.5, *, status: str = "completed", name="x", **config
) -> Run:
    info = {"system": system, "seed": seed, "status": status, "seconds": 60.0, "config": {"seed": seed, **config}}
    return Run(Path(name), info, ({"round": 1, "accuracy_personal_mean": accuracy},), ())


def labels(*runs: Run) -> list[str]:
    return [group.label for group in group_runs(runs)]


def table(*runs: Run) -> list[dict[str, str]]:
    """The final table's rows, each cell by the key of its column."""
    groups = group_runs(runs)
    header, rows = final_rows(groups)
    keys = {column.title: column.key for column in columns(groups)}
    return [dict(zip((keys.get(title, title) for title in header), row, strict=True)) for row in rows]


def test_seeds_of_one_setting_are_one_row_with_mean_and_sample_deviation():
    (row,) = table(run(seed=0, accuracy=0.70), run(seed=1, accuracy=0.74), run(seed=2, accuracy=0.78))
    assert row["Seeds"] == "3"
    assert row["accuracy"] == "74.00 ± 4.00"  # sqrt((4² + 0 + 4²) / 2); the population's is 3.27


def test_a_run_that_lost_states_stands_alone_and_says_so():
    lost = run(seed=1)
    lost = replace(lost, info={**lost.info, "losses": ["client 3 lost its state of round 4"]})
    assert labels(run(seed=0), lost, run(seed=2)) == ["a", "a (states lost)"]


def test_accuracies_of_different_models_in_one_column_say_which():
    judged = run("b", accuracy=0.2)
    judged = replace(
        judged,
        info={**judged.info, "headline": "accuracy_global"},
        rounds=({"round": 1, "accuracy_global": 0.2, "accuracy_personal_mean": 0.4},),
    )
    one, other = table(run(accuracy=0.3), judged)
    assert one["accuracy"] == "30.00 (personal)"
    assert other["accuracy"] == "20.00 (global model)"
    assert (one["personal_accuracy"], other["personal_accuracy"]) == ("30.00", "40.00")
    assert table(judged)[0]["accuracy"] == "20.00"


def test_one_seed_has_no_deviation_rather_than_zero():
    assert table(run(accuracy=0.7))[0]["accuracy"] == "70.00"


def test_settings_are_kept_apart_and_named_by_what_differs_only():
    rates = [run("subfedavg", **{"subfedavg.target-rate": rate, "momentum": 0.5}) for rate in (30.0, 50.0)]
    assert labels(*rates, run("dispfl", momentum=0.9)) == [
        "subfedavg · target-rate 30",
        "subfedavg · target-rate 50",
        "dispfl",
    ]


def test_keys_that_vary_together_are_named_once():
    runs = [run(dataset=data, **{"learning-rate": rate, "batch-size": 10}) for data, rate in (("x", 0.1), ("y", 0.2))]
    assert labels(*runs) == ["a · dataset x", "a · dataset y"]
    third = run(dataset="y", **{"learning-rate": 0.3, "batch-size": 10})
    assert labels(*runs, third)[1:] == ["a · dataset y · learning-rate 0.2", "a · dataset y · learning-rate 0.3"]


def test_where_a_run_lives_does_not_set_it_apart():
    assert labels(run(seed=0, **{"out-dir": "/a"}), run(seed=1, **{"out-dir": "/b"})) == ["a"]


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if option.kind.is_folder])
def test_seeds_with_folders_of_their_own_are_averaged(key):
    assert labels(run(seed=0, **{key: "/a"}), run(seed=1, **{key: "/b"})) == ["a"]


def test_a_setting_of_another_version_sets_runs_apart():
    apart = labels(run(seed=0, **{"unheard-of": 1}), run(seed=1, **{"unheard-of": 2}))
    assert apart == ["a · unheard-of 1", "a · unheard-of 2"]


def test_the_number_of_clients_is_a_setting_although_no_key_of_the_configuration():
    small, large = run(), run()
    small.info["partition"] = [{"partition": 0}]
    large.info["partition"] = [{"partition": 0}, {"partition": 1}]
    assert labels(small, large) == ["a · clients 1", "a · clients 2"]


def test_a_run_that_did_not_complete_is_never_averaged_with_others():
    runs = [run(seed=0), run(seed=1, status="interrupted"), run(seed=2)]
    assert [(group.label, len(group.runs)) for group in group_runs(runs)] == [("a", 2), ("a (interrupted)", 1)]


def test_the_same_seed_twice_is_not_two_seeds():
    assert labels(run(name="one"), run(name="two"), run(seed=1)) == [
        "a · seed 0 · one",
        "a · seed 0 · two",
        "a · seed 1",
    ]


def test_a_run_that_was_killed_and_made_again_leaves_its_seeds_together():
    runs = [run(seed=0), run(name="killed", seed=1, status="interrupted"), run(name="again", seed=1), run(seed=2)]
    assert [(group.label, len(group.runs)) for group in group_runs(runs)] == [("a", 3), ("a (interrupted)", 1)]
    assert labels(run(name="one"), run(name="two"), run(seed=1), run(seed=2))[-1] == "a · seed 1, 2"


def test_a_number_that_one_seed_lacks_is_not_measured():
    assert Statistic.of([0.5, None]) is None
    assert Statistic.of([]) is None
    assert Statistic.of([0.5]) == Statistic(0.5, None)


def test_what_no_run_measured_has_no_column_and_what_one_lacks_is_a_dash():
    other = Run(Path("y"), run("b").info, ({"round": 1, "accuracy_personal_mean": 0.5, "bytes_up": 0},), ())
    mine, theirs = table(run("a"), other)
    assert "MB down" not in mine
    assert (mine["megabytes_up"], theirs["megabytes_up"]) == ("–", "0.00")


def rounds(*rows: tuple[float | None, float | None]) -> Run:
    numbered = [
        {"round": number, "accuracy_validation_mean": validation, "accuracy_personal_mean": test}
        for number, (validation, test) in enumerate(rows, start=1)
    ]
    return Run(Path("x"), run().info, tuple(numbered), ())


def test_the_best_round_is_chosen_by_validation_and_not_by_test():
    assert best_on_validation(rounds((0.5, 0.9), (0.8, 0.6), (0.7, 0.7))) == 0.6


def test_of_equally_good_rounds_the_earliest_is_taken():
    assert best_on_validation(rounds((0.8, 0.6), (0.8, 0.9))) == 0.6


def test_a_round_that_evaluated_drawn_clients_alone_is_never_the_best():
    info = {**run().info, "partition": [{}] * 10}
    info["config"] = {**info["config"], "evaluate-clients": 2}
    rows = tuple(
        {"round": k, "accuracy_validation_mean": v, "accuracy_personal_mean": v, "evaluated": clients}
        for k, (v, clients) in enumerate(((0.9, 2), (0.5, 9), (0.7, 10)), start=1)
    )
    assert best_on_validation(Run(Path("x"), info, rows, ())) == 0.7
    assert best_on_validation(Run(Path("x"), info, rows[:1], ())) is None
    assert best_on_validation(Run(Path("x"), {**info, "partition": [{}] * 2}, rows[:1], ())) == 0.9


def test_a_mean_over_fewer_clients_than_there_are_says_so():
    rows = ({"round": 1, "accuracy_personal_mean": 0.5, "evaluated": 2, "clients": 10},)
    (few,) = table(Run(Path("x"), run().info, rows, ()))
    assert few["personal_accuracy"] == "50.00 (2 of 10 clients)"
    everybody = ({**rows[0], "evaluated": 10, "accuracy_received_mean": 0.4, "accuracy_received_clients": 3},)
    (found,) = table(Run(Path("x"), run().info, everybody, ()))
    assert found["personal_accuracy"] == "50.00"
    assert found["received_accuracy"] == "40.00 (3 of 10 clients)"


def test_a_mean_over_the_clients_that_told_the_number_says_of_how_many():
    row = {"round": 1, "accuracy_personal_mean": 0.5, "accuracy_global": 0.4, "evaluated": 8, "clients": 8}
    row |= {"accuracy_noise": 0.02, "clients_by_column": {"accuracy_personal_mean": 4}}
    row |= {"noise_by_column": {"accuracy_personal_mean": 0.03}}
    (found,) = table(Run(Path("x"), run().info, (row,), ()))
    assert found["personal_accuracy"] == "50.00 (noise ± 3.0, 4 of 8 clients)"
    assert found["global_accuracy"] == "40.00 (noise ± 2.0)"


def test_own_perplexities_of_some_clients_say_so():
    row = {"round": 1, "perplexity_personal_mean": 8.0, "personal_models": 3, "evaluated": 8, "clients": 8}
    (found,) = table(Run(Path("x"), run().info, (row,), ()))
    assert found["own_perplexity"] == "8.00 (3 of 8 clients)"


@pytest.mark.parametrize(("dataset", "rows"), [("table", 2), ("own.py:load", 2), ("cifar10", 1)])
def test_seeds_on_other_folders_are_no_seeds_of_one_setting(dataset, rows):
    runs = [run(seed=seed, **{"dataset": dataset, "data-dir": f"/data/{seed}"}) for seed in (0, 1)]
    found = table(*runs)
    assert len(found) == rows
    assert ("/data/0" in found[0]["System"]) == (rows == 2)


def test_seeds_on_changed_tables_are_no_seeds_of_one_setting():
    """The folder may hold other tables than before, and the same tables may have moved to another folder."""

    def told(seed: int, digest: str, folder: str) -> Run:
        found = run(seed=seed, dataset="table", **{"data-dir": folder})
        return replace(found, info={**found.info, "data_sha256": digest * 64})

    assert labels(told(1, "a", "/t"), told(2, "b", "/t")) == ["a · data aaaaaaaaaaaa", "a · data bbbbbbbbbbbb"]
    assert labels(told(1, "a", "/t"), told(2, "a", "/moved")) == ["a"]


def test_a_round_in_which_some_clients_told_no_accuracy_is_never_the_best():
    rows = (
        {"round": 1, "accuracy_validation_mean": 0.9, "accuracy_personal_mean": 0.9, "evaluated": 8, "clients": 8},
        {"round": 2, "accuracy_validation_mean": 0.7, "accuracy_personal_mean": 0.7, "evaluated": 8, "clients": 8},
        {"round": 3, "accuracy_validation_mean": 0.5, "accuracy_personal_mean": 0.5, "evaluated": 4, "clients": 8},
    )
    rows[0]["clients_by_column"] = {"accuracy_validation_mean": 1}
    (found,) = table(Run(Path("x"), run().info, rows, ()))
    assert found["best_accuracy"] == "70.00"
    assert found["accuracy"] == "50.00 (4 of 8 clients)"


def test_a_client_without_validation_images_takes_the_best_round_from_nobody():
    rows = tuple(
        {
            "round": k,
            "accuracy_validation_mean": value,
            "accuracy_personal_mean": value,
            "evaluated": 4,
            "clients": 4,
            "clients_by_column": {"accuracy_validation_mean": 3},
        }
        for k, value in enumerate((0.5, 0.7, 0.6), 1)
    )
    assert best_on_validation(Run(Path("x"), run().info, rows, ())) == 0.7


def test_a_best_round_of_noised_accuracies_says_so():
    rows = tuple(
        {
            "round": k,
            "accuracy_validation_mean": k / 10,
            "accuracy_personal_mean": 0.5,
            "accuracy_noise": 0.03,
            "evaluated": 4,
            "clients": 4,
        }
        for k in (1, 2)
    )
    (found,) = table(Run(Path("x"), run().info, rows, ()))
    assert found["best_accuracy"] == "50.00 (noise ± 3.0)"


def test_between_peers_the_papers_formula_counts_a_link_once():
    rows = ({"round": 1, "paper_bytes_up": 5e6, "paper_bytes_down": 5e6, "peer_bytes": 4e6},)
    (found,) = table(Run(Path("x"), run().info, rows, ()))
    assert found["paper_megabytes"] == "5.00"
    (star,) = table(Run(Path("x"), run().info, ({"round": 1, "paper_bytes_up": 5e6, "paper_bytes_down": 5e6},), ()))
    assert star["paper_megabytes"] == "10.00"


def test_without_validation_there_is_no_best_round():
    assert best_on_validation(rounds((None, 0.9), (0.8, None))) is None


def test_the_last_round_counts_that_was_evaluated():
    assert table(rounds((None, 0.9), (None, 0.6), (None, None)))[0]["accuracy"] == "60.00"


def test_a_formula_of_one_direction_is_charged_for_that_direction():
    rows = ({"round": 1, "paper_bytes_up": 3, "paper_bytes_down": None}, {"round": 2, "paper_bytes_up": 4})
    assert paper_bytes(Run(Path("x"), run().info, rows, ())) == 7


def test_megabytes_are_a_million_bytes_over_all_rounds():
    rows = ({"round": 1, "bytes_up": 1_500_000}, {"round": 2, "bytes_up": 1_000_000})
    (group,) = group_runs([Run(Path("x"), run().info, rows, ())])
    assert statistics_of(group)["megabytes_up"].mean == 2_500_000
    assert "| 2.50 |" in table_text(".md", *final_rows([group]), num_texts=3)


def table_of_rounds(*rows: dict) -> dict[str, str]:
    numbered = tuple({"round": number, **row} for number, row in enumerate(rows, start=1))
    (row,) = table(Run(Path("x"), run().info, numbered, ()))
    return row


def test_nodes_are_charged_their_mean_round():
    row = table_of_rounds(
        {"busiest_node_bytes": 4e6, "node_bytes_mean": 1e6, "paper_busiest_bytes": 3e6, "peer_bytes": 9e6},
        {"busiest_node_bytes": 2e6, "node_bytes_mean": 2e6, "paper_busiest_bytes": 3e6, "peer_bytes": 8e6},
    )
    assert row["busiest_megabytes"] == "3.000"
    assert row["paper_busiest_megabytes"] == "3.000"
    assert row["node_megabytes"] == "1.500"
    assert row["peer_megabytes"] == "17.00"


def test_a_node_whose_bytes_one_round_lacks_is_not_measured():
    assert "busiest_megabytes" not in table_of_rounds({"busiest_node_bytes": 4e6}, {"busiest_node_bytes": None})


def test_flops_are_per_client_that_trained_and_each_round_counts_once():
    row = table_of_rounds({"flops": 6e9, "replies": 2}, {"flops": 5e9, "replies": 1}, {"flops": 0, "replies": 0})
    assert row["gigaflops"] == "4.00"  # (3 + 5) / 2; over all clients it would be 11 / 3


@pytest.mark.parametrize("lacking", [{"flops": 6e9}, {"replies": 2}, {"flops": 0, "replies": 0}])
def test_flops_without_the_clients_that_spent_them_are_not_measured(lacking):
    assert "gigaflops" not in table_of_rounds(lacking)


def test_every_column_is_in_the_tables_for_papers_and_programs(make_run):
    groups = group_runs([load_run(make_run("run", "dispfl", rounds=2, peers=True))])
    shown = {column.key: column.title for column in columns(groups)}
    for key in ("paper_busiest_megabytes", "node_megabytes", "gigaflops"):
        assert shown[key] in table_text(".md", *final_rows(groups), num_texts=3)
        assert shown[key] in table_text(".tex", *final_rows(groups), num_texts=3)
    (row,) = csv.DictReader(io.StringIO(comma_separated(groups)))
    run = load_run(groups[0].runs[0].folder)
    assert float(row["busiest_megabytes_mean"]) == pytest.approx(run.mean("busiest_node_bytes") / 1e6)
    assert float(row["paper_busiest_megabytes_mean"]) == pytest.approx(run.mean("paper_busiest_bytes") / 1e6)
    assert float(row["node_megabytes_mean"]) == pytest.approx(run.mean("node_bytes_mean") / 1e6)
    assert float(row["peer_megabytes_mean"]) == pytest.approx(run.total("peer_bytes") / 1e6)
    assert float(row["gigaflops_mean"]) == pytest.approx(run.mean("flops") / 10 / 1e9)


def test_a_label_says_in_words_what_privacy_a_run_has():
    def private(enabled, epsilon, noise):
        return run("a", **{"dp.enabled": enabled, "dp.target-epsilon": epsilon, "dp.noise-multiplier": noise})

    rows = [private(False, 0.0, 0.0), private(True, 8.0, 0.0), private(True, 0.0, 2.0)]
    assert labels(*rows) == ["a · not private", "a · ε 8", "a · noise 2"]
    assert labels(*rows[::2]) == ["a · not private", "a · noise 2"]
    assert labels(run("a", refine=True), run("a", refine=False)) == ["a · refine", "a · no refine"]


def test_no_label_has_a_path_of_the_machine(make_run, tmp_path):
    groups = group_runs([load_run(make_run(name, rounds=0, status="failed")) for name in ("one", "two")])
    assert [group.label for group in groups] == [f"subfedavg (failed) · seed 0 · {name}" for name in ("one", "two")]


def test_what_differs_between_groups_is_only_what_has_an_effect_there():
    sparse = run("dispfl", density=0.3, momentum=0.9, **{"dispfl.neighbours": 5})
    dense = run("fedavg", density=0.5, momentum=0.5, **{"dispfl.neighbours": 10})
    assert differing_settings(group_runs([sparse, dense])) == [("momentum", ["0.9", "0.5"])]


def test_the_latex_table_escapes_what_tex_would_run():
    text = table_text(".tex", *final_rows(group_runs([run("a&b_%\\input{x}$~^", dataset="d#1")])), num_texts=3)
    assert r"a\&b\_\%\textbackslash{}input\{x\}\$\textasciitilde{}\textasciicircum{} & d\#1 & -- & 1" in text
    assert text.count("\\\\\n") == 2
    assert "\\toprule" in text


def test_the_markdown_table_keeps_its_columns_whatever_a_name_holds():
    text = table_text(".md", *final_rows(group_runs([run("a|b\n<i>", dataset="x")])), num_texts=3)
    header, rule, row = text.splitlines()
    assert row.startswith(r"| a\|b \<i\> | x |")
    assert header.count("|") == rule.count("|") == row.count("|") - 1


def test_a_csv_guards_texts_alone_from_spreadsheets():
    text = table_text(".csv", ["", "gain"], [["=cmd()", "-3.20"], ["@x", "–"]])
    assert [*csv.reader(io.StringIO(text))] == [["", "gain"], ["'=cmd()", "-3.20"], ["'@x", "–"]]


def test_the_csv_has_plain_numbers_and_empty_cells():
    text = comma_separated(group_runs([run("=cmd()", 0, 0.25), run("=cmd()", 1, 0.75)]))
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["system"] == "'=cmd()"  # a spreadsheet would run it
    assert float(row["accuracy_mean"]) == 0.5
    assert float(row["accuracy_std"]) == pytest.approx(math.sqrt(0.125))
    assert row["density_mean"] == ""
    assert float(row["minutes_mean"]) == 1.0


def test_the_tables_of_real_run_folders_are_written(make_run, tmp_path):
    runs = [load_run(make_run(f"{system}{seed}", system, seed, rounds=4)) for system in ("a", "b") for seed in (0, 1)]
    paths = write_tables(runs, tmp_path / "tables")
    assert [path.name for path in paths] == ["table.md", "table.csv", "table.tex"]
    assert "| System (± SD over seeds) | " in paths[0].read_text(encoding="utf-8")
    assert "\nSystem ($\\pm$ SD over seeds) & " in paths[2].read_text(encoding="utf-8")
    assert len(paths[1].read_text().splitlines()) == 3


def test_a_table_for_latex_has_no_character_that_latex_does_not_know():
    titles = [column.title for column in columns([])]
    assert any("δ" in title for title in titles)
    assert all(latex_text(title).isascii() for title in (*titles, "ptb: first 64 of 900 × 128 tokens"))


def test_a_table_for_a_paper_has_few_columns_intervals_and_bold_where_nothing_is_clearly_ahead(make_run):
    folders = [make_run(f"best{seed}", "fedavg", seed, plateau=0.8) for seed in (0, 1, 2)]
    folders += [make_run(f"same{seed}", "fedprox", seed, plateau=0.8) for seed in (0, 1, 2)]
    folders += [make_run(f"behind{seed}", "subfedavg", seed, plateau=0.4) for seed in (0, 1, 2)]
    groups = group_runs([load_run(folder) for folder in folders])
    header, rows, bold = paper_rows(groups, intervals=True, best_bold=True)
    shown = {column.title: column.key for column in columns(groups)}
    assert [shown[title] for title in header[1:]] == ["personal_accuracy", "megabytes_up", "gigaflops", "density"]
    assert header[0] == "System (95 % interval over seeds)"
    assert bold == {(label, title) for label in ("fedavg", "fedprox") for title in header[:2]}
    assert paper_rows(groups[:2], intervals=True, best_bold=True)[2] == set()  # nothing to choose
    own = [100 * load_run(folder).rounds[-1]["accuracy_personal_mean"] for folder in folders[:3]]
    low, high = ttest_1samp(own, 0).confidence_interval(0.95)
    assert rows[0][1] == f"{sum(own) / 3:.2f} ({low:.2f} to {high:.2f})"
    for run in (run for group in groups for run in group.runs):
        run.info["headline"] = "accuracy_global"
    assert paper_rows(groups, intervals=True, best_bold=True)[0][1] == "Global model (%)"
    titles, deviations, _ = paper_rows(groups, ("personal_accuracy",), intervals=False, best_bold=False)
    assert titles[0] == "System (± SD over seeds)"
    assert deviations[0][1] == f"{sum(own) / 3:.2f} ± {stdev(own):.2f}"
    tex = table_text(".tex", header, rows, bold)
    assert re.search(r"\\textbf{fedavg} & \\textbf{[^}]+} & [\d.]+", tex)
    assert "\nsubfedavg & " in tex
    assert "| **fedprox** | **" in table_text(".md", header, rows, bold)
    assert next(csv.reader(io.StringIO(table_text(".csv", header, rows, bold)))) == header
    assert paper_rows(groups, ["density", "density"], intervals=True, best_bold=False)[0][2:] == []
    with refuses("--columns", "acuracy"):
        paper_rows(groups, ("acuracy",), intervals=True, best_bold=False)
