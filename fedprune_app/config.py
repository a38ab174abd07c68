"""The run configuration: flat kebab-case keys, parsed once per side into frozen dataclasses.

Every option is declared once, below, with its default, its range and one line of help. A wrong value is a
:class:`ConfigError` of one line that names the key, the value and what is allowed. A leaf of the house: it imports
nothing of ours, and everything above ``core`` may import it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

Scalar = bool | int | float | str
T = TypeVar("T")


class ConfigError(ValueError):
    """A value in the configuration that cannot be; the message is one line for the user."""


_REFUSED = "refused setting: "


def refusal(error: ConfigError) -> ConfigError:
    """``error`` as it leaves a ServerApp: Flower hands on the text of an error alone, and :func:`refused` knows it."""
    return ConfigError(f"{_REFUSED}{str(error).removeprefix(_REFUSED)}")


def refused(text: str) -> str:
    """The message of the :class:`ConfigError` that :func:`refusal` put into a text; empty if there is none."""
    return text.partition(_REFUSED)[2]


def option(
    default: Scalar,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare one option: ``least``/``most`` are inclusive bounds, ``above``/``below`` exclusive ones."""
    limits = {"choices": choices, "least": least, "most": most, "above": above, "below": below}
    return field(default=default, metadata={"help": help, **limits})


def in_turn(key: str, text: str, partition: int, default: float) -> float:
    """The share of a client from a list for the clients in turn, '0.2 0.4'; ``default`` where it is empty.

    Raises :class:`ConfigError` naming ``key`` unless all are above 0 and at most 1.
    """
    texts = text.replace(",", " ").split()
    if not texts:
        return default
    try:
        values = [float(each) for each in texts]
    except ValueError:
        values = [math.nan]
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(f"{key} is {text!r}, allowed: numbers above 0 and at most 1")
    return values[partition % len(values)]


def class_names(text: str) -> tuple[str, ...]:
    """The names in ``classes``, 'cat, dog'; none where it is empty. Raises :class:`ConfigError`."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if text and (not all(names) or len(set(names)) < max(len(names), 2)):
        raise ConfigError(f"classes is {text!r}, allowed: at least two names, each once")
    return names


@dataclass(frozen=True)
class SubFedAvgOptions:
    """Sub-FedAvg, Un and Hy; names and values as in the paper's section 4 and the released code."""

    target_rate: float = option(50.0, "percent of all parameters to prune in the end", least=0, below=100)
    prune_step: float = option(10.0, "percent of the remaining weights pruned at a time (r_us)", above=0, below=100)
    final_step_cap: float = option(
        5.0, "most percent that the last step before the target prunes (subfedavg; subfedavg-hy has no cap)", above=0
    )
    accuracy_threshold: float = option(50.0, "percent accuracy below which a client does not prune", least=0, most=100)
    mask_distance: float = option(1e-4, "least distance of the masks after the first and last epoch", least=0, most=1)
    fc_mask_distance: float = option(5e-4, "as mask-distance, of the linear layers of subfedavg-hy", least=0, most=1)
    channel_distance: float = option(0.01, "least distance of the channel masks of subfedavg-hy", least=0, most=1)
    channel_fraction: float = option(
        0.45,
        "position, among a layer's sorted BatchNorm scales, of the largest removed (subfedavg-hy)",
        least=0,
        below=1,
    )
    channel_floor: float = option(0.5, "share of a layer's channels that always stay (subfedavg-hy)", above=0, below=1)
    scale_decay: float = option(0.0, "L1 penalty on BatchNorm scales (subfedavg-hy); the code's -sr is 1e-4", least=0)
    gate_split: str = option(
        "validation",
        "data whose accuracy decides whether to prune; 'test' is what the released code does, 'none' does not ask",
        choices=("validation", "test", "none"),
    )


@dataclass(frozen=True)
class GossipOptions:
    """How decentralised systems exchange models."""

    topology: str = option(
        "random",
        "who receives from whom",
        choices=("random", "random-in", "ring", "full", "exponential", "file"),
    )
    neighbours: int = option(10, "links of a client per round, for the random topologies", least=1)
    adjacency_file: str = option("", "for topology 'file': a text file, row k marks with 1 whom client k receives from")
    gossip: str = option(
        "server",
        "who averages the neighbours' models: the relaying server, or each client, the relay then reads nothing",
        choices=("server", "client"),
    )
    dropped: str = option(
        "absent",
        "a dropped client does nothing; or, as in Dis-PFL's released code, trains alone and still serves its old model",
        choices=("absent", "trains-alone"),
    )


@dataclass(frozen=True)
class DisPFLOptions(GossipOptions):
    """Dis-PFL; the common key ``density`` is every client's, unless ``densities`` or ``capacity`` say otherwise."""

    densities: str = option("", "densities of the clients in turn, '0.2 0.4 0.6 0.8 1.0'; empty: density for all")
    allocation: str = option("erk", "how density is spread over the layers", choices=("erk", "uniform"))
    initial_masks: str = option(
        "per-client",
        "each client draws its first mask, or all of one density draw the same",
        choices=("per-client", "common"),
    )
    prune_rate: float = option(0.5, "share of each layer's weights replaced in round 1 (α₀), annealed", least=0, most=1)
    annealing_rounds: int = option(
        0,
        "rounds over which prune-rate falls to 0; 0: num-server-rounds, and a run cannot be resumed for longer",
        least=0,
    )
    growth: str = option(
        "gradient",
        "what regrows: largest gradients, or at random as in the released scripts",
        choices=("gradient", "random"),
    )
    clip: str = option(
        "dense",
        "max-grad-norm bounds the dense gradient (released code) or the masked one",
        choices=("dense", "masked"),
    )

    def density_of(self, partition: int, default: float) -> float:
        """The density of a client, from the list or ``default``. Raises :class:`ConfigError`."""
        return in_turn("dispfl.densities", self.densities, partition, default)


