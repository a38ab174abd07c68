"""Tables that compare runs in Markdown, LaTeX and CSV: one row per system and setting, with means over seeds."""

import csv
import io
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fedprune_app.config import ConfigError
from fedprune_app.core.texts import one_line
from fedprune_app.files import replace_file
from fedprune_app.results.columns import Column, columns, epsilon_footnote, table_key
from fedprune_app.results.declarations import DECLARATIONS
from fedprune_app.results.differences import OWN, from_best, half_interval, measure_of, of_the_same_data
from fedprune_app.results.groups import NOT_MEASURED, Group, Groups, Statistic, group_runs, value_text
from fedprune_app.results.reader import Run
from fedprune_app.results.texts import own_models, tested_on, windows_of_text

# The titles of a table's first column, which say what stands beside a mean.
DEVIATIONS = "System (± SD over seeds)"
INTERVALS = "System (95 % interval over seeds)"


def statistics_of(group: Group, shown_columns: Iterable[Column] = ()) -> dict[str, Statistic | None]:
    """Return a group's final numbers by key, of all columns or of ``shown_columns``; None for one not measured."""
    return {column.key: group.over(column.value) for column in shown_columns or columns([group])}


def formatted(statistic: Statistic | None, column: Column, seeds: int = 0) -> str:
    """Return a statistic as ``81.20 ± 0.35``, or ``81.20`` for one seed, or – (never 0) if it was not measured.

    With a number of ``seeds`` it is ``81.20 (80.33 to 82.07)``, with Student's 95 % interval.
    """
    if statistic is None:
        return NOT_MEASURED
    mean, std, form = statistic.mean * column.scale, statistic.std, f".{column.decimals}f"
    if std is None or column.decimals == 0:
        return f"{mean:{form}}"
    if not seeds:
        return f"{mean:{form}} ± {std * column.scale:{form}}"
    half = half_interval(std * column.scale, seeds)
    return f"{mean:{form}} ({mean - half:{form}} to {mean + half:{form}})"


def final_rows(groups: Groups, shown_columns: Sequence[Column] = ()) -> tuple[list[str], list[list[str]]]:
    shown_columns = shown_columns or columns(groups)
    numbers = [statistics_of(group, shown_columns) for group in groups]
    measured_columns = [column for column in shown_columns if any(row[column.key] for row in numbers)]
    header = ["System", "Dataset", "Partition", "Seeds", *(column.title for column in measured_columns)]
    judged_by = {group.label: accuracy_words(group.first.headline) for group in groups}
    several = len(set(judged_by.values()) - {""}) > 1

    def cell(group: Group, statistic: Statistic | None, column: Column) -> str:
        words = f" ({judged_by[group.label]})" if several and column.of_headline else ""
        return formatted(statistic, column) + (words + column.footnote(group.runs) if statistic else "")

    rows = [
        [group.label, *data_cells(group), str(len(group.runs)), *(cell(group, row[c.key], c) for c in measured_columns)]
        for group, row in zip(groups, numbers, strict=True)
    ]
    return header, rows


def compared_by(groups: Groups) -> dict[str, str]:
    """Return by label the metric for comparing groups: each one's headline.

    If headlines differ, it is the accuracy of the clients' own models, if all groups have it.
    """
    judged_by = {group.label: group.first.headline for group in groups}
    have_own = all(run.last(OWN) is not None for group in groups for run in group.runs)
    return dict.fromkeys(judged_by, OWN) if have_own and measure_of(groups) == OWN else judged_by


def accuracy_words(name: str) -> str:
    """Return the title of a column of accuracies in rounds.jsonl, in lower case; empty for another column."""
    column = DECLARATIONS.columns.get(name)
    return column.view.text.lower() if column and column.view and name.startswith("accuracy") else ""


def data_cells(group: Group) -> tuple[str, str]:
    run = group.first
    text = next((text for row in reversed(run.rounds) if (text := tested_on(row))), "")
    dataset = value_text(run.config.get("dataset")) + (f", tested on {text}" if text else "")
    is_dealt = not run.headline.startswith("perplexity")  # texts have no labels to partition by
    return dataset, value_text(run.config.get("partition")) if is_dealt else NOT_MEASURED


