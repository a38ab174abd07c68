"""Who may import whom: downwards only. An import in the wrong direction is a design error, found here."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from hatch_build import below_fedprune

ROOT = Path(__file__).parents[1]
ROOF = [  # from the top: a room imports those of lower floors alone, and all that stand below the roof
    {"cli"},
    {"api", "testing"},
    {"sweeps"},
    {"running", "exports"},
    {"server_app", "client_app", "extend"},
    {"preflight"},
    {"resuming", "strategy_builders", "launching"},
    {"plugins"},
    {"registry", "terminal"},
]
ALLOWED = {  # room: rooms it may import
    "fedprune_app.core": set(),
    "fedprune_app.config": set(),
    "fedprune_app.files": set(),
    "fedprune_app.errors": set(),
    "fedprune_app.engine.printable": set(),
    "fedprune_app.data": {"config", "core", "files"},
    "fedprune_app.models": {"core", "files"},
    "fedprune_app.privacy": {"core", "files"},
    # no system, and not where Flower begins; data, results: a language model is measured on a run's test texts
    "fedprune_app.learning": {"config", "core", "data", "files", "models", "privacy", "results"},
    # config: which settings change no result; models: an exported file is loaded as a network
    "fedprune_app.results": {"core", "config", "files", "models"},
    "fedprune_app.engine": {"config", "core", "files", "results"},
    "fedprune_app.federation": {"core", "config", "engine", "results"},
    # data, learning, models: the server of Fed-LTP trains tickets on public data
    "strategies": {"config", "core", "data", "engine", "federation", "files", "learning", "models", "results"},
    "clients": {"core", "config", "engine", "data", "files", "learning", "models", "privacy", "results"},
}
UPWARD = {  # for type checkers alone: the loop of rounds names the hooks that it calls
    ("fedprune_app/federation/loop.py", "strategies"),
    ("fedprune_app/federation/evaluation.py", "strategies"),
}
CORE_LIBRARIES = {"torch", "torchvision", "numpy", "constriction", "cryptography"}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "fedprune_app" and len(parts) > 1 else parts[0]


def files(room: str) -> list[Path]:
    path = ROOT / room.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(path: Path) -> set[str]:
    """All that a file imports, also in functions and for type checkers alone."""
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
            target, name = room_of(module), str(path.relative_to(ROOT))
            assert target == own or target in ALLOWED[room] or (name, target) in UPWARD, f"{name} imports {module}"


def floors_above(order: list[set[str]], name: str) -> set[str]:
    """The names on the floor of ``name``, but for itself, and on those above it."""
    (floor,) = [number for number, names in enumerate(order) if name in names]
    return set().union(*order[: floor + 1]) - {name}


@pytest.mark.parametrize("room", sorted(set().union(*ROOF)))
def test_a_room_of_the_roof_imports_only_lower_floors(room):
    for path in files(f"fedprune_app.{room}"):
        wrong = floors_above(ROOF, room) & {room_of(m) for m in imports(path) if m.startswith("fedprune_app.")}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_files_of_all_rooms_have_an_order():
    """A file imports those below it alone; what imports itself by way of others is named by ``CycleError``."""
    paths = {dotted(path): path for package in ("fedprune_app", "strategies", "clients") for path in files(package)}
    graph = {name: imported_modules(path, paths.keys()) for name, path in paths.items()}
    for name, room in UPWARD:
        graph[dotted(ROOT / name)] -= {module for module in paths if room_of(module) == room}
    TopologicalSorter(graph).prepare()


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, names: Collection[str]) -> set[str]:
    """The modules that a file imports; a package itself counts where more of it is imported than its modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module if module in names else node.module for module in modules}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(names) - {dotted(path)}


PARSING = {"fedprune_app.config.parse_config", "fedprune_app.config.check_resumable"}
PARSING |= {"fedprune_app.preflight.combinations.check_system", "fedprune_app.config.parsing"}
PARSE = {
    "fedprune_app/resuming.py": "the server knows the run that goes on",
}


def test_settings_become_a_run_on_one_way_alone():
    """Whoever starts a run, or is a part of one, asks preflight for it."""
    for package in ("fedprune_app", "strategies", "clients"):
        for path in files(package):
            name = str(path.relative_to(ROOT))
            if not name.startswith(("fedprune_app/preflight/", "fedprune_app/config/")) and name not in PARSE:
                assert not imports(path) & PARSING, f"{name} imports {imports(path) & PARSING}"


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
        "data",
        "models",
        "privacy",
        "learning",
        "results",
        "engine",
    }
    assert rooms == {*rooms_there_are, "federation", *set().union(*ROOF)}


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


# --- how much there is ------------------------------------------------------------------------------------------------

BUDGET = 263_630
"""Tokens of the product. A commit that raises the number says why; what lets it sink lowers it."""

NODES_PER_STATEMENT = 12.75
"""Syntax nodes of a statement, on average: lines that are denser are read more slowly, and save nothing."""

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def product() -> list[Path]:
    return [file for room in ("fedprune_app", "strategies", "clients") for file in (ROOT / room).rglob("*.py")]


def num_tokens(path: Path) -> int:
    """Count the tokens of a file without comments, docstrings, imports and line ends."""
    text, left_out = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in left_out for token in found)


def test_the_product_has_no_more_tokens_than_its_budget():
    found = sum(map(num_tokens, product()))
    assert BUDGET - 2_500 < found <= BUDGET


def test_statements_are_not_denser_than_they_were():
    nodes = [node for file in product() for node in ast.walk(ast.parse(file.read_text()))]
    assert len(nodes) / sum(isinstance(node, ast.stmt) for node in nodes) <= NODES_PER_STATEMENT
