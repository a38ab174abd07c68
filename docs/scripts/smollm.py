"""The data behind docs/smollm.md: FedSpaLLM's Tables 1 to 3 on SmolLM2-135M-Instruct, and other rules of the server.

    python docs/scripts/smollm.py texts CORPORA             # texts/articles and texts/kinds
    python docs/scripts/smollm.py add runs/smollm-*/*/      # rows of completed runs, each once
    python docs/scripts/smollm.py write                     # the tables and the figure of the page

CORPORA holds wikitext-2/{valid,test}.txt, ptb/{valid,test}.txt and shakespeare/input.txt. A run is a row of
docs/data/smollm.csv for each test text. A claim compares the logarithms of perplexities, and Student's t interval of
the seeds' means decides it, as in docs/evidence.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev

import _evidence_figures as drawn
from _rows import append_rows, as_csv, read_rows, with_tables
from _verdicts import chance, holm
from matplotlib.figure import Figure

from fedprune_app.data.text import calibration_documents, perplexity_texts
from fedprune_app.results.differences import Difference, Paired, difference
from fedprune_app.results.metrics import MEGABYTE
from fedprune_app.results.reader import Run, load_run

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "data" / "smollm.csv", ROOT / "docs" / "smollm.md"
FIGURE = ROOT / "docs" / "assets" / "smollm.svg"
ALL_CLAIMS = ROOT / "docs" / "data" / "tables" / "smollm-claims.csv"
DEALS = {"documents": "articles", "one": "kinds"}
"""The folder of texts by the key fedspallm.deal."""
GENRES, NUM_GENRES = "genres", 5
"""The texts of the Brown corpus by genre, which natural.py writes; they are dealt one to a client, as kinds are."""
RULES = {
    "mean": "the paper's mean",
    "masks": "FedPrLLM's vote of Wanda's masks",
    "hessians": "SparseGPT by summed Hessians",
    "alps": "ALPS by summed Hessians",
    "norms": "Wanda by summed norms",
}
"""The rules by which the server makes a layer."""
SEEDS = 3
"""The seeds of a claim, decided on before the first run."""
Row = dict[str, str]


@dataclass(frozen=True)
class Claim:
    """A claim says of a deal, a number of clients and a density that the global model is better than the clients' own.

    With ``own`` it says that on its own kind of text a client's own model is better than the global one. With ``than``
    it says that the gain at ``density`` is larger than the gain at the density ``than``. With ``rule`` it says that the
    global model is better by this rule than by the rule ``against``, or behind it by at most ``margin``, a difference
    of logarithms.
    """

    name: str
    deal: str
    clients: int
    density: float
    in_paper: str = "–"
    own: bool = False
    than: float = 0.0
    rule: str = ""
    against: str = ""
    margin: float = 0.0

    @property
    def text(self) -> str:
        """The claim in words."""
        percent = f"{1 - self.density:.0%}"
        if self.own:
            return f"{percent}: own better than global, each on its own kind of text"
        if self.margin:
            behind = f"at most {100 * self.margin:g} points behind"
            return f"{percent}: {RULES[self.rule]} {behind} {RULES[self.against]}"
        if self.rule:
            return f"{percent}: {RULES[self.rule]} better than {RULES[self.against]}"
        if self.than:
            return f"{percent}: the gain is larger than at {1 - self.than:.0%}"
        return f"{percent}: global better than own"


PERCENTS = (0.5, 0.4, 0.3, 0.2)
IN_PAPER = {
    4: ("+0.6 (+0.4 to +74)", "+1.1 (+0.9 to +143)", "+3.8 (+3.0 to +157)", "+14.9 (+4.4 to +91)"),
    8: ("+1.3 (-2.6 to +97)", "+2.6 (+2.4 to +186)", "+11.9 (+3.3 to +191)", "+15.9 (+6.3 to +153)"),
    16: ("+0.7 (+0.6 to +98)", "+0.9 (+0.4 to +170)", "+8.5 (+5.9 to +225)", "+17.5 (+4.7 to +147)"),
}
"""The paper's gain for OPT-125m on WikiText-2 and PTB, and the range of its three models and these two texts."""
CLAIMS = (
    *(
        Claim(f"{table}{'abcd'[i]}", "articles", clients, density, IN_PAPER[clients][i])
        for table, clients in ((1, 4), (2, 8), (3, 16))
        for i, density in enumerate(PERCENTS)
    ),
    Claim("1e", "articles", 4, 0.3, "+3.2", than=0.5),
    *(Claim(f"4{'abcd'[i]}", "kinds", 4, density) for i, density in enumerate(PERCENTS)),
    *(Claim(f"4{'efgh'[i]}", "kinds", 4, density, own=True) for i, density in enumerate(PERCENTS)),
    *(
        Claim(f"5{name}", "articles", 4, density, rule=rule, against=against)
        for name, density, rule, against in (
            ("a", 0.3, "hessians", "mean"),
            ("b", 0.3, "alps", "hessians"),
            ("c", 0.3, "mean", "masks"),
            ("d", 0.2, "hessians", "mean"),
            ("e", 0.2, "alps", "hessians"),
            ("f", 0.5, "hessians", "mean"),
            ("g", 0.5, "alps", "hessians"),
        )
    ),
    *(
        Claim(f"7{letter}", GENRES, NUM_GENRES, density, own=own)
        for letter, density, own in (("a", 0.5, False), ("b", 0.3, False), ("c", 0.5, True), ("d", 0.3, True))
    ),
    Claim("5h", "articles", 4, 0.5, rule="norms", against="masks", margin=0.1),
    Claim("5i", "articles", 4, 0.3, rule="norms", against="masks", margin=0.1),
)