# The models with perplexities in rounds.jsonl: before pruning, mean of the clients' own, global.
MODELS = ("dense", "personal_mean", "global")


def model_name(key: str, group: Group) -> str:
    if key != "personal_mean":
        return {"dense": "dense model", "global": "global model"}[key]
    rounds = [row["round"] for run in group.runs for row in run.rounds if row.get("perplexity_by_text")]
    return own_models(max(rounds, default=1))


def perplexity_tables(groups: Groups) -> dict[str, dict[str, list[Mapping[str, float]]]]:
    """Return the last perplexities of all runs, by text with its windows, then by group label."""
    tables: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for group in groups:
        run_tables = [run.last_table("perplexity_by_text") for run in group.runs]
        for text in (text for text in run_tables[0] if all(text in table for table in run_tables)):
            title = windows_of_text(text, run_tables[0][text])
            tables.setdefault(title, {})[group.label] = [table[text] for table in run_tables]
    return tables


def perplexity_rows(groups: Groups) -> tuple[list[str], list[list[str]]]:
    columns: list[tuple[str, dict[str, str]]] = []
    groups_by_label = {group.label: group for group in groups}
    for title, by_group in perplexity_tables(groups).items():
        by_model: dict[str, dict[str, str]] = {}
        for key, (label, entries) in itertools.product(MODELS, by_group.items()):
            statistic = Statistic.of(entry.get(key) for entry in entries)
            name = model_name(key, groups_by_label[label])
            cell = formatted(statistic, Column(key, name, lambda run: None, 1, 2))
            if key == "personal_mean" and statistic:
                cell += _fewer_footnote(entries)
            by_model.setdefault(name, {})[label] = cell
        for name, cells in by_model.items():
            if any(cell != NOT_MEASURED for cell in cells.values()):
                columns.append((f"{title}, {name}", cells))
    rows = [[g.label, *(cells.get(g.label, NOT_MEASURED) for _, cells in columns)] for g in groups] if columns else []
    return ["System", *(title for title, _ in columns)], rows


def _fewer_footnote(entries: Sequence[Mapping[str, float]]) -> str:
    counts = [(int(entry["personal_models"]), int(entry["asked"])) for entry in entries if entry.get("asked")]
    num_models, num_asked = min(counts, key=lambda pair: pair[0] - pair[1], default=(0, 0))
    return f" ({num_models} of {num_asked} clients)" if num_models < num_asked else ""


def comma_separated(groups: Groups) -> str:
    """Return the final numbers for programs: accuracies as shares, bytes / 1e6, empty if not measured.

    ``epsilon_footnote`` has the source of the noise of the row's ε, if it was not the operating system.
    """
    shown_columns = columns(groups)
    keys = [f"{column.key}_{part}" for column in shown_columns for part in ("mean", "std")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "system", "dataset", "partition", "status", "seeds", *keys, "epsilon_footnote"])
    for group in groups:
        cells: list[object] = [_csv_text(cell) for cell in (group.label, group.system, *data_cells(group))]
        cells += [group.first.status, len(group.runs)]
        for column, statistic in zip(shown_columns, statistics_of(group, shown_columns).values(), strict=True):
            scale = 1.0 if column.scale == 100 else column.scale  # accuracies stay shares
            parts = (statistic.mean, statistic.std) if statistic else (None, None)
            cells += ["" if value is None else value * scale for value in parts]
        cells.append(epsilon_footnote([group]).strip(" ()"))
        writer.writerow(cells)
    return text.getvalue()


def write_tables(runs: Sequence[Run], out_dir: Path) -> list[Path]:
    """Write the final numbers to ``table.md``, ``table.csv`` and ``table.tex``, and return the paths of all files.

    If perplexities were measured, ``perplexity.md`` has those of every text.
    """
    groups = group_runs(runs)
    out_dir = Path(out_dir)
    header, rows = final_rows(groups)
    header[0] = DEVIATIONS
    texts = {
        "table.md": table_text(".md", header, rows, num_texts=3),
        "table.csv": comma_separated(groups),
        "table.tex": table_text(".tex", header, rows, num_texts=3),
    }
    header, rows = perplexity_rows(groups)
    if rows:
        texts["perplexity.md"] = table_text(".md", [DEVIATIONS, *header[1:]], rows)
    for name, text in texts.items():
        replace_file(out_dir / name, text.encode("utf-8", errors="replace"))
    return [out_dir / name for name in texts]


