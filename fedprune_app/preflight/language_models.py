"""The language models that runs need are on this machine before Flower starts."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from clients.fedspallm import FedSpaLLMClient, evaluation_windows
from clients.node import Place
from fedprune_app.config import Config, written_below
from fedprune_app.data.text import stdlib_training_text
from fedprune_app.federation.participation import check_min_replies
from fedprune_app.files import scratch_folder
from fedprune_app.models.embedded import embedded_folder, write_untrained
from fedprune_app.models.layer_pruning import check_layers, same_inputs
from fedprune_app.models.zero_shot import check_tasks
from strategies.fedspallm import check_pattern


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


def check_texts(config: Config, num_clients: int) -> None:
    """Raise ``ValueError`` if a run of ``num_clients`` would refuse its text or its language model.

    Every client is made, and reads and cuts its text as in the run. The model is opened, and one decoder layer of each
    kind computes.
    """
    check_min_replies(config, num_clients, num_clients)
    check_tasks(config.fedspallm.tasks())
    with scratch_folder() as folder, with_a_model(config) as local_config:
        client_config = written_below(folder, local_config)  # no client's ledger is touched
        for number in range(num_clients):
            client = FedSpaLLMClient(client_config, Place(number, num_clients, folder / "clients"))
            client.read_text()
        evaluation_windows(local_config, client.model)
        check_layers(client.model)
        if config.fedspallm.merge == "hessians":
            same_inputs(client.model)
        check_pattern(local_config, client.model)


@contextmanager
def with_a_model(config: Config) -> Iterator[Config]:
    """Yield the settings with a model that is on this machine, on the CPU.

    A random one stands for the embedded model where that is not trained yet. It has the same shapes and tokenizer.
    """
    local_config = replace(config, device="cpu")
    if config.model != "auto" or embedded_folder([document.text for document in stdlib_training_text()]).is_dir():
        yield local_config
        return
    with scratch_folder() as folder:
        write_untrained(folder / "model")
        yield replace(local_config, model=str(folder / "model"))