@dataclass(frozen=True)
class DPSGDOptions(GossipOptions):
    """D-PSGD and D-PSGD-FT."""

    density: float = option(1.0, "share of each weight tensor under a fixed random mask", above=0, most=1)
    masks: str = option(
        "common", "the fixed mask is one for all, or each client's own", choices=("common", "per-client")
    )


@dataclass(frozen=True)
class FineTuneOptions:
    """FedAvg-FT and D-PSGD-FT: what every client does with the global model before it is evaluated."""

    epochs: int = option(0, "epochs of fine-tuning; 0 takes local-epochs", least=0)
    learning_rate: str = option(
        "last",
        "that of the round just ended, or as in Dis-PFL's released code that of a round before the first",
        choices=("last", "code"),
    )
    layers: str = option(
        "all", "what is fine-tuned; 'last': the last layer alone, as FedP3 compares with it", choices=("all", "last")
    )


@dataclass(frozen=True)
class DittoOptions:
    """Ditto, as Dis-PFL compares with it; local-epochs is not used."""

    global_epochs: int = option(2, "epochs on the global model", least=1)
    personal_epochs: int = option(3, "epochs on the personal model", least=1)
    pull: float = option(0.5, "strength of the pull of the personal model towards the global one (λ)", least=0)


@dataclass(frozen=True)
class FedFomoOptions:
    """FedFomo."""

    candidates: int = option(10, "other clients' models sent to a client per round (M)", least=1)
    exploration: float = option(
        0.5, "probability that candidates are drawn at random, not by past weight", least=0, most=1
    )


@dataclass(frozen=True)
class FedProxOptions:
    """FedProx."""

    mu: float = option(0.01, "strength of the proximal term (μ)", least=0)


@dataclass(frozen=True)
class LGFedAvgOptions:
    """LG-FedAvg."""

    global_layers: int = option(2, "how many of the last layers are averaged; the others stay local", least=1)
    pretrain_rounds: int = option(
        0, "rounds of FedAvg that come first, counted in num-server-rounds; the released script starts so", least=0
    )


@dataclass(frozen=True)
class MTLOptions:
    """MTL, a surrogate for MOCHA on networks."""

    strength: float = option(0.001, "strength of the regulariser (λ)", least=0)
    ridge: float = option(0.1, "added to the task covariance before it is inverted (ε)", above=0)


FEDP3_COUNTS: dict[str, tuple[int, ...]] = {
    "lowerb": (1,),
    "opu2": (2,),
    "opu3": (3,),
    "opu1-2-3": (1, 2, 3),
    "opu2-3": (2, 3),
}
"""FedP3's layer sets by how many hidden layers a client trains; of several counts each client draws one."""
FEDP3_BLOCKS: dict[str, tuple[str, ...]] = {
    "b2-b3-full": ("-layer2", "-layer3"),
    "b2-part": ("-layer2.0", "-layer2.1"),
    "b3-part": ("-layer3.0", "-layer3.1"),
}
"""FedP3's Table 1: what the clients, in turn or at random, leave out of ResNet-18."""


@dataclass(frozen=True)
class FedP3Options:
    """FedP3; the common key ``density`` is that of the layers a client does not train (the paper's global ratio)."""

    layer_set: str = option(
        "lowerb",
        "hidden layers a client trains in full and uploads; the last layer always is",
        choices=(*FEDP3_COUNTS, "all", *FEDP3_BLOCKS, "capacity", "by-hand"),
    )
    assignment: str = option(
        "balanced",
        "layers go to the clients in equal shares as in the released code (mixed numbers of them are drawn), or at "
        "random, once or every round",
        choices=("balanced", "random", "per-round"),
    )
    layers: str = option(
        "", "for layer-set 'by-hand': sets for the clients in turn, 'conv1 conv2; fc1; -conv1' (minus: all but)"
    )
    capacities: str = option(
        "", "for layer-set 'capacity': shares of the model's parameters that clients in turn can hold, '0.5 0.8'"
    )
    densities: str = option("", "densities of the clients in turn, '0.9 0.7'; empty: density for all")
    prune_by: str = option(
        "magnitude",
        "what the server prunes from the layers a client does not train: the smallest weights of the round, or random "
        "ones of the client, drawn once or every round",
        choices=("magnitude", "random", "random-per-round"),
    )
    pruned_weights: str = option(
        "stay-zero",
        "what the server pruned stays pruned in local training, or as in the released code is trained from zero",
        choices=("stay-zero", "train"),
    )
    local: str = option(
        "fixed",
        "local pruning, anew for each step, of the layers a client does not train",
        choices=("fixed", "uniform", "ordered-dropout"),
    )
    local_density: float = option(0.9, "share p of weights or units that local pruning keeps at least", above=0, most=1)
    local_law: str = option(
        "uniform",
        "a step's share: uniform in [p, 1], always p, or one of 0.2, 0.4, ..., 1 from p on",
        choices=("uniform", "constant", "fjord"),
    )
    aggregation: str = option(
        "simple",
        "mean of a layer over its clients: plain; weighted by how many hidden layers they train; that, counting the "
        "last layer; as printed, over all clients, which shrinks layers; or attention (ours)",
        choices=("simple", "weighted", "weighted-with-head", "weighted-literal", "attention"),
    )
    temperature: float = option(1.0, "of attention's softmax over distances from the mean, in their mean", above=0)
    personal_head: bool = option(False, "the last layer stays with the client, as the released code has it in effect")
    head_epochs: int = option(
        0,
        "epochs in the last round, in which clients train the last layer alone (the released code: 10); 0: as always",
        least=0,
    )
    sketch: str = option(
        "coordinates",
        "for system ldp-fedp3: what the clients of a round share out among them at random, each sending its part alone",
        choices=("coordinates", "layers"),
    )

    def density_of(self, partition: int, default: float) -> float:
        """The density of what a client does not train. Raises :class:`ConfigError`."""
        return in_turn("fedp3.densities", self.densities, partition, default)

    def capacity_of(self, partition: int) -> float:
        """The share of the model that a client can hold, where its node does not say. Raises :class:`ConfigError`."""
        return in_turn("fedp3.capacities", self.capacities, partition, 1.0)

    def patterns(self) -> tuple[str, ...]:
        """What to take, for the clients in turn, where layers are named; else nothing."""
        if self.layer_set == "by-hand":
            return tuple(part.strip() for part in self.layers.split(";"))
        return FEDP3_BLOCKS.get(self.layer_set, ())


