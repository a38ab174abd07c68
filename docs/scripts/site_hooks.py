"""What the site holds beside docs/*.md: pages from elsewhere in the repository, notebooks, and the demo's report."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from fedprune_app.results.report import packed_plotly

ROOT = Path(__file__).parents[2]
WITHOUT_PLOTLY = '<script type="text/plain" id="plotly"></script>'
_ELSEWHERE = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "README.md": "index.md",
}
"""Files of the repository, and the pages that show them."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):<code>~?([\w.]+)</code>")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    made = {page: (ROOT / source).read_text() for source, page in _ELSEWHERE.items() if source != "README.md"}
    made |= {f"notebooks/{path.stem}.md": _as_markdown(path) for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to pages of the site; a link to a source file becomes the name of the file."""
    place = page.file.src_uri
    pages = {target: source for source, target in _ELSEWHERE.items()}
    # where the text stands in the repository, from which its links begin
    folder = posixpath.dirname(pages.get(place, "") if place in pages and place != "index.md" else f"docs/{place}")

    def link(found: re.Match[str]) -> str:
        bang, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found[0]
        inside = posixpath.normpath(posixpath.join(folder, path))
        to = _ELSEWHERE.get(inside) or (inside.removeprefix("docs/") if inside.startswith("docs/") else "")
        to = re.sub(r"\.ipynb$", ".md", to)  # notebooks are shown as pages
        if not to or (not bang and files.get_file_from_path(to) is None):
            name = text if "`" in text else f"`{text}`"
            return name if not inside.endswith(".py") or inside in text else f"{name} ({inside})"
        there = posixpath.relpath(to, posixpath.dirname(place) or ".")
        return f"{bang}[{text}]({there}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(link, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show names in docstrings without the marks that Sphinx knows."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)


def on_post_build(config: Any) -> None:
    """Put Plotly into the demo's report, which the repository holds without these 1.8 MB."""
    page = Path(config["site_dir"]) / "assets" / "demo.html"
    page.write_text(page.read_text().replace(WITHOUT_PLOTLY, WITHOUT_PLOTLY.replace("><", f">{packed_plotly()}<")))


def _as_markdown(path: Path) -> str:
    """Return a notebook as a page: texts, code, and printed outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain") or []
            if text:
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts)
