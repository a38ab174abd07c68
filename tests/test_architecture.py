"""Who may import whom: downwards only. An import in the wrong direction is a design error, found here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hatch_build import below_fedprune

ROOT = Path(__file__).parents[1]
ROOF = [
    "registry",
    "preflight",
    "running",
    "run_folder",
    "server_app",
    "client_app",
    "cli",
    "deploy",
    "exporting",
    "launch",
]
ROOF += [
    "node_policy",
    "api",
    "tasks",
    "audit",
    "resuming",
    "shipped",
    "plugins",
    "sweeps",
    "predicting",
    "packing",
    "extend",
    "testing",
    "terminal",
]
ALLOWED = {  # room: rooms it may import
    "fedprune_app.core": set(),
    "fedprune_app.config": set(),
    "fedprune_app.files": set(),
    "fedprune_app.errors": set(),
    "fedprune_app.printable": set(),
    "fedprune_app.data": {"config", "core", "files"},
    "fedprune_app.models": {"core", "files"},
    "fedprune_app.privacy": {"core", "files"},
    "fedprune_app.learning": {"config", "core", "files", "models", "privacy"},  # no system, and not where Flower begins
    # config: which settings change no result; models: an exported file is loaded as a network
    "fedprune_app.results": {"core", "config", "files", "models"},
    "fedprune_app.engine": {"core", "files", "printable", "results"},
    "fedprune_app.federation": {"core", "config", "engine", "results"},
    # data, learning, models: the server of Fed-LTP trains tickets on public data
    "strategies": {"config", "core", "data", "engine", "federation", "files", "learning", "models", "results"},
    "clients": {"core", "config", "engine", "data", "files", "learning", "models", "privacy", "results"},
}
CORE_LIBRARIES = {"torch", "torchvision", "numpy", "constriction"}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "fedprune_app" and len(parts) > 1 else parts[0]


def files(room: str) -> list[Path]:
    path = ROOT / room.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_rooms_below_it(room):
    own = room_of(room + ".x") if room.startswith("fedprune_app") else room
    for path in files(room):
        ours = {m for m in imports(path) if m.split(".")[0] in {"fedprune_app", "strategies", "clients"} and "." in m}
        for module in ours:
            target = room_of(module)
            assert target == own or target in ALLOWED[room], f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize(
    "room", ["strategies", "fedprune_app.learning", "fedprune_app.engine", "fedprune_app.federation"]
)
def test_neither_the_server_nor_what_it_learns_with_imports_a_client(room):
    for path in files(room):
        found = {module for module in imports(path) if room_of(module) == "clients"}
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


FLOWERS_PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.client", "flwr.serverapp", "flwr.serverapp.strategy"}


def private_names_of_flower(path: Path) -> set[str]:
    """Modules of Flower that it does not document, whether they are imported or named in a string, and their names."""
    tree = ast.parse(path.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"flwr(\.\w+)+", node.value)
    }
    loggers = {"flwr.fedprune"}
    private = {name for name in modules if name.split(".")[0] == "flwr"} - FLOWERS_PUBLIC - loggers
    names = {f"{m}.{a.name}" for m, a in _imported_from(tree) if m in FLOWERS_PUBLIC and a.name.startswith("_")}
    return private | names


def _imported_from(tree: ast.Module) -> Iterator[tuple[str, ast.alias]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias) for alias in node.names)


def test_private_names_of_flower_pass_through_one_module():
    through = ROOT / "fedprune_app" / "engine" / "flower_private.py"
    for package in ("fedprune_app", "strategies", "clients"):
        for path in files(package):
            found = private_names_of_flower(path)
            assert not found or path == through, (
                f"{path.relative_to(ROOT)} names {sorted(found)}, which Flower may move with any release: "
                "import the name from fedprune_app.engine.flower_private"
            )
    assert private_names_of_flower(through)


@pytest.mark.parametrize("package", ["fedprune_app", "strategies", "clients"])
def test_the_product_imports_no_tool_of_its_developers(package):
    for path in files(package):
        found = {module for module in imports(path) if module.split(".")[0] in {"devtools", "benchmarks", "tests"}}
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_core_knows_no_framework_but_tensors():
    import sys

    for path in files("fedprune_app.core"):
        for module in imports(path):
            top = module.split(".")[0]
            known = top in sys.stdlib_module_names or top in CORE_LIBRARIES or top == "fedprune_app"
            assert known, f"{path.name} imports {module}"


def test_every_file_belongs_to_a_room():
    rooms = {path.name.removesuffix(".py") for path in (ROOT / "fedprune_app").iterdir()}
    rooms -= {"__init__", "__pycache__", "py.typed"}
    rooms_there_are = {
        "core",
        "config",
        "files",
        "errors",
        "printable",
        "data",
        "models",
        "privacy",
        "learning",
        "results",
        "engine",
    }
    assert rooms == {*rooms_there_are, "federation", *ROOF}


def test_nothing_is_unpickled():
    for package in ("fedprune_app", "strategies", "clients"):
        for path in files(package):
            text = path.read_text()
            assert "pickle" not in imports(path), path
            assert "torch.load(" not in text, path
            assert "allow_pickle=True" not in text, path


@pytest.mark.parametrize("package", ["fedprune_app", "strategies", "clients"])
def test_a_wheel_can_move_every_import_below_fedprune(package):
    """An installed wheel has ``strategies`` and ``clients`` inside of ``fedprune_app``."""
    for path in (ROOT / package).rglob("*.py"):
        below_fedprune(path.read_text())
