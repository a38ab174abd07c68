"""Checks before Flower starts, so that errors of a run's server or first client show at once.

Both are made as in the run, in a temporary folder. With code of a user or with privacy they run a round of two clients
with a few examples. The language models that runs need are made or downloaded first.
"""

import copy
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context, Message
from rich.console import Console
from rich.text import Text

from clients.base import ImageClient
from clients.context import NodeContext
from clients.fedspallm import FedSpaLLMClient
from fedprune_app import plugins
from fedprune_app.config import Config, ConfigError, written_below
from fedprune_app.core.bounds import rounded_down_text
from fedprune_app.data.splits import ClientData, check_repeatable, part_sizes, unread
from fedprune_app.data.text import stdlib_training_text
from fedprune_app.engine.simulated_grid import InProcessGrid, quiet
from fedprune_app.engine.store import VersionedStore, new_run_key
from fedprune_app.federation.clients import ImageClientInfo, Roster
from fedprune_app.federation.participation import check_min_replies, least_members
from fedprune_app.federation.round import RunContext
from fedprune_app.files import may_write, scratch_folder
from fedprune_app.learning import text_cache
from fedprune_app.learning.language_models import evaluation_windows
from fedprune_app.models.cached import is_whole
from fedprune_app.models.embedded import embedded_folder, train_embedded, write_untrained
from fedprune_app.models.layer_pruning import check_layers, same_inputs
from fedprune_app.models.llm import open_model
from fedprune_app.models.names import chosen_name
from fedprune_app.models.sources import resolve_checkpoint
from fedprune_app.preflight.inputs import Placement
from fedprune_app.registry import SYSTEMS
from fedprune_app.results.recorder import Recorder
from fedprune_app.results.tracking import check_tracker
from fedprune_app.strategy_builders import image_strategy
from strategies.fedspallm import check_pattern


def prepare_models(configs: Iterable[Config], console: Console) -> None:
    """Train or download the language models that runs on this machine need.

    This precedes the start of Flower, since clients have only startup-seconds to register. Raises ``ValueError`` for a
    model that is not available.
    """
    # each once, in the order of the runs
    for model, download in dict.fromkeys(
        (run.model, run.download) for run in configs if SYSTEMS[run.system].reads_text
    ):
        if model == "auto":
            embedded_model(console)
            continue
        with console.status(Text(f"fetching {model}" if download else f"looking for {model}")):
            resolve_checkpoint(model, download)


def embedded_model(console: Console) -> Path:
    """Return the folder of the embedded language model; train it now if it does not exist."""
    texts = [document.text for document in stdlib_training_text()]
    folder = embedded_folder(texts)
    if is_whole(folder):
        return folder
    torch.set_num_threads(os.cpu_count() or 1)
    action = "training the embedded language model, once; this takes minutes"
    console.print(action)
    with console.status(action) as status:
        begun: list[tuple[int, float]] = []  # the first step here, and when it was over

        def show(step: int, steps: int, loss: float) -> None:
            begun.append((step, time.monotonic()))
            first, start = begun[0]
            left = (steps - step) * (time.monotonic() - start) / max(1, step - first)
            status.update(f"step {step} of {steps}, loss {loss:.2f}, about {left:.0f} s left")

        return train_embedded(texts, on_step=show)


def check_texts(config: Config, num_clients: int) -> None:
    """Raise ``ValueError`` if a run of ``num_clients`` would fail on its text or its language model.

    Every client is made, and reads and cuts its text as in the run. The model is opened, and one decoder layer of each
    kind is computed.
    """
    check_min_replies(config, num_clients, num_clients)
    with scratch_folder() as folder, with_a_model(config) as local_config:
        client_config = written_below(folder, local_config)  # so that no client's ledger changes
        for number in range(num_clients):
            client = FedSpaLLMClient(client_config, NodeContext(number, num_clients, folder / "clients"))
            client.read_text()
        evaluation_windows(local_config, client.model)
        check_layers(client.model)
        if config.fedspallm.merge == "hessians":
            same_inputs(client.model)
        check_pattern(local_config, client.model)


@contextmanager
def with_a_model(config: Config) -> Iterator[Config]:
    """Yield the settings with a model on this machine, on the CPU.

    A random model of the same shapes and tokenizer replaces the embedded one if that is not trained yet.
    """
    local_config = replace(config, device="cpu")
    if config.model != "auto" or embedded_folder([document.text for document in stdlib_training_text()]).is_dir():
        yield local_config
        return
    with scratch_folder() as folder:
        write_untrained(folder / "model")
        yield replace(local_config, model=str(folder / "model"))


# --- the checks -------------------------------------------------------------------------------------------------------


