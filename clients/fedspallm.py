"""FedSpaLLM, the client half: prune decoder layers, one after the other, with private text.

Bai, Li, Li, Zhao, Kim, "FedSpaLLM: Federated Pruning of Large Language Models", 2024: Algorithm 1, lines 10 to 16.

A message is about one decoder layer. Between messages the client's state is on disk: the hidden states of its segments,
and its own pruned layers, packed. So a fresh process can reply to any message, and memory holds the model's embeddings,
one layer, and that layer's Hessians. Layers that the client does not prune need no message: before the next layer that
it prunes, its hidden states pass through the cached dense ones (equation 9).
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from clients.context import NodeContext
from clients.node import Node, ReplyFields
from clients.privacy import ClientPrivacy, PlannedReleases
from clients.task import Task
from fedprune_app.config import Config
from fedprune_app.core import hessians
from fedprune_app.core.named import TensorDict, ValueDict, Values
from fedprune_app.core.payload import Payload
from fedprune_app.core.rng import generator
from fedprune_app.data.text import (
    Document,
    windows_of,
)
from fedprune_app.engine.layers import LayerFiles
from fedprune_app.engine.store import State, owner
from fedprune_app.engine.wire import Schema
from fedprune_app.learning import text_cache
from fedprune_app.learning.device import recorder_of
from fedprune_app.learning.language_models import language_model, observed_inputs, perplexities
from fedprune_app.models.layer_pruning import MakeStatistic, Pruner, Schedule, input_matrices, prune_layer, recovered
from fedprune_app.privacy import noise as noises
from fedprune_app.results.texts import OWN_TEXT


def by_layer(payload: Payload) -> dict[int, Payload]:
    """Return the decoder layers of a message, by number; there a matrix's name is NUMBER/NAME."""
    layers: dict[int, Payload] = {}
    for full_name, tensor in payload.tensors.items():
        number, _, name = full_name.partition("/")
        layer = layers.setdefault(int(number), Payload({}))
        masks = {name: payload.masks[full_name]} if full_name in payload.masks else {}
        layers[int(number)] = Payload({**layer.tensors, name: tensor}, {**layer.masks, **masks})
    return layers


@dataclass(frozen=True)
class LayerUpdate:
    """Outcome of one message: a layer's payload, the state after it, and further fields of the reply."""

    payload: Payload
    state: State
    metrics: Values


class SegmentPrivacy(ClientPrivacy):
    """Privacy of calibration segments, or of documents as groups. Each release uses all of them, and is an "epoch"."""

    has_paper_figure = False

    @staticmethod
    def sampling(config: Config, num_examples: int) -> tuple[float, int]:
        return 1.0, 1


