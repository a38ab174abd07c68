"""Tables in Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fedprune_app.files import replace_file
from fedprune_app.results.columns import columns, epsilon_remark
from fedprune_app.results.groups import Group, group_runs
from fedprune_app.results.perplexity_tables import perplexity_rows
from fedprune_app.results.reader import Run
from fedprune_app.results.tables import data_cells, final_rows, statistics_of


def markdown(groups: Sequence[Group]) -> str:
    return _markdown(*final_rows(groups), num_texts=3)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int) -> str:
    alignment = ["---"] * num_texts + ["---:"] * (len(header) - num_texts)
    lines = [list(map(_markdown_cell, header)), alignment, *([_markdown_cell(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(groups: Sequence[Group]) -> str:
    header, rows = final_rows(groups)
    lines = [f"\\begin{{tabular}}{{lll{'r' * (len(header) - 3)}}}", "\\toprule"]
    lines += [" & ".join(map(_latex_cell, header)) + " \\\\", "\\midrule"]
    lines += [" & ".join(map(_latex_cell, row)) + " \\\\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def comma_separated(groups: Sequence[Group]) -> str:
    """Return the final numbers for a program: accuracies as shares, bytes / 1e6, empty if not measured.

    ``epsilon_remark`` says of every ε of the row what its noise was, if it was not the operating system's.
    """
    shown_columns = columns(groups)
    keys = [f"{column.key}_{part}" for column in shown_columns for part in ("mean", "std")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["label", "system", "dataset", "partition", "status", "seeds", *keys, "epsilon_remark"])
    for group in groups:
        cells: list[object] = [_csv_text(cell) for cell in (group.label, group.system, *data_cells(group))]
        cells += [group.runs[0].status, len(group.runs)]
        for column, statistic in zip(shown_columns, statistics_of(group, shown_columns).values(), strict=True):
            scale = 1.0 if column.scale == 100 else column.scale  # accuracies stay shares
            parts = (statistic.mean, statistic.std) if statistic else (None, None)
            cells += ["" if value is None else value * scale for value in parts]
        cells.append(epsilon_remark([group]).strip(" ()"))
        writer.writerow(cells)
    return text.getvalue()


def write_tables(runs: Sequence[Run], out_dir: Path) -> list[Path]:
    """Write the final numbers to ``table.md``, ``table.csv`` and ``table.tex``, and return the paths of all files.

    Where perplexities were measured, ``perplexity.md`` has those of every text.
    """
    groups = group_runs(runs)
    out_dir = Path(out_dir)
    texts = {"table.md": markdown(groups), "table.csv": comma_separated(groups), "table.tex": latex(groups)}
    header, rows = perplexity_rows(groups)
    if rows:
        texts["perplexity.md"] = _markdown(header, rows, num_texts=1)
    for name, text in texts.items():
        replace_file(out_dir / name, text.encode("utf-8", errors="replace"))
    return [out_dir / name for name in texts]


def _markdown_cell(text: str) -> str:
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}",
    "<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}",
    "–": "--", "±": "$\\pm$", "ε": "$\\varepsilon$", "δ": "$\\delta$",
    "·": "$\\cdot$", "×": "$\\times$", "\n": " ",
}  # fmt: skip


def _latex_cell(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _csv_text(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would run as a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