@dataclass(frozen=True)
class FedCROptions:
    """FedCR; names as in the released code where it has one."""

    beta: float = option(0.001, "strength of the divergence between prior and encoder (β)", least=0)
    divergence: str = option(
        "prior-to-encoder",
        "KL(prior ‖ encoder), as in the released code, or KL(encoder ‖ prior)",
        choices=("prior-to-encoder", "encoder-to-prior"),
    )
    prior_weight: float = option(
        1.0, "share of a round's product in the prior (beta2 of the released code, whose default 0 never updates it)",
        least=0, most=1,
    )  # fmt: skip
    train_draws: int = option(15, "draws of a code per image in training", least=1)
    test_draws: int = option(30, "draws of a code per image in testing", least=1)
    layer_set: str = option(
        "all", "layers a client trains in full and sends, as fedp3.layer-set", choices=(*FEDP3_COUNTS, "all")
    )

    def as_fedp3(self, options: FedP3Options) -> FedP3Options:
        """FedP3's options as FedCR takes them: its own layer set, heads that stay with the clients."""
        return replace(options, layer_set=self.layer_set, layers="", personal_head=True)


@dataclass(frozen=True)
class FjORDOptions:
    """FjORD; a node's ``capacity`` goes before ``widths``."""

    widths: str = option(
        "0.2 0.4 0.6 0.8 1.0", "share of each layer's units that the clients, in turn, can bear (p_max)"
    )
    distillation: bool = option(
        False, "each step's sub-network learns from the client's widest one, that one from labels"
    )

    def width_of(self, partition: int) -> float:
        """A client's width. Raises :class:`ConfigError`."""
        return in_turn("fjord.widths", self.widths, partition, 1.0)


@dataclass(frozen=True)
class FedLTPOptions:
    """Fed-LTP; the common key ``density`` is what a ticket keeps of each weight tensor (1 - P1), ``dp.count-scale`` the
    scale of the noise on validation scores (λ_val)."""

    public_dataset: str = option("", "the server's public data; empty: a share of dataset that no client gets")
    public_data_dir: str = option("", "folder of the public data, on the server")
    public_samples: int = option(0, "use so many of the public images, with their label law; 0: all", least=0)
    public_head: str = option(
        "same",
        "the public classes number as many as the private ones; or the last layer is dense and not from the ticket",
        choices=("same", "own"),
    )
    tickets: int = option(
        3, "winning tickets to choose from (M); 0: the unpruned initial network in place of one", least=0
    )
    ticket_iterations: int = option(1000, "training steps of a ticket on public data (k)", least=1)
    ticket_batch_size: int = option(60, "public images per step", least=1)
    ticket_learning_rate: float = option(1.2e-3, "learning rate on public data", above=0)
    ticket_optimizer: str = option("adam", "how tickets are trained", choices=("adam", "sgd"))
    rule: str = option(
        "quantile",
        "a ticket keeps density of each tensor, by magnitude; or weights above (1 - density) times the largest",
        choices=("quantile", "relative-threshold"),
    )
    selection: str = option(
        "softmax",
        "which ticket: by softmax of accuracies over temperature, by softmax of counts of correct images, or the best",
        choices=("softmax", "counts", "argmax"),
    )
    temperature: float = option(0.01, "of the softmax of accuracies", above=0)
    start: str = option(
        "rewind",
        "values that clients start from: the ticket's own before its training, those after it, or drawn anew",
        choices=("rewind", "trained", "random"),
    )
    pruning: str = option(
        "one-shot",
        "all clients get the ticket; or each keeps one of nested sub-models, as many as clients take part in a round",
        choices=("one-shot", "iterative"),
    )
    further_pruned: float = option(
        0.1, "share of the survivors that each nested sub-model loses (P2)", least=0, below=1
    )
    validators: str = option(
        "all",
        "who scores each round's model, so that the best round's is the final one: all clients, the round's, or nobody",
        choices=("all", "selected", "none"),
    )


