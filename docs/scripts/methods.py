"""The table of all methods on docs/systems/index.md, from what their classes declare and from a small run of each.

    python docs/scripts/methods.py run      # the runs without a row in docs/data/methods.csv, some seconds each
    python docs/scripts/methods.py write    # the table of the page

A run is on the digits, with ten clients and ten rounds. Its row has what the method keeps, sends and computes as shares
of FedAvg's with the same network. Settings are those of the gallery's files, or the defaults with half of the weights.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _rows import append_rows, read_rows, with_tables

import fedprune_app
from fedprune_app import plugins
from fedprune_app.config.parsing import parse_config
from fedprune_app.preflight.combinations import why_not_private
from fedprune_app.registry import SYSTEMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "systems" / "index.md"
DATA = ROOT / "docs" / "data" / "methods.csv"
GALLERY = ROOT / "gallery"
PAPERS = ROOT / "fedprune_app" / "results" / "templates" / "papers.bib"
SETTING = {"num-server-rounds": 10, "evaluate-every": 10, "local-epochs": 3, "learning-rate": 0.05, "momentum": 0.0}
CLIENTS = 10
LESS = 0.85  # below this share of FedAvg's a number counts as smaller; gossip sends nothing down in the first round


class Method(NamedTuple):
    """What no class declares: what a client has of its own, the page, and a gallery method's paper."""

    personal: str
    page: str = ""
    paper: str = ""


METHODS = {
    "subfedavg": Method("mask, weights under it", "subfedavg.md"),
    "subfedavg-hy": Method("channels, mask, weights", "subfedavg.md"),
    "dispfl": Method("mask and weights", "dispfl.md"),
    "fedp3": Method("its layers", "fedp3.md"),
    "ldp-fedp3": Method("–", "fedp3.md#ldp-fedp3-algorithm-5"),
    "fedltp": Method("–", "fedltp.md"),
    "fedspallm": Method("the client's own pruned model", "fedspallm.md"),
    "fedavg": Method("–"),
    "fedprox": Method("–"),
    "fedavg-ft": Method("the fine-tuned model"),
    "ditto": Method("a second model"),
    "lg-fedavg": Method("lower layers"),
    "fedfomo": Method("all weights"),
    "mtl": Method("all weights"),
    "fedcr": Method("the head"),
    "fjord": Method("width"),
    "dpsgd": Method("–"),
    "dpsgd-ft": Method("the fine-tuned model"),
    "dpfed": Method("–"),
    "fedspa": Method("–"),
    "standalone": Method("everything"),
    "feddst": Method("–", paper="Bibikar et al., AAAI 2022"),
    "ssfl": Method("–", paper="[Ohib et al. 2024](https://arxiv.org/abs/2405.09037)"),
    "fedrts": Method("–", paper="[Huang et al., NeurIPS 2025](https://arxiv.org/abs/2501.19122)"),
    "sparsyfed": Method("–", paper="Guastella et al., ICLR 2025"),
    "dadpfl": Method("mask and weights", paper="[Long et al., TNNLS 2025](https://arxiv.org/abs/2404.15943)"),
    "heterofl": Method("width", paper="Diao et al., ICLR 2021"),
    "fedrolex": Method("width", paper="Alam et al., NeurIPS 2022"),
    "fedper": Method("last layers", paper="Arivazhagan et al. 2019; Collins et al., ICML 2021"),
    "fedbn": Method("norms", paper="Li et al., ICLR 2021"),
    "apfl": Method("a second model, mixed with the common one", paper="Deng et al. 2020"),
    "lpft": Method("the fine-tuned model", paper="[Chen et al. 2025](https://arxiv.org/abs/2511.12695)"),
    "scaffold": Method("–", paper="Karimireddy et al., ICML 2020"),
    "afl": Method("–", paper="[He et al., CVPR 2025](https://arxiv.org/abs/2405.16240)"),
}
SHARED = {"fedrolex": "heterofl"}  # methods that stand in another method's file
NOISE: dict[str, object] = {"dp.enabled": True, "dp.noise-multiplier": 1.0}
SETTINGS: dict[str, dict[str, object]] = {
    "ditto": {"local-epochs": None, "ditto.global-epochs": 3, "ditto.personal-epochs": 3},
    "subfedavg-hy": {"model": "cnn-small-bn"},
    "dispfl": {"density": 0.5},
    "fedp3": {"density": 0.5},
    "fedltp": {"density": 0.5},
    "fedcr": {"model": "cnn-small-cr", "max-grad-norm": 10.0},
    "ldp-fedp3": {**NOISE, "dp.accuracies": "open"},
}
PRIVATE_WITH: dict[str, dict[str, object]] = {
    "dispfl": {"dispfl.growth": "random"},
    "fedspallm": {"fedspallm.merge": "hessians"},
}
SUMMED_WITH: dict[str, dict[str, object]] = {"fedspallm": {"fedspallm.merge": "hessians"}}
TEXT = {"fedspallm": "file, upload"}  # prunes a trained language model, so no run of FedAvg stands beside it


def load() -> None:
    """Register the gallery's methods."""
    files = {str(GALLERY / f"{SHARED.get(path.stem, path.stem)}.py") for path in GALLERY.glob("*.toml")}
    for file in sorted(files):
        plugins.load({"plugins": file})


