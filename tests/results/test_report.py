from __future__ import annotations

import base64
import csv
import json
import math
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from fedprune_app.results.columns import columns, epsilon_footnote
from fedprune_app.results.figures import figures, settings
from fedprune_app.results.figures.clients import by_class
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.report import _times, appearance, each_once, packed_plotly, render, write_report
from fedprune_app.results.tables import comma_separated, final_rows

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>{{7*7}}\u2028\ud800'\""


class Elements(HTMLParser):
    """Tags with attributes, the text outside scripts, and the data script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data.replace("\xa0", " ")


def page_of(folders: list[Path], out: Path) -> str:
    return write_report(folders, out).read_text(encoding="utf-8").replace(packed_plotly(), "")


def test_the_page_needs_nothing_from_the_network(six, tmp_path):
    page = page_of(six, tmp_path / "report.html")
    assert not re.search(r"https?://|//cdn|url\(|@import", page)
    tags = [attributes for _, attributes in Elements(page).tags]
    assert not [attributes for attributes in tags if attributes.keys() & {"src", "action"}]
    assert all(attributes.get("href", "#").startswith("#") for attributes in tags)
    assert "default-src 'none'" in page


def test_the_whole_of_plotly_is_inside_the_page_once(six, tmp_path):
    text = write_report(six, tmp_path / "report.html").read_text(encoding="utf-8")
    packed = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', text, re.DOTALL)
    assert len(packed) == 1
    assert zlib.decompress(base64.b85decode(packed[0].replace(",", "<"))).decode() == get_plotlyjs()
    assert "<" not in packed[0]
    assert "plotly.js" in text[: text.index(packed[0])]  # its licence asks to be named


def test_a_page_is_small(six, tmp_path):
    assert write_report(six, tmp_path / "report.html").stat().st_size < 2_200_000


def test_nothing_a_run_says_can_become_html_or_script(make_run, tmp_path):
    config = {"dataset": HOSTILE, "partition": HOSTILE, HOSTILE: HOSTILE}
    extra = {"paper_bytes_formula": HOSTILE, "model": {"name": HOSTILE}}
    extra |= {"losses": [HOSTILE], "clients_left_out": [HOSTILE]}
    twins = [
        make_run(f"run{i}", HOSTILE, i, config={**config, f"x.{HOSTILE}": HOSTILE + str(i)}, extra=extra)
        for i in (0, 1)
    ]
    failed = make_run("failed", HOSTILE, status="failed", error=HOSTILE, rounds=2)
    elements = Elements(page_of([*twins, failed], tmp_path / "report.html"))
    tags = [tag for tag, _ in elements.tags]
    assert tags.count("script") == 3
    assert "img" not in tags
    assert not any(key.startswith("on") for _, attributes in elements.tags for key in attributes)
    assert "<img src=x onerror=alert(2)>{{7*7}}" in elements.text  # shown as text, and no template is run
    assert "<" not in elements.scripts[1]
    data = json.loads(elements.scripts[1])
    traces = [trace for figure in data["figures"] for view in figure["variants"] for trace in view["traces"]]
    assert all("<" not in trace.get("name", "") for trace in traces)  # plotly reads a little HTML


def test_the_page_shows_the_final_numbers_and_the_configuration(six, tmp_path):
    text = Elements(page_of(six, tmp_path / "report.html")).text
    row = load_run(six[0]).rounds[-1]
    assert f"{100 * row['accuracy_personal_mean']:.2f}" in text
    assert "subfedavg · target-rate 30" in text
    assert "learning-rate" in text
    assert "ab" * 32 in text


def test_a_comparison_with_the_best_says_that_the_same_numbers_chose_it(make_run, tmp_path):
    folders = [make_run(system, system, clients=12) for system in ("fedavg", "dispfl", "ditto")]
    text = Elements(page_of(folders, tmp_path / "report.html")).text
    assert "the best of 3 by these same numbers" in text
    assert "the more systems, the larger the lead that chance alone gives it" in text


def test_code_of_ones_own_has_its_file_s_name_without_folders(make_run, tmp_path):
    own = {"dataset": "/home/me/secret/rings.py:rings"}
    page = page_of([make_run("own", config=own)], tmp_path / "report.html")
    assert "dataset rings.py:rings" in page


def test_a_failed_run_is_shown_as_failed_with_its_error(six, tmp_path):
    text = Elements(page_of(six, tmp_path / "report.html")).text
    assert "fedltp, seed 0: failed" in text
    assert "client 3 sent NaN" in text


def test_a_run_that_lost_states_or_left_out_clients_is_shown_with_what_it_lost(make_run, tmp_path):
    lost = make_run("lost", extra={"losses": ["client 3 lost its state of round 4"]})
    fewer = make_run("fewer", seed=1, extra={"clients_left_out": ["client 5: data-dir is empty"]})
    text = Elements(page_of([lost, fewer, make_run("whole", seed=2)], tmp_path / "report.html")).text
    assert "subfedavg, seed 0: states lost" in text
    assert "client 3 lost its state of round 4" in text
    assert "subfedavg, seed 1: clients left out" in text
    assert "client 5: data-dir is empty" in text
    assert "seed 2: " not in text


def test_the_same_runs_give_the_same_page(six, tmp_path):
    pages = [write_report(six, tmp_path / name).read_bytes() for name in ("one.html", "two.html")]
    assert pages[0] == pages[1]
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_recorded_no_round_still_has_a_page(make_run, tmp_path):
    text = Elements(page_of([make_run("empty", rounds=0, status="interrupted")], tmp_path / "report.html")).text
    assert "interrupted" in text


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def groups_of(folders):
    return group_runs([load_run(folder) for folder in folders])


def drawn(folders) -> dict:
    return {figure.key: figure for figure in figures(groups_of(folders))}


def test_every_figure_with_data_is_drawn_and_none_without(six, make_run):
    expected = {
        "accuracy-by-round",
        "accuracy-by-bytes",
        "accuracy-by-cost",
        "settings",
        "clients",
        "bytes",
        "layers",
        "density",
        "loss",
        "partition",
    }
    assert drawn(six).keys() == expected  # no epsilon was measured
    assert drawn([make_run("empty", rounds=0)]).keys() == {"partition"}


def test_colour_is_the_system_the_same_in_every_report_and_dash_the_setting(six, make_run):
    series = appearance(groups_of(six))
    assert [each.colour for each in series] == [1, 1, 1, 0, 4]
    assert [each.dash for each in series] == ["solid", "dash", "dot", "solid", "solid"]


def test_a_system_without_a_colour_of_its_own_takes_none_that_another_one_has(make_run):
    names = ("mine", "fedavg", "yours", "subfedavg", "fedspallm")
    places = [each.colour for each in appearance(groups_of([make_run(name, name, rounds=0) for name in names]))]
    assert (places[1], places[3]) == (0, 1)
    assert len(set(places)) == len(names)


def test_with_a_single_system_colour_is_the_setting(six):
    assert [each.colour for each in appearance(groups_of(six[:3]))] == [0, 1, 2]


def test_every_setting_looks_different_up_to_forty(make_run):
    (group,) = groups_of([make_run("run", rounds=0)])
    many = [type(group)(f"{i}", "a", {}, group.runs) for i in range(40)]
    assert len({(each.colour, each.dash) for each in appearance(many)}) == 40


def test_accuracy_over_traffic_ends_at_the_bytes_that_were_measured(six):
    run = load_run(six[0])
    trace = drawn(six[:1])["accuracy-by-bytes"].variants[0].traces[0]
    total = sum(row["bytes_up"] + row["bytes_down"] for row in run.rounds) / 1e6
    assert trace["x"][-1] == pytest.approx(total)
    assert trace["y"][-1] == run.rounds[-1]["accuracy_personal_mean"]


def test_where_models_go_from_peer_to_peer_their_traffic_counts_and_not_the_relays(peers):
    run = load_run(peers[0])
    trace = drawn(peers[:1])["accuracy-by-bytes"].variants[0].traces[0]
    assert trace["x"][-1] == pytest.approx(run.total("peer_bytes") / 1e6)
    assert run.total("peer_bytes") != run.total("bytes_up") + run.total("bytes_down")


@pytest.fixture
def private(make_run) -> list[Path]:
    """Two settings of one system, one of them with a budget and two seeds, and a run without privacy."""
    strong = {"dp.enabled": True, "dp.noise-multiplier": 0.5, "dp.epsilon-budget": 6.5, "dp.target-epsilon": 9.0}
    folders = [make_run(f"strong{seed}", seed=seed, noise=0.5, config=strong) for seed in (0, 1)]
    weak = {"dp.enabled": True, "dp.noise-multiplier": 2.0}
    folders.append(make_run("weak", noise=2.0, plateau=0.5, config=weak))
    return [*folders, make_run("open", "fedavg")]


def test_accuracy_over_epsilon_ends_at_what_was_spent(private):
    (trace,) = drawn(private[2:])["accuracy-by-epsilon"].variants[0].traces  # the run without privacy has none
    last = load_run(private[2]).rounds[-1]
    assert (trace["x"][-1], trace["y"][-1]) == (last["epsilon_max"], last["accuracy_personal_mean"])


def test_a_sweep_is_a_point_per_setting_against_epsilon_and_against_traffic(private):
    runs = [load_run(folder) for folder in private]
    by_name = {view.name: view for view in drawn(private)["accuracy-by-cost"].variants}
    strong, weak = by_name["Privacy"].traces
    epsilons = [run.last("epsilon_max") for run in runs[:2]]
    reached = [run.last("accuracy_personal_mean") for run in runs[:2]]
    assert strong["x"] == [pytest.approx(sum(epsilons) / 2)]
    assert strong["y"] == [pytest.approx(sum(reached) / 2)]
    assert strong["error_y"]["array"] == [pytest.approx(abs(reached[0] - reached[1]) / math.sqrt(2))]
    assert (weak["x"], weak["y"]) == ([runs[2].last("epsilon_max")], [runs[2].last("accuracy_personal_mean")])
    points = by_name["Traffic"].traces
    assert {trace["mode"] for trace in points} == {"markers"}  # a line would join settings that differ in much else
    spent = (runs[3].total("bytes_up") + runs[3].total("bytes_down")) / 1e6
    assert [trace["series"] for trace in points] == [0, 1, 2]
    assert points[2]["x"] == [pytest.approx(spent)]


def test_one_setting_shows_no_trade(private):
    assert "accuracy-by-cost" not in drawn(private[:2])


def test_a_sweep_is_drawn_against_the_setting_that_it_varies(make_run):
    rates = {"a": 70.0, "b": 30.0, "c": 50.0}
    folders = [make_run(name, seed=0, config={"subfedavg.target-rate": rate}) for name, rate in rates.items()]
    folders.append(make_run("d", seed=1, config={"subfedavg.target-rate": 30.0}))
    folders += [make_run("other", "fedavg", config={"subfedavg.target-rate": 10.0}), make_run("mine", "mine")]
    runs = [load_run(folder) for folder in folders]
    main, validation = drawn(folders)["settings"].variants
    assert [main.name, validation.name] == ["subfedavg.target-rate", "subfedavg.target-rate, validation"]
    for view, name in ((main, "accuracy_personal_mean"), (validation, "accuracy_validation_mean")):
        line, *points = view.traces
        assert line["x"] == [30.0, 50.0, 70.0]
        reached = [run.last(name) for run in runs]
        means = [(reached[1] + reached[3]) / 2, reached[2], reached[0]]
        assert line["y"] == pytest.approx(means)
        assert [(*trace["x"], *trace["y"]) for trace in points] == list(zip(line["x"], line["y"], strict=True))
        assert points[0]["error_y"]["array"] == [pytest.approx(abs(reached[1] - reached[3]) / math.sqrt(2))]
        assert [trace["series"] for trace in points] == [1, 2, 0]
    assert view.layout["xaxis"].get("type") is None


def test_a_search_is_drawn_without_lines_and_rates_on_a_logarithmic_axis(make_run):
    drawn_settings = [(0.001, 0.1), (0.01, 0.5), (0.2, 0.9)]
    folders = [
        make_run(f"t{rate}", config={"learning-rate": rate, "momentum": momentum}) for rate, momentum in drawn_settings
    ]
    views = {view.name: view for view in drawn(folders)["settings"].variants}
    assert list(views) == ["learning-rate", "learning-rate, validation", "momentum", "momentum, validation"]
    assert all(trace["mode"] == "markers" for view in views.values() for trace in view.traces)
    assert [trace["x"] for trace in views["learning-rate"].traces] == [[0.001], [0.01], [0.2]]
    assert views["learning-rate"].layout["xaxis"]["type"] == "log"
    assert "type" not in views["momentum"].layout["xaxis"]
    assert "settings" not in drawn(folders[:2])  # two runs that differ in two settings tell of neither


def test_perplexity_is_drawn_against_a_setting(make_run):
    runs = []
    for density in (0.3, 0.5):
        folder = make_run(f"p{density}", "fedspallm", headline="perplexity_global", config={"density": density})
        run = load_run(folder)
        runs.append(replace(run, rounds=(*run.rounds[:-1], {**run.rounds[-1], "perplexity_global": 9 - density})))
    (view,) = (view for view in settings.by_setting(group_runs(runs)) if "perplexity" in view.name)
    line, *points = view.traces
    assert (view.name, line["x"], line["y"]) == ("density, perplexity", [0.3, 0.5], [8.7, 8.5])
    assert [trace["y"] for trace in points] == [[8.7], [8.5]]


def test_each_clients_epsilon_is_drawn_under_the_smaller_budget(private):
    largest, each = drawn(private)["epsilon"].variants
    for view in (largest, each):
        (budget,) = [trace for trace in view.traces if trace.get("limit")]
        assert (budget["x"], budget["y"]) == ([1, 10], [6.5, 6.5])
    run = load_run(private[2])
    trace = each.traces[1]
    first = min(row["partition"] for row in run.clients if row["epsilon"] is not None)
    own = [(row["round"], row["epsilon"]) for row in run.clients if row["partition"] == first and row["epsilon"]]
    assert list(zip(trace["x"], trace["y"], strict=True))[: len(own) + 1] == [*own, (None, None)]
    assert trace["x"].count(None) == len({row["partition"] for row in run.clients if row["epsilon"] is not None})


def test_every_epsilon_of_seeded_noise_is_marked_where_people_read_it(make_run, tmp_path):
    settings = {"config": {"dp.enabled": True, "dp.noise-multiplier": 0.5}, "noise": 0.5}
    folders = {
        share: [make_run(f"{share}-{seed}", seed=seed, simulated=share, **settings) for seed in (0, 1)]
        for share in (0.0, 0.5, 1.0)
    }
    for share, mark in ((0.0, ""), (0.5, " (partly simulated)"), (1.0, " (simulated)")):
        groups = group_runs([load_run(folder) for folder in folders[share]])
        header, ((*_, cell),) = final_rows(groups, [column for column in columns([]) if column.key == "epsilon"])
        assert header[-1] == "ε"
        assert cell.endswith(mark)
        assert ("(" in cell) == bool(mark)
        assert next(csv.DictReader(comma_separated(groups).splitlines()))["epsilon_footnote"] == mark.strip(" ()")
        figures_drawn = drawn(folders[share])
        assert figures_drawn["epsilon"].variants[0].layout["yaxis"]["title"]["text"] == f"ε{mark}"
        assert (
            figures_drawn["accuracy-by-epsilon"].variants[0].layout["xaxis"]["title"]["text"]
            == f"Largest ε so far{mark}"
        )
        page = write_report(folders[share], tmp_path / f"{share}.html").read_text()
        assert ("simulated)</td>" in page) == bool(mark)
    mixed = group_runs([load_run(folders[1.0][0]), load_run(folders[0.0][1])])
    assert epsilon_footnote(mixed) == " (simulated)"


def test_noised_accuracies_stand_beside_the_noise_of_the_mean_over_clients_and_seeds(make_run, tmp_path):
    private = {"config": {"dp.enabled": True, "dp.noise-multiplier": 0.5}, "noise": 0.5}
    noised = [
        make_run(f"noised{seed}", seed=seed, accuracy_noise=noise, **private) for seed, noise in ((0, 0.03), (1, 0.04))
    ]
    in_the_open = make_run("open", seed=1, **private)
    keys = ("accuracy", "personal_accuracy", "received_accuracy")
    shown = [column for column in columns([]) if column.key in keys]

    def remarks(*folders):
        _, ((*_, first, second, third),) = final_rows(group_runs([load_run(folder) for folder in folders]), shown)
        return {cell.partition(" (")[2] for cell in (first, second, third)}

    assert remarks(noised[0]) == {"noise ± 3.0)"}
    assert remarks(*noised) == {"noise ± 2.5)"}
    assert remarks(noised[0], in_the_open) == {"noise ± 1.5)"}
    assert remarks(in_the_open) == {""}
    assert "(noise ± 2.5)</td>" in write_report(noised, tmp_path / "noised.html").read_text()


def test_of_very_many_clients_only_some_have_an_epsilon_of_their_own_and_it_is_said(make_run):
    each = drawn([make_run("many", clients=250, noise=1.0, config={"dp.enabled": True})])["epsilon"].variants[1]
    assert each.traces[0]["x"].count(None) == 100
    assert each.note == "Shown are the first 100 clients of each run at most."


def test_seeds_are_drawn_as_their_mean_within_their_range(six):
    runs = [load_run(folder) for folder in six[3:5]]
    low, high, line = drawn(six[3:5])["accuracy-by-round"].variants[0].traces
    last = [run.rounds[-1]["accuracy_global"] for run in runs]
    assert (low["y"][-1], high["y"][-1]) == (min(last), max(last))
    assert line["y"][-1] == pytest.approx(sum(last) / 2)


def test_seeds_of_a_single_evaluation_are_a_point_on_a_bar(make_run):
    folders = [make_run(f"once{seed}", "fedavg", seed, rounds=1) for seed in (0, 1)]
    bar, point = drawn(folders)["accuracy-by-round"].variants[0].traces
    found = [load_run(folder).last("accuracy_personal_mean") for folder in folders]
    assert (bar["x"], bar["y"]) == ([1, 1], [min(found), max(found)])
    assert point["y"] == [pytest.approx(sum(found) / 2)]
    assert "epsilon" not in drawn(folders)  # one round is no curve


def test_systems_that_are_judged_by_different_models_are_compared_by_their_clients_own(six, tmp_path):
    both = [six[0], six[3]]
    assert {load_run(folder).headline for folder in both} == {"accuracy_personal_mean", "accuracy_global"}
    view = drawn(both)["accuracy-by-round"].variants[0]
    own = [load_run(folder).rounds[-1]["accuracy_personal_mean"] for folder in both]
    assert (view.name, [trace["y"][-1] for trace in view.traces]) == ("Personal", own)
    cards = page_of(both, tmp_path / "report.html").split('<section class="cards"')[1].split("</section>")[0]
    assert all(f"{100 * accuracy:.2f}<small> %</small>" in cards for accuracy in own)
    (view,) = (view for view in drawn(both)["accuracy-by-cost"].variants if view.name == "Traffic")
    assert sorted(trace["y"][0] for trace in view.traces if trace["mode"] == "markers") == sorted(own)


def test_the_page_begins_with_what_the_comparison_found_in_words(make_run, tmp_path):
    folders = [
        make_run("dense", "fedavg", plateau=0.8, headline="accuracy_global"),
        make_run("pruned", "subfedavg", plateau=0.7),
        make_run("elsewhere", "fedprox", plateau=0.4, config={"dataset": "mnist"}),
    ]
    dense, pruned = (load_run(folder) for folder in folders[:2])
    own = [100 * run.rounds[-1]["accuracy_personal_mean"] for run in (dense, pruned)]
    bytes_of = [run.total("bytes_up") + run.total("bytes_down") for run in (dense, pruned)]
    said = Elements(page_of(folders, tmp_path / "report.html")).text
    assert f"With fedavg, clients' own models have {own[0]:.1f} %." in said
    sentence = f"With subfedavg they have {own[1]:.1f} %, {own[0] - own[1]:.1f} points below fedavg, with "
    assert sentence + _times(bytes_of[1] / bytes_of[0], "traffic") in said
    assert "One seed, 20 clients: another seed may differ." in said
    assert "With fedprox" not in said  # its clients have other data
    assert said.count("is compared with nothing") == 1
    assert "fedprox is compared with nothing: no other has the same data and seeds." in said


def test_the_words_are_of_the_model_by_which_all_systems_are_judged(make_run, tmp_path):
    folders = [
        make_run(name, name, plateau=plateau, headline="accuracy_global")
        for name, plateau in (("fedavg", 0.8), ("fedprox", 0.5))
    ]
    dense, other = (100 * load_run(folder).rounds[-1]["accuracy_global"] for folder in folders)
    said = Elements(page_of(folders, tmp_path / "report.html")).text
    assert f"With fedavg, the global model has {dense:.1f} %." in said
    assert f"With fedprox it has {other:.1f} %, {dense - other:.1f} points below fedavg" in said
    assert "Accuracy, global model, against fedavg" in said


def test_accuracies_within_twice_their_noise_are_not_told_apart(make_run, tmp_path):
    noise = {"accuracy_noise": 0.4, "config": {"dp.enabled": True, "dp.noise-multiplier": 0.5}, "noise": 0.5}
    folders = [make_run("dense", "fedavg", plateau=0.8, **noise), make_run("pruned", "subfedavg", plateau=0.7, **noise)]
    page = Elements(page_of(folders, tmp_path / "report.html")).text
    assert "not told apart from fedavg (accuracies have noise of ± 56.6 points)" in page
    assert "no: accuracies have noise of ± 56.6 points" in page
    assert "points below" not in page


def test_no_sentence_says_what_an_interval_that_holds_0_contradicts(make_run, tmp_path):
    folders = [make_run(f"{name}{seed}", name, seed) for name in ("fedavg", "fedprox") for seed in (0, 1, 2)]
    page = Elements(page_of(folders, tmp_path / "report.html")).text
    assert "not told apart from fedavg (the interval holds 0), with" in page
    assert "points above" not in page
    assert "points below" not in page


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.001, "next to no traffic"),
        (0.844, "16 % less traffic"),
        (1.001, "the same traffic"),
        (1.45, "45 % more traffic"),
        (2.13, "2.1 times the traffic"),
        (41.7, "42 times the traffic"),
    ],
)
def test_a_ratio_is_put_into_words(ratio, words):
    assert _times(ratio, "traffic") == words


def test_one_column_has_the_accuracy_that_is_compared_and_the_others_are_behind_a_switch(six, tmp_path):
    page = page_of([six[0], six[3]], tmp_path / "report.html")
    table = page.split('id="Final-numbers"')[1].split("</thead>")[0]
    hidden = re.findall(r'<th scope="col" class=" other">(.*?)</th>', table)
    assert {"Accuracy, last round (%)", "Global model (%)"} <= set(hidden)
    assert '<th scope="col" class="">Personal (%)</th>' in table
    assert '<input type="checkbox"> other accuracies' in table


def test_each_entry_of_the_contents_leads_to_a_place_and_each_table_and_figure_has_its_file(six, tmp_path):
    tags = Elements(page_of(six, tmp_path / "report.html")).tags
    places = {attributes["id"] for _, attributes in tags if "id" in attributes}
    entries = [attributes["href"] for _, attributes in tags if "href" in attributes]
    assert len(entries) > 10
    assert all(entry[1:] in places for entry in entries), entries
    figures_saved = {attributes["data-picture"] for _, attributes in tags if "data-picture" in attributes}
    assert figures_saved == drawn(six).keys()
    assert len([attributes for _, attributes in tags if "data-save" in attributes]) >= 4


def test_what_differs_between_runs_stands_in_a_table_of_its_own(six, tmp_path):
    page = page_of(six[:2], tmp_path / "report.html")
    assert '<th scope="row">subfedavg.target-rate</th><td>30</td><td>50</td>' in page
    assert "What differs between these runs" in page


def test_no_page_has_a_path_of_the_machine(make_run, tmp_path):
    settings = {"data-dir": str(tmp_path / "data"), "fedspallm.evaluation-texts": f"a={tmp_path}/t.txt,b={tmp_path}/u"}
    folders = [make_run("one", config=settings, extra={"clients_left_out": ["client 3"]}), make_run("two")]
    page = page_of(folders, tmp_path / "report.html")
    assert str(tmp_path) not in page
    assert "a=…/t.txt,b=…/u" in page


def test_each_client_of_the_last_evaluation_is_a_point_and_the_diamond_is_the_worst_tenth(six):
    run = load_run(six[0])
    box, diamond = drawn(six[:1])["clients"].variants[0].traces
    assert len(box["x"]) == 20
    assert diamond["x"] == [pytest.approx(run.rounds[-1]["accuracy_personal_worst_decile"])]


def test_measured_and_formula_bytes_stand_side_by_side(six):
    (trace,) = drawn(six[:1])["bytes"].variants[0].traces
    run = load_run(six[0])
    names = ("bytes_up", "paper_bytes_up", "bytes_down", "paper_bytes_down")
    assert trace["x"] == pytest.approx([run.total(name) / 1e6 for name in names])
    assert trace["marker"]["pattern"]["shape"] == ["", "/", "", "/"]


def test_what_clients_send_one_another_stands_beside_what_the_server_relays(peers):
    figure = drawn(peers)["bytes"]
    run = load_run(peers[0])
    gossip, star = drawn([peers[0], peers[2]])["bytes"].variants[0].traces
    assert gossip["x"] == pytest.approx([run.total(name) / 1e6 for name in ("peer_bytes", "bytes_up", "bytes_down")])
    assert [text.split(" ", 1)[1] for text in gossip["text"]] == ["⇄ peer to peer", "↑ relayed", "↓ relayed"]
    assert [text.split(" ", 1)[1] for text in star["text"]] == ["↑", "↑ formula", "↓", "↓ formula"]
    assert "only relays" in figure.caption
    assert "relays" not in drawn(peers[2:])["bytes"].caption


def test_the_card_of_a_peer_to_peer_system_does_not_count_what_is_relayed_twice(peers, tmp_path):
    text = " ".join(Elements(page_of(peers[:1], tmp_path / "report.html")).text.split())
    assert f"Traffic, peer to peer{load_run(peers[0]).total('peer_bytes') / 1e6:,.1f} MB" in text


def test_outcome_and_cost_are_two_tables_of_the_same_systems(peers, tmp_path):
    text = Elements(page_of(peers, tmp_path / "report.html")).text
    outcome, cost = text.split("Final numbers")[-1].split("What it cost")
    assert "Minutes" in cost
    assert "MB" not in outcome
    assert "Busiest node, MB/round" in cost.split("Mean ±")[0]
    assert "Accuracy" not in cost.split("Mean ±")[0]
    assert all("dispfl" in part and "fedavg" in part for part in (outcome, cost))


def test_a_run_that_measured_nothing_has_no_table_of_final_numbers(make_run, tmp_path):
    text = Elements(page_of([make_run("empty", rounds=0)], tmp_path / "report.html")).text
    assert "Final numbers" not in text
    assert "What it cost" in text


def test_clients_that_dropped_out_are_told_with_the_lost_replies(peers, tmp_path):
    text = Elements(page_of(peers[:1], tmp_path / "report.html")).text
    row = text.split("Dropped out")[1].split("Configuration")[0].strip()
    assert row.endswith("4")  # 1, 2, 0 and 1 in the four rounds


def test_clients_are_grouped_by_their_rounded_density(peers):
    points, means = drawn(peers[:2])["density-groups"].variants[0].traces
    assert means["x"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert means["text"] == ["8 clients"] * 5
    lowest = [accuracy for density, accuracy in zip(points["x"], points["y"], strict=True) if density == 0.2]
    assert means["y"][0] == pytest.approx(sum(lowest) / 8)
    rows = [row for folder in peers[:2] for row in load_run(folder).clients if row["round"] == 4]
    assert sorted(points["y"]) == sorted(row["accuracy_personal"] for row in rows)


def test_clients_of_one_density_are_not_a_figure(peers):
    assert "density-groups" not in drawn(peers[2:])
    assert len(drawn(peers)["density-groups"].variants[0].traces) == 2


def test_densities_that_round_to_the_same_are_one_group(make_run):
    run = load_run(make_run("run", rounds=0))
    rows = [(0.2, 0.5), (0.204, 0.7)]
    clients = tuple({"round": 1, "partition": i, "density": d, "accuracy_personal": a} for i, (d, a) in enumerate(rows))
    assert not [f for f in figures(group_runs([replace(run, clients=clients)])) if f.key == "density-groups"]
    late = ({**clients[0], "round": 2}, {**clients[1], "round": 2, "density": 0.21}, *clients)
    (figure,) = [f for f in figures(group_runs([replace(run, clients=late)])) if f.key == "density-groups"]
    assert figure.variants[0].traces[1]["y"] == [0.5, 0.7]


def test_each_run_with_masks_is_a_view_of_two_panels_in_one_order(peers):
    views = drawn(peers)["masks"].variants
    assert [view.name for view in views] == ["dispfl · seed 0", "dispfl · seed 1"]
    for view, folder in zip(views, peers, strict=False):
        labels, masks = view.traces
        assert len(view.panels) == 2
        assert labels["x"] == labels["y"] == masks["x"] == masks["y"]
        assert sorted(map(int, labels["x"])) == list(range(20))
        run = load_run(folder)
        a, b = int(labels["y"][2]), int(labels["x"][5])
        counts = [run.info["partition"][client]["train"] for client in (a, b)]
        norms = [math.sqrt(sum(n * n for n in each)) for each in counts]
        dot = sum(n * m for n, m in zip(*counts, strict=True))
        assert labels["z"][2][5] == pytest.approx(dot / norms[0] / norms[1], abs=1e-4)
        assert masks["z"][2][5] == pytest.approx(1 - run.masks.distance[a, b], abs=1e-4)
        assert labels["z"][3][3] is masks["z"][3][3] is None
        assert "after round 4" in view.note


def test_accuracies_by_class_are_a_matrix_with_gaps_where_a_client_has_no_such_class(peers):
    view = drawn(peers)["classes"].variants[0]
    (trace,) = view.traces
    assert (trace["x"][:2], trace["y"]) == (["0", "1"], [str(label) for label in range(5)])
    assert trace["z"][1][0] is None
    run = load_run(peers[0])
    last = [row for row in run.clients if row["partition"] == 7 and row.get("accuracy_by_class")][-1]
    assert trace["z"][2][7] == round(last["accuracy_by_class"]["2"], 3)


def test_a_client_that_the_last_evaluation_lacks_is_not_among_the_accuracies_by_class(peers):
    run = load_run(peers[0])
    last = max(row["round"] for row in run.clients if row.get("accuracy_by_class"))
    absent = [row for row in run.clients if (row["round"], row["partition"]) != (last, 7)]
    view = by_class(group_runs([replace(run, clients=tuple(absent))]))[0]
    assert view.traces[0]["x"] == [str(client) for client in range(20) if client != 7]


def test_of_very_many_clients_every_nth_is_shown_and_the_view_says_so(make_run):
    (view,) = drawn([make_run("many", "dispfl", peers=True, rounds=1, clients=201)])["masks"].variants
    assert len(view.traces[0]["x"]) == len(view.traces[0]["z"]) == len(view.traces[0]["z"][0]) == 101
    assert "one client in 2" in view.note
    assert "20,100 pairs" in view.note


def test_a_partition_shared_by_systems_is_drawn_once_and_zero_is_empty(six):
    views = drawn(six)["partition"].variants
    assert [view.name for view in views] == ["seed 0", "seed 1"]
    counts = load_run(six[0]).info["partition"]
    (trace,) = views[0].traces
    for label in range(10):
        assert [value or 0 for value in trace["z"][label]] == [client["train"][label] for client in counts]
    assert 0 not in [value for line in trace["z"] for value in line]


def test_bytes_by_layer_set_are_bars_with_the_ratio_of_the_largest_to_the_smallest(make_run):
    sizes = [{"fc1": (9e6, 4e6), "conv1 conv2": (8e6, 1e6)}, {"fc1": (9e6, 6e6), "conv2": (7e6, 5e5)}]
    found = [{name: {"bytes_down": d, "bytes_up": u} for name, (d, u) in each.items()} for each in sizes]
    folders = [make_run(f"p{i}", "fedp3", i, extra={"bytes_by_layer_set": each}) for i, each in enumerate(found)]
    figure = drawn([*folders, make_run("a", "fedavg")])["layer-sets"]
    up, down = figure.variants
    (bars,) = up.traces  # fedavg has none
    assert up.layout["xaxis"]["ticktext"] == ["conv2", "fc1", "conv1 + conv2"]
    assert dict(zip(bars["x"], bars["y"], strict=True)) == {0: 0.5, 1: 5.0, 2: 1.0}  # the mean over seeds that have it
    assert bars["text"] == ["0.50", "5.00", "1.00"]
    assert up.note.endswith(": 10.")
    assert down.traces[0]["y"] == [7.0, 9.0, 8.0]
    assert "layer-sets" not in drawn([make_run("b", "fedavg")])


def test_the_name_of_a_large_layer_set_is_cut_short_and_escaped(make_run):
    names = ["<b>a", "a b c d", " ".join(f"l{i}" for i in range(30))]
    sets = {name: {"bytes_down": 2, "bytes_up": 1} for name in names}
    (view, _) = drawn([make_run("p", "fedp3", extra={"bytes_by_layer_set": sets})])["layer-sets"].variants
    assert view.layout["xaxis"]["ticktext"] == ["&lt;b&gt;a", "a … d (4)", "l0 … l29 (30)"]


def test_a_damaged_run_is_left_out_and_named(make_run, tmp_path):
    good = [make_run(f"good{seed}", "fedavg", seed) for seed in (0, 1)]
    damaged = make_run("damaged", "fedavg", 2)
    (damaged / "rounds.jsonl").write_bytes(b'{"round": "one"}\n')
    said: list[str] = []
    page = write_report([good[0], damaged, good[1]], tmp_path / "r.html", on_left_out=said.append).read_text()
    (line,) = said
    assert f"{damaged / 'rounds.jsonl'} is damaged or cut" in line
    text = " ".join(Elements(page.replace(packed_plotly(), "")).text.split())
    assert "Left out: 1 of 3 run folders cannot be read" in text
    assert f"{damaged / 'rounds.jsonl'} is damaged or cut" in text
    assert "Left out" not in page_of(good, tmp_path / "whole.html")


def test_a_report_of_damaged_runs_alone_is_refused(make_run, tmp_path):
    damaged = make_run("damaged", "fedavg")
    (damaged / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"no run folder can be read: .*not valid JSON"):
        write_report([damaged], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_run_that_is_named_twice_is_shown_once(make_run, tmp_path):
    folder, other = make_run("1"), make_run("2", seed=1)
    (tmp_path / "latest").symlink_to(other)
    assert each_once([folder, other, tmp_path / "latest", tmp_path / "x" / ".." / "1"]) == [folder, other]
    page = write_report([folder, other, tmp_path / "latest"], tmp_path / "page.html").read_text()
    assert "latest" not in page


@pytest.mark.full
def test_a_page_of_two_hundred_runs_is_small_and_can_be_filtered(make_run):
    runs = [load_run(make_run("first", rounds=20))]
    for number in range(1, 200):
        config = {**runs[0].config, "learning-rate": number / 1000, "system": ("fedavg", "dispfl")[number % 2]}
        runs.append(replace(runs[0], info={**runs[0].info, "config": config}))
    page = render(runs)
    assert len(page) < 6_000_000
    assert 'id="filter"' in page
    assert page.count("<details") == 201
    assert 'id="filter"' not in render(runs[:10])
