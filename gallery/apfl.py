"""APFL: each client answers for a mixture of the common model and a model of its own.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1. A client has its version w of the
common model, which is averaged, its own model v, and its answer ``v̄ = α v + (1 − α) w``. A step on v follows the
gradient of f(v̄) by v, which is ``α ∇f(v̄)``. With ``apfl.adaptive`` α moves too, once a round as in the released code
(without its decay of 0.02 α), along its own gradient: ``α ← α − η ⟨v − w, ∇f(v̄)⟩``.

Deviations: w is trained first and v then, for as many epochs and under the last w, where the paper takes both steps on
each batch in turn. So v̄ takes ordinary steps of the rate α² η. α stays in [0, 1], the gradient that moves it is that of
all the client's images, and clients count by their numbers of examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedprune_app import extend as fp


@dataclass(frozen=True)
class APFLOptions(fp.Table):
    """The share of a client's own model in its mixture, and whether it is learned."""

    alpha: float = fp.option(0.5, "How much of a client's model is its own, at first (α).", above=0, most=1)
    adaptive: bool = fp.option(True, "If true, every client learns its α.")


class APFL(fp.FedAvg):
    """FedAvg on the server, judged by the clients' mixtures."""

    headline = "accuracy_personal_mean"


class APFLClient(fp.ImageClient):
    """State: the mixture ``weights`` v̄, the client's ``own`` model v, and α."""

    not_summed = ""

    def begin(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        """Return the received model; what does not travel (local norms) is the mixture's."""
        return {**self.own_model(state), **task.payload.tensors}

    def personal_model(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        return self.own_model(state)

    def mixture(self, own: Mapping[str, Tensor], common: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
        """Return ``α v + (1 − α) w``, with the running statistics of w: a variance must not be negative."""
        return {**common, **{name: alpha * own[name] + (1 - alpha) * common[name] for name in self.sizes}}

    def local_update(self, task: fp.Task, state: fp.State) -> fp.Update:
        options, rate = self.config.table(APFLOptions), self.config.learning_rates[task.round]
        own = state.group("own") or self.own_model(fp.State())
        alpha = float(state.meta.get("alpha", options.alpha))
        common = self.begin(task, state)
        if options.adaptive:
            fp.load_state_tensors(self.model, self.mixture(own, common, alpha))
            slope = fp.dense_gradient(self.model, self.data.train_images, self.data.train_labels, device=self.device)
            derivative = sum(float(((own[name] - common[name]) * slope[name]).double().sum()) for name in slope)
            alpha = min(max(alpha - rate * derivative, 0.0), 1.0)

        trained, tensors = self.train_from_start(task, state)
        fp.load_state_tensors(self.model, self.mixture(own, tensors, alpha))
        if alpha:  # at 0 the mixture has nothing of v, which then stays
            result = self.train(task, role="train mixture", learning_rate=alpha**2 * rate)
            trained = trained if trained.diverged else result
        mixed_tensors = fp.state_tensors(self.model, include_buffers=True)
        if alpha:
            own = {n: (mixed_tensors[n] - (1 - alpha) * tensors[n]) / alpha for n in self.sizes}
        payload = fp.Payload({name: tensors[name] for name in self.shared})
        new_state = fp.State(fp.grouped(weights=mixed_tensors, own=own), {"alpha": alpha})
        flops = self.costs.training(epochs=self.config.local_epochs * (2 if alpha else 1))
        flops += self.costs.gradient(self.num_examples) if options.adaptive else 0.0
        return fp.Update(payload, new_state, trained, flops, {"alpha": alpha})


fp.register_system(
    "apfl",
    strategy=APFL,
    client=APFLClient,
    summary="APFL: a mixture of the common model and a client's own",
    options=APFLOptions,
    metrics=[fp.SystemMetric("alpha", "Own model's share α", least=0, most=1, decimals=3)],
)
