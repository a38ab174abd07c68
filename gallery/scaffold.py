"""SCAFFOLD: control variates take from each client's steps what makes its data differ from all others'.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1 with option II. A step is ``y ← y − η (g(y) − c_i + c)``; afterwards
``c_i⁺ = c_i − c + (x − y) / (K η)``, for K steps. The server adds the mean change of the models (η_g = 1, as in all
the paper's experiments), and ``|S| / N`` times the mean change of the ``c_i``. All clients count alike.

Option II takes the client's movement for the sum of its gradients, so momentum is refused. Deviations: K is the number
of a client's own steps, more where it has more data; the paper has one K. It has no weight decay and no clipping:
decay gets into c_i as part of the gradient, and with ``max-grad-norm`` the corrected gradient is clipped, so that c_i
has what is left of it. S are the clients that replied, N the members of the run. Running statistics have no control
variate, and are averaged as they are. The client also answers for its last local model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedprune_app import extend as fp


class Scaffold(fp.FedAvg):
    """The server has a model x and a control variate c, and sends both."""

    by_examples = False
    paper_formula = "64 bits per parameter, both ways: the model and its control variate"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        if momentum := self.config.momentum:
            raise fp.ConfigError("momentum", momentum, "0", condition="with system 'scaffold'")
        self.control = {name: torch.zeros_like(tensor) for name, tensor in self.model.items()}

    def both(self) -> dict[str, Tensor]:
        """Return x and c as they travel."""
        return fp.grouped(model=self.model, control=self.control)

    def send(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(round.participants, fp.Payload(self.both()))

    def expect(self, round: fp.Round, client: int) -> fp.Schema:
        return fp.Schema.like(self.both())

    def end(self, round: fp.Round) -> None:
        """Take lines 16 and 17: clients sent their models, and by how much their control variates changed."""
        means = fp.State(self.mean.mean(self.both()))
        self.model, changes = means.group("model"), means.group("control")
        share = round.log.replies / len(self.members)
        self.control = {name: value + share * changes[name] for name, value in self.control.items()}

    def paper_bytes(self, round: fp.Round) -> tuple[float, float]:
        down, up = super().paper_bytes(round)
        return 2 * down, 2 * up

    def state(self) -> fp.State:
        state = super().state()
        return fp.State({**state.tensors, **fp.grouped(control=self.control)}, state.meta)

    def restore(self, state: fp.State) -> None:
        super().restore(state)
        self.control = state.group("control")


class ScaffoldClient(fp.ImageClient):
    """State: the last local ``weights`` and the client's ``control`` variate c_i."""

    not_summed = ""
    validates = "global"

    def message_schema(self) -> fp.Schema:
        tensors = {name: t for name, t in self.own_model(fp.State()).items() if name in self.shared}
        return fp.Schema.like(fp.grouped(model=tensors, control=tensors))

    def begin(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        model_tensors = fp.State(task.payload.tensors).group("model") or dict(task.payload.tensors)
        return {**state.group("weights"), **model_tensors}

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        begin, control = self.begin(task, state), fp.State(task.payload.tensors).group("control")
        own_control = state.group("control") or {name: torch.zeros_like(t) for name, t in control.items()}
        names = self.sizes.keys() & control.keys()  # norms of the client's own have no correction
        corrections = {name: (control[name] - own_control[name]).to(self.device) for name in names}

        def correct(values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
            for name in corrections:
                gradients[name].add_(corrections[name])

        result, tensors = self.train_from_start(task, state, adjust_gradients=correct)
        scale = result.num_steps * self.config.learning_rates[task.round]
        change = {name: torch.zeros_like(t) for name, t in control.items()}
        change |= {name: (begin[name] - tensors[name]) / scale - control[name] for name in names}
        payload = fp.Payload(fp.grouped(model={name: tensors[name] for name in self.shared}, control=change))
        new_control = {name: own_control[name] + change[name] for name in own_control}
        return fp.Update(
            payload, fp.State(fp.grouped(weights=tensors, control=new_control)), result, self.costs.training()
        )


summary = "SCAFFOLD: control variates against client drift"
fp.register_system("scaffold", strategy=Scaffold, client=ScaffoldClient, summary=summary)
