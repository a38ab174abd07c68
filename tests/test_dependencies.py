"""What the code imports is declared in pyproject.toml: an extra's packages are imported where they are needed alone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fedprune_app.preflight.inputs import Placement
from tests.refusing import refuses

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"fedprune_app", "strategies", "clients"}
LOCKS = [ROOT / "docker" / name for name in ("requirements.lock", "requirements.cuda.lock")]


def named(requirements: list[str]) -> dict[str, Requirement]:
    return {Requirement(text).name.lower().replace("_", "-"): Requirement(text) for text in requirements}


CORE = named(PROJECT["dependencies"])
EXTRAS = named([text for name, texts in PROJECT["optional-dependencies"].items() if name != "dev" for text in texts])


@cache
def declared_by(distribution: str) -> set[str]:
    """What comes with an installed distribution, and the extras of it that are asked for."""
    extras = {"", *(EXTRAS | CORE)[distribution].extras}
    return {
        each.name.lower().replace("_", "-")
        for each in map(Requirement, requires(distribution) or [])
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)
    }


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(top-level module, whether it is imported inside a function or for type checkers alone)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], inside
        is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from imports(node, inside or is_lazy)


def third_party() -> set[tuple[str, bool]]:
    found = set()
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            found |= set(imports(ast.parse(path.read_text())))
    return {(module, lazy) for module, lazy in found if module not in sys.stdlib_module_names and module not in OURS}


@cache
def distributions_of_modules() -> Mapping[str, list[str]]:
    """This looks through the files of all installed packages."""
    return packages_distributions()


@pytest.mark.parametrize(("module", "lazy"), sorted(third_party()))
def test_what_is_imported_is_declared(module, lazy):
    distributions = distributions_of_modules().get(module)
    if not distributions:
        pytest.skip(f"{module} is not installed")
    names = {name.lower().replace("_", "-") for name in distributions}
    if lazy:  # of an extra, or what one of its packages cannot be without
        known = {name for name in {**CORE, **EXTRAS} if installed(name)}
        allowed = {*known, *(each for name in known for each in declared_by(name))}
    else:
        allowed = {*CORE}
    assert names & allowed, f"{module} comes from {sorted(names)}"


def installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


@pytest.mark.parametrize("name", ["click", "cryptography", "grpcio", "grpcio-health-checking", "httpx"])
def test_what_flower_brings_is_declared_with_flowers_own_range(name):
    """A narrower one could not be installed with it. A wider one is for other releases of Flower."""
    (flowers,) = [each for each in map(Requirement, requires("flwr") or []) if each.name == name]
    bounds = {each.operator: Version(each.version) for each in flowers.specifier}
    ours = {each.operator: Version(each.version) for each in CORE[name].specifier}
    assert ours[">="] <= bounds[">="], f"{name} of {flowers} is not allowed by {CORE[name]}"
    assert bounds["<"] <= ours["<"], f"{name} of {flowers} is not allowed by {CORE[name]}"
    if name != "cryptography":  # whose range changed with Flower 1.40
        assert ours == bounds


LEFT_OUT = ("ray", "sqlalchemy", "grpc_health", "fastapi", "plotly", "opacus", "transformers", "torch_pruning")
"""Packages of Ray's engine, of deployments, of reports, and of methods that a run does not use."""

WITHOUT_THEM = f"""
import sys
sys.modules |= dict.fromkeys({LEFT_OUT!r})  # importing one of them fails
from fedprune_app.cli import main
main()
"""


def run_without_them(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    settings = ["system=dispfl", "dataset=digits", "model=cnn-small", "num-server-rounds=1", "local-epochs=1"]
    command = [sys.executable, "-c", WITHOUT_THEM, "run", *settings, "--clients", "2", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.programs
def test_a_run_in_this_process_needs_neither_ray_nor_what_deployments_and_reports_need(tmp_path):
    done = run_without_them(tmp_path / "run", "--engine", "inprocess")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "completed"


def test_without_ray_the_engine_that_is_left_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for engine in ("ray", "flower"):
        with refuses("--engine", engine, condition="Ray"):
            Placement(engine)
    Placement("inprocess")
    Placement(nodes=[{"partition-id": 0}])


# --- the image's packages ---------------------------------------------------------------------------------------------

PIN = re.compile(r"^([a-z0-9.-]+)==(\S+)(.*)$", re.MULTILINE)


def locked(path: Path) -> dict[str, list[str]]:
    """The versions of each package; several where Python versions differ."""
    found: dict[str, list[str]] = {}
    for name, version_text, _ in PIN.findall(path.read_text()):
        found.setdefault(name, []).append(version_text)
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_package_of_the_image_is_pinned_by_version_and_hash_and_no_registry_is_named(path):
    text = path.read_text()
    assert "://" not in text
    blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == sum(map(len, locked(path).values()))
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_default_release_of_flower_is_the_same_in_the_makefile_and_the_image():
    (default,) = re.findall(r"^FLOWER \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f'FLOWER = "{default}"' in (ROOT / "docker" / "lock.py").read_text()
    (pinned,) = locked(LOCKS[0])["flwr"]
    assert Version(pinned) in Requirement(f"flwr=={default}").specifier
    assert Version(pinned) in CORE["flwr"].specifier


def test_the_image_gets_what_the_project_asks_for():
    """After a change of pyproject.toml: make lock."""
    pinned = {name: versions for path in LOCKS for name, versions in locked(path).items()}
    llm = named(PROJECT["optional-dependencies"]["llm"])
    build = named(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    for name, requirement in {**CORE, **llm, **build}.items():
        assert pinned.get(name), f"{name} is not locked"
        assert all(Version(each) in requirement.specifier for each in pinned[name]), name
