"""Gradients of a step: of one client's network as it is, or of several clients' in their grouped form."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fedprune_app.core.named import TensorDict
from fedprune_app.learning.device import computing
from fedprune_app.learning.flat import Flat, FlatLayout
from fedprune_app.learning.grouped import grouped_gradients
from fedprune_app.learning.parts import Changes, Work, leading_network, weights_set_aside
from fedprune_app.learning.training import Training


class SingleClient:
    """Gradients of one client's network or a part of it, private ones included.

    ``loss_sums`` (1,) is the sum of the examples' losses so far. Its contexts are entered on ``stack``.
    """

    def __init__(self, training: Training, flat: Flat, stack: ExitStack) -> None:
        self._training = training
        self._flat = flat
        layout = flat.layout
        self._whole = Work(
            network=training.model,
            by_client=[(layout.views(flat.values), layout.views(flat.gradients))],
            values=[flat.values],
            gradients=[flat.gradients],
            velocity=None if flat.velocity is None else [flat.velocity],
            kept=None if flat.kept is None else [flat.kept],
            named_kept={} if flat.kept is None else layout.views(flat.kept),
        )
        self.loss_sums = torch.zeros(1, dtype=torch.float64, device=training.device)
        self._parameters = dict(training.model.named_parameters())
        self._places: dict[int, tuple[Tensor, Tensor]] = {}  # by size of the batch
        if (private := training.private) is not None:
            whole, shape = self._whole, training.images.shape[1:]
            context = private.attached(training.model, whole.named_gradients, whole.trained(), shape)
            self._private_step = stack.enter_context(context)

    @contextmanager
    def step(self, batches: Sequence[Tensor]) -> Iterator[Changes]:
        """Compute the gradients on the examples at these positions, and yield the tensors that the step changes."""
        (batch,) = batches
        with self._work(batch) as work:
            if self._training.private is None:
                self._back_propagate(work, *self._training.examples(batch))
            else:
                self._find_private_gradients(work, batch)
            yield work

    @contextmanager
    def _work(self, batch: Tensor) -> Iterator[Work]:
        """Yield the tensors of a step: the whole network as two flat tensors, or a part of the network."""
        training, flat = self._training, self._flat
        if training.part is None:
            flat.gradients.zero_()
            yield self._whole
            return
        # the size of a private batch is itself private
        private = training.private
        size = len(batch) if private is None else round(training.expected_batch * private.group_limit)
        part = training.part(size)
        velocity = None if flat.velocity is None else flat.layout.views(flat.velocity)
        if part.extents:
            kept = None if flat.kept is None else self._whole.named_kept
            with leading_network(training.model, part, self._whole.named_values, velocity, kept) as work:
                yield work
            return
        flat.gradients.zero_()
        with weights_set_aside(part.masks, self._whole.named_values, velocity) as keep:
            yield replace(self._whole, keep=keep)

    def put(self, batches: Sequence[Tensor]) -> int:
        """Copy the examples at these positions to the memory of a recorded step; return their number."""
        (batch,) = batches
        if len(batch) not in self._places:
            self._places[len(batch)] = self._training.examples(batch)
        self._training.put_examples(batch, *self._places[len(batch)])
        return len(batch)

    def find_gradients(self, size: int) -> Changes:
        """Compute the gradients on the examples of :meth:`put`, all in fixed memory."""
        self._flat.gradients.zero_()
        self._back_propagate(self._whole, *self._places[size])
        return self._whole

    def _back_propagate(self, work: Work, images: Tensor, labels: Tensor) -> None:
        training = self._training
        with computing(training.device, training.precision):
            loss = training.objective(work.network, images, labels)
        for name, gradient in self._whole.named_gradients.items():
            if self._parameters[name].grad is None:  # the objective or a hook has called zero_grad()
                self._parameters[name].grad = gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss_sums.add_(loss.detach(), alpha=len(labels))

    def _find_private_gradients(self, work: Work, batch: Tensor) -> None:
        training, private, private_step = self._training, self._training.private, self._private_step
        assert private is not None
        if training.part is not None:
            private_step = private_step.of_part(work.network, work.named_gradients, work.trained())
        alone, groups = private.parted(batch)
        for chunk in torch.split(alone.to(training.device), private.physical_batch):
            if len(chunk):
                private_step.add(*training.examples(chunk))
        for group in groups:
            chunks = torch.split(group.to(training.device), private.physical_batch)
            private_step.add_group(training.examples(chunk) for chunk in chunks)
        private_step.finish(training.expected_batch)


class Grouped:
    """Gradients of several clients' networks computed as one, each on its own batch.

    Clients whose training is over come last. Batches that are smaller than others, at the end of an epoch, are padded
    with examples of weight 0. ``loss_sums`` (clients,) are the sums of the examples' losses so far.
    """

    def __init__(self, trainings: Sequence[Training], flat: Flat) -> None:
        first = trainings[0]
        assert first.form is not None
        self._form = first.form
        self._trainings = trainings
        self._flat = flat
        clients, size, device = len(trainings), first.batch_size, first.device
        self._images = torch.zeros(clients, size, *first.images.shape[1:], dtype=first.images.dtype, device=device)
        self._labels = torch.zeros(clients, size, dtype=torch.int64, device=device)
        self._sizes: list[int] = []
        self._weights = torch.zeros(clients, size, device=device)
        self._counts = torch.zeros(clients, dtype=torch.int64, device=device)
        self._networks: dict[int, tuple[TensorDict, list[Tensor], Changes]] = {}
        self._frozen = _frozen_values(trainings, flat.layout)
        # on a CPU, gathering per client is as fast as for all at once, and needs no copy of the examples
        gathers_at_once = device.type != "cpu" and not any(training.augment for training in trainings)
        self._pool = _Pool(trainings) if gathers_at_once else None
        self.loss_sums = torch.zeros(clients, dtype=torch.float64, device=device)

    def step(self, batches: Sequence[Tensor]) -> nullcontext[Changes]:
        """Compute the gradients on the examples at these positions; as a context, the tensors that the step changes."""
        self.put(batches)
        return nullcontext(self.find_gradients(len(batches)))

    def put(self, batches: Sequence[Tensor]) -> int:
        """Copy the examples at these positions to the memory of the next step; return the number of clients."""
        sizes = [len(batch) for batch in batches]
        if sizes != self._sizes:
            self._sizes = sizes
            weights = torch.zeros(len(sizes), self._images.shape[1])
            for row, size in zip(weights, sizes, strict=True):
                row[:size] = 1 / size
            self._weights[: len(sizes)] = weights.to(self._weights.device)
            self._counts[: len(sizes)] = torch.tensor(sizes, device=self._counts.device)
        if self._pool is not None:
            self._pool.put(batches, self._images, self._labels)
        else:
            for number, batch in enumerate(batches):
                self._trainings[number].put_examples(batch, self._images[number], self._labels[number])
        return len(batches)

    def find_gradients(self, clients: int) -> Changes:
        """Compute the gradients on the examples of :meth:`put`, and return the tensors that a step changes.

        All tensors that it reads and writes stay in place from step to step.
        """
        weights, gradients, changes = self._network(clients)
        leaves = [weights[name] for name in self._flat.layout.names]
        losses, new_gradients = grouped_gradients(
            self._form, weights, leaves, self._images[:clients], self._labels[:clients], self._weights[:clients]
        )
        torch._foreach_copy_(gradients, new_gradients)
        self.loss_sums[:clients] += losses.sum(1) * self._counts[:clients]
        return changes

    def _network(self, clients: int) -> tuple[TensorDict, list[Tensor], Changes]:
        """Return the first clients' weights and gradients for the grouped form, and the tensors that a step changes."""
        if clients not in self._networks:
            layout = self._flat.layout
            gradients = [layout.stacked(self._flat.gradients, name, clients) for name in layout.names]
            self._networks[clients] = self._weights_of(clients), gradients, self._changes_of(clients)
        return self._networks[clients]

    def _weights_of(self, clients: int) -> TensorDict:
        flat, layout = self._flat, self._flat.layout
        weights = {name: layout.stacked(flat.values, name, clients).detach().requires_grad_() for name in layout.names}
        if self._frozen is not None:
            frozen = self._frozen.layout
            weights |= {name: frozen.stacked(self._frozen.values, name, clients) for name in frozen.names}
        return weights

    def _changes_of(self, clients: int) -> Changes:
        flat, layout = self._flat, self._flat.layout

        def parts(tensor: Tensor) -> list[Tensor]:
            return [layout.rows(tensor, name, clients) for name in layout.names]

        rows = parts(flat.gradients)
        has_all = clients == layout.clients
        return Changes(
            by_client=[(layout.views(flat.values, k), layout.views(flat.gradients, k)) for k in range(clients)],
            values=[flat.values] if has_all else parts(flat.values),
            gradients=[flat.gradients] if has_all else rows,
            velocity=None if flat.velocity is None else [flat.velocity] if has_all else parts(flat.velocity),
            kept=None if flat.kept is None else [flat.kept] if has_all else parts(flat.kept),
            rows=rows,
        )