def of_gallery(name: str) -> bool:
    return (GALLERY / f"{name}.toml").exists()


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a method's run."""
    if not of_gallery(name):
        given = {"system": name, "fraction-train": 1.0, "model": "cnn-small", **SETTING, **SETTINGS.get(name, {})}
        return {key: value for key, value in given.items() if value is not None}
    settings = {"model": "cnn-small"} | tomllib.loads((GALLERY / f"{name}.toml").read_text())
    return {**settings, "plugins": str(GALLERY / f"{SHARED.get(name, name)}.py"), **SETTING}


def measured(settings: dict[str, Any]) -> dict[str, float]:
    """What a run keeps, sends and computes."""
    with tempfile.TemporaryDirectory() as folder:
        run = fedprune_app.run(settings, out=Path(folder) / "run", clients=CLIENTS, engine="inprocess", progress=False)
        sums = {key: sum(row[key] for row in run.rounds) for key in ("bytes_up", "bytes_down", "flops")}
        return {"file": run.rounds[-1]["density_mean"], **sums}


def measure() -> None:
    """Run each method that has no row yet, and FedAvg with its network."""
    known = {row["system"] for row in read_rows(DATA)}
    beside: dict[str, dict[str, float]] = {}
    for name in [each for each in METHODS if each not in known | TEXT.keys()]:
        settings = settings_of(name)
        model = str(settings["model"])
        if model not in beside:
            base = "cnn-small" if model.endswith("-cr") else model  # a variational encoder is FedCR's alone
            beside[model] = measured({**settings_of("fedavg"), "model": base})
        shares = {key: f"{value / beside[model][key]:.3f}" for key, value in measured(settings).items()}
        names = {"bytes_up": "upload", "bytes_down": "download", "flops": "operations"}
        append_rows(DATA, [{"system": name, **{names.get(key, key): value for key, value in shares.items()}}])


def papers() -> dict[str, str]:
    """By system of the product, the paper that papers.bib names first."""
    found: dict[str, str] = {}
    for entry in PAPERS.read_text().split("\n@"):
        fields = dict(re.findall(r"^  (\w+) = \{(.*)\}", entry, re.M))
        surnames = [name.partition(",")[0] for name in fields["author"].split(" and ")]
        venue = re.search(r"\(([A-Z]\w+)\)", fields.get("booktitle", ""))
        who = surnames[0] + (" et al." if len(surnames) > 2 else "")
        when = f", {venue[1]} {fields['year']}" if venue else f" {fields['year']}"
        words = (who + when).replace("{\\'a}", "á")
        words = f"[{words}](https://arxiv.org/abs/{fields['eprint']})" if "eprint" in fields else words
        for system in fields["keywords"].split(", "):
            found.setdefault(system, words)
    return found


def allowed(name: str, key: str, more: dict[str, object]) -> str:
    """Whether a system bears a setting: yes, no, or with which settings."""

    def reason(settings: dict[str, object]) -> str:
        noise = NOISE if key == "dp.enabled" or name == "ldp-fedp3" else {}
        rounds = {"num-server-rounds": 1} if SYSTEMS[name].reads_text else {}
        config = parse_config({"system": name, key: True, **noise, **rounds, **settings})
        return why_not_private(config) if key == "dp.enabled" else SYSTEMS[name].client.why_not_summed(config)

    if not reason({}):
        return "yes"
    if more and not reason(more):
        return "with " + ", ".join(f"`{setting}={value}`" for setting, value in more.items())
    return "no"


def rows() -> Iterator[str]:
    """The lines of the table."""
    shares = {row["system"]: row for row in read_rows(DATA)}
    by_system = papers()
    titles = ["`system`", "paper", "what it does", "a client's own", "less than FedAvg in"]
    yield f"| {' | '.join([*titles, 'private/secure sums'])} |"
    yield f"|{' --- |' * 6}"
    for name, method in METHODS.items():
        system = SYSTEMS[name]
        key = f"[`{name}`]({method.page})" if method.page else f"`{name}`"
        if of_gallery(name):
            key = f"[{name}](../../gallery/{SHARED.get(name, name)}.py)"
        less = [what for what in ("file", "upload", "download", "operations") if is_less(shares.get(name, {}), what)]
        private = allowed(name, "dp.enabled", PRIVATE_WITH.get(name, {}))
        summed = allowed(name, "secure-sums", SUMMED_WITH.get(name, {}))
        cells = [
            key,
            method.paper or by_system.get(name, "–"),
            system.summary.partition(": ")[2],
            method.personal,
            TEXT.get(name) or ", ".join(less) or "–",
            f"both {private}" if " " in private and private == summed else f"{private}/{summed}",
        ]
        yield f"| {' | '.join(cells)} |"


def is_less(row: dict[str, str], what: str) -> bool:
    return bool(row) and float(row[what]) < LESS


def written(page: str) -> str:
    """The page with its table made anew."""
    load()
    return with_tables(page, "methods", lambda name: "\n".join(rows()))


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        load()
        measure()
    PAGE.write_text(written(PAGE.read_text()))