# --- a table for a paper ----------------------------------------------------------------------------------------------


def paper_rows(
    groups: Groups, keys: Sequence[str] = (), *, intervals: bool, best_bold: bool
) -> tuple[list[str], list[list[str]], set[tuple[str, str]]]:
    """Return the titles and rows of a table of a few columns, and by row and column the titles of cells in bold.

    Without ``keys`` the columns are the measure that compares the groups, upload, operations and density.
    With ``intervals`` Student's 95 % interval over seeds follows a mean, in place of the standard deviation.
    ``best_bold`` marks the most accurate group, and all without a clear difference from it, if others are clearly
    behind. Raises :class:`ConfigError` for an unknown column.
    """
    known_columns = {column.key: column for column in columns(groups)}
    keys = keys or (table_key(measure_of(groups)), "megabytes_up", "gigaflops", "density")
    for key in keys:
        if key not in known_columns:
            raise ConfigError("--columns", key, ", ".join(known_columns))
    shown_columns = [known_columns[key] for key in dict.fromkeys(keys)]
    rows = []
    for group in groups:
        cells, seeds = [], len(group.runs) if intervals else 0
        for column, statistic in zip(shown_columns, statistics_of(group, shown_columns).values(), strict=True):
            cells.append(formatted(statistic, column, seeds) + (column.footnote(group.runs) if statistic else ""))
        rows.append([group.label, *cells])
    header = [INTERVALS if intervals else DEVIATIONS, *(column.title for column in shown_columns)]
    best = ((label, known_columns[table_key(measure)].title) for label, measure in _best(groups) if best_bold)
    return header, rows, {(label, title) for label, accuracy in best for title in (header[0], accuracy)}


def _best(groups: Groups) -> Iterator[tuple[str, str]]:
    """Yield the label and the measure of each group that is among the best of its family."""
    for family in of_the_same_data([group for group in groups if not group.first.flaw]):
        best, distances = from_best(family)
        level = [group.label for group, distance in distances if distance.doubt]
        if len(level) < len(distances):
            yield from ((label, measure_of(family)) for label in (best, *level))


def table_text(
    suffix: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    bold: Collection[tuple[str, str]] = (),
    *,
    num_texts: int = 1,
) -> str:
    """Return the table as LaTeX, CSV or Markdown, as the suffix of a file says; CSV has no bold.

    The first ``num_texts`` columns are of text. ``bold`` has cells, each by the first text of its row and its title.
    """
    if suffix == ".csv":
        text = io.StringIO()
        guarded = [[*map(_csv_text, row[:num_texts]), *row[num_texts:]] for row in rows]
        csv.writer(text, lineterminator="\n").writerows([header, *guarded])
        return text.getvalue()
    escaped, form = (latex_text, "\\textbf{{{}}}") if suffix == ".tex" else (_markdown_cell, "**{}**")
    titles = [escaped(cell) for cell in header]
    cells = [
        [
            (form if (row[0], title) in bold else "{}").format(escaped(cell))
            for title, cell in zip(header, row, strict=True)
        ]
        for row in rows
    ]
    num_numbers = len(header) - num_texts
    if suffix == ".md":
        rule = ["---"] * num_texts + ["---:"] * num_numbers
        return "".join(f"| {' | '.join(line)} |\n" for line in [titles, rule, *cells])
    lines = [f"\\begin{{tabular}}{{{'l' * num_texts}{'r' * num_numbers}}}", "\\toprule"]
    lines += [" & ".join(titles) + " \\\\", "\\midrule", *(" & ".join(row) + " \\\\" for row in cells)]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _markdown_cell(text: str) -> str:
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return one_line(text)


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
    "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}",
    "–": "--", "±": "$\\pm$", "ε": "$\\varepsilon$", "δ": "$\\delta$",
    "·": "$\\cdot$", "×": "$\\times$", "\n": " ",
}  # fmt: skip


def latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _csv_text(text: str) -> str:
    """Return the text, after an apostrophe if a spreadsheet would run it as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