@dataclass(frozen=True)
class FedSPAOptions:
    """Fed-SPA."""

    share: float = option(
        0.4, "share of all coordinates that a client trains and sends in a round (p)", above=0, most=1
    )
    acceleration: str = option(
        "momentum", "the server's step along the mean update", choices=("momentum", "adam", "none")
    )
    server_momentum: float = option(0.5, "of the mean update, for 'momentum'; β₁ of 'adam'", least=0, below=1)
    server_learning_rate: float = option(1.0, "factor on the server's step", above=0)
    adam_beta2: float = option(0.99, "β₂ of 'adam'", least=0, below=1)
    adam_epsilon: float = option(1e-3, "added to the root of the second moment, for 'adam'", above=0)


@dataclass(frozen=True)
class DPOptions:
    """Differential privacy of each client's examples against everyone else, the server included (docs/privacy.md)."""

    enabled: bool = option(False, "train with DP-SGD, charge every release to the client's ledger, refuse what leaks")
    noise_multiplier: float = option(
        0.0, "standard deviation of the noise over clip-norm (σ); 0: what target-epsilon needs", least=0
    )
    target_epsilon: float = option(
        0.0, "choose the noise for this ε over the planned rounds; also a budget; 0: noise-multiplier says", least=0
    )
    planned_rounds: int = option(
        0, "rounds a client is planned to join, for target-epsilon; 0: all of num-server-rounds", least=0
    )
    clip_norm: float = option(1.0, "each example's gradient is clipped to this norm (C)", above=0)
    delta: float = option(1e-5, "δ of every ε; below 1 / (a client's examples) to mean something", above=0, below=1)
    second_delta: float = option(0.0, "another δ, at which ε is told beside it; 0: none", least=0, below=1)
    epsilon_budget: float = option(0.0, "a client stops before its ε passes this; 0: no limit", least=0)
    accountant: str = option(
        "rdp", "how releases compose: Rényi divergences, or privacy loss distributions", choices=("rdp", "pld")
    )
    accuracies: str = option(
        "open",
        "evaluations, of examples never trained on: as they are (no guarantee for those examples), as noised counts "
        "that are charged (with test-split=holdout), or not at all",
        choices=("open", "noised", "none"),
    )
    count_scale: float = option(
        0.0, "scale of the Laplace noise on a count of correct predictions; 0: no noised counts", least=0
    )
    grad_sample: str = option(
        "auto",
        "how gradients per example are made; the results agree, 'auto' is the fastest",
        choices=("auto", "one-pass", "hooks", "functorch", "ghost"),
    )
    physical_batch: int = option(256, "most examples whose gradients are in memory at a time", least=1)
    secure_rng: bool = option(
        False, "noise and samples from the operating system, not reproducible; else from seed, a simulation"
    )
    ledger_dir: str = option(
        "", "folder for one ledger per client over all runs on its data, absolute; empty: with the run's state"
    )


