"""The language models that runs need are on this machine before Flower starts."""

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedprune_app.config import Config


def prepare_models(configs: Iterable[Config], console: Console) -> None:
    """Train or fetch the language models that runs on this machine need.

    This happens before Flower starts, since the clients have only startup-seconds to introduce themselves. Raises
    ``ValueError`` for a model that cannot be had.
    """
    # each of them once, in the order of the runs
    for model, download in dict.fromkeys((run.model, run.download) for run in configs if run.system == "fedspallm"):
        if model == "auto":
            embedded_model(console)
            continue
        from fedprune_app.models.checkpoints import resolve_checkpoint

        with console.status(Text(f"fetching {model}" if download else f"looking for {model}")):
            resolve_checkpoint(model, download)


def embedded_model(console: Console) -> Path:
    """Return the folder of the embedded language model, which is trained now unless that was done before."""
    from fedprune_app.data.text import stdlib_training_text
    from fedprune_app.models.cached import is_whole
    from fedprune_app.models.embedded import embedded_folder, train_embedded

    texts = [document.text for document in stdlib_training_text()]
    folder = embedded_folder(texts)
    if is_whole(folder):
        return folder
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    action = "training the embedded language model, once; this takes minutes"
    console.print(action)
    with console.status(action) as status:

        def show(step: int, steps: int, loss: float) -> None:
            status.update(f"step {step} of {steps}, loss {loss:.2f}")

        return train_embedded(texts, on_step=show)