# --- texts ----------------------------------------------------------------------------------------------------------


def write_texts(corpora: Path, out: Path) -> None:
    """Write the two folders of texts that the matrices name."""
    articles = re.split(r"(?m)^(?= = [^=].* = $)", (corpora / "wikitext-2" / "valid.txt").read_text())
    plays = (corpora / "shakespeare" / "input.txt").read_text()
    cut = len(plays) * 9 // 10
    for folder in DEALS.values():
        for part in ("calibration", "test"):
            (out / folder / part).mkdir(parents=True, exist_ok=True)
        for name in ("wikitext-2", "ptb"):
            shutil.copyfile(corpora / name / "test.txt", out / folder / "test" / f"{name}.txt")
    lines = [json.dumps({"text": article}) for article in articles if article.strip()]
    (out / "articles" / "calibration" / "wikitext-2.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("wikitext-2", "ptb"):
        shutil.copyfile(corpora / name / "valid.txt", out / "kinds" / "calibration" / f"{name}.txt")
    (out / "kinds" / "calibration" / "shakespeare.txt").write_text(plays[:cut])
    (out / "kinds" / "test" / "shakespeare.txt").write_text(plays[cut:])
    library = list(calibration_documents("stdlib", ""))[:2]
    (out / "kinds" / "calibration" / "python.txt").write_text("\n".join(each.text for each in library))
    (out / "kinds" / "test" / "python.txt").write_text(perplexity_texts("stdlib", "")["stdlib"][0])


# --- rows -----------------------------------------------------------------------------------------------------------


def rule_of(config: Mapping[str, object]) -> str:
    """The rule by which the server of these settings makes a layer, of :data:`RULES`."""
    if config["fedspallm.hessian-form"] == "diagonal":
        return "norms"
    return "alps" if config["fedspallm.refine"] else str(config["fedspallm.merge"])


def deal_of(deal: str, clients: int) -> str:
    """The texts that this many clients have by the key fedspallm.deal."""
    return GENRES if (deal, clients) == ("one", NUM_GENRES) else DEALS[deal]


def rows_of(run: Run) -> list[Row]:
    """A completed run as rows, one for each test text; ``own`` has the clients' own perplexities in their order."""
    if run.flaw:
        raise ValueError(f"{run.folder} is {run.flaw}, allowed: a run that has completed")
    last, config = run.rounds[-1], run.config
    found = []
    for text, measured in last["perplexity_by_text"].items():
        own = [each["perplexity"][text] for each in run.clients if each.get("perplexity")]
        row = {
            "rule": rule_of(config),
            "deal": deal_of(config["fedspallm.deal"], len(run.info["partition"])),
            "clients": len(run.info["partition"]),
            "density": config["density"],
            "segments": config["fedspallm.segments"],
            "seed": run.seed,
            "text": text,
            "windows": measured["windows"],
            "dense": f"{measured['dense']:.3f}",
            "own": " ".join(f"{each:.3f}" for each in own),
            "global": f"{measured['global']:.3f}",
            "density_before_expansion": "" if (before := last["density_before_expansion"]) is None else f"{before:.4f}",
            "megabytes_up": f"{sum(each['bytes_up'] for each in run.rounds) / MEGABYTE:.1f}",
            "minutes": f"{run.info['seconds'] / 60:.1f}",
            "final_sha256": run.info["final_sha256"],
            "git_hash": run.info["git_hash"] or "",
        }
        found.append({key: str(value) for key, value in row.items()})
    return found


KEY = ("rule", "deal", "clients", "density", "segments", "seed", "text")


def add(folders: Iterable[Path]) -> int:
    """Add the rows of completed runs that are not there yet, and return how many runs these were."""
    known = {tuple(row[key] for key in KEY) for row in read_rows(DATA)}
    added = 0
    for folder in folders:
        run = load_run(folder)
        new = [] if run.flaw else [row for row in rows_of(run) if tuple(row[key] for key in KEY) not in known]
        if new:
            append_rows(DATA, new)
            added += 1
    return added


# --- tables ---------------------------------------------------------------------------------------------------------


def gains(deal: str, clients: int, density: float) -> Paired:
    """By seed and text: by how much the global logarithm of perplexity is below the mean of the clients' own."""
    return {
        (int(row["seed"]), number): fmean(map(log, _own(row))) - log(float(row["global"]))
        for row, number in _numbered(deal, clients, density)
    }


def gains_at_home(deal: str, clients: int, density: float) -> Paired:
    """By seed and text: by how much the model of the text's own client is below the global one."""
    return {
        (int(row["seed"]), number): log(float(row["global"])) - log(_own(row)[number])
        for row, number in _numbered(deal, clients, density)
    }


def globals_of(rule: str, deal: str, clients: int, density: float) -> Paired:
    """By seed and text: minus the logarithm of the global model's perplexity by this rule."""
    rows = _numbered(deal, clients, density, rule)
    return {(int(row["seed"]), number): -log(float(row["global"])) for row, number in rows}


def _numbered(deal: str, clients: int, density: float, rule: str = "mean") -> list[tuple[Row, int]]:
    """The rows of a cell with the numbers of their texts in the alphabet, which are those of their clients."""
    cell = (rule, deal, str(clients), str(density))
    found = [row for row in read_rows(DATA) if (row["rule"], row["deal"], row["clients"], row["density"]) == cell]
    texts = sorted({row["text"] for row in found})
    return [(row, texts.index(row["text"])) for row in found if int(row["seed"]) < SEEDS]


def _own(row: Mapping[str, str]) -> list[float]:
    return [float(each) for each in row["own"].split()]


def compared(claim: Claim) -> Difference | None:
    """The difference of a claim, with the interval for other seeds; None before its first run."""
    cell = claim.deal, claim.clients, claim.density
    if claim.rule:
        limit = {key: value - claim.margin for key, value in globals_of(claim.against, *cell).items()}
        return difference(globals_of(claim.rule, *cell), limit, of_other_seeds=True)
    made = gains_at_home if claim.own else gains
    first = made(claim.deal, claim.clients, claim.density)
    second = gains(claim.deal, claim.clients, claim.than) if claim.than else dict.fromkeys(first, 0.0)
    return difference(first, second, of_other_seeds=True)


def verdict(apart: Difference | None) -> str:
    """What the interval says; a claim is open while seeds are missing, and where the interval holds 0."""
    seeds = 0 if apart is None else len(apart.by_seed)
    if apart is None or seeds < SEEDS:
        return f"open: {seeds} of {SEEDS} seeds"
    return "shown" if apart.low > 0 else "does not hold here" if apart.high < 0 else "open"


def left_by_holm() -> tuple[set[str], int]:
    """The names of the claims that Holm's correction leaves at 5 %, and of how many tests it is."""
    found = {claim.name: apart for claim in CLAIMS if (apart := compared(claim)) and len(apart.by_seed) >= SEEDS}
    return holm({name: chance(apart) for name, apart in found.items()}), len(found)


def claims_table() -> str:
    """All claims with their differences, intervals and verdicts; those that Holm's correction leaves are bold."""
    strong, _ = left_by_holm()
    lines = [
        "| | clients, texts | claim | in the paper | difference, points | 95 % | by seed | verdict |",
        "| --- | --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for claim in sorted(CLAIMS, key=lambda claim: claim.name):
        numbers = ["–"] * 3
        if (apart := compared(claim)) is not None:
            mean, low, high, *by_seed = (
                f"{100 * (each - claim.margin):+.2f}" for each in (apart.mean, apart.low, apart.high, *apart.by_seed)
            )
            numbers = [mean, f"{low} to {high}" if len(by_seed) > 1 else "–", ", ".join(by_seed)]
        where = f"{claim.clients}, {claim.deal}"
        said = f"**{verdict(apart)}**" if claim.name in strong else verdict(apart)
        lines.append(f"| {' | '.join([claim.name, where, claim.text, claim.in_paper, *numbers, said])} |")
    return "\n".join(lines)


def verdicts_table() -> str:
    """The claims that differ in sparsity alone in one line: their differences and how many have each verdict."""
    lines = [
        "| claims | clients, texts | claim | at sparsity | differences, points | verdicts |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    of_kind: dict[tuple[str, str], list[Claim]] = {}
    for claim in sorted(CLAIMS, key=lambda claim: (claim.name[0], -claim.density)):
        of_kind.setdefault((f"{claim.clients}, {claim.deal}", claim.text.partition(": ")[2]), []).append(claim)
    for (where, said), claims in of_kind.items():
        found = [compared(claim) for claim in claims]
        percents = ", ".join(f"{1 - claim.density:.0%}" for claim in claims)
        points = ", ".join(
            "–" if apart is None else f"{100 * (apart.mean - claim.margin):+.1f}"
            for claim, apart in zip(claims, found, strict=True)
        )
        counts = ", ".join(f"{number} {word}" for word, number in Counter(map(verdict, found)).items())
        names = ", ".join(claim.name for claim in claims)
        lines.append(f"| {' | '.join([names, where, said, percents, points, counts])} |")
    wanted = {
        (rule or "mean", claim.deal, str(claim.clients), str(claim.density))
        for claim in CLAIMS
        for rule in {claim.rule, claim.against}
    }
    runs = {(row["rule"], row["deal"], row["clients"], row["density"], row["seed"]) for row in read_rows(DATA)}
    done = sum(run[:4] in wanted and int(run[4]) < SEEDS for run in runs)
    strong, tests = left_by_holm()
    left = ", ".join(sorted(strong)) or "none"
    lines += [
        "",
        f"Of {tests} decided claims Holm's correction leaves at 5 %: {left}.",
        f"{done} of the {len(wanted) * SEEDS} runs are done.",
    ]
    return "\n".join(lines)


def articles_table() -> str:
    """The paper's Tables 1 to 3: the clients' own models and the global one, by sparsity and text."""
    rows = [row for row in read_rows(DATA) if (row["rule"], row["deal"]) == ("mean", "articles")]
    texts = sorted({row["text"] for row in rows}, reverse=True)
    lines = [
        f"| clients | sparsity | seeds | {' | '.join(f'{text}, own / global' for text in texts)} | MB up |",
        f"| ---: | ---: | ---: |{' ---: |' * (len(texts) + 1)}",
    ]
    cells = {(int(row["clients"]), float(row["density"])) for row in rows}
    for clients, density in sorted(cells, key=lambda cell: (cell[0], -cell[1])):
        cell = [row for row in rows if (int(row["clients"]), float(row["density"])) == (clients, density)]
        by_text = [[row for row in cell if row["text"] == text] for text in texts]
        told = [f"{_spread([fmean(_own(row)) for row in each])} / {_global(each)}" for each in by_text]
        sent = _mean(by_text[0], "megabytes_up")
        line = [str(clients), f"{1 - density:.0%}", str(len(by_text[0])), *told, sent]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines) if rows else "No run has been made yet."


def kinds_table() -> str:
    """On each kind of text: the client that has this kind, the others' geometric mean, and the global model."""
    rows = [row for row in read_rows(DATA) if (row["rule"], row["deal"]) == ("mean", "kinds")]
    texts = sorted({row["text"] for row in rows})
    lines = [f"| sparsity | seeds | {' | '.join(texts)} |", f"| ---: | ---: |{' ---: |' * len(texts)}"]
    for density in sorted({float(row["density"]) for row in rows}, reverse=True):
        cells = []
        for place, text in enumerate(texts):
            of_text = [row for row in rows if float(row["density"]) == density and row["text"] == text]
            own = [_own(row) for row in of_text]
            others = [exp(fmean(log(each) for n, each in enumerate(models) if n != place)) for models in own]
            numbers = fmean(models[place] for models in own), fmean(others), fmean(float(r["global"]) for r in of_text)
            cells.append(" / ".join(f"{number:.0f}" for number in numbers))
        lines.append(f"| {1 - density:.0%} | {len(of_text)} | {' | '.join(cells)} |")
    return "\n".join(lines) if rows else "No run has been made yet."


def rules_table() -> str:
    """The global model by each rule of the server, with 4 clients that hold articles."""
    rows = [row for row in read_rows(DATA) if (row["deal"], row["clients"]) == ("articles", "4")]
    texts = sorted({row["text"] for row in rows}, reverse=True)
    lines = [
        f"| sparsity | rule | seeds | {' | '.join(texts)} | MB up |",
        f"| ---: | --- | ---: |{' ---: |' * (len(texts) + 1)}",
    ]
    for density in sorted({row["density"] for row in rows if row["rule"] != "mean"}, reverse=True):
        for rule, name in RULES.items():
            cell = [row for row in rows if (row["rule"], row["density"]) == (rule, density)]
            by_text = [[row for row in cell if row["text"] == text] for text in texts]
            if cell:
                told = [*map(_global, by_text), _mean(by_text[0], "megabytes_up")]
                lines.append(f"| {1 - float(density):.0%} | {name} | {len(by_text[0])} | {' | '.join(told)} |")
    return "\n".join(lines) if len(lines) > 2 else "No run has been made yet."


def _spread(values: Sequence[float]) -> str:
    """The mean of seeds, with their standard deviation."""
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _global(rows: Sequence[Row]) -> str:
    return _spread([float(row["global"]) for row in rows])


def _mean(rows: Sequence[Row], key: str) -> str:
    return f"{fmean(float(row[key]) for row in rows):.0f}"


TABLES = {"verdicts": verdicts_table, "articles": articles_table, "kinds": kinds_table, "rules": rules_table}


def written(page: str) -> str:
    """The page with its tables made anew."""
    return with_tables(page, "|".join(TABLES), lambda name: TABLES[name]())


def figure() -> Figure:
    """By sparsity and number of clients: how far the global model is ahead of the clients' own, one dot a seed."""
    shown = Figure(figsize=(6, 3), layout="constrained")
    axes = shown.subplots()
    axes.set_prop_cycle(color=drawn.COLOURS)
    for number, (deal, clients) in enumerate((("articles", 4), ("articles", 8), ("articles", 16), ("kinds", 4))):
        found = {density: gains(deal, clients, density) for density in PERCENTS}
        points = [
            (100 * (1 - density), 100 * fmean(gain for (seed, _), gain in each.items() if seed == of))
            for density, each in found.items()
            for of in sorted({seed for seed, _ in each})
        ]
        if points:
            apart = 0.5 * (number - 1.5)  # so that dots of one sparsity stand side by side
            label = f"{clients} clients, {'articles' if deal == 'articles' else 'texts of four kinds'}"
            axes.plot([x + apart for x, _ in points], [y for _, y in points], "o", ms=4, label=label)
    axes.axhline(0, color="#777777", lw=0.8)
    axes.set(xlabel="sparsity, %", ylabel="global ahead of own, points", xticks=[50, 60, 70, 80])
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return shown


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="write the texts of the runs")
    texts.add_argument("corpora", type=Path)
    texts.add_argument("--out", type=Path, default=Path("texts"))
    adding = commands.add_parser("add", help="add rows of completed runs, then write the page")
    adding.add_argument("folders", type=Path, nargs="+")
    commands.add_parser("write", help="write the tables and the figure of the page")
    asked = parser.parse_args()
    if asked.command == "texts":
        write_texts(asked.corpora, asked.out)
        return
    if asked.command == "add":
        print(f"{add(each for each in asked.folders if (each / 'run.json').exists())} runs added")
    ALL_CLAIMS.write_text(as_csv(claims_table()))
    PAGE.write_text(written(PAGE.read_text()))
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure().savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