def warnings(config: Config, placement: Placement) -> list[str]:
    """Return the warnings about unused data and those of the strategy.

    Raises :class:`ConfigError` for a run that could not start, as far as this machine can check. A language model may
    be large, so no server is made for it: its text is read, and its folder is opened.
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
        if SYSTEMS[config.system].reads_text:
            check_texts(config, num_clients)
            return []
        with scratch_folder() as folder:
            return _make_halves(written_below(folder, config), num_clients, folder)  # changes no client's ledger
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    except Exception as error:
        if not plugins.described(config.to_dict()):
            raise
        raise ConfigError(plugins.error_line(error)) from error
    finally:
        if placement.engine != "inprocess":  # other processes need the memory
            text_cache.clear_cache()
            open_model.cache_clear()


def _check_budget(config: Config, sizes: Sequence[int], folder: Path) -> None:
    """Raise :class:`ConfigError` if too few clients' privacy budgets can pay for the training of a round.

    ``sizes`` has each client's number of training examples. The client with the most is charged least.
    """
    k = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[: least_members(config)][-1]
    client = SYSTEMS[config.system].client(config, NodeContext(k, len(sizes), folder / "clients"))
    assert isinstance(client, ImageClient)
    assert client.privacy is not None
    if client.privacy.affords_a_round:
        return
    limit = config.dp.epsilon_limit
    key = "dp.epsilon-budget" if limit == config.dp.epsilon_budget else "dp.target-epsilon"
    allowed = f"at least {rounded_down_text(client.privacy.round_epsilon())}, which one round of client {k} spends"
    raise ConfigError(key, limit, allowed, condition="with these settings")


_FEW = 4  # examples of a client


def _of_one_round(config: Config, num_clients: int) -> Config:
    """Return the settings of one round with few examples, at a learning rate at which no network diverges."""
    return replace(
        config,
        num_server_rounds=1,
        fraction_train=1.0,
        drop_probability=0.0,
        secure_sums=False,  # whose members write down what they have added up
        holdout_clients=0,
        min_replies=num_clients,
        local_epochs=min(config.local_epochs, 2),
        steps_per_epoch=2,
        batch_size=_FEW,
        learning_rate=1e-3,
        validation_fraction=0.5,  # as many validation as training examples
        dp=replace(config.dp, noise_multiplier=1.0, target_epsilon=0.0, epsilon_budget=0.0),
        fedltp=replace(config.fedltp, tickets=min(config.fedltp.tickets, 1), ticket_iterations=1, public_samples=9),
    )


def _try_round(client: ImageClient, context: RunContext) -> None:
    """Run a round of two clients like ``client`` with a few of its examples, by the system's own code.

    Raises :class:`ConfigError` if the network or a plug-in's system fails.
    """
    num_clients = min(len(context.clients), 2)
    config = _of_one_round(client.config, num_clients)
    labels = client.data.train_labels
    positions = torch.arange(_FEW) % len(labels)
    few = client.data.train_images[positions], labels[positions]
    images = copy.copy(client.images)
    images.data, images.sizes = ClientData(*few, *few, *few), dict.fromkeys(images.sizes, _FEW)
    images.groups = {part: torch.arange(_FEW) // 2 for part in images.groups}
    kind = type(client)
    tried_kind: type[ImageClient] = type(kind.__name__, (kind,), {"local_images": lambda _: images})
    failures: list[str] = []

    def answer(message: Message, node: Context) -> Message:
        place = replace(client.context, client_id=int(node.node_config["partition-id"]), run_key=context.run_key)
        try:
            return tried_kind(config, place).reply_to(message)
        except Exception as error:
            step = message.metadata.message_type
            failures.append(f"fails when a client of {config.system} is asked to {step}: {plugins.error_line(error)}")
            raise

    grid = InProcessGrid(answer, num_clients, config.to_dict())
    roster = {k: replace(context.clients[k], node_id=i, num_examples=_FEW) for k, i in enumerate(grid.get_node_ids())}
    strategy = image_strategy(replace(context, config=config, clients=roster))
    try:
        with quiet():
            grid.serve(lambda grid, _: strategy.run(grid))
    except Exception as error:
        if not failures:
            raise
        name = chosen_name(config.model, config.dataset)
        raise ConfigError("model", name, which=failures[0]) from error


def _make_halves(config: Config, num_clients: int, folder: Path) -> list[str]:
    """Make client 0, and a server with copies of it as clients; return the server's warnings."""
    system = SYSTEMS[config.system]
    client = system.client(config, NodeContext(0, num_clients, folder / "clients"))
    assert isinstance(client, ImageClient)
    check_repeatable(client.images.data_config, num_clients)
    sizes = [client.num_examples] * num_clients
    if config.dp.enabled:  # privacy depends on each client's number of examples
        sizes = [part_sizes(client.images.data_config, k, num_clients)["train"] for k in range(num_clients)]
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
    context = RunContext(config, roster, recorder, checkpoints, key)
    warnings = image_strategy(context).warnings()
    if config.dp.enabled or plugins.described(config.to_dict()):
        _try_round(client, context)
    recorder.finish("interrupted")
    return [*unread(client.images.data_config), *warnings]
