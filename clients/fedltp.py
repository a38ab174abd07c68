"""Fed-LTP, the client half: DP-SGD on a received sub-model, and a noised score of the round's model.

Shi et al., "Efficient Federated Learning with Enhanced Privacy via Lottery Ticket Pruning in Edge Computing",
Algorithm 2, lines 11 to 18, and section 4.4. The text clips the gradient of a mini-batch and adds noise of σC to it,
which bounds no example's influence. Here each example's gradient is masked, then clipped, and the noised sum is divided
by the batch size.
"""

from dataclasses import replace
from typing import ClassVar

from clients.base import Scores, Update
from clients.fedavg import FedAvgClient
from clients.node import ReplyFields
from clients.privacy import PlannedReleases
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core.masks import packed
from fedprune_app.core.named import TensorDict, ValueDict
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import State, grouped
from fedprune_app.learning.planned_noise import planned_rounds
from fedprune_app.models import vision


class FedLTPClient(FedAvgClient):
    """State: ``weights``, zero outside of ``masks``, the masks of the client's sub-model."""

    not_summed = "its clients send different coordinates"
    declares: ClassVar = ReplyFields(evaluation=frozenset({"score", "num-validation", "declined"}))

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Require noised scores, or none.

        The masks need no noise: the server makes them from public data, or at worst from what was released.
        """
        if config.fedltp.validators == "none" or config.dp.count_scale > 0:
            return ""
        return (
            f"fedltp.validators is {config.fedltp.validators!r}, allowed with dp.enabled: 'none', or with "
            "dp.count-scale above 0 (scores are then noised, and charged)"
        )

    def planned_releases(self) -> PlannedReleases:
        """Plan one score for every round of the run, since any round may request one.

        A client tests the global model as received, so an evaluation needs three counts.
        """
        scores = int(self.config.fedltp.validators != "none")
        unjoined = self.config.num_server_rounds - planned_rounds(self.config)
        counts = {"round_counts": scores, "more_counts": unjoined * scores, "evaluation_counts": 3}
        return replace(super().planned_releases(), **counts)

    def masks(self, task: Task, state: State) -> TensorDict:
        return state.group("masks") or dict(task.payload.masks)

    def local_update(self, task: Task, state: State) -> Update:
        masks = dict(task.payload.masks)
        result, tensors = self.train_from_start(task, state, masks=masks)  # lines 11 to 16
        payload = Payload(packed({name: tensors[name] for name in self.shared}, masks))  # line 17
        return Update(payload, State(grouped(weights=tensors, masks=masks)), result, self.costs.training(masks))

    def received_scores(self, task: Task, state: State) -> Scores:
        """Test the global model itself, not the client's sub-model of it."""
        scores = {"accuracy-global": self.test_accuracy(task, self.begin(task, state), task.payload.masks)}
        scores["accuracy-validation"] = self.accuracy(task, "validation")
        return {**scores, "accuracy-received": scores["accuracy-global"]}

    def answer_evaluation(self, task: Task) -> tuple[int, ValueDict]:
        """Reply as every client does, or with a score if the server requests one."""
        if task.fields.get("asks") != "score":
            return super().answer_evaluation(task)
        state, _ = self.load_state(task)
        vision.load_state_tensors(self.model, self.begin(task, state))
        return self.num_examples, self.score(task)

    def score(self, task: Task) -> ValueDict:
        """Equation 17: return the loaded model's correct predictions on validation data, noised when private."""
        num_validation = self.images.sizes["validation"]
        if not num_validation:
            raise ValueError("the client has no validation examples to score with")
        correct = min(self.evaluated("validation").correct, num_validation)  # a draw may have more than planned
        if self.privacy is None:
            return {"score": correct, "num-validation": num_validation}
        public = vision.state_tensors(self.model, include_buffers=True)
        from fedprune_app.privacy.ledger import Overspent

        try:
            score = self.privacy.noised_score(correct, "validation", task.round, public)
        except Overspent as error:
            return self.privacy.declined(task.round, error)
        return {"score": score, "num-validation": num_validation, **self.privacy.report(task.round)}
