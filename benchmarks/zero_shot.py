"""Zero-shot accuracy of language models on three small tasks of ours, by the lm-evaluation-harness.

    python benchmarks/zero_shot.py dense=FOLDER alps=runs/x/0/models/global
    python benchmarks/zero_shot.py --write-tasks      # benchmarks/tasks anew, from the lists in this file

* ``agreement``: which verb goes with the subject, behind a noun of the other number ("The keys to the cabinet are").
* ``capitals``: the capital of a country, among four.
* ``kinds``: what kind of thing something is, among four.

The questions are written for this repository. They tell how much pruning costs, not how good a model is. A model's
folder is a run's ``models/global``, an exported model, or a checkpoint. The files in benchmarks/tasks are code: the
harness renders their templates without a sandbox, so run no task files of strangers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _zero_shot import accuracies

from fedprune_app.models.llm import LanguageModel

TASKS = Path(__file__).parent / "tasks"
NAMES = ("agreement", "capitals", "kinds")
TASK = """# Written by benchmarks/zero_shot.py --write-tasks.
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
SUBJECTS = ("key", "author", "picture", "teacher", "song", "player", "window", "letter", "driver", "door", "farmer")
SUBJECTS += ("doctor", "book", "road", "child")
PLACES = ("near the", "behind the", "beside the", "with the")
OTHERS = ("cabinet", "garden", "house", "mountain", "river", "table", "wall")
IRREGULAR = {"child": "children"}
VERBS = (("is", "are"), ("was", "were"), ("has", "have"))
CAPITALS = {
    "Europe": "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Poland Warsaw, Greece Athens, Portugal Lisbon, "
    "Norway Oslo, Sweden Stockholm, Austria Vienna, Hungary Budapest, Ireland Dublin, Finland Helsinki, "
    "Denmark Copenhagen, Russia Moscow, Ukraine Kyiv",
    "Asia": "Japan Tokyo, China Beijing, Thailand Bangkok, Vietnam Hanoi, Iran Tehran, Iraq Baghdad, Turkey Ankara, "
    "Nepal Kathmandu, Indonesia Jakarta, Afghanistan Kabul, Syria Damascus, Lebanon Beirut",
    "Africa": "Egypt Cairo, Kenya Nairobi, Morocco Rabat, Ghana Accra, Algeria Algiers, Ethiopia Addis-Ababa, "
    "Sudan Khartoum, Libya Tripoli",
    "America": "Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago, Argentina Buenos-Aires, Venezuela Caracas, "
    "Colombia Bogotá, Ecuador Quito",
}
KINDS = {
    "bird": "robin eagle sparrow pigeon owl parrot crow penguin",
    "fish": "salmon trout tuna shark cod herring carp eel",
    "tree": "oak pine birch maple willow elm cedar palm",
    "tool": "hammer saw screwdriver wrench drill chisel axe shovel",
    "fruit": "apple banana cherry pear orange grape peach plum",
    "instrument": "violin piano guitar trumpet flute cello drum harp",
    "colour": "red green blue yellow purple brown pink orange",
    "sport": "tennis football hockey baseball golf rugby boxing swimming",
}
CHOICES = 4


def agreement() -> Iterator[dict[str, Any]]:
    number = 0
    for subject in SUBJECTS:
        for other in OTHERS:
            is_plural = number % 2 == 1
            head = IRREGULAR.get(subject, f"{subject}s") if is_plural else subject
            noun = other if is_plural else f"{other}s"
            verbs = VERBS[number % len(VERBS)]
            question = f"The {head} {PLACES[number % len(PLACES)]} {noun}"
            yield {"question": question, "choices": list(verbs), "answer": int(is_plural)}
            number += 1


def capitals() -> Iterator[dict[str, Any]]:
    for text in CAPITALS.values():
        pairs = [pair.strip().split(" ") for pair in text.split(",")]
        for place, (country, capital) in enumerate(pairs):
            others = [pairs[(place + step) % len(pairs)][1] for step in range(1, CHOICES)]
            yield question_of(f"The capital of {country} is the city of", capital, others, place)


def kinds() -> Iterator[dict[str, Any]]:
    names = list(KINDS)
    for place, (kind, text) in enumerate(KINDS.items()):
        for turn, thing in enumerate(text.split()):
            others = [names[(place + turn + step) % len(names)] for step in range(1, len(names))]
            others = [name for name in others if name != kind and thing not in KINDS[name].split()][: CHOICES - 1]
            article = "An" if thing[0] in "aeiou" else "A"
            mass = kind in ("colour", "sport")
            text_of = f"{thing.capitalize() if mass else f'{article} {thing}'} is a kind of"
            yield question_of(text_of, kind, others, turn)


def question_of(question: str, right: str, others: list[str], turn: int) -> dict[str, Any]:
    """Return a question whose right answer is at another place in each turn."""
    answer = turn % CHOICES
    choices = [*others[:answer], right, *others[answer:]]
    return {"question": question, "choices": [choice.replace("-", " ") for choice in choices], "answer": answer}


def files() -> dict[str, str]:
    """Return the files of all tasks by name."""
    texts = {}
    for name, make in zip(NAMES, (agreement, capitals, kinds), strict=True):
        texts[f"{name}.yaml"] = TASK.format(name=name)
        texts[f"{name}.jsonl"] = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in make())
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--write-tasks", action="store_true")
    options = parser.parse_args()
    if options.write_tasks:
        for name, text in files().items():
            (TASKS / name).write_text(text, encoding="utf-8")
    torch.set_num_threads(1)
    print(f"| model | {' | '.join(NAMES)} |\n| --- |{' ---: |' * len(NAMES)}")
    for name, _, folder in (text.partition("=") for text in options.models):
        tasks = {task: TASKS / f"{task}.yaml" for task in NAMES}
        scores = accuracies(LanguageModel(Path(folder)), lambda layer: {}, tasks, batch_size=16, download=False)
        print(f"| {name} | {' | '.join(f'{100 * scores[task].value:.1f}' for task in NAMES)} |", flush=True)


if __name__ == "__main__":
    main()
