"""The data behind "What you can make of one upload" on docs/smollm.md: models from sums that clients sent once.

    python docs/scripts/one_upload.py run --texts texts/articles --model MODEL.gguf --out runs/one-upload
    python docs/scripts/one_upload.py files runs/one-upload --program llama-perplexity --test wikitext-2/test.txt
    python docs/scripts/one_upload.py add runs/one-upload       # rows of what is done, and the tables
    python docs/scripts/one_upload.py write                     # the tables alone

``run`` goes on where it stopped, with the steps that decide claims first. A step is `fedprune run`, `fedprune compress`
or, for comparison, rounding to nearest on the same grids: GPTQ with the unit matrix for a Hessian. The claims stood
here before the first run, with three seeds. Each compares logarithms of perplexities; Student's t interval decides it.
Two more of the model cut to 0.7, recovered, in 4 bits are decided by a measurement of its file: at most 0.14 of the
dense float32 file's bytes, and at least 4 times as many tokens a second in llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import torch
from _rows import append_rows, as_csv, read_rows, with_tables
from smollm import DATA as BY_LAYER
from smollm import PAGE, SEEDS, verdict

from fedprune_app.core.payload import Payload
from fedprune_app.exports.gguf_file import write_gguf
from fedprune_app.exports.language import export_gguf
from fedprune_app.files import replace_file
from fedprune_app.learning.device import device_of, prepare_torch
from fedprune_app.learning.language_models import language_model, perplexities
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.differences import Difference, Paired, difference
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import load_run, read_info
from strategies.merging import Compression
from strategies.pruned_model import PrunedModel

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "one_upload.csv"
FILES = ROOT / "docs" / "data" / "one_upload_files.csv"
GEMMA = ROOT / "docs" / "data" / "one_upload_gemma.csv"
ALL_CLAIMS = ROOT / "docs" / "data" / "tables" / "one-upload-claims.csv"
COMMON = {
    "system": "fedspallm",
    "dataset": "text",
    "fraction-train": "1.0",
    "evaluate-clients": "1",
    "deadline-seconds": "36000.0",
    "fedspallm.deal": "documents",
    "fedspallm.segments": "8",
    "fedspallm.segment-length": "512",
    "fedspallm.window": "512",
    "fedspallm.test-windows": "8",
    "fedspallm.merge": "hessians",
    "fedspallm.keep-sums": "true",
}
UPLOADS = {
    "sums": {"num-server-rounds": "1", "batch-size": "8", "density": "0.5", "fedspallm.layers-per-exchange": "0"},
    "recovered": {
        "num-server-rounds": "2",
        "evaluate-every": "2",
        "batch-size": "2",
        "density": "0.7",
        "fedspallm.pattern": "cut",
        "fedspallm.layers-per-exchange": "0",
        "fedspallm.recovery-rounds": "1",
        "fedspallm.recovery-segments": "64",
        "fedspallm.recovery-steps": "16",
    },
}
"""The settings of the runs that ask clients, by the name of the run's folder, which a seed follows."""
DENSITIES, LAYERS = ("0.5", "0.3", "0.2"), 30
EXCHANGES = {
    f"exchanges-{number}-{density}": {
        "num-server-rounds": "1",
        "batch-size": "8",
        "density": density,
        "fedspallm.layers-per-exchange": str(LAYERS // number),
        "fedspallm.keep-sums": "false",
    }
    for number in (3, 10)
    for density in DENSITIES
}
"""Runs whose clients send sums of the model pruned so far, in so many exchanges."""
UPLOADS |= EXCHANGES
UPLOADS["dense-trained"] = {**UPLOADS["recovered"], "density": "1.0", "fedspallm.pattern": ""}
CUT = ("fedspallm.pattern=cut", "density=0.7")


@dataclass(frozen=True)
class Model:
    """A model is in the folder ``name``, which a seed follows, and was made from the folder ``source``.

    An upload has no source. ``changes`` are settings of `fedprune compress`; without any, weights are rounded to
    nearest.
    """

    name: str
    shape: str
    bits: int
    source: str = ""
    changes: tuple[str, ...] = ()


HALF, SMALLER, DENSE, RECOVERED = "50 % removed", "cut to 0.7", "dense", "cut to 0.7, recovered"
TRAINED = "dense, trained as in recovery"
OF_SUMS = (
    Model("sums", HALF, 16),
    Model("half-4", HALF, 4, "sums", ("fedspallm.bits=4",)),
    Model("half-4-nearest", HALF, 4, "sums"),
    Model("cut", SMALLER, 16, "sums", CUT),
    Model("cut-4", SMALLER, 4, "sums", (*CUT, "fedspallm.bits=4")),
    Model("cut-4-nearest", SMALLER, 4, "cut"),
    Model("dense-3", DENSE, 3, "sums", ("density=1.0", "fedspallm.bits=3")),
    Model("dense-3-nearest", DENSE, 3, "sums"),
)
OF_RECOVERED = (
    Model("recovered", RECOVERED, 16),
    Model("recovered-4", RECOVERED, 4, "recovered", ("fedspallm.bits=4",)),
)
"""The models that decide the claims."""
MORE = (
    Model("recovered-8", RECOVERED, 8, "recovered", ("fedspallm.bits=8",)),
    Model("cut-8", SMALLER, 8, "sums", (*CUT, "fedspallm.bits=8")),
    Model("half-8", HALF, 8, "sums", ("fedspallm.bits=8",)),
    Model("dense-4", DENSE, 4, "sums", ("density=1.0", "fedspallm.bits=4")),
    Model("dense-8", DENSE, 8, "sums", ("density=1.0", "fedspallm.bits=8")),
    Model("dense-trained", TRAINED, 16),
    Model("density-0.3", "70 % removed", 16, "sums", ("density=0.3",)),
    Model("density-0.2", "80 % removed", 16, "sums", ("density=0.2",)),
)
"""Further models, of seed 0 alone."""
BY_EXCHANGES = tuple(Model(name, "", 16) for name in EXCHANGES)
"""Models of seed 0 in a table of their own."""
MODELS = (*OF_SUMS, *OF_RECOVERED, *MORE, *BY_EXCHANGES)


@dataclass(frozen=True)
class Claim:
    """The model ``better`` has a lower perplexity than ``other``, or one that is at most ``share`` times as high."""

    name: str
    text: str
    better: str
    other: str
    share: float = 1.0


CLAIMS = (
    Claim("6a", "50 % removed, 4 bits: GPTQ by summed Hessians better than to nearest", "half-4", "half-4-nearest"),
    Claim("6b", "cut to 0.7, 4 bits: GPTQ by summed Hessians better than to nearest", "cut-4", "cut-4-nearest"),
    Claim("6c", "dense, 3 bits: GPTQ by summed Hessians better than to nearest", "dense-3", "dense-3-nearest"),
    Claim("6d", "cut to 0.7, recovered: 4 bits at most 1.06 times 16 bits", "recovered-4", "recovered", 1.06),
)


# --- runs -----------------------------------------------------------------------------------------------------------


def fedprune(*words: str) -> None:
    """Run a command of fedprune in a process of its own."""
    command = [sys.executable, "-c", "from fedprune_app.cli import main; main()", *words]
    subprocess.run(command, check=True)


def upload(name: str, seed: int, out: Path, given: Mapping[str, str]) -> None:
    """Have clients send sums, and make the first model of them; go on with a run that stopped."""
    settings = {**COMMON, **UPLOADS[name], **given, "seed": str(seed)}
    more = ["--resume"] if (out / "run.json").exists() else []
    words = [f"{key}={value}" for key, value in settings.items()]
    fedprune("run", *words, "--clients", "4", "--engine", "inprocess", "--out", str(out), *more)


def to_nearest(run: Path, model: Model) -> dict[str, float]:
    """Round a run's model, or the dense one, to nearest on GPTQ's grid, and return its perplexities by text."""
    info = read_info(run)
    changes = {"num-server-rounds": 1, "fedspallm.recovery-rounds": 0, "fedspallm.bits": model.bits}
    config = prepare(replace(of_run(info, ()), on_command_line=changes)).config
    prepare_torch(config)
    dense = language_model(config, device_of(config))
    compression, pruned = Compression(config, dense), PrunedModel(dense, run, info["run_key"])
    pruned.versions = dict.fromkeys(pruned.versions, 1)
    unit = {name: torch.eye(size) for name, size in compression.sizes.items()}

    def layer(number: int) -> dict[str, torch.Tensor]:
        payload = pruned.layer(number)
        if model.shape == DENSE:
            weights = dense.layer_tensors(number)
            weights = {name: weights[name] for name in dense.prunable(number)}
            payload = Payload(
                weights, {name: torch.ones_like(each, dtype=torch.bool) for name, each in weights.items()}
            )
        return dict(compression.rounded(payload, unit)[0].tensors)

    return {name: result.value for name, result in perplexities(config, dense, layer).items()}


def make(model: Model, seed: int, out: Path, given: Mapping[str, str]) -> None:
    """Make a model, unless it is there."""
    folder, source = out / f"{model.name}-{seed}", out / f"{model.source}-{seed}"
    if is_done(folder):
        return
    if not model.source:
        upload(model.name, seed, folder, given)
    elif model.changes:
        shutil.rmtree(folder, ignore_errors=True)  # what was interrupted is made anew
        fedprune("compress", str(source), *model.changes, "-o", str(folder))
    else:
        start = time.monotonic()
        perplexity = to_nearest(source, model)
        folder.mkdir(exist_ok=True)
        said = {"perplexity": perplexity, "seconds": time.monotonic() - start}
        replace_file(folder / COMPARISON, json.dumps(said).encode())


COMPARISON = "nearest.json"


def is_done(folder: Path) -> bool:
    """Whether the folder has a finished model."""
    if (folder / COMPARISON).exists():
        return True
    return (folder / "run.json").exists() and read_info(folder)["status"] == "completed"


def run(out: Path, given: Mapping[str, str], chosen: str, seeds: int) -> None:
    """Make the models of some seeds whose names match, those that decide claims first."""
    out.mkdir(parents=True, exist_ok=True)
    steps = [(model, seed) for of_upload in (OF_SUMS, OF_RECOVERED) for seed in range(seeds) for model in of_upload]
    for model, seed in [*steps, *((model, 0) for model in (*MORE, *BY_EXCHANGES))]:
        if re.fullmatch(chosen, model.name):
            make(model, seed, out, given)


# --- files for llama.cpp ----------------------------------------------------------------------------------------------

IN_LLAMA_CPP = (DENSE, "dense-8", "dense-4", "sums", "half-8", "half-4", "recovered", "recovered-8", "recovered-4")
"""The models of which there are files. "dense" is the model that clients were sent."""
WINDOWS = "64"
"""So many windows of 512 tokens llama.cpp reads, and it counts the second half of each."""


def measure_files(out: Path, program: Path, test: Path) -> None:
    """Write seed 0's models as GGUF files, and have llama.cpp measure their perplexity and the time of a token."""
    known = {row["model"] for row in read_rows(FILES)}
    for name in IN_LLAMA_CPP:
        folder = out / f"{name if name != DENSE else 'sums'}-0"
        if name in known or not is_done(folder):
            continue
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            path = Path(scratch) / "model.gguf"
            if name == DENSE:
                kind = write_gguf(language_model(prepare(of_run(read_info(folder), ())).config), path)
                size, share = path.stat().st_size, 1.0
            else:
                dense, made = export_gguf(folder, path)
                if dense.milliseconds is None or made.milliseconds is None:
                    raise SystemExit("llama.cpp is missing: install the extra fedprune[llamacpp]")
                kind, size, share = made.model.rpartition(", ")[2], made.bytes, made.milliseconds / dense.milliseconds
            command = [str(program), "-m", str(path), "-f", str(test), "-c", "512", "--chunks", WINDOWS, "-t", "1"]
            said = subprocess.run(command, check=True, capture_output=True, text=True)
        found = re.search(r"PPL = ([0-9.]+) \+/- ([0-9.]+)", said.stdout + said.stderr)
        if found is None:
            raise SystemExit(f"{program} wrote no perplexity of {name}")
        row = {"model": name, "type": kind, "megabytes": f"{size / MEGABYTE:.1f}", "token": f"{share:.2f}"}
        append_rows(FILES, [{**row, "perplexity": f"{float(found[1]):.2f}", "standard_error": found[2]}])


# --- rows and tables ------------------------------------------------------------------------------------------------


def rows_of(model: Model, seed: int, out: Path) -> list[dict[str, str]]:
    """A model's rows, one for each text; none where it has not been made."""
    folder = out / f"{model.name}-{seed}"
    if not is_done(folder):
        return []
    if (folder / COMPARISON).exists():
        said = json.loads((folder / COMPARISON).read_text())
        info, perplexity, seconds = {}, said["perplexity"], said["seconds"]
    else:
        info = read_info(folder)
        seconds, perplexity = info["seconds"], info.get("perplexity")
        if perplexity is None:
            measured = load_run(folder).rounds[-1]["perplexity_by_text"]
            perplexity = {text: each["global"] for text, each in measured.items()}
    sent = load_run(out / f"{next(name for name in UPLOADS if _comes_from(model, name))}-{seed}")
    megabytes = sum(each["bytes_up"] for each in sent.rounds) / MEGABYTE / len(sent.info["partition"])
    return [
        {
            "model": model.name,
            "shape": model.shape,
            "bits": str(model.bits),
            "seed": str(seed),
            "text": text,
            "perplexity": f"{value:.3f}",
            "megabytes_of_a_client": f"{megabytes:.1f}",
            "minutes": f"{seconds / 60:.1f}",
            "final_sha256": info.get("final_sha256", ""),
            "git_hash": info.get("git_hash") or "",
        }
        for text, value in perplexity.items()
    ]


def _comes_from(model: Model, upload: str) -> bool:
    return upload == model.name or any(_comes_from(each, upload) for each in MODELS if each.name == model.source)


KEY = ("model", "seed", "text")


def add(out: Path, data: Path = DATA) -> int:
    """Add the rows of finished models that are not there yet, and return how many these are."""
    known = {tuple(row[key] for key in KEY) for row in read_rows(data)}
    found = [row for seed in range(SEEDS) for model in MODELS for row in rows_of(model, seed, out)]
    if data == GEMMA and (dense := out / "sums-0").exists():
        common = {"model": DENSE, "shape": DENSE, "bits": "16", "seed": "0"}
        of_texts = read_info(dense)["dense_perplexity"].items()
        found += [
            {**dict.fromkeys(found[0], ""), **common, "text": t, "perplexity": f"{v['value']:.3f}"} for t, v in of_texts
        ]
    new = [row for row in found if tuple(row[key] for key in KEY) not in known]
    if new:
        append_rows(data, new)
    return len(new)


def logarithms(model: str) -> Paired:
    """By seed and text: minus the logarithm of a model's perplexity."""
    texts = sorted({row["text"] for row in read_rows(DATA)})
    rows = [row for row in read_rows(DATA) if row["model"] == model]
    return {(int(row["seed"]), texts.index(row["text"])): -log(float(row["perplexity"])) for row in rows}


def compared(claim: Claim) -> Difference | None:
    """The difference of a claim, with the interval for other seeds; None before its first run."""
    limit = {key: value - log(claim.share) for key, value in logarithms(claim.other).items()}
    return difference(logarithms(claim.better), limit, of_other_seeds=True)


def claims_table() -> str:
    """All claims with their differences, intervals and verdicts."""
    lines = ["| | claim | difference, points | 95 % | verdict |", "| --- | --- | ---: | --- | --- |"]
    for claim in CLAIMS:
        numbers = ["–"] * 2
        if (apart := compared(claim)) is not None:
            mean, low, high = (
                f"{100 * (each - log(claim.share)):+.1f}" for each in (apart.mean, apart.low, apart.high)
            )
            numbers = [mean, f"{low} to {high}" if len(apart.by_seed) > 1 else "–"]
        lines.append(f"| {' | '.join([claim.name, claim.text, *numbers, verdict(apart)])} |")
    return "\n".join(lines)


def models_table() -> str:
    """What seed 0's sums gave, by shape and bits: perplexities, and what llama.cpp makes of the file."""
    rows = [row for row in read_rows(DATA) if row["seed"] == "0"]
    texts = sorted({row["text"] for row in rows}, reverse=True)
    found = {(row["model"], row["text"]): float(row["perplexity"]) for row in rows}
    found |= {(DENSE, row["text"]): float(row["dense"]) for row in read_rows(BY_LAYER) if row["deal"] == "articles"}
    files = {row["model"]: row for row in read_rows(FILES)}
    lines = [f"| {' | '.join(COLUMNS)} |", f"| --- | ---: |{' ---: |' * (len(COLUMNS) - 2)}"]
    for model in sorted((Model(DENSE, DENSE, 16), *MODELS), key=_place):
        if model.shape not in SHAPES or model.name.endswith(NEAREST) or (model.name, texts[0]) not in found:
            continue
        measured = files.get(model.name)
        cells = [", ".join(f"{found[model.name, text]:.1f}" for text in texts)]
        cells.append(f"{measured['megabytes']} ({measured['type']})" if measured else "–")
        cells += [(measured and measured[column]) or "–" for column in ("perplexity", "token")]
        lines.append(f"| {' | '.join([model.shape, str(model.bits), *cells])} |")
    return "\n".join(lines)


def _place(model: Model) -> tuple[int, int]:
    return (SHAPES.index(model.shape) if model.shape in SHAPES else len(SHAPES), -model.bits)


def gemma_table() -> str:
    """What one upload gave of Gemma 3 270M."""
    of_model: dict[tuple[str, str], list[str]] = {}
    for row in sorted(
        read_rows(GEMMA), key=lambda row: (*_place(Model("", row["shape"], int(row["bits"]))), row["text"])
    ):
        of_model.setdefault((row["shape"], row["bits"]), []).append(f"{float(row['perplexity']):.1f}")
    lines = ["| model | bits | ptb | wikitext-2 |", "| --- | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {' | '.join([*key, *cells])} |" for key, cells in of_model.items())])


