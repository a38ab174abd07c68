"""A run is checked before Flower starts: whatever its server or its first client would refuse is refused here.

Both are made as the run makes them, in a temporary folder, and asked nothing but who they are. The language models
that runs need are brought to this machine first.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from clients.base import ImageClient
from clients.fedspallm import FedSpaLLMClient
from clients.place import Place
from fedprune_app import plugins
from fedprune_app.config import Config, ConfigError, written_below
from fedprune_app.core.bounds import least_said
from fedprune_app.core.rng import generator
from fedprune_app.data.splits import check_repeatable, label_counts, unread
from fedprune_app.data.text import stdlib_training_text
from fedprune_app.engine.store import VersionedStore, new_run_key
from fedprune_app.federation.clients import ImageClientInfo, Roster
from fedprune_app.federation.participation import check_min_replies
from fedprune_app.federation.round import RunContext
from fedprune_app.files import may_write, scratch_folder
from fedprune_app.learning import text_cache
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.learning.language_models import evaluation_windows
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models.cached import is_whole
from fedprune_app.models.embedded import embedded_folder, train_embedded, write_untrained
from fedprune_app.models.layer_pruning import check_layers, same_inputs
from fedprune_app.models.llm import open_model
from fedprune_app.models.names import chosen_name
from fedprune_app.models.sources import resolve_checkpoint
from fedprune_app.preflight.given import Placement
from fedprune_app.privacy.noise import KeyedNoise
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.recorder import Recorder
from fedprune_app.results.tracking import check_tracker
from fedprune_app.strategy_builders import BUILDS
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
        with console.status(Text(f"fetching {model}" if download else f"looking for {model}")):
            resolve_checkpoint(model, download)


def embedded_model(console: Console) -> Path:
    """Return the folder of the embedded language model, which is trained now unless that was done before."""
    texts = [document.text for document in stdlib_training_text()]
    folder = embedded_folder(texts)
    if is_whole(folder):
        return folder
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


# --- the checks -------------------------------------------------------------------------------------------------------


def doubts(config: Config, placement: Placement) -> list[str]:
    """Return what makes a run at this place less than its settings seem to say.

    This is what of the data is not read, and what the strategy doubts. Raises :class:`ConfigError` for a run that could
    not start, as far as this machine can tell. A language model may be large, so its server is not made: its text is
    read, and its folder is opened.
    """
    if placement.engine != "inprocess" or not placement.is_simulation:
        plugins.check_reachable(config.to_dict())
    num_clients = placement.clients
    if num_clients < config.min_clients and not placement.superlink:
        raise ConfigError("min-clients", config.min_clients, "at most that", condition=f"with {num_clients} clients")
    if not placement.shares_data:
        return []
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "auto, cpu", condition="on this machine, which has no GPU")
    try:
        for key, place in (("state-dir", config.state_dir), ("dp.ledger-dir", config.dp.ledger_dir)):
            if place and not may_write(Path(place).expanduser()):
                raise ConfigError(key, place, "a folder in which you may write")
        if SYSTEMS[config.system].data == "text":
            check_texts(config, num_clients)
            return []
        with scratch_folder() as folder:
            return _make_halves(written_below(folder, config), num_clients, folder)  # no client's ledger is touched
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    except Exception as error:
        if not plugins.described(config.to_dict()):
            raise
        raise ConfigError(plugins.told(error)) from error
    finally:
        if placement.engine != "inprocess":  # other processes do the work, and need the memory
            text_cache.forget_documents()
            open_model.cache_clear()


def _check_budget(config: Config, sizes: Sequence[int], folder: Path) -> None:
    """Raise :class:`ConfigError` where no client's privacy budget bears the training of a round.

    ``sizes`` has each client's number of training examples. The one with the most spends the least.
    """
    k = sizes.index(max(sizes))
    client = SYSTEMS[config.system].client(config, Place(k, len(sizes), folder / "clients"))
    assert isinstance(client, ImageClient)
    assert client.privacy is not None
    if client.privacy.affords_a_round:
        return
    key = "dp.epsilon-budget" if config.dp.epsilon_budget else "dp.target-epsilon"
    limit = config.dp.epsilon_budget or config.dp.target_epsilon
    allowed = f"at least {least_said(client.privacy.round_epsilon())}, which one round of client {k} spends"
    raise ConfigError(key, limit, allowed, condition="with these settings")


def _try_network(client: ImageClient, name: str) -> None:
    """Have the client train its network for a step on two examples, and test it, as in round 1.

    Raises :class:`ConfigError` where the network fails.
    """
    config, private = client.config, None
    indices = torch.arange(2) % client.num_examples
    images, labels = client.data.train_images[indices], client.data.train_labels[indices]
    if client.privacy is not None:
        from fedprune_app.privacy.dpsgd import DPSGD

        private = DPSGD(1.0, 1.0, 1.0, 1, KeyedNoise(bytes(32)), config.dp.grad_sample)
    try:
        model = copy.deepcopy(client.model)
        options: dict[str, Any] = {"private": private, "device": client.device, "precision": config.precision}
        client.costs.training()
        train(model, images, labels, SGD(1e-3), rng=generator(config.seed, "trial"), **options)
        evaluate(model, images, labels, device=client.device, precision=config.precision)
    except Exception as error:  # a user's network raises what it likes
        error_text = " ".join((str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}").split())
        purpose = "private training" if private else "training"
        raise ConfigError(
            "model", name, which=f"cannot be used for {purpose} with {config.system}", hint=error_text
        ) from error


def _make_halves(config: Config, num_clients: int, folder: Path) -> list[str]:
    """Make client 0, and a server that takes all others to be like this client; return what the server doubts."""
    system = SYSTEMS[config.system]
    client = system.client(config, Place(0, num_clients, folder / "clients"))
    assert isinstance(client, ImageClient)
    check_repeatable(client.images.data_config, num_clients)
    _try_network(client, str(chosen_name(config.model, config.dataset)))
    sizes = [client.num_examples] * num_clients
    if config.dp.enabled:  # the promise depends on how many examples each client has
        sizes = [sum(label_counts(client.images.data_config, k, num_clients)["train"]) for k in range(num_clients)]
        if client.privacy is not None and not client.privacy.affords_a_round:
            _check_budget(config, sizes, folder)
    first_client = ImageClientInfo.read(0, client.get_properties({}))
    roster: Roster = {k: replace(first_client, id=k, node_id=k, num_examples=size) for k, size in enumerate(sizes)}
    if config.tracking != "none":
        check_tracker(config.tracking)
    recorder = Recorder(folder / "run")
    key = new_run_key()
    recorder.start({"system": config.system}, config.seed, {"headline": system.strategy.headline, "run_key": key})
    checkpoints = VersionedStore(folder / "run" / "checkpoints")
    strategy = BUILDS[system.data](RunContext(config, roster, recorder, checkpoints, key))
    recorder.finish("interrupted")
    return [*unread(client.images.data_config), *strategy.doubts()]
