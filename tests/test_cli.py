"""The command line as a user types it, on the in-process engine: once in a process of its own, else in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedprune_app import cli
from fedprune_app.config import OPTIONS
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.results.recorder import write_info
from tests.examples import full, in_test
from tests.refusing import refuses

ROOT = Path(__file__).parents[1]
SMALL = ["num-server-rounds=2", "local-epochs=1", "evaluate-every=1"]
MATRICES = sorted((ROOT / "configs/matrices").rglob("*.yaml"))
SOME_MATRICES = ("dispfl_small", "fedltp_small", "fedp3_layers", "fedspallm_claims", "subfedavg_rounds", "tuned")
HERE = ["--engine", "inprocess", "--clients", "4"]


def test_list_names_what_there_is_for_people_and_machines(capsys):
    cli.app(["list"], standalone_mode=False)
    assert "subfedavg" in capsys.readouterr().out
    cli.app(["list", "--json"], standalone_mode=False)
    listed = json.loads(capsys.readouterr().out)
    assert {"subfedavg", "fedavg", "standalone"} <= listed["systems"].keys()
    assert listed["keys"]["learning-rate"]["default"] == 0.01
    assert all(entry["help"] for entry in listed["keys"].values())
    assert listed["keys"]["momentum"]["range"] == "at least 0 and below 1"
    assert listed["keys"]["dispfl.gossip"]["choices"].keys() == {"server", "client"}


def test_a_system_of_the_gallery_is_listed_with_its_file_which_an_error_for_it_names(fedprune, capsys, monkeypatch):
    file = ROOT / "gallery" / "heterofl.py"
    monkeypatch.setenv("COLUMNS", "200")
    cli.app(["list"], standalone_mode=False)
    listed = capsys.readouterr().out
    assert "  fedrolex  " in listed
    assert str(file) in listed
    for arguments in (["run", "system=fedrolex"], ["list", "fedrolex"]):
        code, told = fedprune(*arguments)
        assert (code, told.endswith(f"; it is in the gallery: --plugin {file}\n")) == (2, True)


def test_the_page_of_a_system_is_listed_without_marks_of_code(capsys):
    cli.app(["list", "dispfl"], standalone_mode=False)
    assert "The client half is clients/dispfl.py." in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100])
def test_all_settings_are_listed_with_default_range_and_the_words_of_each_choice(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    cli.app(["list", "--keys"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    shown = " ".join(" ".join(lines).split())
    for key, option in OPTIONS.items():
        assert any(line.startswith(f"{key} = ") for line in lines), key
        for choice in option.choices:
            assert f" {choice}: " in shown, f"{key}={choice}"
    if columns == 100:
        assert "momentum = 0.5 The momentum of local SGD. Allowed: at least 0 and below 1." in shown
        assert "gradient: the weights with the largest gradients random: random weights" in shown


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("run sys", ["system=", "system=dispfl"]),  # the words as bash passes them
        ("run system =", ["dispfl", "fedavg"]),
        ("run system = disp", ["dispfl"]),
        ("run --clients 4 system = fedavg learning-r", ["learning-rate=", "learning-rate=0.01"]),
        ("run dp.ena", ["dp.enabled=", "dp.enabled=true", "dp.enabled=false"]),
        ("check dispfl.growth = ", ["gradient", "random"]),
        ("run data-dir = ph", []),  # bash completes files
        ("run -c quick", ["quickstart"]),
        ("list disp", ["dispfl"]),
        ("report runs/", ["runs/a", "runs/b"]),
        ("export r", ["runs/a", "runs/b"]),
    ],
)
def test_a_shell_completes_settings_configurations_and_run_folders(words, offered, monkeypatch, capsys, tmp_path):
    for name in "ab":
        write_info(tmp_path / "runs" / name, {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_WORDS", f"fedprune {words}")
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ") + 1))
    monkeypatch.setenv("_FEDPRUNE_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        cli.app(prog_name="fedprune")
    found = capsys.readouterr().out.split()
    assert set(offered) <= set(found)
    assert bool(found) == bool(offered)


def test_most_shells_pass_a_setting_as_one_word(monkeypatch, capsys):
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "fedprune run system=disp")
    monkeypatch.setenv("_FEDPRUNE_COMPLETE", "complete_zsh")
    with pytest.raises(SystemExit):
        cli.app(prog_name="fedprune")
    assert capsys.readouterr().out.strip() == """_arguments '*: :(("system=dispfl"))'"""


def test_a_level_of_the_log_may_be_in_small_letters_or_is_refused(fedprune, monkeypatch):
    for level, code in (("debug", 0), ("", 0), ("foo", 2)):
        monkeypatch.setenv("FEDPRUNE_LOG", level)
        found, said = fedprune("list")
        assert found == code, said
    assert "FEDPRUNE_LOG is 'FOO'" in " ".join(said.split())


def test_a_folder_with_the_name_of_a_shipped_configuration_does_not_hide_it(fedprune, tmp_path):
    (tmp_path / "fedp3").mkdir()
    code, said = fedprune("check", "-c", "fedp3", "dataset=digits", "model=cnn-small", "partition=shards")
    assert "cannot be read" not in said, code


@pytest.mark.full
def test_a_run_in_a_process_of_its_own_leaves_its_folder_and_a_second_into_it_is_refused(fedprune, tmp_path):
    command = [sys.executable, "-m", "fedprune_app.cli", "run", "system=fedavg", *SMALL, *HERE, "--out", "runs/a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "a"
    info = json.loads((folder / "run.json").read_text())
    assert (info["status"], info["rounds_completed"], info["config"]["system"]) == ("completed", 2, "fedavg")
    assert len(info["final_sha256"]) == 64
    assert (folder / "models" / "global.safetensors").exists()
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    again, told = fedprune("run", *SMALL, *HERE, "--out", "runs/a")
    assert again == 2
    assert told.count("\n") == 1
    assert "already holds a run" in told
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


@pytest.mark.full
def test_more_rounds_can_be_added_to_a_finished_run(fedprune, tmp_path):
    assert fedprune("run", *SMALL, *HERE, "--out", "a")[0] == 0
    refused, says = fedprune("run", "--resume", "learning-rate=0.5", "--out", "a")
    assert refused == 2
    assert "learning-rate is 0.5" in says
    # without --clients: as many as the run began with
    longer, says = fedprune("run", "--resume", "num-server-rounds=4", *HERE[:2], "--out", "a")
    assert longer == 0, says
    assert fedprune("run", "num-server-rounds=4", *SMALL[1:], *HERE, "--out", "b")[0] == 0
    hashes = {json.loads((tmp_path / name / "run.json").read_text())["final_sha256"] for name in "ab"}
    assert len(hashes) == 1


def test_a_run_that_stopped_before_its_clients_were_known_goes_on_with_as_many(fedprune, tmp_path, monkeypatch):
    def stopped(*given, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedprune_app.server_app.register_clients", stopped)
        fedprune("run", *SMALL, *HERE, "--out", "a")
    info = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (info["status"], info["partition"], info["num_partitions"]) == ("interrupted", None, 4)
    code, says = fedprune("run", "--resume", *HERE[:2], "--clients", "5", "--out", "a")
    assert (code, "--clients is 5" in says) == (2, True), says
    code, says = fedprune("run", "--resume", *HERE[:2], "--out", "a")
    assert code == 0, says
    assert len(json.loads((tmp_path / "a" / "run.json").read_text())["partition"]) == 4


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(fedprune, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "m.yaml").write_text("systems: [fedavg]\n")
    allowed = "allowed: a folder in which you may write"
    for command in (["run", *SMALL], ["sweep", "m.yaml"]):
        code, said = fedprune(*command, *HERE, "--out", "file/out")
        assert (code, f"--out is '{tmp_path}/file/out', {allowed}" in " ".join(said.split())) == (2, True), said
        code, said = fedprune(*command, *HERE, "--out", "file")
        assert (code, "--out" in said, "a folder" in said) == (2, True, True)
    private = ["dp.enabled=true", "dp.noise-multiplier=1", "dp.ledger-dir=file/ledgers"]
    for key, more in (("state-dir", ["state-dir=file/states"]), ("dp.ledger-dir", private)):
        code, said = fedprune("run", "system=fedavg", *SMALL, *more, *HERE, "--out", "a")
        assert (code, f"{key} is " in said, allowed in " ".join(said.split())) == (2, True, True), said
    assert not (tmp_path / "a").exists()


@pytest.mark.full
def test_a_ledger_folder_is_relative_to_where_the_command_was_typed(fedprune, tmp_path):
    private = ["system=fedavg", "dp.enabled=true", "dp.noise-multiplier=1", "dp.ledger-dir=ledgers"]
    code, says = fedprune("run", *SMALL, *private, *HERE, "--out", "a")
    assert code == 0, says
    assert len(list((tmp_path / "ledgers").glob("00000-*.jsonl"))) == 1


PRIVATE = ("system=fedavg", "dp.enabled=true", "dp.noise-multiplier=1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "learning-rte=1"], "did you mean 'learning-rate'?"),
        (["run", "learning-rate=-1"], "learning-rate is -1.0"),
        (["run", "system=none"], "system is 'none'"),
        (["run", "-c", "missing.toml"], "config file is 'missing.toml'"),
        (["run", "--engine", "spark"], "--engine is 'spark'"),
        (["run", "--clients", "0"], "--clients is 0"),
        (["run", "--resume"], "holds no run to resume"),
        (["run", "out-dir=/x"], "out-dir is '/x'"),
        (
            ["run", "--engine", "inprocess", "--workers", "2"],
            "--workers is 2",
        ),
        (
            ["deploy", "local", "--capacities", "5 1 1", "system=dispfl"],
            "--capacities is '5 1 1'",
        ),
        (
            ["deploy", "local", "--capacities", "1 1 nan", "system=dispfl"],
            "--capacities is '1 1 nan'",
        ),
        (["audit", *PRIVATE, "--json", "/etc/passwd/audit.json"], "'/etc/passwd/audit.json' cannot be written"),
        (["run", "validation-fraction=0"], "validation-fraction is 0.0"),
        full(["run", "seed"], "setting is 'seed'"),
        full(["sweep", "missing.yaml"], "matrix is 'missing.yaml'"),
        full(["audit", "system=fedavg"], "dp.enabled is false"),
        full(["audit", "a.toml", "b.toml"], "config file is 'a.toml'"),
        full(["report", "."], "run folder is '.'"),
        full(["report", "", "-o", "r.html"], "argument is ''"),
        full(["run", "--out="], "argument is '--out='"),
        full(["run", "--out", "/etc/passwd"], "--out is '/etc/passwd'"),
        full(["deploy", "login", "localhost", "--secret", "x"], "address of the SuperLink is 'localhost'"),
        full(["predict", ".", "image.png"], "cannot be read: "),
        (["run", "ssfl"], "setting is 'ssfl', allowed: KEY=VALUE, such as system=NAME; a file is given as -c FILE"),
        (["new", "dispfl"], "lower-case letters, digits and dashes, and no folder or system that exists"),
        full(["deploy", "certificates", "--host", "bad host!"], "--host is 'bad host!'"),
        full(["deploy", "certificates", "--host", "-x"], "--host is '-x'"),
    ],
)
def test_a_users_mistake_is_one_line_and_nothing_is_written(arguments, says, fedprune, tmp_path):
    code, told = fedprune(*arguments)
    assert code == 2
    assert says in told
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_the_server_refuses_is_one_line_too(fedprune):
    assert fedprune("run", "system=fedavg", *SMALL, *HERE, "--out", "a")[0] == 0
    code, told = fedprune("run", "--resume", "num-server-rounds=1", *HERE, "--out", "a")
    assert code == 2
    assert told.startswith("error: num-server-rounds is 1, ")


def test_a_database_is_made_and_said(fedprune, tmp_path):
    code, told = fedprune("deploy", "database", "superlink.db")
    assert (code, told) == (0, "made: superlink.db\n")
    assert (tmp_path / "superlink.db").is_file()


def test_a_run_that_fails_exits_1_with_its_reason(fedprune):
    code, told = fedprune("run", "learning-rate=1e30", *SMALL, *HERE, "--out", "a")
    assert code == 1
    last = told.strip().splitlines()[-1]
    assert last.startswith("failed: ")
    assert "training diverged" in last
    assert "Traceback" not in told


def test_a_run_that_fails_later_says_that_it_can_be_resumed(fedprune):
    """By these draws four of four clients stay in round 1, and two in round 2."""
    drawn = ("seed=5", "drop-probability=0.3", "fraction-train=1.0", "min-replies=3")
    code, told = fedprune("run", *SMALL, *HERE, *drawn, "--out", "a")
    reason = "round 2 had 2 good replies, min-replies asks for 3; no reply failed: fewer clients were asked"
    assert (code, told.splitlines()[-1]) == (1, f"failed: {reason}; --resume continues after round 1")
    resumed = ("--resume", "min-replies=1", "--engine", "inprocess", "--out", "a")
    assert fedprune("run", *resumed)[0] == 0


MATRIX = """
clients: 4
common: {num-server-rounds: 2, local-epochs: 1, evaluate-every: 1}
systems:
  - fedavg
  - {system: subfedavg, subfedavg.target-rate: 30}