def exchanges_table() -> str:
    """Seed 0's perplexities of SparseGPT by summed Hessians, by sparsity and number of exchanges, beside the mean."""
    found = {(row["model"], row["text"]): float(row["perplexity"]) for row in read_rows(DATA) if row["seed"] == "0"}
    found |= {("density-0.5", text): found["sums", text] for text in TEXTS}
    by_rule = {"hessians": f"exchanges-{LAYERS}", "mean": "mean"}
    for row in read_rows(BY_LAYER):
        if (row["deal"], row["clients"], row["seed"]) == ("articles", "4", "0") and row["rule"] in by_rule:
            found[f"{by_rule[row['rule']]}-{row['density']}", row["text"]] = float(row["global"])
    lines = [
        "| sparsity | 1 exchange | 3 | 10 | 30 | the paper's mean |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for density in DENSITIES:
        of_exchanges = (f"exchanges-{number}-{density}" for number in (3, 10, LAYERS))
        names = [f"density-{density}", *of_exchanges, f"mean-{density}"]
        cells = [", ".join(f"{found[name, text]:.1f}" for text in TEXTS) for name in names]
        lines.append(f"| {1 - float(density):.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


TEXTS, NEAREST = ("wikitext-2", "ptb"), "-nearest"
SHAPES = (DENSE, TRAINED, HALF, SMALLER, RECOVERED)
COLUMNS = ("model", "bits", "wikitext-2, ptb", "MB", "64 windows", "a token")
TABLES = {
    "one-upload": models_table,
    "one-upload-claims": claims_table,
    "one-upload-exchanges": exchanges_table,
    "one-upload-gemma": gemma_table,
}


def written(page: str) -> str:
    """The page with its tables made anew."""
    return with_tables(page, "|".join(TABLES), lambda name: TABLES[name]())


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="make the models that are missing")
    running.add_argument("--texts", type=Path, required=True)
    running.add_argument("--model", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--only", default=".*", help="a pattern of models' names")
    running.add_argument("--seeds", type=int, default=SEEDS)
    running.add_argument("--gemma", action="store_true", help="the model is Gemma 3 270M, which needs its start token")
    measuring = commands.add_parser("files", help="measure the files of seed 0 in llama.cpp")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--program", type=Path, required=True, help="llama-perplexity")
    measuring.add_argument("--test", type=Path, required=True, help="WikiText-2's test text")
    adding = commands.add_parser("add", help="add the rows of finished models")
    adding.add_argument("out", type=Path)
    adding.add_argument("--gemma", action="store_true", help="the runs are of Gemma 3 270M")
    commands.add_parser("write", help="write the tables of the page")
    asked = parser.parse_args()
    if asked.command == "run":
        given = {"data-dir": str(asked.texts.absolute()), "model": str(asked.model.absolute())}
        given |= {"fedspallm.start-token": "true"} if asked.gemma else {}
        run(asked.out, given, asked.only, asked.seeds)
        return
    if asked.command == "files":
        measure_files(asked.out, asked.program, asked.test)
    if asked.command == "add":
        print(f"{add(asked.out, GEMMA if asked.gemma else DATA)} rows added")
    ALL_CLAIMS.write_text(as_csv(claims_table()))
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
