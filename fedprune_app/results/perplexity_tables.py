"""Perplexities by test text, and accuracies by task, of language models."""

import itertools
from collections.abc import Mapping, Sequence

from fedprune_app.results.columns import Column
from fedprune_app.results.groups import NOT_MEASURED, Group, Statistic
from fedprune_app.results.tables import formatted
from fedprune_app.results.texts import own_models, windows_of_text

MODELS = ("dense", "personal_mean", "global")
"""Whose perplexity of a test text rounds.jsonl has: of the model before pruning, mean of the clients' own, global."""


def model_name(key: str, group: Group) -> str:
    if key != "personal_mean":
        return {"dense": "dense model", "global": "global model"}[key]
    rounds = [row["round"] for run in group.runs for row in run.rounds if row.get("perplexity_by_text")]
    return own_models(max(rounds, default=1))


def perplexity_tables(groups: Sequence[Group]) -> dict[str, dict[str, list[Mapping[str, float]]]]:
    """Return the last perplexities of all runs, by text with its windows, and then by a group's label."""
    tables: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for group in groups:
        run_tables = [run.last_table("perplexity_by_text") for run in group.runs]
        for text in (text for text in run_tables[0] if all(text in table for table in run_tables)):
            title = windows_of_text(text, run_tables[0][text])
            tables.setdefault(title, {})[group.label] = [table[text] for table in run_tables]
    return tables


def perplexity_rows(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    columns: list[tuple[str, dict[str, str]]] = []
    groups_by_label = {group.label: group for group in groups}
    for title, by_group in perplexity_tables(groups).items():
        by_model: dict[str, dict[str, str]] = {}
        for key, (label, entries) in itertools.product(MODELS, by_group.items()):
            statistic = Statistic.of(entry.get(key) for entry in entries)
            name = model_name(key, groups_by_label[label])
            cell = formatted(statistic, Column(key, name, lambda run: None, 1, 2))
            if key == "personal_mean" and statistic:
                cell += _fewer_remark(entries)
            by_model.setdefault(name, {})[label] = cell
        for name, cells in by_model.items():
            if any(cell != NOT_MEASURED for cell in cells.values()):
                columns.append((f"{title}, {name}", cells))
    columns += _task_columns(groups)
    rows = [[g.label, *(cells.get(g.label, NOT_MEASURED) for _, cells in columns)] for g in groups] if columns else []
    return ["System", *(title for title, _ in columns)], rows


def _fewer_remark(entries: Sequence[Mapping[str, float]]) -> str:
    counts = [(int(entry["personal_models"]), int(entry["asked"])) for entry in entries if entry.get("asked")]
    num_models, num_asked = min(counts, key=lambda pair: pair[0] - pair[1], default=(0, 0))
    return f" ({num_models} of {num_asked} clients)" if num_models < num_asked else ""


def _task_columns(groups: Sequence[Group]) -> list[tuple[str, dict[str, str]]]:
    columns: dict[tuple[str, str], dict[str, str]] = {}
    for group in groups:
        run_tables = [run.last_table("accuracy_by_task") for run in group.runs]
        for task in (task for task in run_tables[0] if all(task in table for table in run_tables)):
            for key in ("dense", "global"):
                title = f"{task}: {run_tables[0][task]['examples']} examples (%)"
                statistic = Statistic.of(table[task].get(key) for table in run_tables)
                cell = formatted(statistic, Column(key, key, lambda run: None, 100, 1))
                columns.setdefault((title, model_name(key, group)), {})[group.label] = cell
    return [(f"{title}, {name}", cells) for (title, name), cells in columns.items()]
