"""The final table compares many runs: one row per system and setting, mean ± standard deviation over seeds."""

from collections.abc import Iterable, Sequence

from fedprune_app.results.columns import Column, columns
from fedprune_app.results.declarations import MEASURES
from fedprune_app.results.groups import NOT_MEASURED, Group, Statistic, value_text
from fedprune_app.results.texts import tested_on


def statistics_of(group: Group, shown_columns: Iterable[Column] = ()) -> dict[str, Statistic | None]:
    """Return a group's final numbers by the key of a column, of all columns or of the ``shown_columns``.

    A number that a run did not measure is None.
    """
    return {
        column.key: Statistic.of(column.value(run) for run in group.runs)
        for column in shown_columns or columns([group])
    }


def formatted(statistic: Statistic | None, column: Column) -> str:
    """Return a statistic as ``81.20 ± 0.35``, or ``81.20`` for one seed, or – (never 0) if it was not measured."""
    if statistic is None:
        return NOT_MEASURED
    mean = f"{statistic.mean * column.scale:.{column.decimals}f}"
    if statistic.std is None or column.decimals == 0:
        return mean
    return f"{mean} ± {statistic.std * column.scale:.{column.decimals}f}"


def final_rows(groups: Sequence[Group], shown_columns: Sequence[Column] = ()) -> tuple[list[str], list[list[str]]]:
    shown_columns = shown_columns or columns(groups)
    numbers = [statistics_of(group, shown_columns) for group in groups]
    measured_columns = [column for column in shown_columns if any(row[column.key] for row in numbers)]
    header = ["System", "Dataset", "Partition", "Seeds", *(column.title for column in measured_columns)]
    judged_by = {group.label: accuracy_words(group.runs[0].headline) for group in groups}
    several = len(set(judged_by.values()) - {""}) > 1

    def cell(group: Group, statistic: Statistic | None, column: Column) -> str:
        words = f" ({judged_by[group.label]})" if several and column.of_headline else ""
        return formatted(statistic, column) + (words + column.remark(group.runs) if statistic else "")

    rows = [
        [group.label, *data_cells(group), str(len(group.runs)), *(cell(group, row[c.key], c) for c in measured_columns)]
        for group, row in zip(groups, numbers, strict=True)
    ]
    return header, rows


OWN = "accuracy_personal_mean"


def compared_by(groups: Sequence[Group]) -> dict[str, str]:
    """Return by label the number that groups are compared by: what each is judged by, if that is the same for all.

    Otherwise it is the accuracy of the clients' own models, if all groups have it.
    """
    judged_by = {group.label: group.runs[0].headline for group in groups}
    have_own = all(run.last(OWN) is not None for group in groups for run in group.runs)
    return dict.fromkeys(judged_by, OWN) if have_own and len(set(judged_by.values())) > 1 else judged_by


def accuracy_words(name: str) -> str:
    """Return whose accuracy a column of rounds.jsonl has, in words; empty for another column."""
    column = MEASURES.columns.get(name)
    return column.view.text.lower() if column and column.view and name.startswith("accuracy") else ""


def data_cells(group: Group) -> tuple[str, str]:
    run = group.runs[0]
    text = next((text for row in reversed(run.rounds) if (text := tested_on(row))), "")
    dataset = value_text(run.config.get("dataset")) + (f", tested on {text}" if text else "")
    is_dealt = not run.headline.startswith("perplexity")  # texts have no labels, so no partition by them
    return dataset, value_text(run.config.get("partition")) if is_dealt else NOT_MEASURED