class FedSpaLLMClient(Node):
    """State: ``hidden``, the hidden states before layer ``next`` of round ``of-round``.

    By layer, ``pruned`` has the step that pruned it last, and ``removed`` the number of its pruned weights.
    """

    privacy_kind = SegmentPrivacy
    versions_kept = 1  # hidden states are large, and can be computed again
    declares: ClassVar = ReplyFields(
        registration=frozenset({"documents", "shell-digest", "layer-digests"}),
        training=frozenset({"density", "relative-error", "recovery-loss"}),
        evaluation=frozenset({"digest", "density", "pruned-layers", "perplexity/", "windows", "windows-in-text"}),
        withheld_when_private=frozenset({"documents", "relative-error", "recovery-loss"}),
    )

    def __init__(self, config: Config, context: NodeContext) -> None:
        super().__init__(config, context)
        self.options = config.fedspallm
        self.model = language_model(config, self.device, context.policy)
        self.layers = LayerFiles(
            self.store.folder / "layers", owner(f"layer of client {self.client_id}", context.run_key)
        )
        if self.has_own_text:
            self.kept_properties = {"data-sha256": hashlib.sha256(b"".join(self.record_digests())).hexdigest()}
        self.privacy = self.open_privacy(self.record_digests, self.options.deal)
        self.shares_noise = config.dp.enabled and config.dp.noise_shared_by > 1
        if self.shares_noise and self.member is not None and self.privacy is not None:
            self.member.noise = f"noise of {self._own_noise(self.privacy)}, secure-rng {config.dp.secure_rng}"

    # --- privacy ------------------------------------------------------------------------------------------------

    @classmethod
    def why_not_private(cls, config: Config) -> str:
        """Require that the client sends only noised sums, one for each layer and distinct input."""
        options = config.fedspallm
        if options.merge != "hessians":
            allowed = "hessians, since masks and weights are chosen by the raw text"
            return f"fedspallm.merge is {options.merge!r}, allowed with dp.enabled: {allowed}"
        if options.hessian_form == "int8":
            return "fedspallm.hessian-form is 'int8', allowed with dp.enabled: float32, diagonal"
        if options.recovery_rounds:
            return f"fedspallm.recovery-rounds is {options.recovery_rounds}, allowed with dp.enabled: 0"
        if config.dp.clip_norm > 1:
            return f"dp.clip-norm is {config.dp.clip_norm}, allowed with system 'fedspallm': above 0 and at most 1"
        return ""

    @classmethod
    def why_not_summed(cls, config: Config) -> str:
        for name, allowed in {"merge": "hessians", "hessian-form": "float32", "recovery-rounds": 0}.items():
            if (value := getattr(config.fedspallm, name.replace("-", "_"))) != allowed:
                return f"fedspallm.{name} is {value!r}, allowed with secure-sums: {allowed}"
        return ""

    def integers(self, task: Task, payload: Payload, terms: Mapping[str, int]) -> TensorDict:
        if self.shares_noise:
            return dict(payload.tensors)
        return hessians.integers(payload.tensors, self.num_examples)

    @cached_property
    def observed_matrices(self) -> list[str]:
        """The matrices of a layer whose inputs the client observes, to send their Hessians or noised sums."""
        return [name for names in observed_inputs(self.config, self.model) for name in names]

    def planned_releases(self) -> PlannedReleases:
        """Plan the sums that a client releases in a round, if it takes part in all layers."""
        return PlannedReleases(self.model.num_layers * len(observed_inputs(self.config, self.model)))

    def record_digests(self) -> list[bytes]:
        """Return a digest of each record: a document of the client's own data, or a dealt segment."""
        if self.own_text is not None:
            documents, test = self.own_text
            return [hashlib.sha256(text.encode()).digest() for text in [*(d.text for d in documents), test]]
        return [hashlib.sha256(segment.numpy().tobytes()).digest() for segment in self.segments()[0]]

    @property
    def num_examples(self) -> int:
        return self.options.segments

    def message_schema(self) -> Schema:
        layers = [self.model.layer_like(layer) for layer in range(self.model.num_layers)]
        if self.options.merge == "hessians" or self.options.recovery_rounds:  # a message may hold all layers
            return Schema.like({f"{i}/{name}": t for i, shapes in enumerate(layers) for name, t in shapes.items()})
        return max(map(Schema.like, layers), key=lambda schema: schema.max_bytes)

    @property
    def has_own_text(self) -> bool:
        """Return whether the client has text of its own, part of which is its test text."""
        return self.context.has_own_data or (self.options.deal == "own" and self.config.dataset == "text")

    @cached_property
    def own_text(self) -> tuple[list[Document], str] | None:
        """The client's own documents to calibrate with, and its test text; None without text of its own."""
        if self.has_own_text:
            return text_cache.own_text(self.config.data_dir, self.config.test_fraction, self.config.seed)
        return None

    def segments(self, count: int = 0) -> tuple[Tensor, list[str]]:
        """Return the private text: token ids (segments, length), and the names of the segments' documents.

        There are ``count`` segments, or for 0 as many as the client calibrates with. With ``dp.enabled`` text of the
        client's own may have fewer: their number is secret, so the missing ones count as blanks. A blank adds nothing
        to a sum, and is not returned.
        """
        options = self.options
        segments, documents = text_cache.segments(
            self.model,
            self.config.dataset,
            self.config.data_dir,
            self.config.test_fraction if self.has_own_text else None,
            deal="own" if self.has_own_text else options.deal,
            partition=self.client_id,
            num_partitions=self.context.share[1],
            count=count or self.num_examples,
            max_segments=max(self.num_examples, options.recovery_segments if options.recovery_rounds else 0),
            length=self.model.sequence_length(options.segment_length),
            seed=self.config.seed,
            may_lack=self.has_own_text and self.config.dp.enabled,
            most_of_document=self.config.dp.group_limit if self.protects_documents else 0,
        )
        return (self.model.started(segments) if options.start_token else segments), documents

    @property
    def protects_documents(self) -> bool:
        return self.config.dp.enabled and self.config.dp.unit == "group"

    def by_document_size(self, states: Tensor) -> dict[int, Tensor]:
        """Return the segments' ``states`` by the size of their document in segments; by 1 if segments are protected."""
        if not (self.protects_documents and len(self.segments()[0])):
            return {1: states}
        documents = self.segments()[1]
        counts = Counter(documents)
        sizes = torch.tensor([counts[document] for document in documents])
        return {size: states[sizes == size] for size in sorted({*counts.values()})}

    def read_text(self) -> list[str]:
        """Read all calibration and test text, and return the names of its documents.

        Raises ``ValueError`` if there is too little, unless that is secret.
        """
        _, documents = self.segments()
        if self.options.recovery_rounds:
            self.segments(self.options.recovery_segments)
        if self.own_text and not self.config.dp.enabled:
            windows_of(self.model.encode(self.own_text[1]), self.model.sequence_length(self.options.window))
        return documents

    # --- pruning ------------------------------------------------------------------------------------------------

    def local_update(self, task: Task, state: State) -> LayerUpdate:
        """Run lines 11 to 15 for one layer; ``task.round`` counts layers over all rounds."""
        if task.fields.get("recovers"):
            return self.recovered(task, state)
        if self.options.merge == "hessians":
            return self.observed(task, state)
        layer, of_round, step = int(task.fields["layer"]), int(task.fields["of-round"]), task.round
        hidden = self.hidden_states_before(layer, state, of_round)
        module = self.model.layer(layer, {**self.model.layer_tensors(layer), **task.payload.tensors})
        pruned_at: dict[str, int] = dict(state.meta.get("pruned", {}))
        removed_counts: dict[str, int] = dict(state.meta.get("removed", {}))
        payload, error = Payload({}), 0.0
        if task.fields["prunes"]:
            pruner = Pruner(
                self.options.pruner,
                self.config.density,
                self.options.n_of_m(),
                self.options.block_size,
                recorder_of(self.config, self.device),
            )
            result = prune_layer(self.model, layer, module, hidden, pruner, self.config.batch_size)
            payload, hidden, error = result.payload, result.hidden, result.relative_error
            self.layers.save(layer, step, payload)
            self.layers.drop_before(layer, pruned_at.get(str(layer), step))
            pruned_at[str(layer)], removed_counts[str(layer)] = step, payload.num_elements() - payload.num_kept()
            if self.options.merge == "masks":
                payload = Payload(payload.masks, payload.masks)
        else:
            hidden = self.model.pass_through(module, hidden, self.config.batch_size)
        meta = {"of-round": of_round, "next": layer + 1, "pruned": pruned_at, "removed": removed_counts}
        is_last = layer == self.model.num_layers - 1
        return LayerUpdate(payload, State({} if is_last else {"hidden": hidden}, meta), {"relative-error": error})

    def observed(self, task: Task, state: State) -> LayerUpdate:
        """Return the Hessians of a layer behind the pruned layers that the server sent.

        The client prunes nothing. Its state holds the hidden states that enter the layer.
        """
        layer, of_round = int(task.fields["layer"]), int(task.fields["of-round"])
        meta = self._received_layers(task, state)
        if any(number < int(meta.get("next", 0)) for number in by_layer(task.payload)):
            meta["of-round"] = 0  # the hidden states have passed the layer before it was pruned: compute them anew
        hidden = self.hidden_states_before(layer, State(state.tensors, meta), of_round)
        module = self.model.layer(layer, self.model.layer_tensors(layer))
        meta |= {"of-round": of_round, "next": layer}
        if self.privacy is not None:
            payload = self._private_moments(self.privacy, layer, module, hidden, meta, task.round)
        else:
            matrices = input_matrices(self.model, module, self.observed_matrices, hidden, self.config.batch_size)
            payload = Payload(hessians.encoded(matrices, self.options.hessian_form))
        return LayerUpdate(payload, State({"hidden": hidden}, meta), {})

    def _private_moments(
        self,
        privacy: ClientPrivacy,
        layer: int,
        module: nn.Module,
        hidden: Tensor,
        meta: Values,
        round: int,
    ) -> Payload:
        """Return means of clipped second moments over the segments, noised and charged, in place of Hessians.

        ``hidden`` are the hidden states that enter the layer, ``meta`` the state's values. One segment, or one document
        by the mean over its segments, changes a sum by at most ``dp.clip-norm`` in the Frobenius norm. If only
        diagonals travel, only they are noised, and the norm is that of the diagonal.
        """
        clip_norm, size = self.config.dp.clip_norm, self.config.batch_size
        by_diagonal = self.options.hessian_form == "diagonal"
        states = hidden if len(hidden) else hidden.new_zeros(1, *hidden.shape[1:])  # for the shapes of the sums
        states_by_size = self.by_document_size(states)
        moments: TensorDict = {}
        for count, some in states_by_size.items():
            kind: MakeStatistic = partial(hessians.ClippedMoments, clip_norm=clip_norm, by_diagonal=by_diagonal)
            if self.shares_noise:
                kind = partial(hessians.IntegerMoments, clip_norm=clip_norm, group_size=count)
            sums = input_matrices(self.model, module, self.observed_matrices, some, size, kind)
            if not self.shares_noise:
                sums = {name: total / count for name, total in sums.items()}
            moments = {name: total + moments.get(name, 0) for name, total in sums.items()}
        model = [self.model.shell_digest(), *(self.model.layer_digest(number) for number in range(layer + 1))]
        received_digests = meta["received"]
        pruned_digests = [received_digests.get(str(number), "") for number in range(layer)]
        settings = (
            f"{privacy.noise_multiplier} {clip_norm} {(self.num_examples, *hidden.shape[1:])} {size} "
            + " ".join(model + pruned_digests)
        )
        if max(states_by_size) > 1:
            settings += f" {self.config.dp.group_limit} of each document"
        if by_diagonal:
            settings += " on the diagonal"
        if self.shares_noise:
            settings += f" shared by {self.config.dp.noise_shared_by}"
        noise = privacy.noise(f"second moments of layer {layer}", round, {}, settings)
        tensors: TensorDict = {}
        for name, total in moments.items():
            released = total * bool(len(hidden))
            if self.shares_noise:
                std, draw = self._own_noise(privacy), noise.discrete_gaussian
                tensors |= hessians.noised_integers(name, released, std, draw, self.num_examples)
                continue
            released = released.double()
            vector = released.diagonal().cpu() if by_diagonal else hessians.isometric(released)
            vector = noises.noised(
                vector, noise.gaussian(len(vector), vector.device), privacy.noise_multiplier * clip_norm
            )
            noised_total = vector if by_diagonal else hessians.from_isometric(vector, len(total))
            tensors[hessians.HESSIAN + name] = (noised_total / self.num_examples).float()
        privacy.charge_steps(len(moments), f"second moments of decoder layer {layer}")
        return Payload(tensors)

    def _own_noise(self, privacy: ClientPrivacy) -> float:
        """Return the standard deviation of the client's part of a shared noise.

        With the deviation s in units of 2⁻⁴⁰, here at least 2³⁰, probabilities of a sum of such parts are those of one
        discrete Gaussian but for ``exp(±10 d h exp(-π² s²))``, for d numbers and h parts (Kairouz, Liu and Steinke,
        "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation", 2021). Those are
        the ones of a rounded Gaussian but for ``exp(±5 d / s²)``, since ``∫ exp(-(x + u)² / 2s²) du`` over a unit is
        near ``exp(-x² / 2s²)``. Whoever reads a Gaussian that is added to integers can round it, at no cost. So for a
        billion numbers ε is a Gaussian's to 10⁻⁸.

        Raises ``ValueError`` for noise with which this does not hold, or the sum does not fit into int64.
        """
        own_noise = self.config.dp.own_part(privacy.noise_multiplier) * self.config.dp.clip_norm
        if not 2**-9 <= own_noise <= 2**16:  # off the diagonal it is smaller by √2
            raise ValueError(f"a client's noise is {own_noise:g}, allowed with dp.noise-shared-by: 0.002 to 65536")
        return own_noise

    def recovered(self, task: Task, state: State) -> LayerUpdate:
        """Train the kept weights of the server's layers; the update has only these weights, in the mask's order.

        The client's state does not change: a pruned model of its own is not trained.
        """
        options = self.options
        schedule = Schedule(options.recovery_steps, self.config.batch_size, options.recovery_learning_rate)
        round = int(task.fields["of-round"])
        draw = generator(self.config.seed, "recovery", self.client_id, round)
        segments, _ = self.segments(options.recovery_segments)
        layers, loss = recovered(self.model, by_layer(task.payload), segments, schedule, draw)
        kept_weights = {
            f"{layer}/{name}": tensor[payload.masks[name]]
            for layer, payload in layers.items()
            for name, tensor in payload.tensors.items()
        }
        return LayerUpdate(Payload(kept_weights), State({}, dict(state.meta)), {"recovery-loss": loss})

    def _received_layers(self, task: Task, state: State) -> ValueDict:
        """Save the pruned layers of a message on disk, and return the state's JSON values with them."""
        meta = {**state.meta, "pruned": dict(state.meta.get("pruned", {}))}
        removed_counts = meta["removed"] = dict(state.meta.get("removed", {}))
        if self.privacy is not None:
            meta["received"] = dict(state.meta.get("received", {}))
        for layer, payload in by_layer(task.payload).items():
            self.layers.save(layer, task.round, payload)
            if self.privacy is not None:
                meta["received"][str(layer)] = payload.digest()  # part of the noise's key
            meta["pruned"][str(layer)] = task.round
            removed_counts[str(layer)] = payload.num_elements() - payload.num_kept()
        return meta

    def hidden_states_before(self, layer: int, state: State, of_round: int) -> Tensor:
        """Return the hidden states that enter ``layer`` in round ``of_round``.

        They are computed from those in ``state``, if these are of the same round and of no later layer, else from the
        text. The hidden states in ``state`` are overwritten, to save memory.
        """
        if state.meta.get("of-round") == of_round and int(state.meta["next"]) <= layer:
            position, hidden = int(state.meta["next"]), state.tensors["hidden"]
            hidden = hidden.to(self.model.home(hidden.shape[0] * hidden.shape[1]))
        else:
            tokens = self.segments()[0]
            blanks = tokens if len(tokens) else tokens.new_zeros(1, tokens.shape[1])
            position, hidden = 0, self.model.embed(blanks, self.config.batch_size)[: len(tokens)]
        if layer:
            text_cache.clear_cache()
        for earlier_layer in range(position, layer):
            tensors = self.model.layer_tensors(earlier_layer)  # line 12
            version = int(state.meta.get("pruned", {}).get(str(earlier_layer), 0))
            # the client pruned the layer in this round, or received it pruned
            if (of_round - 1) * self.model.num_layers < version <= of_round * self.model.num_layers:
                tensors |= self.own_layer(earlier_layer, state).tensors
            module = self.model.layer(earlier_layer, tensors)
            if len(hidden):
                hidden = self.model.pass_through(module, hidden, self.config.batch_size)
        return hidden

    def answer_training(self, task: Task) -> tuple[Payload, ValueDict]:
        """Reply as every client does, but decline if the budget cannot pay for all layers from this one on."""
        if self.privacy is not None:
            self._plan_from(self.privacy, int(task.fields["layer"]))
        return super().answer_training(task)

    def _plan_from(self, privacy: ClientPrivacy, layer: int) -> None:
        """Set the round's cost to that of all layers from ``layer`` on; after the last layer comes the first."""
        layers = self.model.num_layers - layer % self.model.num_layers
        privacy.round_cost = dict(privacy.steps(layers * len(observed_inputs(self.config, self.model))))

    def report(self, task: Task, update: LayerUpdate) -> ValueDict:
        if self.privacy is not None:
            self._plan_from(self.privacy, int(task.fields["layer"]) + 1)
            return {"density": self.density(update.state), **self.privacy.report(task.round)}
        if not all(bool(hidden.isfinite().all()) for hidden in update.state.tensors.values()):
            raise ValueError(f"hidden states after decoder layer {task.fields['layer']} are not finite")
        return {"density": self.density(update.state)}

    # --- evaluation ---------------------------------------------------------------------------------------------

    def own_layer(self, layer: int, state: State) -> Payload:
        """Return the client's own version of a layer's matrices; empty if it never pruned them."""
        version = state.meta.get("pruned", {}).get(str(layer))
        if version is None:
            return Payload({})
        return self.layers.load(layer, int(version), Schema.like(self.model.layer_like(layer)).max_bytes)

    def check_state(self, round: int) -> None:
        meta = self.store.read(round).meta
        self.check_kept(meta)
        for layer, version in meta.get("pruned", {}).items():
            self.layers.check(int(layer), int(version))

    def density(self, state: State) -> float:
        removed_counts: dict[str, int] = state.meta.get("removed", {})
        return 1 - sum(removed_counts.values()) / self.model.num_parameters()[0]

    def registration(self) -> ValueDict:
        """Report also the documents of the client's text, and the digests of its dense model."""
        documents = self.read_text()  # fails now, not after all pruning
        return {
            **super().registration(),
            **({} if self.config.dp.enabled else {"documents": [] if self.own_text else documents[:32]}),
            "shell-digest": self.model.shell_digest(),
            "layer-digests": [self.model.layer_digest(layer) for layer in range(self.model.num_layers)],
        }

    def evaluation(self, task: Task, state: State) -> tuple[int, ValueDict]:
        """Report the perplexity of the client's own model on the test texts, or on its own text.

        After one round this is the paper's "standalone". From the second on a client prunes the merged layers.
        """
        if self.options.merge == "hessians":
            state = State({}, self._received_layers(task, state))
        digest = self.model.digest(partial(self.own_layer, state=state))
        fields: ValueDict = {"digest": digest, "density": self.density(state)}
        fields["pruned-layers"] = len(state.meta.get("pruned", {}))
        text = self.own_text[1] if self.own_text else None
        if self.privacy is not None:
            fields |= self.privacy.report(task.round)
            text = text if self.config.dp.accuracies == "open" else None
        if text is None and self.options.merge == "hessians":  # the client's model is the server's
            return self.num_examples, fields
        results = perplexities(self.config, self.model, lambda i: self.own_layer(i, state).tensors, text)
        for name, result in results.items():
            fields[f"perplexity/{name}"] = result.value
        if text is not None:  # the server knows the windows of the other texts
            own_result = results[OWN_TEXT]
            fields |= {"windows": own_result.windows, "windows-in-text": own_result.windows_in_text}
        return self.num_examples, fields
