"""What a paper takes from runs: a figure, a paragraph on the settings, and references."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from fedprune_app.registry import SYSTEMS
from fedprune_app.results.groups import group_runs
from fedprune_app.results.paper import drawn, figure_names, protocol, references, write_paper
from fedprune_app.results.reader import load_run
from tests.refusing import refuses


@pytest.fixture
def groups(make_run):
    folders = [make_run(f"dense{seed}", "fedavg", seed, rounds=4) for seed in (0, 1)]
    config = {"num-server-rounds": 4, "dataset": "a_b", "subfedavg.target-rate": 50.0, "test-split": "labels"}
    config |= {"subfedavg.prune-step": 5.0, "subfedavg.accuracy-threshold": 50.0}  # the second is the default
    folders.append(make_run("pruned", "subfedavg", rounds=4, config=config))
    return group_runs([load_run(folder) for folder in folders])


def test_a_figure_of_the_report_is_a_file_with_the_systems_by_name(groups):
    picture = drawn(groups, "accuracy-by-bytes", "svg").decode()
    assert picture.startswith("<?xml")
    assert "<!-- fedavg -->" in picture
    assert "<!-- subfedavg -->" in picture
    assert "<!-- Measured traffic (MB) -->" in picture
    assert drawn(groups, "accuracy-by-bytes", "pdf").startswith(b"%PDF")


def test_a_figure_without_spread_says_why(fedprune, make_run):
    folders = [make_run("single", "fedavg"), make_run("other", "fedavg", 1)]
    note = "note: no spread is shown, since each system has one seed\n"
    assert note in fedprune("figure", folders[0], "accuracy-by-round", "-o", "one.svg")[1]
    assert note not in fedprune("figure", *folders, "accuracy-by-round", "-o", "two.svg")[1]


@pytest.mark.full
def test_every_figure_of_lines_can_be_drawn_in_each_of_its_views(groups, make_run):
    private = make_run("private", rounds=3, noise=1.0, config={"dp.enabled": True, "dp.epsilon-budget": 5.0})
    groups = [*groups, *group_runs([load_run(private)])]
    assert "epsilon" in figure_names(groups)
    for name, views in figure_names(groups).items():
        for view in views:
            assert drawn(groups, name, "svg", view.name)


def test_a_figure_or_view_that_there_is_not_is_refused_with_those_that_there_are(groups):
    with refuses("FIGURE", "accuracy"):
        drawn(groups, "accuracy", "pdf")
    with refuses("--view", "Mine"):
        drawn(groups, "accuracy-by-round", "pdf", "Mine")


def test_each_system_that_a_paper_describes_has_a_reference_with_the_title_that_its_code_names():
    without = {"standalone"}
    assert {name for name in SYSTEMS if not references([name])} == without
    for name in ("subfedavg", "dispfl", "fedp3", "fedltp", "fedspallm", "ditto", "fedfomo", "fjord", "fedspa", "fedcr"):
        entry = next(iter(references([name]).values()))
        title = re.findall(r"title = {(.+)}", entry)[0].replace("{", "").replace("}", "")
        code = " ".join((import_module(SYSTEMS[name].strategy.__module__).__doc__ or "").split())
        assert title.lower() in code.lower(), name


def test_the_paragraph_names_the_settings_and_cites_only_what_there_are_references_for(groups):
    text = protocol(groups)
    assert text.startswith("We compare FedAvg~\\cite{")
    assert re.search(r"Sub-FedAvg \(Un\)~\\cite{[^}]+} \(target-rate 50, prune-step 5\)\.", text)
    assert "learning rate 0.01" in text
    assert "Accuracy (personal) is the mean over all clients" in text
    assert "(test-split -- or labels)" in text
    assert r"digits or a\_b" in text
    assert "over the seeds, of which there are 1 or 2" in text
    cited = {key for keys in re.findall(r"\\cite{([^}]+)}", text) for key in keys.split(",")}
    assert cited == set(references(["fedavg", "subfedavg"]))


@pytest.mark.full
def test_a_paper_has_four_files_and_replaces_none_that_is_there(groups, tmp_path):
    paths = write_paper(groups, tmp_path / "paper")
    assert [path.name for path in paths] == ["table.tex", "protocol.tex", "references.bib", "figure.pdf"]
    with refuses("--output", paths[0]):
        write_paper(groups, tmp_path / "paper")
    write_paper(groups, tmp_path / "paper", force=True)
