"""The claims of docs/evidence.md, and the matrices of runs that test them. A claim stands here before its first run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

OURS = "not in the paper"  # the source of a claim that is ours


@dataclass(frozen=True)
class Claim:
    """A claim says that ``better`` beats ``worse``, or with ``margin`` that it is no more than so many points behind.

    Both are settings that a row must have, such as ``{"system": "dispfl", "density": 0.5}``. ``seeds`` is the number of
    seeds that was decided on before the first run, from ``first_seed`` on. ``measure`` says what a client tests: its
    ``personal`` model, or the ``received`` one. ``worse_measure`` does so for ``worse``, where that differs. ``known``
    is what earlier runs had said when the claim was written down.
    """

    name: str
    source: str
    text: str
    data: str
    better: Mapping[str, Any]
    worse: Mapping[str, Any]
    seeds: int = 3
    first_seed: int = 0
    margin: float = 0.0
    measure: str = "personal"
    worse_measure: str = ""
    known: str = ""

    def counts(self, row: Mapping[str, str]) -> bool:
        """Whether the row is of one of the claim's seeds."""
        return self.first_seed <= int(row["seed"]) < self.first_seed + self.seeds

    @property
    def floor(self) -> float:
        """The difference of accuracies above which the claim holds."""
        return -self.margin / 100

    @property
    def in_paper(self) -> str:
        """The paper's own difference in points, for its networks and data, or a dash where it gives none."""
        return IN_PAPER.get(self.name.removeprefix("7"), "–")


def _dispfl(**more: Any) -> dict[str, Any]:
    return {"system": "dispfl", **{key.replace("_", "."): value for key, value in more.items()}}


def _at_random(density: float, **more: Any) -> dict[str, Any]:
    """Dis-PFL with random growth, as in the released scripts, which made the paper's numbers."""
    return _dispfl(density=density, dispfl_growth="random", **more)


def _subfedavg(target: float) -> dict[str, Any]:
    return {"system": "subfedavg", "subfedavg.target-rate": target}


def _fedp3(density: float, layer_set: str = "lowerb", **more: Any) -> dict[str, Any]:
    return {"system": "fedp3", "density": density, "fedp3.layer-set": layer_set, **more}


def _local(kind: str) -> dict[str, Any]:
    """What a local step of FedP3 leaves out, at the density 0.7."""
    return {"fedp3.local": kind, "fedp3.local-density": 0.7}


def _fedltp(**more: Any) -> dict[str, Any]:
    return {"system": "fedltp", **{f"fedltp.{key}": value for key, value in more.items()}}


def _fedspa(acceleration: str, **more: Any) -> dict[str, Any]:
    options = {"acceleration": acceleration, **more}
    return {"system": "fedspa", **{f"fedspa.{key}": value for key, value in options.items()}}


def of_merge(density: float, segments: int, merge: str = "mean", **more: Any) -> dict[str, Any]:
    """The settings of FedSpaLLM that tell one cell from another."""
    options = {"segments": segments, "merge": merge, **more}
    return {"system": "fedspallm", "density": density, **{f"fedspallm.{key}": value for key, value in options.items()}}


def _of_language(name: str, source: str, text: str, better: Mapping[str, Any], **more: Any) -> Claim:
    """A claim about perplexity: the global model against the clients' own of the same run, or as ``more`` says."""
    how = {"worse": better, "worse_measure": "personal", **more}
    return Claim(name, source, text, LANGUAGE, better, seeds=5, measure="received", **how)


