"""The demo is small enough for two cores and three minutes, and real in every part; ``fedprune demo`` runs it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedprune_app.config import Config, ConfigError, Scalar
from fedprune_app.results.lock import is_held
from fedprune_app.results.ownership import check_free, is_marked
from fedprune_app.results.reader import read_info

DEMO_CLIENTS = 20
DEMO_SYSTEMS = ("standalone", "fedavg", "subfedavg", "dispfl")
LLM_CLIENTS = 4
LLM_DENSITIES = (0.5, 0.3)


def demo_settings(system: str) -> dict[str, Scalar]:
    """Return the settings of one system's demo run: the embedded digits, two label shards per client."""
    return {"system": system, "num-server-rounds": 20, "fraction-train": 0.5, "evaluate-every": 2}


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


def check_replaceable(folder: Path, force: bool) -> None:
    """Raise :class:`ConfigError` unless a demo may run in ``folder`` and replace what is there.

    A demo may replace an earlier demo's run, unless somebody has continued that one. ``force`` allows any run that is
    over.
    """
    if is_held(folder):
        raise ConfigError(f"{str(folder)!r} is in use by another process, allowed: a run that is over")
    if force:
        return
    check_free(folder)
    if not (folder / "run.json").exists():
        return
    if not is_marked(folder, "demo") or read_info(folder).get("resumed_after_rounds"):
        raise ConfigError(f"{str(folder)!r} holds a run that is no demo's, allowed: another --out, or --force")


def prepare_models(configs: Iterable[Config], console: Console) -> None:
    """Train or fetch the language models that runs on this machine need.

    This happens before Flower starts, since the clients have only startup-seconds to introduce themselves. Raises
    ``ValueError`` for a model that cannot be had.
    """
    asked = {(config.model, config.download): None for config in configs if config.system == "fedspallm"}
    for model, download in asked:  # in the order of the runs
        if model == "auto":
            embedded_model(console)
            continue
        from fedprune_app.models.checkpoints import resolve_checkpoint

        with console.status(Text(f"fetching {model}" if download else f"looking for {model}")):
            resolve_checkpoint(model, download)


def embedded_model(console: Console) -> Path:
    """Return the folder of the embedded language model, which is trained now unless that was done before."""
    from fedprune_app.data.text import stdlib_training_text
    from fedprune_app.models.embedded import embedded_folder, is_whole, train_embedded

    texts = [document.text for document in stdlib_training_text()]
    folder = embedded_folder(texts)
    if is_whole(folder):
        return folder
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    if not console.is_terminal:  # a bar is shown there alone
        console.print("training the embedded language model, once; this takes minutes")
    columns = (TextColumn("{task.description}", style="bold"), BarColumn(bar_width=24), MofNCompleteColumn())
    said = TextColumn("{task.fields[said]}")
    with Progress(*columns, said, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training the embedded language model, once", total=None, said="")

        def show(step: int, steps: int, loss: float) -> None:
            bar.update(task, completed=step, total=steps, said=f"loss {loss:.2f}")

        return train_embedded(texts, on_step=show)
