"""The site is built from the pages as they are, and every link in it leads somewhere without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import ROOT

pytestmark = pytest.mark.programs
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and the places in it that a link can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.places |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") != "canonical" and found.get("href"):
            self.loads.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages of the site by path, as `make site` builds them."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_every_link_leads_to_a_place_in_the_site(site):
    folder, pages = site
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target) or path.name == "404.html":
                continue
            to = (path.parent / target).resolve() if target else path
            to = to / "index.html" if to.is_dir() else to
            if not to.exists() or (anchor and to in pages and anchor not in pages[to].places):
                broken.append(f"{path.relative_to(folder)}: {link}")
    assert not broken
    assert len(pages) > 25


def test_no_page_loads_anything_from_elsewhere(site):
    _, pages = site
    assert not [load for page in pages.values() for load in page.loads if re.match(r"(?:https?:)?//", load)]


def test_the_reference_has_every_public_name_and_setting(site):
    import fedprune_app
    from fedprune_app.config import OPTIONS

    folder, _ = site
    python = (folder / "reference" / "python.html").read_text()
    settings = (folder / "reference" / "settings.html").read_text()
    assert [name for name in fedprune_app.__all__ if name not in python] == []
    assert [key for key in OPTIONS if f"<code>{key}</code>" not in settings] == []
    assert ":class:" not in python


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_every_notebook_runs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        assert not [output for output in cell.get("outputs", []) if output.output_type == "error"]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2