datasets: [digits]
seeds: [0, 1]
"""


def test_a_sweep_of_no_clients_is_refused(fedprune, tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    code, told = fedprune("sweep", "m.yaml", "--clients", "0", "--engine", "inprocess", "--out", "s")
    assert (code, told.count("\n")) == (2, 1)
    assert "--clients is 0" in told
    assert not (tmp_path / "s").exists()


@pytest.mark.full
def test_a_sweep_runs_every_cell_once_and_tables_them(fedprune, tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    code, told = fedprune("sweep", "m.yaml", "--out", "s", "--engine", "inprocess")
    assert code == 0, told
    names = [f"{system}-digits-seed{seed}" for system in ("fedavg", "subfedavg-target-rate30") for seed in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "s").iterdir() if path.is_dir()) == sorted(names)
    tables = {path.suffix: path.read_text() for path in (tmp_path / "s").glob("[!.]*") if path.is_file()}
    assert tables.keys() == {".md", ".csv", ".tex"}
    assert "±" in tables[".md"]

    # a cell that was cut short is run again, finished ones are left alone
    cut = tmp_path / "s" / names[0] / "run.json"
    info = json.loads(cut.read_text())
    write_info(cut.parent, info | {"status": "interrupted", "final_sha256": None})
    whole = tmp_path / "s" / names[1] / "run.json"
    written = whole.stat().st_mtime_ns
    refused, told = fedprune("sweep", "m.yaml", "--out", "s", "--engine", "inprocess")
    assert refused == 2
    assert "is not empty" in told
    again, told = fedprune("sweep", "m.yaml", "--out", "s", "--engine", "inprocess", "--resume")
    assert again == 0, told
    assert told.count("finished before") == 3
    assert json.loads(cut.read_text())["final_sha256"] == info["final_sha256"]
    assert whole.stat().st_mtime_ns == written
    # a damaged one is told, and stops no other
    damaged = tmp_path / "s" / names[0] / "clients.jsonl"
    kept = damaged.read_bytes()
    damaged.write_bytes(kept[:-5])
    code, told = fedprune("sweep", "m.yaml", "--out", "s", "--engine", "inprocess", "--resume")
    assert (code, "1 of 4 runs failed" in told, told.count("finished before")) == (1, True, 4)
    damaged.write_bytes(kept)
    refused, told = fedprune(
        "sweep", "m.yaml", "--out", "s", "--engine", "inprocess", "--resume", "num-server-rounds=1"
    )
    assert (refused, "num-server-rounds is 1, allowed when resuming: at least 2" in " ".join(told.split())) == (2, True)


def test_a_report_is_written_for_a_folder_of_runs(fedprune, tmp_path):
    assert fedprune("run", *SMALL, *HERE, "--out", "runs/a")[0] == 0
    code, told = fedprune("report", "runs", "-o", "r.html")
    assert code == 0, told
    assert "subfedavg" in (tmp_path / "r.html").read_text()
    assert fedprune("table", "runs")[0] == 0
    assert fedprune("table", "runs", "-o", "t.tex")[0] == 0
    assert (tmp_path / "t.tex").read_text().startswith("\\begin{tabular}")
    code, told = fedprune("table", "runs", "-o", "t.tex")
    assert (code, "exists" in told) == (2, True)


ALIASES = "x"
for depth in range(12):  # a hundred bytes a level, ten times the entries
    ALIASES = f"&a{depth} [{ALIASES}" + f",*a{depth - 1}" * 9 * (depth > 0) + "]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("systems: [fedavg]\nrounds: 3", "entry is 'rounds'"),
        ("seeds: [1]", "systems is None"),
        ("systems: [{momentum: 0.1}]", "an entry of systems is {'momentum': 0.1}"),
        (f"systems: [{ALIASES}]", "an entry of systems is [[[["),
        (f"systems: [{{system: fedavg, seed: {ALIASES}}}]", "seed in systems is [[[["),
        ("systems: [fedavg, fedavg]", "name of runs is 'fedavg-digits-seed0'"),
        ("systems: [fedavg]\nseeds: [a]", "seeds is ['a']"),
        ("systems: [fedavg]\nclients: 0", "clients is 0"),
        ("systems: [fedavg\n", "cannot be read"),
        ("- 1", "holds no table"),
        ("systems: [fedavg]\ncommon: {bogus: 1}", "setting is 'bogus'"),
        ("systems: [fedavg]\ncommon: {seed: 1}", "seed in common is 1"),
        ("systems: [!!python/object/apply:os.system [id]]", "cannot be read"),
        (
            "systems: [fedavg]\nseeds: [1]\nseeds: [2]",
            "the key 'seeds' twice, in the table that begins in line 1",
        ),
        (
            "systems: [{system: fedavg, momentum: 0,\n momentum: 0.5}]",
            "the key 'momentum' twice, in the table that begins in line 1",
        ),
        (
            "systems: [fedavg]\ncommon: {dp.enabled: true, dp: {enabled: false}}",
            "m.yaml': an entry of common: dp.enabled is given twice",
        ),
        ("systems: [fedavg]\ndatasets: []", "datasets is []"),
        ("systems: [fedavg]\ndatasets: false", "datasets is false"),
        ("systems: [fedavg]\ncommon: []", "an entry of common is []"),
        ("systems: [fedavg]\nclients:", "clients is None"),
        ("systems: [fedavg]\nseeds: [0, 0]", "seeds is [0, 0]"),
        ("systems: [fedavg]\ncommon: {out-dir: /q}", "run 'fedavg-digits-seed0': out-dir is '/q'"),
        ("systems: [{system: fedavg, resume-from: q}]", "seed0': resume-from is 'q'"),
        ("systems: [{system: fedavg, foo: 1}]", "m.yaml', run 'fedavg-foo1-digits-seed0': setting is 'foo'"),
        full("systems: [fedavg]\nseeds: [-1]", "m.yaml', run 'fedavg-digits-seed-1': seed is -1"),
        full(
            "systems: [{system: fedavg, density: 0.2}]", "m.yaml', run 'fedavg-density0.2-digits-seed0': density is 0.2"
        ),
    ],
)
def test_a_matrix_with_a_mistake_is_refused_by_name(text, says, tmp_path):
    from fedprune_app.sweeps.matrix import read_matrix

    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ValueError, match=r".") as caught:
        read_matrix(tmp_path / "m.yaml").cells(RunInputs(out=tmp_path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    in_test(MATRICES, *(ROOT / f"configs/matrices/{name}.yaml" for name in SOME_MATRICES)),
    ids=lambda path: path.stem,
)
def test_every_matrix_of_the_repository_is_valid_and_names_its_own_command(path, tmp_path):
    from fedprune_app.sweeps.matrix import read_matrix

    assert f"#   fedprune sweep {path.relative_to(ROOT)} " in path.read_text()
    matrix = read_matrix(path)
    needs_data = any(values.get("dataset", "digits") not in ("digits", "stdlib") for _, values in matrix.settings)
    assert matrix.cells(RunInputs(on_command_line={"data-dir": "/data"} if needs_data else {}, out=tmp_path))


@pytest.mark.parametrize("table", [1, 2, 3])
def test_fedspallms_tables_wait_for_all_their_clients_to_read_a_large_text_and_model(table, tmp_path):
    from fedprune_app.sweeps.matrix import read_matrix

    matrix = read_matrix(ROOT / f"configs/matrices/papers/fedspallm_table{table}.yaml")
    for cell in matrix.cells(RunInputs(on_command_line={"data-dir": "/data"}, out=tmp_path)):
        assert cell.config.min_clients == matrix.num_clients == (4, 8, 16)[table - 1]
        assert cell.config.startup_seconds >= 1800


def test_the_command_line_may_set_what_a_matrix_does_not_vary(tmp_path):
    from fedprune_app.sweeps.matrix import read_matrix

    (tmp_path / "m.yaml").write_text(MATRIX + "  \n")
    matrix = read_matrix(tmp_path / "m.yaml")
    assert (
        matrix.cells(RunInputs(on_command_line={"num-server-rounds": 9}, out=tmp_path))[0].config.num_server_rounds == 9
    )
    for key in ("system", "seed", "subfedavg.target-rate"):
        with refuses(key, which="the matrix varies"):
            matrix.cells(RunInputs(on_command_line={key: 1}, out=tmp_path))
    other = "systems: [fedavg, {system: ditto, num-server-rounds: 3}]\ncommon: {num-server-rounds: 1, momentum: 0.1}\n"
    (tmp_path / "m.yaml").write_text(other)
    matrix = read_matrix(tmp_path / "m.yaml")
    assert matrix.cells(RunInputs(on_command_line={"momentum": 0.2}, out=tmp_path))[1].config.momentum == 0.2
    with refuses("num-server-rounds", which="the matrix varies"):
        matrix.cells(RunInputs(on_command_line={"num-server-rounds": 2}, out=tmp_path))


def test_a_table_of_a_matrix_may_replace_what_it_merges(tmp_path):
    from fedprune_app.sweeps.matrix import read_matrix

    (tmp_path / "m.yaml").write_text("systems: [&a {system: fedavg, momentum: 0.5}, {<<: *a, momentum: 0.25}]")
    cells = read_matrix(tmp_path / "m.yaml").cells(RunInputs(out=tmp_path))
    assert [cell.config.momentum for cell in cells] == [0.5, 0.25]


def test_settings_too_long_for_a_folders_name_are_cut_and_stay_apart(tmp_path):
    from fedprune_app.sweeps.matrix import matrix_of

    settings = [{"system": "fedavg", "classes": ",".join(map(str, range(count)))} for count in (60, 100, 101)]
    names = [name for name, _ in matrix_of({"systems": settings, "datasets": ["image-folder"]}, "x").settings]
    assert names[0] == f"fedavg-classes{'_'.join(map(str, range(60)))}-image-folder-seed0"  # as ever
    assert len(set(names)) == 3
    for name in names:
        (tmp_path / name).mkdir()


def test_a_sweep_decides_itself_where_its_runs_are(fedprune, tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    (tmp_path / "s.yaml").write_text("common: {system: fedavg}\nsearch: {space: {momentum: [0, 0.5]}}")
    for name in ("m.yaml", "s.yaml"):
        code, told = fedprune("sweep", name, "out-dir=/q", "--engine", "inprocess", "--out", "s")
        assert (code, "out-dir is '/q'" in told, told.count("\n")) == (2, True, 1)


def test_a_text_of_a_matrix_is_the_number_that_its_option_takes(tmp_path):
    from fedprune_app.sweeps.matrix import read_matrix

    (tmp_path / "m.yaml").write_text("systems: [fedavg]\ncommon: {learning-rate: 1e-4, weight-decay: 5E-4}")
    config = read_matrix(tmp_path / "m.yaml").cells(RunInputs(out=tmp_path))[0].config
    assert (config.learning_rate, config.weight_decay) == (1e-4, 5e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        full(["list"]),
        full(["list", "--keys"]),
        full(["run", "densty=0.1"]),
        full(["run", "system=FedAvg"]),
        full(["sweep", "matrix.yaml", "lr=1"]),
        full(["report", "nowhere"]),
    ],
)
def test_what_needs_no_network_is_answered_before_torch_and_flower_are_imported(arguments, tmp_path):
    (tmp_path / "matrix.yaml").write_text("systems: [fedavg]\ndatasets: [digits]\nseeds: [0]\n")
    heavy = {"torch", "flwr", "ray", "pandas"} | ({"numpy"} if arguments == ["--help"] else set())
    program = (
        "import sys\n"
        "from fedprune_app.cli import main\n"
        f"sys.argv = ['fedprune', *{arguments}]\n"
        "try:\n    main()\n"
        f"finally:\n    print('heavy:', *sorted({heavy} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "heavy:", done.stderr


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["--num-server-rounds", "3"],
            "there is no option --num-server-rounds; settings are given as KEY=VALUE: num-server-rounds=...",
        ),
        (["--rounds", "3"], "there is no option --rounds; settings are given as KEY=VALUE: num-server-rounds=..."),
        full(["--nonsense"], "there is no option --nonsense"),
        full(["--clients", "-3"], "--clients is -3"),
    ],
)
def test_an_option_that_is_a_setting_is_answered_with_the_setting(arguments, answer, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fedprune_app.cli", "run", *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr.startswith(f"error: {answer}")) == (2, True)


def test_report_watch_follows_runs_until_none_is_going_on(fedprune, federate, tmp_path, monkeypatch):
    folder = federate(system="standalone", num_server_rounds=1).folder
    looks, pages = iter([True, False, True, False, False, False]), []
    page = tmp_path / "page.html"
    monkeypatch.setattr("fedprune_app.results.report.is_any_running", lambda folders: next(looks))
    monkeypatch.setattr(cli.results.time, "sleep", lambda seconds: pages.append(page.read_text()))
    code, said = fedprune("report", folder, "-o", page, "--watch")
    assert code == 0, said
    assert len(pages) == 6
    assert all('<meta http-equiv="refresh" content="5">' in each for each in pages)
    assert 'http-equiv="refresh"' not in page.read_text()  # what is left does not load itself anew
    assert next(looks, None) is None  # three quiet looks in a row end the watch


def test_a_run_that_goes_on_is_known_from_one_that_ended(federate, tmp_path):
    from fedprune_app.engine.store import exclusive
    from fedprune_app.results.report import is_any_running

    folder = federate(system="standalone", num_server_rounds=1).folder
    assert not is_any_running([folder, tmp_path / "none"])
    info = json.loads((folder / "run.json").read_text())
    write_info(folder, {**info, "status": "running"})
    with exclusive(folder):
        assert is_any_running([folder])
