"""The report in a real browser, at the widths of a desk and of a phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedprune_app.results.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

# The page reports on itself to the frame around it: a browser window cannot be made as narrow as a phone.
PROBE = """<script>
addEventListener("error", (event) => { (window.problems ??= []).push(event.message); });
document.addEventListener("securitypolicyviolation", (event) => { (window.problems ??= []).push(event.blockedURI); });
addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll(".views button").forEach((button) => button.click());
  document.querySelector(".chip").click();
}, 1500));
addEventListener("load", () => setTimeout(() => {
  const hidden = document.getElementById("plot-loss").data.filter((trace) => trace.visible === false).length;
  const figures = [...document.querySelectorAll(".figure")];
  const shares = (figure, kind) => [...figure.querySelectorAll(`${kind} text`)].map((text) => text.textContent)
    .filter((text) => text.endsWith("%"));
  const twice = figures.some((figure) => [".xtick", ".ytick"].some((kind) => {
    const told = shares(figure, kind);
    return new Set(told).size < told.length;
  }));
  const overflows = figures.some((figure) => figure.scrollWidth > figure.clientWidth + 1);
  parent.postMessage([
    document.getElementById("plot-masks")._fullLayout.xaxis2.domain[0] > 0 ? "beside" : "below",
    document.getElementById("note-masks").textContent.includes("4,950 pairs"),
    innerWidth, document.documentElement.scrollWidth, document.querySelectorAll(".plot").length,
    document.querySelectorAll(".plot svg.main-svg:first-of-type").length, overflows, hidden, twice,
    (window.problems ?? []).join(" "),
  ].join("|"), "*");
}, 4000));
</script></head>"""
FRAME = """<!doctype html><body style="margin: 0">
<iframe src="page.html" style="border: 0; width: {width}px; height: 8000px"></iframe>
<script>addEventListener("message", (event) => {{ document.body.dataset.found = event.data; }});</script>
"""


def chromium(folder: Path, *arguments: str) -> str:
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    place = [f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars", "--virtual-time-budget=8000"]
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *quiet, *place, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=1000).stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_drawn_and_the_page_fits_the_screen(make_run, tmp_path, width, scheme):
    folders = [make_run(f"s{rate}", config={"subfedavg.target-rate": rate}) for rate in (30.0, 50.0)]
    folders += [make_run(f"d{seed}", "dispfl", seed, clients=100, peers=True) for seed in (0, 1)]
    folders += [make_run("p", "fedavg", noise=1.0, config={"dp.enabled": True, "dp.epsilon-budget": 5.0})]
    folders += [make_run("f", "fedltp", rounds=3, status="failed", error="a_very_long_word" * 20)]
    text = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</head>", PROBE, 1), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    address = (tmp_path / "frame.html").as_uri()
    look = [f"--window-size={width + 20},8000", *(["--force-dark-mode"] if scheme == "dark" else [])]

    found = chromium(tmp_path, *look, "--dump-dom", address).split('data-found="')[1].split('"')[0]
    panels, note, inner, page_width, plots, drawn, overflows, hidden, twice, problems = found.split("|")
    assert int(inner) == width
    assert int(page_width) <= width
    assert int(drawn) == int(plots) == text.count('<article class="figure') == 15
    assert (panels, note) == ("beside" if width == 1280 else "below", "true")
    assert twice == "false"  # where an axis spans little, each tick still says another share
    assert (overflows, hidden, problems) == ("false", "1", "")  # the legend's first chip hides its one curve

    picture = tmp_path / f"{width}-{scheme}.png"
    chromium(tmp_path, *look, f"--screenshot={picture}", address)
    assert picture.stat().st_size > 50_000  # an empty page compresses to a tenth of that


# Each text's colour is compared with what is painted behind it, by the formula of WCAG 2.1; texts of figures are left
# to the colours of the page, which they share.
CONTRAST = """<script>
addEventListener("load", () => setTimeout(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r / 255, g / 255, b / 255].map(linear);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = new Set();
  let count = 0;
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest("svg, script, noscript, .plot")) continue;
    const style = getComputedStyle(node);
    const [one, two] = [light(parse(style.color)), light(behind(node))].sort((a, b) => b - a);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    const ratio = (one + 0.05) / (two + 0.05);
    count += 1;
    if (ratio < (large ? 3 : 4.5)) low.add(`${node.tagName}.${node.className} ${ratio.toFixed(2)}`);
  }
  const dark = light(behind(document.body)) < 0.2 ? "dark" : "light";
  document.body.dataset.found = [dark, count > 50, [...low].slice(0, 5).join(", ")].join("|");
}, 1500));
</script></head>"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_aa_asks_for(make_run, tmp_path, scheme):
    folders = [make_run(name, name, seed=0) for name in ("fedavg", "subfedavg", "standalone")]
    folders += [make_run("f", "fedltp", rounds=3, status="failed", error="it broke")]
    text = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</head>", CONTRAST, 1), encoding="utf-8")
    look = ["--window-size=1280,4000", *(["--force-dark-mode"] if scheme == "dark" else [])]
    found = chromium(tmp_path, *look, "--dump-dom", (tmp_path / "page.html").as_uri())
    assert f'data-found="{scheme}|true|"' in found, found[found.index("data-found") :][:300]


