"""AFL: the last layer is solved for in closed form, once, from sums over all clients' features, which stay frozen.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with
Pre-trained Models", CVPR 2025, arXiv 2405.16240. X are a client's features (what the last layer sees), Y its labels as
one-hot rows. A client has ``C = XᵀX + γI`` and its own solution ``W = C⁻¹XᵀY``. By the absolute aggregation law the
solution of all clients is ``(Σ C)⁻¹ Σ C W``, and their K regularisers are taken away: ``(Σ C − KγI)⁻¹ Σ C W``. That is
the least squares solution of all data, however they are dealt.

Deviations: the paper adds one client after the other by the law; here sums are exact, in any order. So a client sends
``C W = XᵀY`` in the place of W, as large, and ``XᵀX``. Without inverses at the clients γ only matters where it stays
(``afl.removes-regulariser = false``). Singular sums have the solution of least norm. What travels is divided by the
client's number of examples, which is its weight. The paper's backbone is pre-trained; here it is the run's initial
network. Where a round asks some of the clients alone, later rounds add the others. Rates and epochs have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedprune_app import extend as fp


@dataclass(frozen=True)
class AFLOptions(fp.Table):
    """The regulariser of the clients' moments, and whether the server removes it."""

    regulariser: float = fp.option(1.0, "What each client adds to the diagonal of its moments (γ).", least=0)
    removes_regulariser: bool = fp.option(True, "If true, the server takes all regularisers away before it solves.")


def solution(moments: Tensor, products: Tensor) -> Tensor:
    """Return the W of least norm that solves ``moments W = products`` by least squares."""
    inverse: Tensor = torch.linalg.pinv(moments, rtol=1e-10, hermitian=True)
    return inverse @ products


class AFL(fp.FedAvg):
    """The server sums moments and solves for the last layer; each client is added once."""

    paper_formula = "64 bits per entry of C and W, up, once; 32 bits per weight of the last layer, down"

    def __init__(self, context: fp.RunContext, model: Mapping[str, Tensor], prunable: frozenset[str]) -> None:
        super().__init__(context, model, prunable)
        self.head = fp.layers.last_layers(list(model), prunable, 1)
        if model[self.head[0]].dim() != 2:
            raise fp.ConfigError("model", self.config.model, "one that ends with a linear layer")
        classes, width = model[self.head[0]].shape
        shapes = {"moments": (width, width), "products": (width, classes)}
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self.counted: list[int] = []

    def last_layer(self) -> fp.Payload:
        """Return what travels down."""
        return fp.Payload({name: self.model[name] for name in self.head})

    def send(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        payload = self.last_layer()
        return (fp.OutgoingMessage(k, payload, fields={"counted": k in self.counted}) for k in round.participants)

    def send_to_evaluate(self, round: fp.Round) -> Iterator[fp.OutgoingMessage]:
        return fp.OutgoingMessage.to_each(self.clients, self.last_layer())

    def expect(self, round: fp.Round, client: int) -> fp.Schema:
        return fp.Schema.like({} if client in self.counted else self.sums)

    def begin(self, round: fp.Round) -> None:
        super().begin(round)
        self.new: list[int] = []

    def receive(self, round: fp.Round, reply: fp.Reply) -> None:
        if reply.client not in self.counted:
            super().receive(round, reply)
            self.new.append(reply.client)

    def end(self, round: fp.Round) -> None:
        num_examples, means = sum(map(self.weight_of, self.new)), self.mean.mean(self.sums)
        self.sums = {name: total + num_examples * means[name] for name, total in self.sums.items()}
        self.counted = sorted({*self.counted, *self.new})
        moments, options = self.sums["moments"], self.config.table(AFLOptions)
        if not options.removes_regulariser:
            moments = moments + len(self.counted) * options.regulariser * torch.eye(len(moments))
        weight = solution(moments, self.sums["products"]).T.float().contiguous()
        no_bias = {name: torch.zeros_like(self.model[name]) for name in self.head[1:]}
        self.model = {**self.model, self.head[0]: weight, **no_bias}

    def paper_bytes(self, round: fp.Round) -> tuple[float, float]:
        down = 4.0 * len(round.participants) * self.last_layer().num_elements()
        return down, 8.0 * len(self.new) * sum(total.numel() for total in self.sums.values())

    def state(self) -> fp.State:
        state = super().state()
        return fp.State({**state.tensors, **fp.grouped(sums=self.sums)}, {**state.meta, "counted": self.counted})

    def restore(self, state: fp.State) -> None:
        super().restore(state)
        self.sums, self.counted = state.group("sums"), list(state.meta["counted"])


class AFLClient(fp.ImageClient):
    """State: the last received model, ``weights``, and the fit of the client's own solution."""

    validates = "received"

    def begin(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return {**self.own_model(state), **task.payload.tensors}

    def personal_model(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return self.begin(task, state)

    def features(self) -> Tensor:
        """Return what the last layer sees of each training image, one row each."""
        layer, batches = list(self.prunable)[-1].rpartition(".")[0], list[Tensor]()
        hook = self.model.get_submodule(layer).register_forward_pre_hook(lambda _, seen: batches.append(seen[0]))
        with torch.no_grad():
            for start in range(0, self.num_examples, 500):
                self.model.eval()(self.data.train_images[start : start + 500].to(self.device))
        hook.remove()
        return torch.cat(batches).double().cpu()

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        weights, loss, flops, payload = self.begin(task, state), state.meta.get("loss", 0.0), 0.0, fp.Payload({})
        if not task.fields["counted"]:
            fp.load_state_tensors(self.model, weights)
            features, num_examples = self.features(), self.num_examples
            labels = F.one_hot(self.data.train_labels.cpu(), self.dataset.num_classes).double()
            moments, products = features.T @ features, features.T @ labels
            regulariser = self.config.table(AFLOptions).regulariser * torch.eye(len(moments))
            loss = float((features @ solution(moments + regulariser, products) - labels).square().mean())
            payload = fp.Payload({"moments": moments / num_examples, "products": products / num_examples})
            flops = self.costs.gradient(num_examples) / 3 + 2.0 * num_examples * payload.num_elements()  # no backward
        new_state = fp.State(fp.grouped(weights=weights), {"loss": loss})
        return fp.Update(payload, new_state, fp.TrainingResult(loss, 1, self.num_examples), flops)


summary = "AFL: the last layer in closed form, from exact sums over all clients' frozen features"
fp.register_system("afl", strategy=AFL, client=AFLClient, summary=summary, options=AFLOptions)
