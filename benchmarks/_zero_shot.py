"""A language model answers tasks that it was not trained for: zero-shot accuracy by the lm-evaluation-harness.

Source: EleutherAI's package ``lm_eval``, which the papers on pruned language models report with. A task is one of the
harness' own, or a YAML file in its format. **A task file is code**: the harness renders the templates in it without a
sandbox, and what a template says is run. Use files that you would run as a program.
"""

import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedprune_app.core.texts import one_line
from fedprune_app.models.llm import LanguageModel, LayerTensors

_METRICS = ("acc,none", "exact_match,none")  # as the harness names them, without a filter


@dataclass(frozen=True)
class Accuracy:
    """An accuracy is a share in [0, 1] of so many ``examples`` of a task."""

    value: float
    examples: int


def read_task(name: str, path: Path) -> dict[str, Any]:
    """Return the task ``name`` in a YAML file, in the harness' format.

    Paths of data files begin at the YAML file's folder. A tag such as ``!function`` is refused, but the file's
    templates are code all the same. Raises a one-line ``ValueError`` naming the file.
    """
    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"task '{name}': {str(path)!r} cannot be read as YAML of data alone: {one_line(error)}"
        ) from None
    if not isinstance(task, dict) or "dataset_path" not in task:
        raise ValueError(
            f"task '{name}': {str(path)!r} has no 'dataset_path', allowed: a task of lm-evaluation-harness"
        )
    arguments = task.get("dataset_kwargs")
    if isinstance(arguments, dict) and "data_files" in arguments:
        arguments["data_files"] = _resolve_files(path.parent, arguments["data_files"])
    return {**task, "task": name}


def _resolve_files(folder: Path, files: Any) -> Any:
    if isinstance(files, dict):
        return {key: _resolve_files(folder, file) for key, file in files.items()}
    if isinstance(files, list):
        return [_resolve_files(folder, file) for file in files]
    return str(folder / files)


def accuracies(
    model: LanguageModel, layers: LayerTensors, tasks: Mapping[str, Path | None], *, batch_size: int, download: bool
) -> dict[str, Accuracy]:
    """Return the accuracy of ``model``, with the matrices of ``layers``, on each of the ``tasks`` by name.

    A task without a file is the harness' own; its data come from the local hub cache, and with ``download`` from the
    hub. The whole model is in memory, in its dtype. Raises a one-line ``ValueError`` for a task that cannot be run, or
    where the package is missing.
    """
    loaded_tasks = [name if path is None else read_task(name, path) for name, path in tasks.items()]
    with _quiet(offline=not download):
        try:
            from lm_eval.evaluator import evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ValueError(f"zero-shot tasks need the package {error.name}: install lm-eval[hf]") from None
        network = model.whole(layers).eval()
        tokenizer = model.tokenizer
        prefix_token = next(
            (token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), None
        )
        harness = HFLM(
            pretrained=network,
            tokenizer=tokenizer,
            batch_size=batch_size,
            device=str(model.device),
            prefix_token_id=tokenizer("\n").input_ids[0] if prefix_token is None else prefix_token,
        )
        try:
            manager = TaskManager(include_defaults=any(path is None for path in tasks.values()))
            report = evaluate(harness, manager.load(loaded_tasks), bootstrap_iters=0, log_samples=False)
        except Exception as error:  # the harness and its data sets refuse with many kinds of error
            raise ValueError(f"tasks {', '.join(tasks)} cannot be run: {one_line(error)[:300]}") from None
    return {name: _accuracy(name, report) for name in tasks}


def _accuracy(name: str, report: Mapping[str, Any]) -> Accuracy:
    results = report["results"].get(name, {})
    for metric in _METRICS:
        if metric in results:
            return Accuracy(float(results[metric]), int(report["n-samples"][name]["effective"]))
    metrics = ", ".join(key for key in results if "," in key and "_stderr" not in key) or "nothing"
    raise ValueError(f"task '{name}' tells {metrics}, allowed: a task with the metric acc or exact_match")


@contextmanager
def _quiet(offline: bool) -> Iterator[None]:
    """Let the harness and its libraries say nothing, and reach no hub, until the block ends."""
    variables = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"} if offline else {}
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # progress bars, which would break the run's own
            yield
    finally:
        logging.disable(level)
        for name, value in old_values.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