@dataclass(frozen=True)
class FedSpaLLMOptions:
    """FedSpaLLM; the common key ``density`` is what is kept of every matrix, ``batch-size`` counts sequences."""

    pruner: str = option("sparsegpt", "how a client prunes", choices=("sparsegpt", "wanda", "magnitude"))
    pattern: str = option("", "keep n of every m neighbours, as '2:4', in place of density")
    block_size: int = option(128, "columns that SparseGPT prunes at a time", least=1)
    damping: float = option(0.01, "SparseGPT's damping, as a share of the mean of the Hessian's diagonal", least=0)
    count: str = option(
        "exact",
        "entries pruned: exactly as many, or one more per block as in SparseGPT's code",
        choices=("exact", "code"),
    )
    segments: int = option(32, "calibration segments of a client", least=1)
    segment_counts: str = option("", "segments of the clients in turn, '32 8 2'; empty: fedspallm.segments for all")
    segment_length: int = option(0, "tokens of a segment; 0: as many as the model takes, at most 2048", least=0)
    deal: str = option(
        "documents",
        "a client's text: its share of the documents, one document alone, its share of all segments; or data-dir is "
        "its own",
        choices=("documents", "one", "segments", "own"),
    )
    window: int = option(
        0, "tokens of a window that perplexity is measured on; 0: as many as the model takes, at most 2048", least=0
    )
    test_windows: int = option(0, "measure perplexity on the first so many windows of a text; 0: all", least=0)
    evaluation_texts: str = option(
        "", "more texts to measure perplexity on, 'wikitext-2=/path/a.txt, ptb=/path/b.txt'; paths are absolute"
    )
    dtype: str = option(
        "auto", "of the model; 'auto' is the checkpoint's", choices=("auto", "float32", "float16", "bfloat16")
    )
    layer_shares: str = option(
        "", "shares of the layers that the clients in turn prune in a round, '1.0 0.5'; empty: all, or capacity"
    )
    unsampled: str = option(
        "cached",
        "layers a client does not prune: its cached dense ones; or the current ones, sent to it from round 2 on",
        choices=("cached", "current"),
    )
    expansion: str = option(
        "matrix",
        "prune the mean to density: of each matrix, of each decoder layer, or of all together; or not",
        choices=("matrix", "layer", "global", "none"),
    )
    ties: str = option(
        "magnitude",
        "equally often pruned weights go by smallest mean |w|, by |w|·‖x‖ with the inputs clients saw, or by place",
        choices=("magnitude", "wanda", "index"),
    )
    weights: str = option(
        "uniform", "clients count alike in the mean, or by their segments", choices=("uniform", "segments")
    )

    def n_of_m(self) -> tuple[int, int] | None:
        """``pattern`` as (n, m), or None. Raises :class:`ConfigError`."""
        if not self.pattern:
            return None
        n, _, m = self.pattern.partition(":")
        if not (n.isdecimal() and m.isdecimal() and 0 < int(n) <= int(m)):
            raise ConfigError(f"fedspallm.pattern is {self.pattern!r}, allowed: n:m with n at least 1 and at most m")
        return int(n), int(m)

    def num_segments(self, partition: int) -> int:
        """Calibration segments of a client. Raises :class:`ConfigError`."""
        texts = self.segment_counts.replace(",", " ").split() or [str(self.segments)]
        if not all(text.isdecimal() and int(text) > 0 for text in texts):
            raise ConfigError(
                f"fedspallm.segment-counts is {self.segment_counts!r}, allowed: whole numbers, at least 1"
            )
        return int(texts[partition % len(texts)])

    def more_texts(self) -> dict[str, Path]:
        """``evaluation-texts`` as name → path, in its order. Raises :class:`ConfigError`."""
        found: dict[str, Path] = {}
        for text in filter(None, (part.strip() for part in self.evaluation_texts.split(","))):
            name, _, path = (part.strip() for part in text.partition("="))
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in found or not Path(path).is_absolute():
                raise ConfigError(
                    f"fedspallm.evaluation-texts has {text!r}, allowed: name=path, names of letters and digits, each "
                    "once, and absolute paths"
                )
            found[name] = Path(path)
        return found

    def layer_share(self, partition: int) -> float:
        """The share of the layers that a client prunes. Raises :class:`ConfigError`."""
        texts = self.layer_shares.replace(",", " ").split()
        try:
            values = [float(text) for text in texts] or [1.0]
        except ValueError:
            values = [math.nan]
        if not all(0 < value <= 1 for value in values):
            raise ConfigError(
                f"fedspallm.layer-shares is {self.layer_shares!r}, allowed: numbers above 0 and at most 1"
            )
        return values[partition % len(values)]


