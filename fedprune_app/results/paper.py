"""What a paper takes from runs: a figure, the paragraph on how they were made, and references for BibTeX.

The figures are those of the report, drawn by Matplotlib in place of plotly.js, which needs a browser.
"""

import html
import io
import re
from collections.abc import Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from fedprune_app.config import OPTIONS, ConfigError
from fedprune_app.config.systems import SYSTEMS
from fedprune_app.files import replace_file
from fedprune_app.results.columns import last_footnote
from fedprune_app.results.differences import measure_of
from fedprune_app.results.figures import figures
from fedprune_app.results.figures.common import Trace, Variant
from fedprune_app.results.groups import Group, Groups, has_effect, value_text
from fedprune_app.results.ownership import check_new_file
from fedprune_app.results.report import COLOURS, Series, appearance, filled
from fedprune_app.results.tables import accuracy_words, latex_text, paper_rows, table_text

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_MARKERS = {"": "o", "diamond": "D", "circle-open": "$\\circ$"}
_DENSITIES = ("density", "subfedavg.target-rate", "dpsgd.density", "fedspa.share", "fjord.widths")
_INCHES = (4.2, 3.0)


def figure_names(groups: Groups) -> dict[str, list[Variant]]:
    """Return by name the views of the report's figures that are made of lines and points."""
    by_name = {figure.key: figure.variants for figure in figures(groups)}
    types = {name: {trace["type"] for view in views for trace in view.traces} for name, views in by_name.items()}
    return {name: views for name, views in by_name.items() if types[name] == {"scatter"}}


def check_figure_file(output: Path) -> None:
    if output.suffix not in (".pdf", ".svg", ".png"):
        raise ConfigError("--output", output, "a file that ends in .pdf, .svg or .png")


def drawn(groups: Groups, name: str, form: str, view: str = "") -> bytes:
    """Return a figure of the report as a file of this ``form``: pdf, svg or png.

    ``view`` is one of the figure's views, by default the first. Raises :class:`ConfigError` for an unknown figure or
    view, and where Matplotlib is not installed.
    """
    by_name = figure_names(groups)
    if name not in by_name:
        raise ConfigError("FIGURE", name, ", ".join(by_name))
    views = {variant.name: variant for variant in by_name[name]}
    view = view or next(iter(views))
    if view not in views:
        raise ConfigError("--view", view, ", ".join(views))
    try:
        matplotlib: Any = import_module("matplotlib")
        canvas = import_module("matplotlib.figure").Figure(_INCHES, layout="constrained")
    except ImportError:
        raise ConfigError("a figure needs the package matplotlib: install the extra fedprune[figures]") from None
    axes = canvas.add_subplot()
    _draw(axes, views[view], appearance(groups))
    file = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": 42}):  # fonts that journals take
        canvas.savefig(file, format=form, dpi=200)
    return file.getvalue()


def _draw(axes: Any, view: Variant, series: Sequence[Series]) -> None:
    lower: Trace = {}
    for trace in view.traces:
        each = series[trace["series"]]
        colour, x, y = COLOURS[each.colour], trace["x"], trace["y"]
        if trace.get("band"):  # the range of the seeds: a lower line, and then the upper one
            if lower:
                axes.fill_between(x, lower["y"], y, color=colour, alpha=0.14, linewidth=0)
            lower = {} if lower else trace
            continue
        is_line, name = "lines" in trace["mode"], trace.get("name")  # what joins points has no name
        axes.errorbar(
            x,
            y,
            yerr=(trace.get("error_y") or {}).get("array"),
            color=colour,
            linestyle=_DASHES[trace.get("line", {}).get("dash", each.dash)] if is_line else "",
            linewidth=1.6 if name else 0.8,
            marker=_MARKERS[trace.get("marker", {}).get("symbol", "")] if "markers" in trace["mode"] else None,
            markersize=3 if is_line else 5,
            label=name and html.unescape(name),
        )
    for axis, name in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        layout = view.layout.get(f"{name}axis", {})
        axis.set_label_text(html.unescape(layout.get("title", {}).get("text", view.name if name == "y" else "")))
        if layout.get("tickformat", "").endswith("%"):
            axis.set_major_formatter(import_module("matplotlib.ticker").PercentFormatter(1))
    if view.layout["xaxis"].get("type") == "log":
        axes.set_xscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(frameon=False, fontsize="small")