class _Pool:
    """The examples of all clients as one tensor, so that a GPU gathers a step's batches in a few operations."""

    def __init__(self, trainings: Sequence[Training]) -> None:
        images, labels = zip(*(training.on_device for training in trainings), strict=True)
        self._images, self._labels = torch.cat(images), torch.cat(labels)
        counts = torch.tensor([0, *map(len, labels)])[:-1]
        self._starts = counts.cumsum(0)[:, None].to(self._labels.device)

    def put(self, batches: Sequence[Tensor], images: Tensor, labels: Tensor) -> None:
        """Copy the examples at these positions to each client's row; its first one pads a smaller batch."""
        most = images.shape[1]
        full = [
            batch if len(batch) == most else torch.cat([batch, batch[:1].expand(most - len(batch))])
            for batch in batches
        ]
        positions = (torch.stack(full) + self._starts[: len(full)]).flatten()
        torch.index_select(self._images, 0, positions, out=images.flatten(0, 1)[: len(positions)])
        torch.index_select(self._labels, 0, positions, out=labels.flatten()[: len(positions)])


def _frozen_values(trainings: Sequence[Training], trained: FlatLayout) -> Flat | None:
    """Return the values of the parameters that are not trained; None if all are."""
    model = trainings[0].model
    if not (names := [name for name, _ in model.named_parameters() if name not in trained.names]):
        return None
    frozen = Flat(FlatLayout(model, names, len(trainings)))
    for client, training in enumerate(trainings):
        parameters = dict(training.model.named_parameters())
        for name, values in frozen.layout.views(frozen.values, client).items():
            values.copy_(parameters[name].detach())
    return frozen
