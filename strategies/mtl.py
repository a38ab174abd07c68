"""MTL: every client has a model of its own, and the server learns which clients' models go together.

After Smith, Chiang, Sanjabi, Talwalkar, "Federated Multi-Task Learning" (MOCHA), NeurIPS 2017, and Zhang, Yeung, "A
Convex Formulation for Learning Task Relationships in Multi-Task Learning", UAI 2010:

    min  Σ_k F_k(w_k) + λ/2 · tr(W (Ω + εI)⁻¹ Wᵀ),    Ω = (WᵀW)^{1/2} / tr((WᵀW)^{1/2})

MOCHA solves convex duals; for networks there is none. **This is our surrogate for the row "MTL" of Sub-FedAvg's
tables**, which say no more about it: columns of W are whole models, clients take SGD steps on their own part, the
server computes Ω anew every round. ε makes the inverse exist.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from strategies.base import Contents
from strategies.relay import Relay


class MTL(Relay):
    """The gradient of the regulariser by w_k is ``λ P_kk (w_k − a_k)``, with ``P = (Ω + εI)⁻¹`` and
    ``a_k = −Σ_{j≠k} P_jk w_j / P_kk``: the server sends ``a_k`` and ``P_kk``.
    """

    paper_formula = "32 bits per parameter, both ways"

    def reply_schema(self, partition: int) -> wire.Schema:
        return wire.Schema.like(self.model)

    def outgoing(self, round: int, participants: list[int]) -> Iterator[tuple[int, Contents]]:
        members = sorted(self.letter_rounds)
        known = [k for k in participants if k in self.letter_rounds]
        if len(members) < 2 or not known:
            yield from ((partition, Contents()) for partition in participants)
            return
        # (members, parameters), float64
        columns = torch.stack([torch.cat([t.reshape(-1) for t in self._model(k).values()]) for k in members]).double()
        precision = self._precision(columns)
        for partition in participants:
            if partition not in known:
                yield partition, Contents()
                continue
            place = members.index(partition)
            strength = float(precision[place, place])
            shares = -precision[:, place] / strength
            shares[place] = 0
            parts = torch.split(shares @ columns, [tensor.numel() for tensor in self.model.values()])
            anchor = {n: part.view(t.shape).to(t.dtype) for (n, t), part in zip(self.model.items(), parts, strict=True)}
            yield partition, Contents(wire.to_arrays(Payload(anchor)), fields={"precision": strength})

    def _precision(self, columns: Tensor) -> Tensor:
        """``(Ω + εI)⁻¹`` of these models, float64 (members, members)."""
        values, vectors = torch.linalg.eigh(columns @ columns.T)
        roots = values.clamp(min=0).sqrt()
        omega = roots / roots.sum().clamp(min=1e-300)
        precision: Tensor = (vectors / (omega + self.config.mtl.ridge)) @ vectors.T
        return precision

    def _model(self, partition: int) -> dict[str, Tensor]:
        letter = wire.from_arrays(self.letter(partition), self.reply_schema(partition).max_bytes)
        return dict(letter.tensors)
