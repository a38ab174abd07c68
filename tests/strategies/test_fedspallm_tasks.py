"""FedSpaLLM's zero-shot accuracies: of the dense model once, and of the global one."""

from __future__ import annotations

import pytest

from fedprune_app.models import zero_shot
from fedprune_app.models.llm import LanguageModel
from fedprune_app.results.groups import group_runs
from fedprune_app.results.reader import load_run
from fedprune_app.results.tables import perplexity_rows
from tests.models.test_zero_shot import task
from tests.strategies.test_fedspallm import family, llm, run, settings, texts

__all__ = ["family", "llm", "run", "settings", "task", "texts"]  # fixtures


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")  # of the harness' own libraries
def test_a_run_records_what_the_dense_model_and_the_global_one_answer(run, llm, task):
    result = run(fedspallm_evaluation_tasks=f"capitals={task}")
    found = result.rounds[-1]["accuracy_by_task"]["capitals"]

    def accuracy(folder):
        model = LanguageModel(folder)
        return zero_shot.accuracies(model, lambda layer: {}, {"capitals": task}, batch_size=4, download=False)

    assert found == {
        "dense": accuracy(llm)["capitals"].value,
        "global": accuracy(result.folder / "models" / "global")["capitals"].value,
        "examples": 9,
    }
    assert result.info["dense_accuracy"] == {"capitals": found["dense"]}
    header, ((_, *cells),) = perplexity_rows(group_runs([load_run(result.folder)]))
    shown = dict(zip(header[1:], cells, strict=True))
    assert shown["capitals: 9 examples (%), global model"] == f"{100 * found['global']:.1f}"


@pytest.mark.few(1)
def test_a_run_without_tasks_records_none(run):
    assert "accuracy_by_task" not in run().rounds[-1]
