"""Every private name of Flower is where ``flower_private`` says, or a sentence says what moved in this release."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import flwr
import pytest
from flwr.app import Message, RecordDict
from packaging.requirements import Requirement
from packaging.version import Version

from fedprune_app.engine import flower_private
from fedprune_app.engine.flower_private import PLACES

FLOWER = Path(flwr.__file__).parent
HERE = f"Flower {version('flwr')}"

REPLACED = ("load_control_authn_plugin",)
"""Names that are looked up in Flower's own modules, where :func:`replace` puts ours; nobody here imports them."""

MEMBERS = {
    "ControlAuthnPlugin": ("validate_tokens_in_metadata", "get_login_details", "get_auth_tokens", "refresh_tokens"),
    "HttpGrid": ("_runtime_client", "node", "run", "pull_messages"),
    "Run": ("create_empty", "primary_task_id", "federation_id", "override_config"),
    "TaskIdentity": ("task_id", "run_id", "node_id"),
}
"""Members of private classes that are used or replaced."""

ARGUMENTS = {
    "_run_simulation": (
        "num_supernodes exit_event server_app_attr client_app_attr server_app_context backend_config app_dir run is_app"
    ),
    "inflate_object_from_contents": "object_id object_contents",
    "make_pull_object_fn_protobuf": "pull_object_protobuf node run_id",
    "pull_objects": "object_ids pull_object_fn max_time max_tries_per_object initial_backoff backoff_cap",
}
"""Arguments that private functions are called with; the first ones may be positional."""


def defined_now(name: str) -> str:
    """Say which of Flower's modules define this name."""
    defines = re.compile(rf"^(?:class|def) {name}\b|^{name}\b.*=|^    \w+ as {name},?$", re.MULTILINE)
    found = [
        ".".join(("flwr", *path.relative_to(FLOWER).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted(FLOWER.rglob("*.py"))
        if defines.search(path.read_text())
    ]
    return f"{name} is defined in {', '.join(found)} now" if found else f"no module of Flower defines {name} now"


def what_moved(name: str) -> str:
    """One sentence on a name that is not at its place, or nothing."""
    module = PLACES[name]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"{HERE} cannot import {module}, where {name} was ({error}): {defined_now(name)}"
    return "" if hasattr(found, name) else f"{HERE} has no {name} in {module}: {defined_now(name)}"


def has_member(cls: type, member: str) -> bool:
    """Whether a class, its metaclass or what its methods give to ``self`` has the member."""
    if any(
        member in vars(each) or member in getattr(each, "__annotations__", {}) for each in (*cls.__mro__, type(cls))
    ):
        return True
    ours = [each for each in cls.__mro__ if each.__module__.startswith("flwr.")]
    return any(f"self.{member}" in inspect.getsource(each) for each in ours)


@pytest.mark.parametrize("name", PLACES)
def test_a_private_name_is_where_it_is_expected(name):
    moved = what_moved(name)
    assert not moved, moved
    if name not in REPLACED:
        getattr(flower_private, name)


@pytest.mark.parametrize(
    ("name", "member"), [(name, member) for name, members in MEMBERS.items() for member in members]
)
def test_a_private_class_has_the_members_that_are_used(name, member):
    assert has_member(getattr(flower_private, name), member), f"{HERE}: {PLACES[name]}.{name} has no {member}"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_private_function_takes_the_arguments_that_it_is_given(name):
    taken = list(inspect.signature(getattr(flower_private, name)).parameters)
    missing = [argument for argument in ARGUMENTS[name].split() if argument not in taken]
    assert not missing, f"{HERE}: {name} of {PLACES[name]} takes no {', '.join(missing)}, but {', '.join(taken)}"


def test_a_message_takes_the_ids_that_a_grid_gives_to_it(monkeypatch):
    monkeypatch.setattr(flower_private.TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(flower_private.TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(flower_private.TaskIdentity, "_task_id", 1)
    message = Message(RecordDict(), 2, "train")
    flower_private.set_message_id(message, "three")
    flower_private.set_answered_id(message, "four")
    said = (message.metadata.message_id, message.metadata.reply_to_message_id)
    assert said == ("three", "four"), f"{HERE}: the metadata of a message keep ids elsewhere"


def test_the_client_of_a_grid_holds_a_client_of_httpx():
    source = inspect.getsource(importlib.import_module("flwr.supercore.protobuf.client"))
    assert "self._client = httpx.Client(" in source, (
        f"{HERE}: the Runtime API's client keeps its httpx.Client elsewhere"
    )


def test_type_checkers_see_classes_at_the_places_where_they_are():
    tree = ast.parse(Path(flower_private.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.asname: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom) and node.module != "flwr.app"
        for alias in node.names
    }
    assert seen.items() <= PLACES.items()


def test_a_name_that_moved_is_one_line_with_the_releases_that_are_allowed(monkeypatch):
    monkeypatch.setitem(PLACES, "gone", "flwr.common.constant")
    with pytest.raises(
        ImportError, match=r"Flower \S+ has no gone in flwr.common.constant, allowed: Flower 1.39 to 1.42"
    ):
        getattr(flower_private, "gone")  # noqa: B009 - as an import statement asks
    with pytest.raises(AttributeError):
        getattr(flower_private, "never")  # noqa: B009
    assert what_moved("gone").endswith("no module of Flower defines gone now")
    monkeypatch.setitem(PLACES, "add_exit_handler", "flwr.common.constant")
    assert "add_exit_handler is defined in flwr.supercore.exit.exit_handler now" in what_moved("add_exit_handler")


def test_flower_has_few_private_names_that_are_used():
    assert len(PLACES) <= 31


def test_the_releases_of_errors_and_of_the_project_are_the_same():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = [Requirement(text) for text in project["dependencies"]]
    (flower,) = [each for each in ours if each.name == "flwr"]
    bounds = {each.operator: Version(each.version) for each in flower.specifier}
    last = Version(flower_private._LAST)
    assert bounds == {">=": Version(flower_private._FIRST), "<": Version(f"{last.major}.{last.minor + 1}")}


def test_no_name_is_imported_before_somebody_asks():
    program = (
        "import sys\n"
        "from fedprune_app.engine import flower_private\n"
        "assert flower_private.has_fleet_port() in (True, False)\n"
        "assert flower_private.if_imported('HttpGrid') is None\n"
        "print(*(name for name in sys.modules if name.partition('.')[0] in ('flwr', 'torch', 'ray')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("text", "has_port"), [("1.39.0", True), ("1.40.0", False), ("1.42.0", False), ("2.0.0", False)]
)
def test_nodes_have_a_port_of_their_own_up_to_1_39(monkeypatch, text, has_port):
    monkeypatch.setattr(flower_private, "version", lambda name: text)
    assert flower_private.has_fleet_port() is has_port
