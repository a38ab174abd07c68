"""The pages can be read in the repository as in the site: links lead to files and headings, and no made page is old."""

from __future__ import annotations

import posixpath
import re
import runpy
import subprocess

from tests.docs.blocks import ROOT

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)


def anchor_of(heading):
    """Return the anchor that a repository's reader gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def without_code(path):
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def broken_links(pages):
    """Return the links between files that lead nowhere, as `page: link`."""
    broken = []
    for page in pages:
        for link in _LINK.findall(without_code(page)):
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / posixpath.normpath(path) if path else page
            headings = (
                re.findall(r"^#+ (.*)$", without_code(target), re.M)
                if target.suffix == ".md" and target.exists()
                else []
            )
            if not target.exists() or (anchor and headings and anchor not in map(anchor_of, headings)):
                broken.append(f"{page.name}: {link}")
    return broken


def test_every_link_between_files_of_the_repository_leads_somewhere():
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pages = [ROOT / name for name in listed if (ROOT / name).exists()]
    assert len(pages) > 20
    assert broken_links(pages) == []


def test_all_pages_together_have_at_most_60_000_words():
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    words = {name: len((ROOT / name).read_text().split()) for name in listed if (ROOT / name).exists()}
    assert sum(words.values()) <= 60_000, sorted(words.items(), key=lambda page: -page[1])[:5]


def test_links_to_a_missing_file_and_to_a_missing_heading_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# A `name`, and more\n")
    (tmp_path / "page.md").write_text(
        "[a](there.md#a-name-and-more) [b](there.md#else) [c](gone.md) [d](https://x.org/gone.md)\n"
    )
    assert broken_links([tmp_path / "page.md"]) == ["page.md: there.md#else", "page.md: gone.md"]


def test_the_page_of_all_settings_says_what_the_declarations_say():
    made = runpy.run_path(str(ROOT / "docs" / "scripts" / "settings_page.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["settings_page"](), "write the page anew: make settings"
