"""Decentralised systems, the client half: start from the average with the neighbours, train, publish the result."""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch

from clients.base import ImageClient, Scores
from clients.node import ReplyFields
from clients.task import Task
from fedprune_app.core.aggregate import MaskedMean
from fedprune_app.core.named import TensorDict, Tensors, ValueDict
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State
from fedprune_app.engine.wire import Schema
from fedprune_app.models import vision


class GossipClient(ImageClient):
    """Base class of clients that average with neighbours.

    State: ``weights``, those published last, and ``masks``, under which they were trained.
    """

    declares: ClassVar = ReplyFields(training=frozenset({"accuracy-received"}))

    def peer_schema(self) -> Schema:
        """Return the schema of a neighbour's update: the shared tensors, with masks if the system prunes."""
        return self.shared_schema(self.prunable if self.prunes else ())

    @property
    @abstractmethod
    def prunes(self) -> bool:
        """Return whether the prunable tensors are masked."""

    @abstractmethod
    def start_masks(self, task: Task, state: State) -> TensorDict:
        """Return the masks to train under in this round."""

    def begin(self, task: Task, state: State) -> TensorDict:
        """Return ``w_{k,t+1/2}``: the average of the neighbours' models and the client's own, under this round's masks.

        Without neighbours' models it is the client's own model, at first the common initial one. A client that has not
        trained adds no model, and keeps its initial weights where no neighbour has a weight.
        """
        own_weights, start = state.group("weights"), self.own_model(state)
        tensors, held_masks, updates = task.payload.tensors, task.payload.masks, dict(task.peer_updates)
        if updates:
            if own_weights:
                updates[self.client_id] = Payload(
                    {name: own_weights[name] for name in self.shared}, state.group("masks")
                )
            mean = MaskedMean(len(updates))
            for sender, update in updates.items():
                try:
                    mean.add(update)
                except ValueError as error:  # finite, but too large to be summed
                    task.notes.append(f"peer/{sender} is left out: {error}")
            tensors, held_masks = mean.mixed(), mean.held()
        if not own_weights:
            tensors = {
                name: torch.where(held_masks[name], t, start[name]) if name in held_masks else t
                for name, t in tensors.items()
            }
        masks = self.start_masks(task, state)
        start = {**start, **tensors}
        return {name: torch.where(masks[name], t, 0) if name in masks else t for name, t in start.items()}

    def personal_model(self, task: Task, state: State) -> TensorDict:
        return state.group("weights") or self.begin(replace(task, payload=Payload({}), peer_updates={}), state)

    def received_scores(self, task: Task, state: State) -> Scores:
        """Test the consensus model; the start of training is tested by :meth:`test_start`."""
        consensus = {**self.local_norms(state), **task.payload.tensors}
        scores = {"accuracy-global": self.test_accuracy(task, consensus)}
        if self.validates == "received":
            scores["accuracy-validation"] = self.accuracy(task, "validation")
        return scores

    def test_start(self, task: Task, start: Tensors) -> ValueDict:
        """Load the start of training, and test it in rounds that end with an evaluation.

        A client whose budget cannot pay for both training and a count does not test.
        """
        vision.load_state_tensors(self.model, start)
        is_tested = task.fields.get("evaluates") and (self.privacy is None or self.privacy.spares_count())
        score = self.accuracy(task, "test") if is_tested else None
        return {} if score is None else {"accuracy-received": score}
