"""Files are written in one place: whole or not at all, through nobody's link, and nothing of killed writers stays."""

from __future__ import annotations

import ast
import itertools
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from clients.base import remember_scores
from devtools.faults.disk import Died, Disk
from fedprune_app import files
from fedprune_app.core.payload import Payload
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.store import State, VersionedStore
from fedprune_app.files import (
    SharedFolderError,
    append_lines,
    appending,
    kept_secret,
    replace_file,
    replacing,
    replacing_folder,
    scratch_folder,
)
from fedprune_app.launching.credentials import make_certificates, make_node_key
from fedprune_app.privacy.ledger import Data, Ledger

ROOT = Path(__file__).parents[1]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user, too")


@pytest.fixture
def place():
    """A folder that other users reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o755)
        made = Path(outer) / "place"
        made.mkdir()
        yield made


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- other users ------------------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_private_key_goes_through_no_link_of_another_user(place, mode):
    place.chmod(mode)
    (place / "theirs").mkdir()
    os.chown(place / "theirs", NOBODY, NOBODY)
    for name in ("node.key", f".node.key.{os.getpid()}.tmp", ".node.key.tmp"):
        command = ["ln", "-s", str(place / "theirs" / "stolen"), str(place / name)]
        subprocess.run(command, check=True, user=NOBODY, group=NOBODY)
    if mode == 0o777:
        with pytest.raises(
            SharedFolderError, match=r"node\.key' is a secret that other users could replace there, allowed"
        ):
            make_node_key(place / "node.key")
    else:
        make_node_key(place / "node.key")
        assert (place / "node.key").stat().st_uid == 0
    assert not left_in(place / "theirs")


@needs_root
def test_a_secret_is_not_written_to_the_folder_of_another_user(place):
    os.chown(place, NOBODY, NOBODY)
    with pytest.raises(SharedFolderError, match=r"superlink\.key' is a secret that other users could replace there"):
        make_certificates(place, ["localhost"])
    assert left_in(place) == set()
    replace_file(place / "notes", b"no secret")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o770, True), (0o707, True), (0o1777, False), (0o755, False)])
def test_a_secret_is_refused_where_others_may_write(place, mode, is_refused):
    place.chmod(mode)
    if is_refused:
        with pytest.raises(
            SharedFolderError, match="allowed: a folder that is yours and that nobody else may write to"
        ):
            replace_file(place / "key", b"secret", mode=0o600)
    else:
        replace_file(place / "key", b"secret", mode=0o600)
    assert (place / "key").exists() != is_refused


def test_a_folder_that_is_made_for_a_secret_is_not_a_shared_one(place):
    before = os.umask(0o002)  # what many systems give their users
    try:
        make_node_key(place / "new" / "node.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((place / "new").stat().st_mode) == 0o755
    assert stat.S_IMODE((place / "new" / "node.key").stat().st_mode) == 0o600


def test_what_a_node_keeps_of_its_data_is_for_its_owner_alone(place):
    """States, ledgers, scores and layers, and each folder that is made for them, whatever the umask admits."""
    before = os.umask(0o022)
    try:
        VersionedStore(place / "states" / "run" / "00000").save(1, State({"hidden": torch.ones(3)}))
        LayerFiles(place / "layers").save(0, 1, Payload({"weight": torch.ones(3)}))
        Ledger(place / "ledgers" / "all" / "own.jsonl", data=Data.of([b"a" * 32], "own", joins=True))
        remember_scores(place / "scores" / "best.json", "digest", {"accuracy": 0.5})
        kept_secret(place / "secrets" / "split.secret")
        replace_file(place / "public" / "run.json", b"{}")
    finally:
        os.umask(before)
    modes = {path.relative_to(place).parts: stat.S_IMODE(path.stat().st_mode) for path in place.rglob("*")}
    assert modes.pop(("public",)) == 0o755
    assert modes.pop(("public", "run.json")) == 0o644
    private = {names: mode for names, mode in modes.items() if not names[-1].endswith(".lock")}  # locks are empty
    assert {mode for names, mode in private.items() if place.joinpath(*names).is_file()} == {0o600}
    assert {mode for names, mode in private.items() if place.joinpath(*names).is_dir()} == {0o700}
    assert len({names[0] for names in private}) == 5


def test_a_temporary_name_cannot_be_foreseen_and_is_never_followed(place, monkeypatch):
    seen = []
    for _ in range(3):
        with replacing(place / "file", 0o600) as file:
            (name,) = left_in(place) - {"file"}
            seen.append(name)
            assert stat.S_IMODE((place / name).stat().st_mode) == 0o600, "from the start"
            file.write(b"content")
    assert len(set(seen)) == 3
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "0" * 2 * size)  # as if it were
    (place / f".fedprune-{'0' * 16}.tmp").symlink_to(place / "stolen")
    with pytest.raises(FileExistsError, match=r"/place/file'$"):
        replace_file(place / "file", b"more")
    assert not (place / "stolen").exists()


def test_a_link_in_a_files_place_is_replaced_and_none_is_appended_to(place):
    (place / "elsewhere").write_bytes(b"as it was")
    (place / "file").symlink_to(place / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        append_lines(place / "file", b"more")
    replace_file(place / "file", b"new")
    assert not (place / "file").is_symlink()
    assert (place / "elsewhere").read_bytes() == b"as it was"


# --- whole or not at all ----------------------------------------------------------------------------------------------


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(place):
    replace_file(place / "file", b"old")
    with suppress(KeyboardInterrupt), replacing(place / "file") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert left_in(place) == {"file"}
    assert (place / "file").read_bytes() == b"old"


def test_an_interrupted_folder_leaves_the_old_one_and_nothing_else(place):
    for content in ("first", "second"):
        with replacing_folder(place / "model") as new:
            (new / content).write_text(content)
    with suppress(KeyboardInterrupt), replacing_folder(place / "model") as new:
        (new / "third").write_text("third")
        raise KeyboardInterrupt
    assert left_in(place) == {"model"}
    assert left_in(place / "model") == {"second"}


def model_of(content: str, path: Path) -> None:
    with replacing_folder(path) as new:
        (new / "weights").write_text(content)


def killed_at_each_change(place: Path) -> Iterator[Path]:
    """Folders where a writer that replaces the first model by the second was killed, and another wrote a file since."""
    for number in itertools.count():
        for after in (False, True):
            root = place / f"{number}-{after}"
            model_of("first", root / "model")
            disk = Disk(root, stops_at=number, after=after)
            with suppress(Died), disk.watched():
                model_of("second", root / "model")
            replace_file(root / "other", b"")  # removes what the killed writer left
            yield root
        if disk.count <= number:
            return


def test_a_folder_takes_the_place_of_a_link_and_of_a_file(place):
    (place / "elsewhere").mkdir()
    (place / "link").symlink_to("elsewhere")
    (place / "file").write_text("")
    for name in ("link", "file"):
        model_of(name, place / name)
        assert not (place / name).is_symlink()
        assert (place / name / "weights").read_text() == name
    assert left_in(place / "elsewhere") == set()


def test_a_kill_at_any_change_loses_no_folder(place):
    found = []
    for root in killed_at_each_change(place):
        models = sorted(left_in(root) - {"other"}, reverse=True)
        assert all(re.fullmatch(r"model|\.model\.[0-9a-f]{16}\.old", name) for name in models)
        found.append(((root / models[0] / "weights").read_text(), models[0] == "model"))
    assert set(found) == {("first", True), ("first", False), ("second", True)}


def test_an_error_names_the_file_and_no_temporary_one(place):
    (place / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as error:
        replace_file(place / "folder", b"content")
    assert str(error.value) == f"[Errno 21] Is a directory: '{place / 'folder'}'"
    with pytest.raises(FileNotFoundError, match="another file"), replacing(place / "file"):
        raise FileNotFoundError(2, "No such file or directory", "another file")


# --- killed writers ---------------------------------------------------------------------------------------------------

WRITERS = {
    "file": "with files.replacing(place / 'model') as new: new.write(bytes(10**6)); new.flush(); wait()",
    "folder": "with files.replacing_folder(place / 'model') as new: (new / 'part').write_bytes(bytes(10**6)); wait()",
    "scratch": "import tempfile; tempfile.tempdir = str(place)\nwith files.scratch_folder() as new: wait()",
}


def writer_at_work(place: Path, kind: str) -> subprocess.Popen[str]:
    """A process in the middle of writing, until its input ends."""
    code = "import sys; from pathlib import Path; from fedprune_app import files; place = Path(sys.argv[1])\n"
    code += "def wait(): print('at work', flush=True); sys.stdin.read()\n" + WRITERS[kind]
    command = [sys.executable, "-c", code, str(place)]
    process = subprocess.Popen(command, text=True, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "at work\n"
    return process


@pytest.mark.parametrize("kind", WRITERS)
def test_the_next_writer_removes_what_a_killed_one_left_but_nothing_of_a_living_one(place, kind):
    with writer_at_work(place, kind) as living, writer_at_work(place, kind) as killed:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(left_in(place)) == 2
        replace_file(place / "other", b"")
        assert len(left_in(place)) == 2, "the living one's, and the new file"
        living.communicate()
        assert living.returncode == 0
    assert left_in(place) == ({"other"} if kind == "scratch" else {"other", "model"})


def test_what_merely_looks_like_a_leftover_stays(place):
    names = {
        ".fedprune-notes.tmp",
        ".model.123.tmp",
        "fedprune-0123456789abcdef.tmp",
        ".fedprune-0123456789abcdef.tmp.old",
    }
    for name in names:
        (place / name).write_text("a user's own")
    (place / ".fedprune-0123456789abcdef.tmp").symlink_to(place / "nowhere")
    os.mkfifo(place / ".fedprune-0123456789abcdee.tmp")
    replace_file(place / "file", b"")
    assert left_in(place) == {*names, ".fedprune-0123456789abcdef.tmp", ".fedprune-0123456789abcdee.tmp", "file"}


@needs_root
def test_leftovers_of_another_user_stay(place):
    (place / ".fedprune-0123456789abcdef.tmp").write_text("")
    os.chown(place / ".fedprune-0123456789abcdef.tmp", NOBODY, NOBODY)
    replace_file(place / "file", b"")
    assert len(left_in(place)) == 2


def test_writers_in_one_folder_do_not_take_each_others_files_for_leftovers(place):
    errors = []

    def write(k: int) -> None:
        try:
            for i in range(60):
                replace_file(place / f"{k}", b"%d" % i, durable=False)
                with replacing_folder(place / f"folder-{k}") as new:
                    (new / "file").write_text(str(i))
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert left_in(place) == {name for k in range(4) for name in (f"{k}", f"folder-{k}")}


def test_a_scratch_folder_is_its_owners_alone_and_goes(place, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(place))
    with scratch_folder() as folder:
        (folder / "inner").mkdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert left_in(place) == set()


# --- the one place ----------------------------------------------------------------------------------------------------

ELSEWHERE = {  # what writes by itself, and why it may
    "fedprune_app/files.py": "the one place",
    "fedprune_app/launching/simulation.py": "into a scratch folder",
    "fedprune_app/launching/processes.py": "a new temporary file of Python's own",
    "fedprune_app/models/saving.py": "into a folder of replacing_folder",
    "fedprune_app/models/embedded.py": "into a folder of replacing_folder",
    "fedprune_app/models/cached.py": "into a folder of replacing_folder",
    "fedprune_app/models/gguf.py": "into a folder of replacing_folder",
    "fedprune_app/models/sources.py": "into a folder of replacing_folder",
    "fedprune_app/privacy/ledger.py": "adds to a ledger in place, under a lock: a rename could lose a charge",
    "fedprune_app/data/folders.py": "into the temporary file of replacing",
    "fedprune_app/exports/formats.py": "into memory",
    "fedprune_app/exports/language.py": "renames a whole file out of a scratch folder beside it, and makes it durable",
    "fedprune_app/testing/runs.py": "copies a run within a scratch folder",
}
WRITING = {
    "write_text",
    "write_bytes",
    "touch",
    "copyfile",
    "copy",
    "copy2",
    "copytree",
    "mkstemp",
    "NamedTemporaryFile",
}
WRITING |= {"TemporaryDirectory", "mkdtemp", "rename", "renames", "save_file", "save_pretrained", "symlink_to", "savez"}
OF_MODULES = {("os", "replace"), ("np", "save"), ("torch", "save"), ("export", "save"), ("shutil", "move")}


def writes(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = function.value if isinstance(function, ast.Attribute) else None
        owner_name = getattr(owner, "attr", getattr(owner, "id", ""))
        if name == "copy" and owner_name != "shutil":
            continue
        modes = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        opens = name == "open" and any(isinstance(m, str) and len(m) < 4 and set(m) & set("wax+") for m in modes)
        if name in WRITING or (owner_name, name) in OF_MODULES or opens:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    return found


def test_who_waits_for_another_process_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "_QUIETLY_SECONDS", 0.01)
    holds, ends = threading.Event(), threading.Event()

    def hold():
        with files.locked(tmp_path / "a.lock", "holds it"):
            holds.set()
            ends.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    holds.wait(60)
    monkeypatch.setattr(files, "log_waiting", lambda what: (caplog.records.append(what), ends.set()))
    with files.locked(tmp_path / "a.lock", "trains a model"):
        assert caplog.records == ["trains a model"]
    holder.join()
    with files.locked(tmp_path / "a.lock", "nobody"):
        assert caplog.records == ["trains a model"]


def test_nothing_else_writes_files():
    found = {}
    for package in ("fedprune_app", "strategies", "clients"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if places := writes(path):
                found[str(path.relative_to(ROOT))] = places
    assert not {name: places for name, places in found.items() if name not in ELSEWHERE}
    assert set(found) == set(ELSEWHERE), "no reason stands for what is gone"


def test_a_log_is_opened_without_following_a_link(place):
    (place / "log.txt").symlink_to(place / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        appending(place / "log.txt")
