"""What a plug-in may register."""

from __future__ import annotations

import pytest

from fedprune_app import plugins
from tests.plugins.conftest import write
from tests.refusing import refuses

pytestmark = pytest.mark.usefixtures("no_plugins")


HEAD = """from dataclasses import dataclass
from fedprune_app.extend import FedAvg, FedAvgClient, Table, option, register_model, register_system
"""


OWN = "register_system({name!r}, strategy=FedAvg, client=FedAvgClient, summary='x', {more})"


@pytest.mark.parametrize(
    ("options", "name", "more", "said"),
    [
        ("", "own", "uses=('nosuch',)", ("uses", "nosuch")),
        ("", "own", "uses='density'", ("uses", "d")),
        ("", "Bad Name!", "", ("system", "Bad Name!")),
        ("mu: float = option(0.1, 'A number.')", "own", "options=O", ("options",)),
        ("@mu: float = 0.1", "own", "options=O", ("mu", ...)),
        ("@mu: float = option('a', 'x')", "own", "options=O", ("mu", ...)),
        ("@mu: float = option(1, 'x')", "own", "options=O", ("mu", ...)),
        ("@mu: tuple = option((), 'x')", "own", "options=O", ("mu", ...)),
    ],
)
def test_a_wrong_registration_is_refused_where_the_plug_in_is_loaded(tmp_path, options, name, more, said):
    frozen = "@dataclass(frozen=True)\n" if options.startswith("@") else ""
    table = f"{frozen}class O(Table):\n    {options.removeprefix('@') or 'pass'}\n"
    code = write(tmp_path / "wrong.py", f"{HEAD}{table}{OWN.format(name=name, more=more)}")
    with refuses(*said):
        plugins.load({"plugins": code})


REGISTER = "from fedprune_app.extend import *\nclass S(FedAvg): pass\nclass C(FedAvgClient): pass\n"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("register_system('fedavg', strategy=S, client=C, summary='')", ("system", "fedavg")),
        ("register_system('a=b', strategy=S, client=C, summary='')", ("system", "a=b")),
        ("register_system('x', strategy=C, client=C, summary='')", ("strategy",)),
        ("register_system('x', strategy=S, client=S, summary='')", ("client",)),
        ("register_system('x', strategy=S, client=C, summary='', options=dict)", ("options", dict)),
        ("register_model('lenet5', print, '')", ("model", "lenet5")),
        ("S.headline = 'nonsense'\nregister_system('x', strategy=S, client=C, summary='')", ("headline", "nonsense")),
        ("C.validates = 'persnal'\nregister_system('x', strategy=S, client=C, summary='')", ("validates", "persnal")),
    ],
)
def test_what_a_plugin_may_not_register(tmp_path, call, said):
    with refuses(*said):
        plugins.load({"plugins": write(tmp_path / "bad.py", f"{REGISTER}{call}\n")})


def test_two_plugins_do_not_share_a_name(tmp_path):
    call = f"{REGISTER}register_system('x', strategy=S, client=C, summary='')\n"
    plugins.load({"plugins": write(tmp_path / "one.py", call)})
    with refuses("system", "x", where="two", which="one"):
        plugins.load({"plugins": write(tmp_path / "two.py", call)})