@dataclass(frozen=True)
class Config:
    """One run, resolved. Field ``learning_rate`` is the key ``learning-rate``; tables of systems are fields."""

    system: str = option("subfedavg", "which system to run (see `fedprune list`)")
    dataset: str = option("digits", "which data (see `fedprune list`)")
    data_dir: str = option("", "folder of the data; not needed for digits")
    classes: str = option("", "an image folder's classes in order, 'cat, dog'; empty: those it has folders for")
    download: bool = option(
        False, "fetch what is missing: a torchvision dataset into data-dir, a model from the Hugging Face hub"
    )
    partition: str = option("shards", "how the training data is dealt to the clients (see `fedprune list`)")
    shard_size: int = option(0, "samples per shard; 0 deals out all the data in equal shards", least=0)
    shards_per_client: int = option(2, "shards per client", least=1)
    classes_per_client: int = option(2, "classes per client for partition 'classes'", least=1)
    class_assignment: str = option(
        "cyclic", "which classes a client gets for partition 'classes'", choices=("cyclic", "random")
    )
    dirichlet_alpha: float = option(0.3, "concentration of the Dirichlet partitions", above=0)
    dirichlet_groups: int = option(
        0, "clients in so many groups share label preferences ('dirichlet-client'); 0: each its own", least=0
    )
    samples_per_client: int = option(0, "deal out only so many samples per client, on average; 0: all", least=0)
    augmentation: str = option(
        "none", "of training images: nothing, or random crops (padding 4) and flips", choices=("none", "crop-flip")
    )
    public_fraction: float = option(
        0.0,
        "share of the training images that no client gets, for a server that uses public data; with system 'fedltp' "
        "and no public dataset 0 means 0.2",
        least=0,
        below=1,
    )
    validation_fraction: float = option(0.1, "share of a client's training data held out", least=0, below=1)
    test_split: str = option("labels", "test data of a client", choices=("labels", "proportional", "holdout"))
    test_samples: int = option(
        100, "images a client is tested on, rounded up per label, when test-split is 'proportional'", least=1
    )
    test_fraction: float = option(0.3, "share tested on when test-split is 'holdout'", above=0, below=1)
    model: str = option("auto", "which network; 'auto' takes the dataset's (see `fedprune list`)")
    init: str = option(
        "default",
        "initial weights: the network's own (PyTorch's; VGG-11: Kaiming), the released Sub-FedAvg code's, or Kaiming",
        choices=("default", "subfedavg", "kaiming"),
    )
    batch_norm: str = option(
        "averaged",
        "BatchNorm scales and statistics: averaged by the server, or kept local and never sent",
        choices=("averaged", "local"),
    )
    num_server_rounds: int = option(20, "communication rounds", least=1)
    fraction_train: float = option(0.5, "share of the clients sampled per round", above=0, most=1)
    drop_probability: float = option(0.0, "probability that a sampled client drops out of the round", least=0, below=1)
    local_epochs: int = option(5, "epochs of local training per round", least=1)
    steps_per_epoch: int = option(0, "steps of a local epoch; 0: as many as go through the examples once", least=0)
    batch_size: int = option(10, "samples per local step", least=1)
    learning_rate: float = option(0.01, "local learning rate in round 1", above=0)
    lr_decay: float = option(1.0, "factor on the learning rate per round", above=0, most=1)
    momentum: float = option(0.5, "SGD momentum", least=0, below=1)
    weight_decay: float = option(0.0, "SGD weight decay", least=0)
    max_grad_norm: float = option(0.0, "clip the gradient's global norm to this; 0 does not clip", least=0)
    density: float = option(0.5, "kept share of the parameters, where a system prunes to a density", above=0, most=1)
    seed: int = option(0, "everything random derives from it", least=0, most=2**53)
    evaluate_every: int = option(5, "evaluate all clients every so many rounds; 0 only after the last", least=0)
    deadline_seconds: float = option(600.0, "a round waits this long for replies", above=0)
    startup_seconds: float = option(300.0, "the run waits this long for its clients to come up", above=0)
    min_clients: int = option(1, "the run waits for so many clients, startup-seconds long, and needs them", least=1)
    min_replies: int = option(1, "a round with fewer good replies stops the run", least=1)
    robust: str = option(
        "none",
        "how the server averages models: plainly, each client's move clipped to robust-norm, or by coordinate without "
        "the smallest and largest values",
        choices=("none", "clip", "trimmed-mean"),
    )
    robust_norm: float = option(
        0.0, "L2 norm that a client's model may be from the server's, for robust 'clip'", least=0
    )
    robust_trim: float = option(
        0.2,
        "share of a coordinate's values left out at either end, for robust 'trimmed-mean'; if that is none, it stays",
        least=0,
        below=0.5,
    )
    out_dir: str = option("", "run folder, absolute; empty: ~/fedprune-runs/<run id>")
    state_dir: str = option("", "folder for the clients' state of any run, absolute; empty: <run folder>/clients")
    resume_from: str = option("", "run folder to continue")
    accept_loss: bool = option(False, "resume also where a damaged file makes the result another; run.json says so")
    device: str = option("auto", "where clients train; 'auto' takes CUDA when present", choices=("auto", "cpu", "cuda"))
    num_threads: int = option(1, "torch threads per client; a different number changes float sums", least=1)
    tracking: str = option("none", "also write TensorBoard files", choices=("none", "tensorboard"))
    subfedavg: SubFedAvgOptions = field(default_factory=SubFedAvgOptions)
    dispfl: DisPFLOptions = field(default_factory=DisPFLOptions)
    dpsgd: DPSGDOptions = field(default_factory=DPSGDOptions)
    finetune: FineTuneOptions = field(default_factory=FineTuneOptions)
    ditto: DittoOptions = field(default_factory=DittoOptions)
    fedfomo: FedFomoOptions = field(default_factory=FedFomoOptions)
    fedprox: FedProxOptions = field(default_factory=FedProxOptions)
    lgfedavg: LGFedAvgOptions = field(default_factory=LGFedAvgOptions)
    mtl: MTLOptions = field(default_factory=MTLOptions)
    fedp3: FedP3Options = field(default_factory=FedP3Options)
    fedcr: FedCROptions = field(default_factory=FedCROptions)
    fjord: FjORDOptions = field(default_factory=FjORDOptions)
    fedltp: FedLTPOptions = field(default_factory=FedLTPOptions)
    fedspa: FedSPAOptions = field(default_factory=FedSPAOptions)
    dp: DPOptions = field(default_factory=DPOptions)
    fedspallm: FedSpaLLMOptions = field(default_factory=FedSpaLLMOptions)

    @property
    def learning_rates(self) -> _LearningRates:
        """``config.learning_rates[t]`` is the local learning rate of round ``t`` (1-based)."""
        return _LearningRates(self.learning_rate, self.lr_decay)

    @property
    def public_share(self) -> float:
        """Share of the training images that no client gets."""
        if self.public_fraction or self.system != "fedltp" or self.fedltp.public_dataset or not self.fedltp.tickets:
            return self.public_fraction
        return 0.2

    def to_dict(self) -> dict[str, Scalar]:
        """The flat kebab-case form, every key present."""
        return {key: value for key, (value, _) in _declared(self).items()}


@dataclass(frozen=True)
class _LearningRates:
    first: float
    decay: float

    def __getitem__(self, round: int) -> float:
        return self.first * self.decay ** (round - 1)


def _declared(config: Config) -> dict[str, tuple[Scalar, Mapping[str, Any]]]:
    """Key → (value, metadata) of every option, tables as ``table.key``."""
    declared: dict[str, tuple[Scalar, Mapping[str, Any]]] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if hasattr(value, "__dataclass_fields__"):
            for sub in fields(value):
                key = f"{item.name}.{sub.name.replace('_', '-')}"
                declared[key] = (getattr(value, sub.name), sub.metadata)
        else:
            declared[item.name.replace("_", "-")] = (value, item.metadata)
    return declared


DEFAULTS: dict[str, Scalar] = Config().to_dict()
HELP: dict[str, str] = {key: meta["help"] for key, (_, meta) in _declared(Config()).items()}