SCARCE, CLASSES, FIVE_HUNDRED = "dispfl-scarce", "dispfl-classes", "dispfl-500"
ROUNDS, ROUNDS_MNIST, LAYERS, PRIVATE = "subfedavg-rounds", "subfedavg-rounds-mnist", "fedp3-layers", "fedltp-fashion"
FASHION, LANGUAGE, TUNED = "fedp3-fashion", "fedspallm-merges", "tuned"
TUNED_GALLERY = "tuned-gallery"  # rows of gallery/tuned.yaml, of which there are no claims
TUNED_LAST = "tuned-last"  # rows of tuned_last.yaml, of the configurations and of the gallery
TUNED_AGAIN = "again"  # rows of again.yaml, of the configurations and of the gallery
AGAIN_CLASSES = "again-classes"  # rows of again_classes.yaml, of both too
WATCH = "natural-watch"
IN_GALLERY = (TUNED_LAST, TUNED_AGAIN, AGAIN_CLASSES, WATCH)
"""The rows of these data files come from a matrix of the gallery too, which has the same name."""
AGAIN = {"3c": "fedp3-layers", "3g": "fedp3-fashion", "3i": "fedp3-fashion", "5b": "fedspallm"}
"""Open claims that are tested once more on seeds 11 to 15, which no run had: by claim, the name of their matrix."""
MATRICES = {
    SCARCE: ("dispfl_scarce", "dispfl_beside", "dispfl_densities", "dispfl_dropping"),
    CLASSES: ("dispfl_classes",),
    FIVE_HUNDRED: ("dispfl_500",),
    ROUNDS: ("subfedavg_rounds",),
    ROUNDS_MNIST: ("subfedavg_rounds_mnist",),
    LAYERS: ("fedp3_layers",),
    FASHION: ("fedp3_fashion",),
    PRIVATE: ("fedltp_fashion", "fedltp_fashion_pruning"),
    LANGUAGE: ("fedspallm_claims",),
    TUNED: ("tuned",),
    TUNED_LAST: ("tuned_last",),
    TUNED_AGAIN: ("again",),
    AGAIN_CLASSES: ("again_classes",),
    WATCH: ("natural_watch",),
    **{f"fresh-{name}": (f"fresh_{name.replace('-', '_')}",) for name in AGAIN.values()},
}
"""Which files of configs/matrices make the rows of a data file."""
SECTIONS = {
    "1": "1. Dis-PFL", "2": "2. Sub-FedAvg", "3": "3. FedP3", "4": "4. Fed-LTP",
    "5": "5. FedSpaLLM (a point is a hundredth of the logarithm of perplexity)",
    "6": "6. Tuned alike", "7": "7. Once more, on fresh seeds",
    "8": "8. Natural clients, after a last phase", "9": "9. Tuned anew, after a last phase",
}  # fmt: skip
"""The sections of the page, by the digit with which a claim's name begins."""
IN_PAPER = {
    "1a": "+24.15", "1b": "+22.35", "1c": "+1.80", "1d": "+0.20", "1f": "+4.50", "1g": "+11.02", "1h": "+21.02",
    "1i": "+9.00", "1j": "-2.43", "1k": "+1.60", "1p": "+4.57", "1q": "+0.18", "1r": "+24.15", "1s": "+1.80",
    "2a": "+1.57", "2b": "0.00", "2c": "+8.16", "2d": "-2.41", "2f": "+5.03", "2g": "+1.08",
    "3a": "+5.32", "3b": "+27.76", "3h": "+22.44",
    "4a": "+4.58", "4b": "+4.24", "4c": "-0.90", "4e": "+4.24", "4f": "+4.24",  # CIFAR-10 public, non-IID
    "4h": "+14 (IID)", "4i": "+1",  # FEMNIST public
    "6a": "+24.15", "6b": "+4.50", "6c": "+11.02", "6d": "+9.00", "6e": "+1.80", "6f": "+22.35",
    "9b": "+24.15", "9c": "-4.50", "9f": "+1.80", "9u": "+11.02", "9v": "+9.00",
    "5a": "+3 to +157", "5b": "+3 to +157", "5c": "+3 to +91",  # three models, three texts, 4 clients
}  # fmt: skip
"""The differences of the papers' tables and texts, by the claim's name."""
STANDALONE, DPSGD_FT = {"system": "standalone"}, {"system": "dpsgd-ft"}
TEXTS = ("ptb", "stdlib", "wikitext-2")
TEN, ALL = {"system": "fedavg-ft", "fraction-train": 0.1}, {"system": "fedavg-ft", "fraction-train": 1.0}
COMMON = frozenset(
    {
        "dispfl.neighbours", "dpsgd.neighbours", "fedfomo.candidates", "subfedavg.prune-step",
        "ditto.personal-epochs", "ditto.pull", "dispfl.prune-rate", "subfedavg.accuracy-threshold",
        "dadpfl.threshold", "dadpfl.waves", "dadpfl.least-density", "lpft.head-epochs", "sparsyfed.exponent",
        "fedrts.adjusted", "fedrts.rounds-between", "fedrts.scale", "fedrts.trust",
        "fedper.personal-layers", "apfl.alpha", "apfl.adaptive", "feddst.prune-rate", "feddst.rounds-between",
        "fedltp.public-dataset", "fedltp.tickets", "fedltp.ticket-iterations",
        "fedspallm.deal", "fedspallm.block-size", "fedspallm.segment-length", "fedspallm.window",
        "fedspallm.test-windows",
    }
)  # fmt: skip
"""These settings of systems do not tell the rows of a data file apart."""
MERGES = {
    "the paper's mean": {"fedspallm.merge": "mean"},
    "Hessians": {"fedspallm.merge": "hessians"},
}
"""The ways to make a layer that :func:`cells_table` compares."""
CELLS = tuple(product((4, 8, 16), (2, 32), (0.4, 0.2)))
"""The numbers of clients and of segments, and the density, of which a cell is."""
ELSEWHERE = ("seed", "data-dir", "plugins", "fedltp.public-data-dir", "fedspallm.evaluation-texts")
FULL = _at_random(0.5, dispfl_topology="full", dispfl_dropped="trains-alone")
CAPACITIES = "0.2 0.4 0.7 1.0"