# --- words and references ---------------------------------------------------------------------------------------------


def references(systems: Sequence[str]) -> dict[str, str]:
    """Return the BibTeX entries of the papers of these systems, by key; a plug-in's system has none."""
    text = resources.files(__package__).joinpath("templates/papers.bib").read_text(encoding="utf-8")
    entries = {re.findall(r"@\w+{([^,]+),", entry)[0]: entry for entry in re.split(r"\n\n(?=@)", text.strip())}
    return {key: entry for key, entry in entries.items() if set(_systems_of(entry)) & set(systems)}


def _systems_of(entry: str) -> list[str]:
    return re.findall(r"[\w-]+", entry.partition("keywords = {")[2])


def protocol(groups: Groups) -> str:
    """Return the paragraph of a paper that says how these runs were made, as LaTeX that cites :func:`references`."""
    runs = [group.first for group in groups]
    entries = references([group.system for group in groups])

    def cited(group: Group) -> str:
        keys = ",".join(key for key, entry in entries.items() if group.system in _systems_of(entry))
        settings = [
            f"{key.rpartition('.')[2]} {value_text(group.first.config.get(key))}"
            for key in dict.fromkeys([*_pruned_by(group), *_chosen(group)])
        ]
        name = SYSTEMS[group.system].summary.partition(":")[0] if group.system in SYSTEMS else group.system
        cite = f"~\\cite{{{keys}}}" if keys else ""
        return latex_text(name) + cite + (latex_text(f" ({', '.join(settings)})") if settings else "")

    return filled(
        __package__,
        "templates/protocol.tex",
        each=lambda key: latex_text(" or ".join(dict.fromkeys(value_text(run.config.get(key)) for run in runs))),
        systems=dict.fromkeys(map(cited, groups)),
        clients={len(run.info.get("partition") or ()) for run in runs},
        models={latex_text(str((run.info.get("model") or {}).get("name", "–"))) for run in runs},
        is_trained=runs[0].headline.startswith("accuracy"),
        accuracy=accuracy_words(measure_of(groups)),
        epsilons=[
            latex_text(f"{group.label}: {epsilon.mean:.3g}{last_footnote(group.runs, 'epsilon_max')}")
            for group in groups
            if (epsilon := group.last("epsilon_max"))
        ],
        seeds=sorted({len(group.runs) for group in groups}),
        versions=sorted({str((run.info.get("versions") or {}).get("fedprune", "–")) for run in runs}),
    )


def _pruned_by(group: Group) -> list[str]:
    """Return the settings that say how far a system prunes: density, if a plug-in that is not loaded prunes."""
    kept = group.last("density_mean")
    found = [key for key in _DENSITIES if has_effect(key, group)]
    return found or ["density"] if kept and kept.mean < 1 else []


def _chosen(group: Group) -> list[str]:
    """Return the system's own options that are not the defaults, and all of a plug-in that is not loaded."""
    config = group.first.config
    known = [key for key in config if "." in key and key in OPTIONS and "system" in OPTIONS[key].needs]
    found = [key for key in known if has_effect(key, group) and config[key] != OPTIONS[key].default]
    return found + [key for key in config if key not in OPTIONS and key.startswith(f"{group.system}.")]


def write_paper(groups: Groups, out: Path, force: bool = False) -> list[Path]:
    """Write figure, table, paragraph and references to the folder ``out``, and return their paths.

    Raises :class:`ConfigError` for a file that exists, unless ``force`` says to replace it.
    """
    table = table_text(".tex", *paper_rows(groups, intervals=True, best_bold=True))
    bibliography = "\n\n".join(references([group.system for group in groups]).values())
    texts = {"table.tex": table, "protocol.tex": protocol(groups), "references.bib": f"{bibliography}\n"}
    files = {out / name: text.encode() for name, text in texts.items()}
    if "accuracy-by-bytes" in figure_names(groups):
        files[out / "figure.pdf"] = drawn(groups, "accuracy-by-bytes", "pdf")
    for path in files:
        check_new_file(path, force)
    for path, content in files.items():
        replace_file(path, content)
    return list(files)
