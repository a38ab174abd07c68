"""Fed-LTP, the client half: DP-SGD on a received sub-model, and a noised score of the round's model.

Shi et al., "Efficient Federated Learning with Enhanced Privacy via Lottery Ticket Pruning in Edge Computing",
Algorithm 2, lines 11 to 18, and section 4.4. The text clips the gradient of a mini-batch and adds noise of σC to it,
undivided: that bounds no example's influence. Here each example's gradient is masked, then clipped, and the noised sum
is divided by the batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clients.base import Update
from clients.fedavg import FedAvgClient
from clients.node import NDArrays, received_payload
from fedprune_app.config import Config
from fedprune_app.core.masks import packed, unpacked
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.learning.evaluate import evaluate
from fedprune_app.models import vision


class FedLTPClient(FedAvgClient):
    """State: ``weights``, zero outside of ``masks``, those of the sub-model it was trained as."""

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """The masks are public: made by the server of public data, or at worst of what was released; and scores are
        noised."""
        if config.fedltp.validators == "none" or config.dp.count_scale > 0:
            return ""
        return (
            f"fedltp.validators is {config.fedltp.validators!r}, allowed with dp.enabled: 'none', or with "
            "dp.count-scale above 0 (scores are then noised, and charged)"
        )

    def round_counts(self) -> int:
        """At most one score a round: whether this client is asked is not for it to say."""
        return int(self.config.fedltp.validators != "none")

    def planned_counts(self) -> int:
        """Scores are asked for in rounds that the client does not join, too."""
        unjoined = self.config.num_server_rounds - self.planned_rounds()
        return super().planned_counts() + unjoined * self.round_counts()

    def masks(self, state: State) -> dict[str, Tensor]:
        return state.group("masks") or dict(self.received.masks)

    def local_update(self, received: Payload, state: State, round: int) -> Update:
        masks = dict(received.masks)
        vision.load_state_tensors(self.model, self.begin(received, state))
        result = self.train(round, masks=masks)  # lines 11 to 16
        tensors = vision.state_tensors(self.model, include_buffers=True)
        payload = Payload(packed({name: tensors[name] for name in self.shared}, masks))  # line 17
        return Update(payload, State(grouped(weights=tensors, masks=masks)), result, self.training_flops(masks))

    def uploaded(self, sent: Payload, before: Mapping[str, Tensor]) -> Payload:
        masks = dict(self.received.masks)
        return Payload(unpacked(sent.tensors, masks, before), masks)

    def received_scores(self, received: Payload, state: State) -> dict[str, float | None]:
        """Of the global model as it is, whatever sub-model of it this client trains."""
        scores = {"accuracy-global": self.test_accuracy(self.begin(received, state), received.masks)}
        scores["accuracy-validation"] = self.accuracy("validation")
        return {**scores, "accuracy-received": scores["accuracy-global"]}

    def evaluate(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        if config.get("asks") != "score":
            return super().evaluate(parameters, config)
        self.request, self.received = config, received_payload(parameters, config)
        state, _ = self._state(config, before=int(config["round"]) + 1)
        vision.load_state_tensors(self.model, self.begin(self.received, state))
        return 0.0, self.num_examples, self.score(int(config["round"]))

    def score(self, round: int) -> dict[str, Any]:
        """Equation 17: correct predictions of the model as it is on validation data, noised when private."""
        images, labels = self.data.validation_images, self.data.validation_labels
        if not len(labels):
            raise ValueError("the client has no validation examples to score with")
        correct = evaluate(self.model, images, labels, device=self.device).correct
        if self.privacy is None:
            return {"score": correct, "num-validation": len(labels)}
        public = vision.state_tensors(self.model, include_buffers=True)
        from fedprune_app.privacy.ledger import Overspent

        try:
            noised = self.privacy.noised_score(correct, "validation", round, public)
        except Overspent as error:
            return self.privacy.declined(round, error)
        return {"score": noised, "num-validation": len(labels), **self.privacy.report(round)}
