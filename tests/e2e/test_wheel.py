"""An installed wheel: its parts have names of their own, beside packages of somebody else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hatch_build import below_fedprune
from tests.docs.blocks import ROOT

RUN = ("system=dispfl", "num-server-rounds=1", "local-epochs=1", "dispfl.neighbours=2", "--clients", "3")


def built(folder: Path, **environment: str) -> Path:
    """The wheel of this checkout, as pip builds it in this environment."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the content of a wheel, and with somebody else's packages ``clients`` and ``strategies``."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(folder)
    place = folder / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place)
    (place / "clients.py").write_text("ADDRESSES = ['somebody@example.org']\n")
    (place / "strategies").mkdir()
    (place / "strategies" / "__init__.py").write_text("TO_WIN = 'patience'\n")
    return place


def python(site: Path, folder: Path, code: str) -> str:
    """What a program says that finds the wheel before the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.programs
def test_a_wheel_has_the_api_the_package_and_its_metadata_at_the_top(site):
    tops = {path.name for path in site.iterdir()} - {"clients.py", "strategies"}
    assert sorted(name.partition("-")[0] for name in tops) == ["fedprune", "fedprune", "fedprune_app"]
    assert (site / "fedprune_app" / "strategies" / "dispfl.py").exists()
    assert (site / "fedprune_app" / "configs" / "subfedavg.toml").exists()


@pytest.mark.programs
def test_a_wheel_has_the_api_by_its_short_name_and_the_gallery_by_the_names_of_its_methods(site, tmp_path):
    code = "import sys, fedprune; assert 'torch' not in sys.modules; print(fedprune.run.__module__, fedprune.__file__)"
    assert python(site, tmp_path, code).split() == ["fedprune_app.api", str(site / "fedprune" / "__init__.py")]
    code = (
        "import sys, fedprune_app.cli\n"
        "sys.argv = 'fedprune check --plugin fedprune_app.gallery.ssfl -c ssfl --clients 3'.split()\n"
        "fedprune_app.cli.main()\n"
    )
    assert "SSFL" in python(site, tmp_path, code)


@pytest.mark.programs
def test_an_index_is_told_the_licence_by_its_name_and_where_the_pictures_are(tmp_path):
    wheel = built(tmp_path, FEDPRUNE_SOURCE="https://example.org/fedprune/")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith("dist-info/METADATA"))
        metadata = file.read(name).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Project-URL: Source, https://example.org/fedprune" in metadata
    assert "(https://example.org/fedprune/docs/assets/masks.webp)" in metadata
    assert "](docs/" not in metadata


@pytest.mark.programs
def test_an_installed_wheel_runs_on_every_engine_beside_packages_of_the_same_names(site, federate, tmp_path):
    code = (
        "import sys, clients, strategies, fedprune_app.cli\n"
        "assert clients.ADDRESSES and strategies.TO_WIN and fedprune_app.__file__.startswith(sys.path[1])\n"
        f"sys.argv = ['fedprune', 'run', *{RUN!r}, '--engine', '%s', '--out', '%s']\n"
        "fedprune_app.cli.main()\n"
    )
    hashes = set()
    for engine in ("inprocess", "ray", "flower"):
        python(site, tmp_path, code % (engine, engine))
        hashes.add(json.loads((tmp_path / engine / "run.json").read_text())["final_sha256"])
    settings = {"num_server_rounds": 1, "local_epochs": 1, "dispfl.neighbours": 2}
    settings |= {"fraction_train": 0.5, "evaluate_every": 5}
    assert hashes == {federate(clients=3, system="dispfl", **settings).sha256}


@pytest.mark.programs
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_wheel_has_the_library_in_c_where_a_compiler_is(site, tmp_path):
    code = (
        "from fedprune_app.core import compiled, masked_tensors\n"
        "print(compiled.FOLDER.parents[2], masked_tensors.is_compiled())"
    )
    place, is_compiled = python(site, tmp_path, code).rsplit(maxsplit=1)
    assert (place, is_compiled) == (str(site), "True")
    (wheel,) = site.parent.glob("*.whl")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    without = built(tmp_path, CC=str(tmp_path / "no-compiler"))
    assert without.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(without) as file:
        assert not [name for name in file.namelist() if name.endswith(".so")]


@pytest.mark.programs
def test_a_plugin_is_the_same_file_for_a_wheel_and_a_checkout(site, tmp_path):
    page = (ROOT / "docs" / "extend.md").read_text()
    (tmp_path / "my_prox.py").write_text(page.partition("```python\n# my_prox.py\n")[2].partition("```")[0])
    code = "from fedprune_app.testing import check_system\ncheck_system('my-prox', plugins='my_prox.py')\nprint('kept')"
    assert python(site, tmp_path, code) == "kept\n"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from clients.base import X", "from fedprune_app.clients.base import X"),
        ("    from strategies import base", "    from fedprune_app.strategies import base"),
        (
            "import clients\nimport strategies\n",
            "from fedprune_app import clients\nfrom fedprune_app import strategies\n",
        ),
        ("from fedprune_app.federation.clients import X", "from fedprune_app.federation.clients import X"),
        (
            '"""Which clients come from where."""\nimport clientside',
            '"""Which clients come from where."""\nimport clientside',
        ),
    ],
)
def test_imports_are_moved_below_fedprune(source, found):
    assert below_fedprune(source) == found


@pytest.mark.parametrize("source", ["import clients.base", "import json, clients", "import clients as c"])
def test_an_import_that_cannot_be_moved_stops_the_build(source):
    with pytest.raises(ValueError, match="an import of clients has a form that a wheel cannot change"):
        below_fedprune(source)
