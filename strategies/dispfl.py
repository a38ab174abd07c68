"""Dis-PFL, the server half: no model, only the links between clients and the updates that travel over them.

Dai, Shen, He, Tian, Tao, "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training", ICML 2022, Algorithm 1, lines 5 to 7. The client half is ``clients/dispfl.py``.
"""

from fedprune_app.config import DisPFLOptions
from fedprune_app.core.masks import dense_share
from fedprune_app.engine.wire import Schema
from fedprune_app.results.similarity import MaskDistances
from strategies.gossip import Gossip

_COMPARED_UP_TO = 500  # clients whose masks are compared with each other after the last round


class DisPFL(Gossip):
    """Average the models of a client's neighbours by their masks; compare all masks after the last round.

    Line 7 divides by the masks that the weights were trained under, as the released code does. The text divides by the
    new masks, which do not match the weights' support.
    """

    @property
    def options(self) -> DisPFLOptions:
        return self.config.dispfl

    def warnings(self) -> list[str]:
        """Say so if a density cannot be reached."""
        share = dense_share({name: tensor.shape for name, tensor in self.model.items()}, self.prunable)
        least = min(self.options.density_of(client, self.config.density) for client in self.clients)
        words = f"density {least:g} cannot be reached: {share:.0%} of the model is in no convolution or linear layer"
        return [*super().warnings(), *([words] if share > least else [])]

    def published(self) -> Schema:
        return Schema.like(self.model, masked=self.prunable)

    def finish(self) -> None:
        """Record the distance between the final masks of each two clients: the paper's Figure 5 (b).

        It is the share of coordinates that one keeps and the other does not, in tensors that any client prunes.
        """
        self.release_updates()
        if not self.reads_updates:
            return
        distances, pruned = MaskDistances(), set[str]()
        for client in sorted(self.update_rounds)[:_COMPARED_UP_TO]:
            try:
                update = self.read_update(client)
            except ValueError:  # it is lost, which is recorded already
                continue
            distances.add(client, update)
            pruned |= {name for name, mask in update.masks.items() if not mask.all()}
        if len(distances.masks) < 2:
            return
        num_coordinates = max(1, sum(self.model[name].numel() for name in pruned))
        distances.close_layer(num_coordinates)  # the whole model at once
        # a resumed run may have begun no round
        last = self.participation.round(int(self.recorder.info["rounds_completed"]))
        self.recorder.masks(distances.clients(), distances.matrix(num_coordinates), self.neighbours(last))
