"""Options of FedSpaLLM, which prunes language models with clients' private text."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedprune_app.config.common import CommonOptions, Table
from fedprune_app.config.errors import ConfigError
from fedprune_app.config.options import Needs, NoneOf, PathKind, option, share_in_turn

# The pattern that removes heads and feed-forward units.
CUT = "cut"


@dataclass(frozen=True)
class FedSpaLLMOptions(Table):
    """How clients prune or observe, how the server merges, and on which texts perplexity is measured.

    The common key ``density`` is the kept share of every matrix, and ``batch-size`` counts sequences.
    """

    needs: ClassVar[Needs] = {"system": ("fedspallm",)}

    pruner: str = option(
        "sparsegpt",
        "The method by which a client prunes.",
        choices={
            "sparsegpt": "SparseGPT: the remaining weights are changed to make up for the pruned ones",
            "wanda": "Wanda: the weights with the smallest |w|·‖x‖ of each row are pruned",
            "magnitude": "the weights with the smallest |w| are pruned",
        },
    )
    pattern: str = option(
        "",
        "The pattern of kept weights. Empty means single weights, of which the key density says how many. n:m, such as "
        "'2:4', keeps n of every m neighbours. 'cut' removes whole heads and feed-forward units, so that an ordinary "
        "smaller model with the share density of the matrices is left.",
    )
    block_size: int = option(
        128,
        "The number of columns that SparseGPT prunes at a time.",
        least=1,
        needs={".pruner": ("sparsegpt",), ".refine": (False,), ".pattern": NoneOf((CUT,))},
    )
    segments: int = option(32, "The number of calibration segments of a client.", least=1)
    segment_length: int = option(
        0, "The number of tokens in a segment. 0 means as many as the model takes, at most 2048.", least=0
    )
    start_token: bool = option(
        False,
        "Whether the tokenizer's start token takes the place of each segment's and window's first token.",
    )
    deal: str = option(
        "documents",
        "The text that a client calibrates with.",
        choices={
            "documents": "a share of the documents",
            "one": "one document alone",
            "segments": "a share of all segments",
            "own": "the text in the client's own data-dir",
        },
    )
    window: int = option(
        0,
        "The number of tokens in a window that perplexity is measured on. 0 means as many as the model takes, at "
        "most 2048.",
        least=0,
    )
    test_windows: int = option(
        0,
        "The number of windows of a text, from its beginning, that perplexity is measured on. 0 means all windows.",
        least=0,
    )
    evaluation_texts: str = option(
        "",
        "The further texts that perplexity is measured on, with absolute paths: 'wikitext-2=/path/a.txt, "
        "ptb=/path/b.txt'.",
        kind=PathKind.NAMED_FILES,
    )
    dtype: str = option(
        "auto",
        "The number format of the model.",
        choices={
            "auto": "the checkpoint's",
            "float32": "32 bits",
            "float16": "16 bits",
            "bfloat16": "16 bits, with the range of 32",
        },
    )
    layer_shares: str = option(
        "",
        "The shares of the layers that the clients in turn prune in a round: '1.0 0.5'. Empty means all layers, or"
        " the share that a node's capacity gives.",
    )
    unsampled: str = option(
        "cached",
        "The version of a layer that a client uses where the client does not prune the layer.",
        choices={
            "cached": "the dense layer that the client has",
            "current": "the current layer, which the client gets from round 2 on",
        },
    )
    merge: str = option(
        "mean",
        "The rule by which the server makes a layer from the messages of the clients.",
        choices={
            "mean": "the paper's rule: each weight's mean over the clients that kept the weight, pruned to density",
            "masks": "FedPrLLM's rule: clients send masks alone, the weights that most of them keep stay, as they were",
            "hessians": "clients send Hessians in place of weights, and the server prunes once by their sum",
        },
    )
    refine: bool = option(
        False,
        "If true, the server prunes by ALPS in place of SparseGPT. ALPS solves for masks and weights of a whole matrix"
        " at once.",
        needs={".merge": ("hessians",), ".pattern": NoneOf((CUT,))},
    )
    layers_per_exchange: int = option(
        1,
        "The number of decoder layers whose Hessians are those of one model, pruned up to the first of them. 1 is best."
        " 0 means all layers: of the dense model. That costs little down to a density of 0.5.",
        least=0,
        needs={".merge": ("hessians",)},
    )
    hessian_form: str = option(
        "float32",
        "The numbers in which a Hessian travels.",
        choices={
            "float32": "32 bits",
            "int8": "the diagonal in 32 bits, and correlations in 8, which the server shrinks by 1 %",
            "diagonal": "the diagonal alone, by which the server prunes as Wanda does",
        },
        needs={".merge": ("hessians",)},
    )
    keep_sums: bool = option(
        False,
        "If true, the server keeps the sums of Hessians in the run's folder, for `fedprune compress`.",
        needs={".merge": ("hessians",)},
    )
    bits: int = option(
        16,
        "The number of bits of a weight, by GPTQ on the grids of GGUF files: 8, 5, 4 or 3. 16 does not round.",
        needs={".merge": ("hessians",)},
    )
    recovery_rounds: int = option(
        0,
        "The number of rounds, the last ones of the run, in which clients train the kept weights on their text.",
        least=0,
    )
    recovery_segments: int = option(
        256,
        "The number of segments that a client trains on in such a round.",
        least=1,
        needs={".recovery-rounds": NoneOf((0,))},
    )
    recovery_steps: int = option(
        100,
        "The number of training steps of a client in such a round, each on batch-size segments.",
        least=1,
        needs={".recovery-rounds": NoneOf((0,))},
    )
    recovery_learning_rate: float = option(
        3e-4,
        "The largest learning rate of these steps.",
        above=0,
        needs={".recovery-rounds": NoneOf((0,))},
    )

    def check(self, common: CommonOptions) -> None:
        if common.system == "fedspallm" and common.precision == "bf16":
            raise ConfigError(
                "precision", "bf16", "float32, tf32 (and fedspallm.dtype)", condition="with system 'fedspallm'"
            )
        self.layer_share(0)
        self.more_texts()
        if common.system == "fedspallm" and self.pruning_rounds(common) < 1:
            raise ConfigError(
                "fedspallm.recovery-rounds",
                self.recovery_rounds,
                f"less than num-server-rounds, {common.num_server_rounds}",
            )
        condition = f"with fedspallm.merge {self.merge!r}"
        if self.merge == "hessians" and self.pruner != "sparsegpt":
            raise ConfigError("fedspallm.pruner", self.pruner, "sparsegpt", condition=condition)
        if self.merge != "hessians" and self.pattern == CUT:
            raise ConfigError("fedspallm.pattern", CUT, "empty, n:m", condition=condition)
        if self.merge != "mean" and self.pruning_rounds(common) > 1:
            raise ConfigError(
                "num-server-rounds",
                common.num_server_rounds,
                "1 more than fedspallm.recovery-rounds",
                condition=condition,
            )
        if self.hessian_form == "diagonal" and (self.refine or self.pattern == CUT):
            allowed = "float32, int8"
            raise ConfigError("fedspallm.hessian-form", "diagonal", allowed, condition="with refine or pattern 'cut'")
        if self.bits not in (16, 8, 5, 4, 3):
            raise ConfigError("fedspallm.bits", self.bits, "16, 8, 5, 4, 3")
        if self.bits != 16 and self.recovery_rounds:
            allowed = "16, and `fedprune compress` afterwards"
            raise ConfigError("fedspallm.bits", self.bits, allowed, condition="with fedspallm.recovery-rounds")
        if (pattern := self.n_of_m()) and self.block_size % pattern[1]:
            raise ConfigError(
                "fedspallm.block-size", self.block_size, f"a multiple of {pattern[1]}", condition="with a pattern"
            )

    def pruning_rounds(self, common: CommonOptions) -> int:
        """Return the number of rounds that prune; the rounds after them recover."""
        return common.num_server_rounds - self.recovery_rounds

    def pruned_before(self, layer: int) -> int:
        """Return the number of pruned layers below ``layer`` in the model in which clients observe its inputs."""
        return layer - layer % self.layers_per_exchange if self.layers_per_exchange else 0

    def observes_all(self) -> bool:
        """Return whether clients observe the inputs of all matrices, not only of those that a cut needs."""
        return self.pattern != CUT or self.keep_sums or self.bits != 16

    def shrinkage(self) -> float:
        """Return the share by which correlations shrink, to offset errors of 8 bits or of a dense model's inputs."""
        if self.layers_per_exchange == 0:
            return 0.1
        return 0.01 if self.hessian_form == "int8" else 0.0

    def n_of_m(self) -> tuple[int, int] | None:
        """Return ``pattern`` as (n, m), or None if it is empty or 'cut'. Raises :class:`ConfigError`."""
        if self.pattern in ("", CUT):
            return None
        n, _, m = self.pattern.partition(":")
        if not (n.isdecimal() and m.isdecimal() and 0 < int(n) <= int(m)):
            raise ConfigError("fedspallm.pattern", self.pattern, "n:m with n at least 1 and at most m, or cut")
        return int(n), int(m)

    def more_texts(self) -> dict[str, Path]:
        """Return ``evaluation-texts`` as name → path, in their order. Raises :class:`ConfigError`."""
        path_by_name: dict[str, Path] = {}
        for text in filter(None, (part.strip() for part in self.evaluation_texts.split(","))):
            name, _, path = (part.strip() for part in text.partition("="))
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in path_by_name or not Path(path).is_absolute():
                allowed = "name=path, names of letters and digits, each once, and absolute paths"
                raise ConfigError("fedspallm.evaluation-texts", text, allowed)
            path_by_name[name] = Path(path)
        return path_by_name

    def layer_share(self, client: int) -> float:
        """Return the share of the layers that ``client`` prunes. Raises :class:`ConfigError`."""
        return share_in_turn("fedspallm.layer-shares", self.layer_shares, client, 1.0)
