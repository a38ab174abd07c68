"""The demo is small enough for two cores and three minutes, and real in every part; ``fedprune demo`` runs it."""

from pathlib import Path

from fedprune_app.config import ConfigError, Scalar
from fedprune_app.preflight.prepare import check_out
from fedprune_app.results.ownership import check_free, is_marked
from fedprune_app.results.reader import read_info

DEMO_CLIENTS = 20
DEMO_SYSTEMS = ("standalone", "fedavg", "subfedavg", "dispfl")
LLM_CLIENTS = 4
LLM_DENSITIES = (0.5, 0.3)


def demo_settings(system: str) -> dict[str, Scalar]:
    """Return the settings of one system's demo run: the embedded digits, label shares of each client by Dirichlet(0.3).

    A client has 72 images of several classes, so it gains by a federation. Gossip at density 0.5 gains little there.
    """
    return {
        "system": system,
        "evaluate-every": 2,
        "partition": "dirichlet-client",
        "num-server-rounds": 20,
        "fraction-train": 0.5,
        **({"density": 0.8, "dispfl.growth": "random"} if system == "dispfl" else {}),
    }


def llm_settings(density: float) -> dict[str, Scalar]:
    """Return the settings of one run on the embedded language model; clients hold packages of the standard library."""
    return {
        "system": "fedspallm",
        "dataset": "stdlib",
        "num-server-rounds": 1,
        "fraction-train": 1.0,
        "density": density,
        "batch-size": 64,
        "fedspallm.deal": "one",
        "fedspallm.block-size": 16,  # an eighth of the model's width
        "fedspallm.segments": 32,
        "fedspallm.test-windows": 256,
    }


def check_replaceable(folder: Path) -> None:
    """Raise :class:`ConfigError` unless a demo may run in ``folder`` and replace what is there.

    A demo may replace an earlier demo's run, unless somebody has continued that one.
    """
    check_out(folder)
    check_free(folder)
    is_there = (folder / "run.json").exists()
    if is_there and (not is_marked(folder, "demo") or read_info(folder).get("resumed_after_rounds")):
        raise ConfigError("--out", folder, "another folder", which="holds a run that is no demo's")