def _check(key: str, value: Any, default: Scalar, meta: Mapping[str, Any]) -> Scalar:
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)  # a list of one number, as `layer-shares=0.5`, which TOML and YAML read as a number
    if type(value) is not kind:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        raise ConfigError(f"{key} is {value!r}, allowed: {names[kind]}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r}, allowed: a finite number")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"{key} is {value!r}, allowed: {', '.join(meta['choices'])}")
    bounds = [
        (f"at least {meta['least']}", meta["least"] is None or value >= meta["least"]),
        (f"above {meta['above']}", meta["above"] is None or value > meta["above"]),
        (f"at most {meta['most']}", meta["most"] is None or value <= meta["most"]),
        (f"below {meta['below']}", meta["below"] is None or value < meta["below"]),
    ]
    if not all(holds for _, holds in bounds):
        allowed = " and ".join(text for text, _ in bounds if "None" not in text)
        raise ConfigError(f"{key} is {value!r}, allowed: {allowed}")
    assert isinstance(value, Scalar)
    return value


def parse_config(values: Mapping[str, Any]) -> Config:
    """The configuration that flat ``values`` describe; missing keys take their defaults.

    Raises :class:`ConfigError` for an unknown key, a wrong type, or a value out of range. Names of systems, datasets,
    partitions and models are checked where these are registered.
    """
    declared = _declared(Config())
    for key in values:
        if key not in declared:
            close = difflib.get_close_matches(key, declared, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see `fedprune list --keys`"
            raise ConfigError(f"unknown key {key!r}: {hint}")
    checked = {key: _check(key, values.get(key, default), default, meta) for key, (default, meta) in declared.items()}
    top: dict[str, Any] = {k.replace("-", "_"): v for k, v in checked.items() if "." not in k}
    for item in fields(Config):
        if item.name not in top:
            prefix = f"{item.name}."
            table = {k[len(prefix) :].replace("-", "_"): v for k, v in checked.items() if k.startswith(prefix)}
            top[item.name] = type(getattr(Config(), item.name))(**table)
    for key in ("out-dir", "state-dir", "resume-from", "data-dir", "fedltp.public-data-dir"):
        path = str(checked[key])
        if path and not Path(path).expanduser().is_absolute():
            raise ConfigError(f"{key} is {path!r}, allowed: an absolute path")
        if "." not in key:
            top[key.replace("-", "_")] = str(Path(path).expanduser()) if path else ""
    config = Config(**top)
    config.dispfl.density_of(0, config.density)
    config.fjord.width_of(0)
    if class_names(config.classes) and config.dataset != "image-folder":
        raise ConfigError(f"classes is {config.classes!r}, allowed with dataset {config.dataset!r}: nothing")
    if (config.robust == "clip") != (config.robust_norm > 0):
        allowed = "above 0" if config.robust == "clip" else "0"
        raise ConfigError(f"robust-norm is {config.robust_norm}, allowed with robust {config.robust!r}: {allowed}")
    _check_fedp3(config)
    config.fedspallm.layer_share(0)
    config.fedspallm.num_segments(0)
    config.fedspallm.more_texts()
    for key in ("fedspallm.segment-length", "fedspallm.window"):
        if checked[key] == 1:
            raise ConfigError(f"{key} is 1, allowed: 0, or at least 2")
    if config.fedspallm.ties == "wanda" and config.fedspallm.pruner == "magnitude":
        raise ConfigError("fedspallm.ties is 'wanda', allowed with fedspallm.pruner 'magnitude': magnitude, index")
    if config.fedspallm.expansion == "global" and config.fedspallm.pattern:
        raise ConfigError("fedspallm.expansion is 'global', allowed with a pattern: matrix, layer, none")
    if (pattern := config.fedspallm.n_of_m()) and config.fedspallm.block_size % pattern[1]:
        allowed = f"a multiple of {pattern[1]}"
        raise ConfigError(f"fedspallm.block-size is {config.fedspallm.block_size}, allowed with a pattern: {allowed}")
    _check_adjacency("dispfl", config.dispfl)
    _check_adjacency("dpsgd", config.dpsgd)
    prunes_on_validation = (
        config.system in ("subfedavg", "subfedavg-hy") and config.subfedavg.gate_split == "validation"
    )
    prunes = config.subfedavg.target_rate > 0 or config.system == "subfedavg-hy"  # channels go whatever the target
    if prunes_on_validation and config.validation_fraction == 0 and prunes:
        raise ConfigError("validation-fraction is 0.0, allowed with subfedavg.gate-split 'validation': above 0")
    channel_fraction, channel_floor = config.subfedavg.channel_fraction, config.subfedavg.channel_floor
    if config.system == "subfedavg-hy" and channel_fraction + channel_floor >= 1:
        raise ConfigError(
            f"subfedavg.channel-fraction is {channel_fraction!r}, allowed with channel-floor {channel_floor!r}: below "
            f"{1 - channel_floor:g}, or a step would remove channels that have to stay"
        )
    if config.system == "fedfomo" and config.validation_fraction == 0:
        raise ConfigError("validation-fraction is 0.0, allowed with system 'fedfomo', which weighs by it: above 0")
    _check_private(config.dp)
    if config.system == "fedltp" and config.fedltp.validators != "none" and config.validation_fraction == 0:
        raise ConfigError(
            f"validation-fraction is 0.0, allowed with fedltp.validators {config.fedltp.validators!r}: above 0"
        )
    if config.resume_from and config.out_dir and config.out_dir != config.resume_from:
        raise ConfigError(f"out-dir is {config.out_dir!r}, allowed with resume-from: that same folder, or nothing")
    return config


def _check_fedp3(config: Config) -> None:
    options = config.fedp3
    options.density_of(0, config.density)
    options.capacity_of(0)
    if (options.layer_set == "by-hand") != bool(options.layers):
        allowed = "nothing" if options.layers else "sets of layers"
        raise ConfigError(
            f"fedp3.layers is {options.layers!r}, allowed with fedp3.layer-set {options.layer_set!r}: {allowed}"
        )

    if config.system == "ldp-fedp3" and not config.dp.enabled:
        raise ConfigError("dp.enabled is False, allowed with system 'ldp-fedp3', which promises privacy: true")
    if config.system == "fedcr" and options.local != "fixed":
        raise ConfigError(f"fedp3.local is {options.local!r}, allowed with system 'fedcr': 'fixed'")
    if config.system == "fedcr" and options.head_epochs:
        raise ConfigError(f"fedp3.head-epochs is {options.head_epochs}, allowed with system 'fedcr': 0")


def _check_private(dp: DPOptions) -> None:
    if dp.ledger_dir and not Path(dp.ledger_dir).is_absolute():
        raise ConfigError(f"dp.ledger-dir is {dp.ledger_dir!r}, allowed: an absolute path")
    if not dp.enabled:
        return
    if (dp.noise_multiplier > 0) == (dp.target_epsilon > 0):
        given = f"dp.noise-multiplier is {dp.noise_multiplier!r} and dp.target-epsilon is {dp.target_epsilon!r}"
        raise ConfigError(f"{given}, allowed with dp.enabled: one of them above 0")
    if dp.accuracies == "noised" and dp.count_scale == 0:
        raise ConfigError("dp.count-scale is 0.0, allowed with dp.accuracies 'noised': above 0")


def _check_adjacency(table: str, options: GossipOptions) -> None:
    path = options.adjacency_file
    if bool(path) != (options.topology == "file"):
        allowed = "a path" if not path else "nothing"
        raise ConfigError(
            f"{table}.adjacency-file is {path!r}, allowed with {table}.topology {options.topology!r}: {allowed}"
        )
    if path and not Path(path).is_absolute():
        raise ConfigError(f"{table}.adjacency-file is {path!r}, allowed: an absolute path")


_MAY_CHANGE_ON_RESUME = {
    "num-server-rounds",
    "evaluate-every",
    "deadline-seconds",
    "startup-seconds",
    "min-clients",
    "min-replies",
    "out-dir",
    "state-dir",
    "resume-from",
    "accept-loss",
    "data-dir",
    "fedltp.public-data-dir",
    "download",
    "tracking",
}


def check_resumable(before: Mapping[str, Any], config: Config) -> None:
    """Raise :class:`ConfigError` where ``config`` would not continue a run that began with the settings ``before``."""
    fixed = {"state-dir"} if config.dp.enabled else set()  # where the clients' ledgers are
    why = _why_the_number_of_rounds_is_fixed(config)
    fixed |= {"num-server-rounds"} if why else set()
    for key, value in config.to_dict().items():
        if key not in _MAY_CHANGE_ON_RESUME - fixed and before.get(key) != value:
            reason = f"; {why}" if key == "num-server-rounds" else ""
            raise ConfigError(
                f"{key} is {value!r}, allowed when resuming: {before.get(key)!r}, as the run began{reason}"
            )


def _why_the_number_of_rounds_is_fixed(config: Config) -> str:
    """Why earlier rounds would have been others in a run of another length; empty where they would not."""
    if config.system == "dispfl" and config.dispfl.prune_rate and not config.dispfl.annealing_rounds:
        return "dispfl.prune-rate falls over these rounds, unless a run begins with dispfl.annealing-rounds"
    if config.dp.enabled and config.dp.target_epsilon and not config.dp.planned_rounds:
        return "dp.target-epsilon is spread over these rounds, unless a run begins with dp.planned-rounds"
    if config.system == "fedp3" and config.fedp3.head_epochs:
        return "fedp3.head-epochs are trained in the last of these rounds"
    return ""


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, as Flower does with ``--run-config`` files."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_toml(path: Path) -> dict[str, Any]:
    """Flat keys of a run-config file. Raises :class:`ConfigError` naming the file."""
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"config file {str(path)!r} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"config file {str(path)!r} cannot be read: it is nested too deeply") from None


def parse_override(text: str) -> tuple[str, Scalar]:
    """``key=value`` from a command line; the value is read as TOML, or as plain text where it is none."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is not of the form key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = value
    if not isinstance(parsed, bool | int | float | str):
        raise ConfigError(f"{key.strip()} is {value!r}, allowed: a number, true, false or a text")
    return key.strip(), parsed


def to_toml(values: Mapping[str, Scalar]) -> str:
    """Flat values as TOML that Flower and :func:`read_toml` read back."""
    lines = []
    for key, value in sorted(values.items(), key=lambda item: ("." in item[0], item[0])):
        quoted = f'"{key}"' if "." in key else key
        if isinstance(value, str):
            # JSON's escapes are TOML's, but for the delete character
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        elif isinstance(value, bool):
            text = str(value).lower()
        else:
            text = repr(value)
        lines.append(f"{quoted} = {text}")
    return "\n".join(lines) + "\n"
