"""Zero-shot accuracy by the lm-evaluation-harness, on tasks in local files."""

from __future__ import annotations

import json

import pytest
import torch

from fedprune_app.config import parse_config
from fedprune_app.models.llm import LanguageModel
from tests.docs.scripts import script
from tests.models.tiny_llm import tiny_byte_model
from tests.refusing import refuses

zero_shot = script("_zero_shot")
accuracies, read_task = zero_shot.accuracies, zero_shot.read_task
CHOICES = ("Paris", "Rome", "Oslo")
TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A file of nine questions with three choices each."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("lm_eval")
    examples = [{"question": f"Number {i} of", "choices": CHOICES, "answer": i % 3} for i in range(9)]
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    path = tmp_path / "task.yaml"
    path.write_text(TASK)
    return path


@torch.inference_mode()
def likeliest(whole, question):
    """The choice whose bytes are likeliest after the question, by hand."""

    def score(choice):
        ids = torch.tensor([list(f"{question} {choice}".encode())])
        logs = whole(ids).logits.log_softmax(-1)
        return float(sum(logs[0, at - 1, ids[0, at]] for at in range(len(question), ids.shape[1])))

    return max(range(3), key=lambda i: score(CHOICES[i]))


@pytest.mark.filterwarnings("ignore")  # of the harness' own libraries
def test_the_accuracy_is_that_of_the_likeliest_choice(task, tmp_path):
    model = LanguageModel(tiny_byte_model(tmp_path / "model", "llama"))
    found = accuracies(model, lambda layer: {}, {"capitals": task}, batch_size=4, download=False)["capitals"]
    whole = model.whole(lambda layer: {}).eval()
    right = [likeliest(whole, f"Number {i} of") == i % 3 for i in range(9)]
    assert (found.value, found.examples) == (pytest.approx(sum(right) / 9), 9)

    def doubled(layer):
        return {name: -2 * model.layer_tensors(layer)[name] for name in model.prunable(layer)}

    other = accuracies(model, doubled, {"capitals": task}, batch_size=4, download=False)["capitals"]
    whole = model.whole(doubled).eval()
    assert other.value == pytest.approx(sum(likeliest(whole, f"Number {i} of") == i % 3 for i in range(9)) / 9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dataset_path: !function code.py", "cannot be read as YAML of data alone"),
        ("- a list", "has no 'dataset_path'"),
        (TASK.replace("capitals.jsonl", "none.jsonl"), "tasks capitals cannot be run"),
        (TASK.replace("metric: acc", "metric: acc_norm"), "tells acc_norm,none, allowed: a task with the metric acc"),
    ],
)
def test_a_task_that_cannot_be_is_refused_in_one_line(task, tmp_path, text, says):
    task.write_text(text)
    model = LanguageModel(tiny_byte_model(tmp_path / "model", "llama"))
    with pytest.raises(ValueError, match=says) as caught:
        accuracies(model, lambda layer: {}, {"capitals": task}, batch_size=4, download=False)
    assert "\n" not in str(caught.value)


def test_data_files_lie_beside_the_task(task):
    found = read_task("capitals", task)
    assert found["task"] == "capitals"
    assert found["dataset_kwargs"]["data_files"] == {"test": str(task.parent / "capitals.jsonl")}
    with pytest.raises(ValueError, match=r"none\.yaml' cannot be read"):
        read_task("capitals", task.parent / "none.yaml")


def test_no_run_reads_a_task_file_which_is_code():
    with refuses("setting", "fedspallm.evaluation-tasks"):
        parse_config({"system": "fedspallm", "fedspallm.evaluation-tasks": "piqa"})
    assert "A task file is code" in str(zero_shot.__doc__)
