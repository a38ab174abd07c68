"""Fed-LTP's Algorithm 1: winning tickets, which the server trains on public data. Nothing private is read here."""

import logging
import time

import numpy as np
from torch import Tensor, nn

from fedprune_app.config import Config, ConfigError
from fedprune_app.core import rng
from fedprune_app.core.masks import full_masks
from fedprune_app.core.payload import Payload
from fedprune_app.core.tickets import Ticket, selection_probabilities, ticket_masks
from fedprune_app.data.data_config import data_config
from fedprune_app.data.public import public_dataset, some_of
from fedprune_app.data.splits import public_part
from fedprune_app.learning.device import device_of
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.learning.hooks import adam
from fedprune_app.learning.sgd import SGD
from fedprune_app.learning.train import train
from fedprune_app.models import vision
from fedprune_app.models.initial import initial_model, trains_on_one
from fedprune_app.models.names import chosen_name

log = logging.getLogger("flwr.fedprune")


def winning_ticket(config: Config, shape: tuple[int, int, int], num_classes: int) -> Ticket:
    """Train and prune ``fedltp.tickets`` networks on public data and draw one, for images of ``shape``.

    The score of a ticket is that of the trained and pruned network, on the images it was trained on. Raises
    :class:`ConfigError` for public data of other classes.
    """
    options = config.fedltp
    model = initial_model(config.model, config.dataset, shape, num_classes, init=config.init, seed=config.seed)
    initial = vision.state_tensors(model, include_buffers=True)
    weights = vision.prunable_names(model)
    if not options.tickets:
        masks = full_masks({name: initial[name].shape for name in weights})
        return Ticket(initial, initial, masks, {"tickets": 0, "public_images": 0})
    start_time = time.monotonic()
    images, labels, public_classes = public_images(config, shape, num_classes)
    if public_classes != num_classes:
        raise ConfigError(
            "fedltp.public-dataset",
            options.public_dataset,
            f"one of {num_classes}, as the private data",
            which=f"has {public_classes} classes",
        )
    network = chosen_name(config.model, config.dataset)
    public_network = config.model, config.dataset, shape, public_classes
    tickets, counts = [], []
    for j in range(options.tickets):
        draw = rng.generator(config.seed, "ticket", j)
        model = vision.build_model(network, shape, public_classes, rng=draw, init=config.init)
        start_tensors = vision.state_tensors(model, include_buffers=True)  # w_0
        _train(config, model, images, labels, j, skips_lone=not trains_on_one(*public_network))
        trained_tensors = vision.state_tensors(model, include_buffers=True)  # w_j
        masks = ticket_masks({name: trained_tensors[name] for name in weights}, config.density, options.rule)
        vision.load_state_tensors(model, Payload.pruned(trained_tensors, masks).tensors)
        counts.append(evaluate(model, images, labels, device=device_of(config)).correct)
        tickets.append((start_tensors, trained_tensors, masks))
        log.info("ticket %d: %d of %d public images", j, counts[-1], len(labels))
    probabilities = selection_probabilities(counts, len(labels))
    index = int(rng.numpy_generator(config.seed, "ticket selection").choice(len(tickets), p=np.array(probabilities)))
    start_tensors, trained_tensors, masks = tickets[index]
    start = {"rewind": start_tensors, "trained": trained_tensors, "random": dict(initial)}[options.start]
    about = {
        "tickets": options.tickets,
        "public_images": len(labels),
        "correct": counts,
        "probabilities": probabilities,
        "chosen": index,
        "seconds": time.monotonic() - start_time,
    }
    return Ticket(start, trained_tensors, masks, about)


def _train(config: Config, model: nn.Module, images: Tensor, labels: Tensor, ticket: int, *, skips_lone: bool) -> None:
    """Train for k steps, which is line 4 of the algorithm.

    The text's learning rate is 1.2e-3. With Adam this is what Frankle and Carbin train with.
    """
    options = config.fedltp
    sgd = SGD(
        options.ticket_learning_rate,
        momentum=0.0,
        batch_size=options.ticket_batch_size,
        steps_per_epoch=options.ticket_iterations,
        skips_lone=skips_lone,
    )
    draw = rng.generator(config.seed, "ticket training", ticket)
    result = train(model, images, labels, sgd, rng=draw, adjust_gradients=adam(), device=device_of(config))
    if result.diverged:
        raise ConfigError(
            "model",
            config.model,
            f"one whose training on public data does not diverge (loss {result.loss_mean})",
        )


def public_images(config: Config, shape: tuple[int, int, int], num_classes: int) -> tuple[Tensor, Tensor, int]:
    """Return the public images, their labels, and the number of their classes.

    The public data are a dataset of their own, in the shape of the private one, or the share of the private dataset
    that no client has.
    """
    options = config.fedltp
    if options.public_dataset:
        folder, samples = options.public_data_dir, options.public_samples
        return public_dataset(options.public_dataset, folder, shape, samples, config.seed, config.download)
    images, labels = public_part(data_config(config))
    indices = some_of(labels.numpy(), options.public_samples, config.seed)
    return images[indices], labels[indices], num_classes