FILTER = """<script>
addEventListener("load", () => setTimeout(() => {
  const input = document.getElementById("filter");
  input.value = "fedavg 0.003";
  input.dispatchEvent(new Event("input"));
  const rows = [...document.querySelectorAll("table tbody tr[data-row]")].filter((row) => !row.hidden);
  const chips = [...document.querySelectorAll("[data-series]")].filter((chip) => !chip.hidden);
  const legend = document.querySelector(".legend").clientHeight / innerHeight;
  document.body.dataset.found = [rows.length, chips.length, legend < 0.25].join("|");
}, 1500));
</script></head>"""


def test_many_runs_are_filtered_by_words(make_run, tmp_path):
    rates = (0.001, 0.003, 0.01, 0.03)
    folders = [
        make_run(f"{name}-{rate}", name, rounds=2, config={"learning-rate": rate})
        for name in ("fedavg", "subfedavg", "ditto", "standalone")
        for rate in rates
    ]
    text = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</head>", FILTER, 1), encoding="utf-8")
    found = chromium(tmp_path, "--window-size=1280,900", "--dump-dom", (tmp_path / "page.html").as_uri())
    # a row each in the tables of final numbers and of costs, for fedavg and for subfedavg, whose name holds the word
    assert 'data-found="4|2|true"' in found, found[found.index("data-found") :][:100]


PAPER = """<script>
addEventListener("load", () => setTimeout(() => {
  dispatchEvent(new Event("beforeprint"));
  const figures = [...document.querySelectorAll(".figure:not(.wide)")].map((figure) => figure.getBoundingClientRect());
  const rows = new Map();
  for (const { top } of figures) rows.set(Math.round(top), (rows.get(Math.round(top)) ?? 0) + 1);
  const page = document.querySelector("main").getBoundingClientRect();
  const tables = [...document.querySelectorAll("table")].map((table) => table.getBoundingClientRect());
  const cut = tables.some((table) => table.right > page.right + 1);
  document.body.dataset.found = [Math.max(...rows.values()), cut, page.width].join("|");
}, 3000));
</script></head>"""


def test_on_paper_two_figures_stand_in_a_row_and_no_table_is_cut(make_run, tmp_path):
    folders = [make_run(name, name) for name in ("fedavg", "subfedavg", "standalone", "fedprox")]
    folders.append(make_run("peers", "dispfl", peers=True))
    text = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</head>", PAPER, 1), encoding="utf-8")
    found = chromium(tmp_path, "--window-size=1280,900", "--dump-dom", (tmp_path / "page.html").as_uri())
    assert 'data-found="2|false|720"' in found, found[found.index("data-found") :][:100]