def _one_shot(density: float, validators: str = "none") -> dict[str, Any]:
    return {"density": density, **_fedltp(pruning="one-shot", validators=validators)}


def _iterative(density: float, further_pruned: float) -> dict[str, Any]:
    options = {"validators": "none", "further-pruned": further_pruned}
    return {"density": density, **_fedltp(pruning="iterative", **options)}


ONE_SHOT, ITERATIVE = _one_shot(0.53), _iterative(0.99, 0.2)
FEDPER, FEDREP = ({"system": "fedper", "fedper.head-epochs": epochs} for epochs in (0, 5))
LAST_PHASE = (
    *(
        Claim(
            name, OURS, f"Tuned: a last phase makes {method} more accurate",
            TUNED_LAST, {"system": system, **more}, {"system": system, **more}, seeds=5, first_seed=1,
            measure="last_phase", worse_measure="personal",
        )
        for name, method, system, more in (
            ("6h", "FedRep", "fedper", FEDREP), ("6i", "FedPer", "fedper", FEDPER), ("6j", "FedBN", "fedbn", {}),
            ("6k", "LG-FedAvg", "lg-fedavg", {}), ("6l", "Ditto", "ditto", {}), ("6m", "Sub-FedAvg", "subfedavg", {}),
        )
    ),
    *(
        Claim(
            name, OURS,
            f"Tuned: FedAvg-FT (10 clients) beats {method}, both after a last phase",
            TUNED_LAST, TEN, settings, seeds=5, first_seed=1, measure="last_phase",
        )
        for name, method, settings in (
            ("6o", "FedRep", FEDREP), ("6p", "FedPer", FEDPER), ("6q", "FedBN", {"system": "fedbn"}),
            ("6r", "LG-FedAvg", {"system": "lg-fedavg"}), ("6s", "Ditto", {"system": "ditto"}),
            ("6t", "Sub-FedAvg", {"system": "subfedavg"}), ("6u", "APFL", {"system": "apfl"}),
        )
    ),
)  # fmt: skip
"""These claims are of runs in which all clients train once more in the end. No such run was known before them.

All settings are the tuned ones, whose accuracy without a last phase was known.
"""
FIRST = (
    Claim(
        "1a", "Dis-PFL, Table 1", "Dis-PFL at density 0.5 beats training alone", SCARCE,
        _dispfl(density=0.5), STANDALONE,
    ),
    Claim(
        "1b", "Dis-PFL, Table 1", "D-PSGD-FT beats training alone", SCARCE,
        DPSGD_FT, STANDALONE,
    ),
    Claim(
        "1c", "Dis-PFL, Tables 1 and 3",
        "Dis-PFL at density 0.5, with half the traffic, is at most one point behind D-PSGD-FT", SCARCE,
        _dispfl(density=0.5), DPSGD_FT, margin=1.0,
    ),
    Claim(
        "1d", "Dis-PFL, Tables 1 and 4", "Dis-PFL at density 0.8 is at most one point behind D-PSGD-FT", SCARCE,
        _dispfl(density=0.8), DPSGD_FT, margin=1.0,
    ),
    Claim(
        "1e", "Dis-PFL, Algorithm 2", "Growth by gradient beats growth at random, density 0.5", SCARCE,
        _dispfl(density=0.5), _at_random(0.5),
    ),
    *(
        Claim(
            name, "Dis-PFL, Table 1", f"Dis-PFL at density 0.5 beats {other}", SCARCE,
            _at_random(0.5), {"system": system},
        )
        for name, other, system in (
            ("1f", "FedAvg-FT (10 clients)", "fedavg-ft"), ("1g", "Ditto (10 clients)", "ditto"),
            ("1h", "FedFomo", "fedfomo"), ("1i", "Sub-FedAvg (10 clients)", "subfedavg"),
        )
    ),
    Claim(
        "1j", "Dis-PFL, Table 4", "Dis-PFL at density 0.2 is at most three points behind density 0.5", SCARCE,
        _at_random(0.2), _at_random(0.5), margin=3.0,
    ),
    Claim(
        "1k", "Dis-PFL, Table 4", "Dis-PFL at density 0.5 beats at density 0.8", SCARCE,
        _at_random(0.5), _at_random(0.8),
    ),
    Claim(
        "1l", "Dis-PFL, section 4.5", "Dis-PFL at density 0.5 beats at density 1.0", SCARCE,
        _at_random(0.5), _at_random(1.0),
    ),
    *(
        Claim(
            name, "Dis-PFL, Figure 6",
            f"Dis-PFL beats training alone where a client drops out of {share} % of the rounds", SCARCE,
            FULL | {"drop-probability": share / 100},
            STANDALONE,
        )
        for name, share in (("1m", 20), ("1n", 50), ("1o", 80))
    ),
    *(
        claim
        for first, second, data, where in (
            ("1p", "1q", CLASSES, "two classes per client"), ("1r", "1s", FIVE_HUNDRED, "500 images per client"),
        )
        for claim in (
            Claim(
                first, "Dis-PFL, Table 1", f"With {where}, Dis-PFL at density 0.5 beats training alone",
                data, _at_random(0.5), STANDALONE,
            ),
            Claim(
                second, "Dis-PFL, Tables 1 and 3",
                f"With {where}, Dis-PFL at density 0.5 is at most one point behind D-PSGD-FT",
                data, _at_random(0.5), DPSGD_FT, margin=1.0,
            ),
        )
    ),
    *(
        Claim(
            name, "Dis-PFL, section 4.5", f"With {where}, Dis-PFL at density 0.5 beats at density 1.0",
            data, _at_random(0.5), _at_random(1.0),
        )
        for name, data, where in (
            ("1t", CLASSES, "two classes per client"), ("1u", FIVE_HUNDRED, "500 images per client"),
        )
    ),
    Claim(
        "2a", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 30 % beats training alone", ROUNDS,
        _subfedavg(30.0), STANDALONE,
    ),
    Claim(
        "2b", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 50 % is at most half a point behind training alone", ROUNDS,
        _subfedavg(50.0), STANDALONE, margin=0.5,
    ),
    Claim(
        "2c", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 50 % beats LG-FedAvg", ROUNDS,
        _subfedavg(50.0), {"system": "lg-fedavg"},
    ),
    Claim(
        "2d", "Sub-FedAvg, Table 1", "Sub-FedAvg (Un) at 70 % is at most three points behind 30 %", ROUNDS,
        _subfedavg(70.0), _subfedavg(30.0), margin=3.0,
    ),
    Claim(
        "2e", OURS, "Sub-FedAvg (Un) at 30 % beats FedAvg's clients after local training",
        ROUNDS, _subfedavg(30.0), {"system": "fedavg"},
    ),
    Claim(
        "2f", "Sub-FedAvg, Table 1", "MNIST: Sub-FedAvg (Un) at 50 % beats training alone",
        ROUNDS_MNIST, _subfedavg(50.0), STANDALONE,
    ),
    Claim(
        "2g", "Sub-FedAvg, Table 1", "MNIST: Sub-FedAvg (Un) at 50 % beats LG-FedAvg", ROUNDS_MNIST,
        _subfedavg(50.0), {"system": "lg-fedavg"},
    ),
    Claim(
        "2h", OURS,
        "MNIST: Sub-FedAvg (Un) at 50 % beats FedAvg's clients after local training",
        ROUNDS_MNIST, _subfedavg(50.0), {"system": "fedavg"},
    ),
    Claim(
        "3a", "FedP3, Figure 4", "With one hidden layer per client, accuracy falls from density 1.0 to 0.9", LAYERS,
        _fedp3(1.0), _fedp3(0.9),
    ),
    Claim(
        "3b", "FedP3, Figure 4", "With one hidden layer per client, accuracy falls from density 1.0 to 0.5", LAYERS,
        _fedp3(1.0), _fedp3(0.5),
    ),
    Claim(
        "3c", "FedP3, Figure 2",
        "FedP3 with three hidden layers per client (OPU3) at 0.9 is at most two points behind FedAvg", LAYERS,
        _fedp3(0.9, "opu3"), {"system": "fedavg"}, margin=2.0,
    ),
    Claim(
        "3d", "FedP3, Figure 2",
        "Three hidden layers per client (OPU3) beat one (LowerB), density 0.9", LAYERS,
        _fedp3(0.9, "opu3"), _fedp3(0.9),
    ),
    Claim(
        "3e", OURS,
        "Layers by what a client can hold beat one hidden layer each, density 0.9",
        LAYERS, _fedp3(0.9, "capacity", **{"fedp3.capacities": CAPACITIES}), _fedp3(0.9),
    ),
    Claim(
        "3f", "FedP3, Figure 2", "Fashion-MNIST: OPU3 at 0.9 is at most two points behind FedAvg", FASHION,
        _fedp3(0.9, "opu3"), {"system": "fedavg"}, margin=2.0,
    ),
    Claim(
        "3g", "FedP3, Figure 2", "Fashion-MNIST: OPU3 beats LowerB, density 0.9", FASHION,
        _fedp3(0.9, "opu3"), _fedp3(0.9),
    ),
    Claim(
        "3h", "FedP3, Figure 4", "Fashion-MNIST: accuracy falls from density 0.9 to 0.5, OPU3", FASHION,
        _fedp3(0.9, "opu3"), _fedp3(0.5, "opu3"),
    ),
    Claim(
        "3i", "FedP3, Table 2",
        "Fashion-MNIST: local steps without pruning beat with uniform pruning, 0.7",
        FASHION, _fedp3(0.9, "opu3"), _fedp3(0.9, "opu3", **_local("uniform")),
    ),
    Claim(
        "3j", "FedP3, Table 2", "Fashion-MNIST: uniform pruning beats ordered dropout, 0.7", FASHION,
        _fedp3(0.9, "opu3", **_local("uniform")), _fedp3(0.9, "opu3", **_local("ordered-dropout")),
    ),
    Claim(
        "4a", "Fed-LTP, Table 3", "Fed-LTP's one-shot tickets beat DP-Fed, at equal noise", PRIVATE,
        ONE_SHOT, {"system": "dpfed"}, seeds=5, measure="received",
    ),
    Claim(
        "4b", "Fed-LTP, Table 3",
        "Fed-LTP's one-shot tickets beat Fed-SPA without acceleration, p = 0.4",
        PRIVATE, ONE_SHOT, _fedspa("none"), seeds=5, measure="received",
    ),
    Claim(
        "4c", "Fed-LTP, Table 3", "Iterative pruning, averaged over the holders, is at most two points behind one-shot",
        PRIVATE, ITERATIVE, ONE_SHOT, seeds=5, margin=2.0, measure="received",
    ),
    Claim(
        "4d", "Fed-LTP, Algorithm 2",
        "Iterative pruning is more accurate with line 9 as printed, divided by K, than averaged over the holders",
        PRIVATE, ITERATIVE | {"fedltp.average": "participants"}, ITERATIVE, seeds=5, measure="received",
    ),
    Claim(
        "4e", "Fed-LTP, Table 3",
        "Fed-LTP's one-shot tickets beat Fed-SPA with damped momentum, p = 0.4",
        PRIVATE, ONE_SHOT, _fedspa("momentum"), seeds=5, measure="received",
    ),
    Claim(
        "4f", "Fed-LTP, Table 3", "Fed-LTP's one-shot tickets beat Fed-SPA with Adam, p = 0.4",
        PRIVATE, ONE_SHOT, _fedspa("adam", **{"server-learning-rate": 0.003}), seeds=5, measure="received",
    ),
    Claim(
        "4g", "Fed-LTP, Figure 5", "One-shot tickets that keep 0.53 of the weights beat with 0.22",
        PRIVATE, ONE_SHOT, _one_shot(0.22), measure="received",
    ),
    Claim(
        "4h", "Fed-LTP, Figure 5", "Iterative pruning that keeps 0.54 of the weights beats with 0.20",
        PRIVATE, _iterative(0.738, 0.1), _iterative(0.738, 0.4), measure="received",
    ),
    Claim(
        "4i", "Fed-LTP, Figure 6", "Iterative pruning is more accurate with a winning ticket than without",
        PRIVATE, ITERATIVE, _iterative(1.0, 0.2), measure="received",
    ),
    Claim(
        "4j", "Fed-LTP, Figure 7",
        "One-shot tickets: the best round by noised scores beats the last round",
        PRIVATE, _one_shot(0.53, "all"), ONE_SHOT, measure="received",
    ),
    _of_language(
        "5a", "FedSpaLLM, Table 1",
        "With 2 segments per client, the global model is better than the clients' own, 70 %",
        of_merge(0.3, 2),
    ),
    _of_language(
        "5b", "FedSpaLLM, Table 1",
        "With 32 segments per client, the global model is better than the clients' own, 70 %",
        of_merge(0.3, 32),
    ),
    _of_language(
        "5c", "FedSpaLLM, Table 1",
        "With 32 segments per client, the global model is better than the clients' own, 80 %",
        of_merge(0.2, 32),
    ),
    _of_language(
        "5d", OURS,
        "Pruned by Hessians, the global model is better than by the mean, 32 segments, 50 %",
        of_merge(0.5, 32, "hessians", refine=True), worse=of_merge(0.5, 32), worse_measure="received",
    ),
    _of_language(
        "5e", OURS,
        "Pruned by Hessians, the global model is better than by the mean, 32 segments, 80 %",
        of_merge(0.2, 32, "hessians", refine=True), worse=of_merge(0.2, 32), worse_measure="received",
    ),
    _of_language(
        "5f", OURS,
        "Pruned by Hessians, the global model is better than the clients' own, 32 segments, 50 %",
        of_merge(0.5, 32, "hessians", refine=True), worse=of_merge(0.5, 32),
    ),
    _of_language(
        "5g", OURS,
        "The mean of the clients' weights is better than FedPrLLM's vote of their masks (Wanda), 32 segments, 50 %",
        of_merge(0.5, 32), worse=of_merge(0.5, 32, "masks", pruner="wanda"), worse_measure="received",
    ),
    _of_language(
        "5h", OURS,
        "The mean of the clients' weights is better than FedPrLLM's vote of their masks (Wanda), 32 segments, 80 %",
        of_merge(0.2, 32), worse=of_merge(0.2, 32, "masks", pruner="wanda"), worse_measure="received",
    ),
    *(
        _of_language(
            name, OURS,
            "The mean of the clients' weights is better than a vote of their masks, both by SparseGPT, 32 segments, "
            f"{removed} %",
            of_merge(density, 32), worse=of_merge(density, 32, "masks"), worse_measure="received",
        )
        for name, density, removed in (("5i", 0.5, 50), ("5j", 0.2, 80))
    ),
    *(
        Claim(
            name, "Dis-PFL, Table 1", f"Tuned: Dis-PFL at density 0.5 beats {other}", TUNED,
            _at_random(0.5), settings, seeds=5, first_seed=1,
        )
        for name, other, settings in (
            ("6a", "training alone", STANDALONE), ("6b", "FedAvg-FT (10 clients)", TEN),
            ("6c", "Ditto (10 clients)", {"system": "ditto"}),
            ("6d", "Sub-FedAvg (10 clients)", {"system": "subfedavg"}),
        )
    ),
    Claim(
        "6e", "Dis-PFL, Tables 1 and 3", "Tuned: Dis-PFL at density 0.5 is at most one point behind D-PSGD-FT",
        TUNED, _at_random(0.5), DPSGD_FT, seeds=5, first_seed=1, margin=1.0,
    ),
    Claim(
        "6f", "Dis-PFL, Table 1", "Tuned: D-PSGD-FT beats training alone", TUNED,
        DPSGD_FT, STANDALONE, seeds=5, first_seed=1,
    ),
    *LAST_PHASE,
    Claim(
        "6g", OURS, "Tuned: FedAvg-FT with all clients a round beats with ten",
        TUNED, ALL, TEN, seeds=5, first_seed=1,
    ),
)  # fmt: skip
"""The claims but for those that are tested once more."""
ONCE_MORE = tuple(
    replace(claim, name=f"7{claim.name}", data=f"fresh-{AGAIN[claim.name]}", seeds=5, first_seed=11)
    for claim in FIRST
    if claim.name in AGAIN
)
"""The first verdict of these was known when they were written down. It is not pooled with the second."""
FEDAVG_FT, SUBFEDAVG = {"system": "fedavg-ft"}, {"system": "subfedavg"}
OF_NATURAL = (
    ("a", "FedAvg-FT beats training alone", FEDAVG_FT, STANDALONE, 0.0),
    ("b", "Dis-PFL at density 0.5 beats training alone", _at_random(0.5), STANDALONE, 0.0),
    ("c", "FedAvg-FT beats Dis-PFL at density 0.5", FEDAVG_FT, _at_random(0.5), 0.0),
    ("d", "Sub-FedAvg beats training alone", SUBFEDAVG, STANDALONE, 0.0),
    ("e", "FedP3 at 0.9 beats training alone", {"system": "fedp3", "density": 0.9}, STANDALONE, 0.0),
    ("f", "FedDST at density 0.5 is at most one point behind FedAvg-FT", {"system": "feddst"}, FEDAVG_FT, 1.0),
    ("g", "SSFL at density 0.5 is at most one point behind FedAvg-FT", {"system": "ssfl"}, FEDAVG_FT, 1.0),
)
NATURAL = tuple(
    Claim(
        f"8{letter}", OURS, f"Watches, tuned: {text}", WATCH, better, worse,
        seeds=5, first_seed=1, margin=margin, measure="last_phase",
    )
    for letter, text, better, worse, margin in OF_NATURAL
)  # fmt: skip
"""These claims are of clients that no draw made: persons."""
FEDDST, FEDRTS, SSFL = {"system": "feddst"}, {"system": "fedrts"}, {"system": "ssfl"}
DISPFL = _at_random(0.5)
OF_ALL_CLIENTS = (
    ("a", "FedAvg-FT beats training alone", FEDAVG_FT, STANDALONE, 0.0, "tuned: +11.18"),
    ("b", "Dis-PFL at density 0.5 beats training alone", DISPFL, STANDALONE, 0.0, "6a: +6.56"),
    ("c", "FedAvg-FT beats Dis-PFL at density 0.5", FEDAVG_FT, DISPFL, 0.0, "6b: +4.62"),
    ("d", "Sub-FedAvg beats training alone", SUBFEDAVG, STANDALONE, 0.0, "tuned: +5.26"),
    ("f", "Dis-PFL at density 0.5 is at most one point behind D-PSGD-FT", DISPFL, DPSGD_FT, 1.0, "6e: -4.24"),
    ("t", "DA-DPFL beats Dis-PFL at density 0.5", {"system": "dadpfl"}, DISPFL, 0.0, "tuned: -0.27"),
    ("u", "Dis-PFL at density 0.5 beats Ditto", DISPFL, {"system": "ditto"}, 0.0, "6c: +1.02"),
    ("v", "Dis-PFL at density 0.5 beats Sub-FedAvg", DISPFL, SUBFEDAVG, 0.0, "6d: +1.30"),
)
"""Claims of systems whose clients all train in each round."""
OF_AGAIN = (
    *OF_ALL_CLIENTS,
    ("e", "LP-FT beats FedAvg-FT", {"system": "lpft"}, FEDAVG_FT, 0.0, "-0.35 (validation)"),
    ("g", "FedRTS at density 0.5 beats FedDST", FEDRTS, FEDDST, 0.0, "+1.7 (validation)"),
    ("h", "FedDST at density 0.5 is at most one point behind FedAvg-FT", FEDDST, FEDAVG_FT, 1.0, "tuned: -1.70"),
    ("i", "SSFL at density 0.5 is at most one point behind FedAvg-FT", SSFL, FEDAVG_FT, 1.0, "tuned: -2.24"),
    ("j", "FedRTS at density 0.5 is at most one point behind FedAvg-FT", FEDRTS, FEDAVG_FT, 1.0, "-0.5 (validation)"),
    *(
        (letter, f"FedAvg-FT beats {method}", FEDAVG_FT, {"system": system, **more}, 0.0, known)
        for letter, method, system, more, known in (
            ("k", "FedRep", "fedper", FEDREP, "6o: +9.65"), ("l", "FedPer", "fedper", FEDPER, "6p: +9.69"),
            ("m", "FedBN", "fedbn", {}, "6q: +7.56"), ("n", "Ditto", "ditto", {}, "6s: +4.77"),
            ("o", "APFL", "apfl", {}, "6u: +6.08"), ("p", "LG-FedAvg", "lg-fedavg", {}, "6r: +11.00"),
            ("q", "SCAFFOLD", "scaffold", {}, "tuned: +3.62"), ("r", "SparsyFed", "sparsyfed", {}, "tuned: +4.36"),
            ("s", "Sub-FedAvg", "subfedavg", {}, "6t: +5.25"),
        )
    ),
)  # fmt: skip
OF_CLASSES = (
    ("w", "FedAvg-FT beats training alone", FEDAVG_FT, STANDALONE, 0.0, "without tuning, 1p: Dis-PFL -2.49"),
    ("x", "FedRTS at density 0.5 is at most one point behind FedAvg-FT", FEDRTS, FEDAVG_FT, 1.0, "9j: +0.74"),
    ("y", "FedAvg-FT beats FedRep", FEDAVG_FT, {"system": "fedper", **FEDREP}, 0.0, "9k: +8.64"),
    ("z", "FedAvg-FT beats Sub-FedAvg", FEDAVG_FT, SUBFEDAVG, 0.0, "9s: +2.68"),
)
"""Claims with two classes per client, where the settings are those of the search with Dirichlet data."""
OF_PAPER = dict.fromkeys("bcuv", "Dis-PFL, Table 1") | {"f": "Dis-PFL, Tables 1 and 3"}
AGAIN_TUNED = tuple(
    Claim(
        f"9{letter}", OF_PAPER.get(letter, OURS), f"Tuned anew{of}: {text}", data,
        better, worse, seeds=5, first_seed=21, margin=margin, measure="last_phase", known=known,
    )
    for data, of, claims in ((TUNED_AGAIN, "", OF_AGAIN), (AGAIN_CLASSES, ", two classes per client", OF_CLASSES))
    for letter, text, better, worse, margin, known in claims
)  # fmt: skip
"""These claims are of a search and of seeds of their own; the verdicts of the earlier search were known."""
CLAIMS = (*FIRST, *ONCE_MORE, *NATURAL, *AGAIN_TUNED)
LEVEL, MARGIN = ("1d", "3h", "3j", "4a", "6g"), 1.0
"""Claims with a mean near their limit, and the points within which two settings are called level.

Both were chosen after the runs, so a claim's verdict does not follow them.
"""
