"""MTL: every client has a model of its own, and the server learns which clients' tasks are related.

After Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning" (MOCHA), NeurIPS 2017, and Zhang, Yeung, "A
Convex Formulation for Learning Task Relationships in Multi-Task Learning", UAI 2010:

    min  Σ_k F_k(w_k) + λ/2 · tr(W (Ω + εI)⁻¹ Wᵀ),    Ω = (WᵀW)^{1/2} / tr((WᵀW)^{1/2})

MOCHA solves convex duals; networks have none. **This is our surrogate for the row "MTL" of Sub-FedAvg's tables**, which
give no details: columns of W are whole models, clients take SGD steps on their own part, the server computes Ω anew
every round. ε makes the inverse exist.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.federation.round import OutgoingMessage, Round
from strategies.gossip import Relay


class MTL(Relay):
    """Learn how the clients' tasks are related, and send each client the point that pulls its model.

    The gradient of the regulariser by w_k is ``λ P_kk (w_k − a_k)``, with ``P = (Ω + εI)⁻¹`` and
    ``a_k = −Σ_{j≠k} P_jk w_j / P_kk``. The server sends ``a_k`` and ``P_kk``.
    """

    paper_formula = "32 bits per parameter, both ways"

    def expect(self, round: Round, client: int) -> wire.Schema:
        return wire.Schema.like(self.model)

    def send(self, round: Round) -> Iterator[OutgoingMessage]:
        schema, models = wire.Schema.like(self.model), {}
        for client, update in self.updates_of(sorted(self.update_rounds), round.log).items():
            tensors = schema.read(update).tensors
            models[client] = torch.cat([tensors[name].reshape(-1) for name in self.model])  # in the server's order
        members = list(models)
        if len(members) < 2:
            yield from map(OutgoingMessage, round.participants)
            return
        # (members, parameters), float64
        columns = torch.stack(list(models.values())).double()
        precision = self._precision(columns)
        for client in round.participants:
            if client not in models:
                yield OutgoingMessage(client)
                continue
            position = members.index(client)
            strength = float(precision[position, position])
            shares = -precision[:, position] / strength
            shares[position] = 0
            parts = torch.split(shares @ columns, [tensor.numel() for tensor in self.model.values()])
            anchor = {n: part.view(t.shape).to(t.dtype) for (n, t), part in zip(self.model.items(), parts, strict=True)}
            yield OutgoingMessage(client, Payload(anchor), fields={"precision": strength})

    def _precision(self, columns: Tensor) -> Tensor:
        """Return ``(Ω + εI)⁻¹`` of these models, float64 (members, members)."""
        values, vectors = torch.linalg.eigh(columns @ columns.T)
        roots = values.clamp(min=0).sqrt()
        omega = roots / roots.sum().clamp(min=1e-300)
        precision: Tensor = (vectors / (omega + self.config.mtl.ridge)) @ vectors.T
        return precision
