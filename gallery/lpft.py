"""LP-FT: FedAvg, and then every client trains the last layer of the global model alone, and after that all of it.

Chen, Ghoukasian, Jin, Wang, Karimireddy, Li, "A Closer Look at Personalized Fine-Tuning in Heterogeneous Federated
Learning", arXiv 2511.12695: linear probing and then fine-tuning (Kumar et al., ICLR 2022), after the federation. A head
that fits the client's data first leaves less to distort in the features.

Deviations: how many epochs each phase has, and its learning rate, could not be found. Here fine-tuning is that of
FedAvg-FT, ``local-epochs`` at the rate of the round, and probing has as many epochs at the same rate unless
``lpft.head-epochs`` says otherwise. The head is the last layer with weights. While it is probed, running statistics of
BatchNorm move, since the network is in training mode. A client does all this whenever the run is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedprune_app import extend as fp


@dataclass(frozen=True)
class LPFTOptions(fp.Table):
    """Number of epochs in which only the last layer is trained."""

    head_epochs: int = fp.option(0, "The epochs on the last layer alone; 0 means local-epochs.", least=0)


class LPFTClient(fp.FedAvgFTClient):
    """Evaluate the received model after both phases; the result never leaves the client."""

    not_private = "nobody has examined what it releases"

    def personal_model(self, task: fp.Task, state: fp.State) -> dict[str, Tensor]:
        head = fp.layers.last_layers(list(self.sizes), self.prunable, 1)
        head_epochs = self.config.table(LPFTOptions).head_epochs or self.config.local_epochs
        fp.load_state_tensors(self.model, self.begin(task, state))
        self.train(task, role="probe", epochs=head_epochs, frozen=self.sizes.keys() - set(head))
        self.train(task, role="fine-tune")
        return fp.state_tensors(self.model, include_buffers=True)


summary = "LP-FT: FedAvg, fine-tuned by each client, the last layer first"
fp.register_system("lpft", strategy=fp.FedAvgFT, client=LPFTClient, summary=summary, options=LPFTOptions)
