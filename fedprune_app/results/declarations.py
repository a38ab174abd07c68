"""The declarations of all metrics of a run, in the order in which they are recorded: :data:`DECLARATIONS`."""

from functools import partial
from typing import Literal

from fedprune_app.results.footnotes import accuracy_footnote, both, fewer_footnote, noise_footnote, noised_footnote
from fedprune_app.results.metrics import (
    MEGABYTE,
    ClientMetric,
    Column,
    Curve,
    Declarations,
    FieldKind,
    InLine,
    InTable,
    Recorded,
    ReplyKind,
    Title,
)
from fedprune_app.results.statistics import largest, mean, noise_of_mean, number, running_mean, spread, worst_decile

_TRAINING, _EVALUATION = frozenset({ReplyKind.TRAINING}), frozenset({ReplyKind.EVALUATION})


_LAYER, _PERPLEXITY, _PRIVACY = (
    frozenset({ReplyKind.LAYER}),
    frozenset({ReplyKind.PERPLEXITY}),
    frozenset({ReplyKind.PRIVACY}),
)


_sometimes = partial(Column, recorded=Recorded.WHERE_MEASURED)
_told_sometimes = partial(ClientMetric, recorded=Recorded.WHERE_MEASURED)
_accuracy = partial(ClientMetric, least=0, most=1, may_be_noised=True)


def _megabytes(key: str, title: str, of_rounds: Literal["total", "mean"], place: int) -> InTable:
    decimals = 2 if of_rounds == "total" else 3
    return InTable(key, title, decimals, 1 / MEGABYTE, of_rounds, is_cost=True, place=place)


def _epsilon(name: str, table: InTable, line: InLine | None = None) -> ClientMetric:
    """Declare an ε: the round has the largest of all clients, with a footnote if noise derives from the seed."""
    column = Column(f"{name}_max", largest, table=table, line=line, footnote=noise_footnote)
    return ClientMetric(name, optional=_PRIVACY, least=0, columns=(column,))


DECLARATIONS = Declarations(
    (
        Column("round"),
        Column("seconds"),
        # accepted replies of clients that trained
        Column("replies"),
        Column("failures", lost=Title("Failures", 10)),
        Column("stragglers", lost=Title("Stragglers", 20)),
        # sampled clients that dropped out of the round
        Column("dropped", lost=Title("Dropped out", 40)),
        # training messages, as serialised
        Column("bytes_up", table=_megabytes("megabytes_up", "MB up", "total", 10)),
        Column("bytes_down", table=_megabytes("megabytes_down", "MB down", "total", 20)),
        Column("evaluation_bytes_up"),
        Column("evaluation_bytes_down"),
        # bytes between peers; null in a star
        Column("peer_bytes", table=_megabytes("peer_megabytes", "MB, peer to peer", "total", 40)),
        # heavier direction of the busiest node: a star's server, else a client
        Column("busiest_node_bytes", table=_megabytes("busiest_megabytes", "Busiest node, MB/round", "mean", 50)),
        # heavier direction of a client, mean over the participants
        Column("node_bytes_mean", table=_megabytes("node_megabytes", "Per node, MB/round", "mean", 70)),
        # bytes by the paper's own formula for the round, and for its busiest node in one direction
        Column("paper_bytes_up"),
        Column("paper_bytes_down"),
        Column(
            "paper_busiest_bytes",
            table=_megabytes("paper_busiest_megabytes", "Busiest node, MB/round, paper's formula", "mean", 60),
        ),
        ClientMetric("num_examples", least=1, is_count=True),
        _accuracy(
            "accuracy_personal",
            optional=_EVALUATION,
            view=Title("Personal", 10),
            columns=(
                Column(
                    "accuracy_personal_mean",
                    mean,
                    is_headline=True,
                    table=InTable("personal_accuracy", "Personal (%)", 2, 100, place=5),
                    view=Title("Personal", 10),
                    line=InLine("personal accuracy", "personal", ".1f", 100, " %"),
                    footnote=both(accuracy_footnote, fewer_footnote),
                    is_noised_mean=True,
                ),
                Column("accuracy_personal_std", spread, needs_open=True),
                Column(
                    "accuracy_personal_worst_decile",
                    worst_decile,
                    table=InTable("worst_decile", "Personal, worst decile (%)", 2, 100, place=30),
                    view=Title("Worst decile", 40),
                    footnote=fewer_footnote,
                    needs_open=True,
                ),
            ),
        ),
        # accuracy of held-out clients, after they joined
        _told_sometimes(
            "accuracy_newcomer",
            least=0,
            most=1,
            may_be_noised=True,
            columns=(
                _sometimes(
                    "accuracy_newcomer_mean",
                    table=InTable("newcomer_accuracy", "New clients (%)", 2, 100, place=29),
                    footnote=noised_footnote,
                ),
            ),
        ),
        # accuracy after one more local phase of all clients, and the phase's costs
        _told_sometimes(
            "accuracy_last_phase",
            least=0,
            most=1,
            columns=(
                _sometimes(
                    "accuracy_last_phase_mean",
                    table=InTable("last_phase_accuracy", "After a last phase (%)", 2, 100, place=28),
                    footnote=accuracy_footnote,
                ),
                *(_sometimes(f"last_phase_{cost}") for cost in ("bytes_up", "bytes_down", "flops")),
            ),
        ),
        _told_sometimes(
            "accuracy_last_phase_validation",
            least=0,
            most=1,
            columns=(_sometimes("accuracy_last_phase_validation_mean"),),
        ),
        # tested before training, in the training reply or by the evaluation
        _accuracy(
            "accuracy_received",
            optional=_TRAINING | _EVALUATION,
            view=Title("Received", 30),
            columns=(
                Column(
                    "accuracy_received_mean",
                    mean,
                    table=InTable("received_accuracy", "Received (%)", 2, 100, place=28),
                    view=Title("Received", 30),
                    footnote=both(accuracy_footnote, partial(fewer_footnote, count_column="accuracy_received_clients")),
                    is_noised_mean=True,
                ),
                # in decentralised systems clients receive a model only in rounds in which they train
                _sometimes("accuracy_received_clients", number),
            ),
        ),
        _accuracy(
            "accuracy_validation",
            optional=_EVALUATION,
            columns=(
                Column(
                    "accuracy_validation_mean",
                    mean,
                    view=Title("Validation", 50),
                    footnote=fewer_footnote,
                ),
            ),
        ),
        _told_sometimes(
            "accuracy_global",
            optional=_EVALUATION,
            least=0,
            most=1,
            may_be_noised=True,
            view=Title("Global model", 20),
            columns=(
                Column(
                    "accuracy_global",
                    mean,
                    is_headline=True,
                    table=InTable("global_accuracy", "Global model (%)", 2, 100, place=40),
                    view=Title("Global model", 20),
                    line=InLine("global accuracy", "global", ".1f", 100, " %"),
                    footnote=both(accuracy_footnote, fewer_footnote),
                    is_noised_mean=True,
                ),
            ),
        ),
        # standard deviation of the noise in each of the client's accuracies on test data
        _told_sometimes(
            "accuracy_noise",
            optional=_EVALUATION,
            least=0,
            columns=(_sometimes("accuracy_noise", noise_of_mean),),
        ),
        # by column over fewer clients than were evaluated: their number, and the noise in their mean
        _sometimes("clients_by_column", kind=FieldKind.BY_NAME),
        _sometimes("noise_by_column", kind=FieldKind.BY_NAME),
        # accuracy of the personal model on the client's test examples of each class, by the class's number
        _told_sometimes(
            "accuracy_by_class",
            "accuracy-of-class",
            optional=_EVALUATION,
            least=0,
            most=1,
            withheld=True,
            by="class",
            kind=FieldKind.BY_NAME,
            columns=(_sometimes("accuracy_by_class", running_mean, kind=FieldKind.BY_NAME),),
        ),
        # language models: on the run's first test text, others are in perplexity_by_text
        ClientMetric(
            "perplexity_personal",
            columns=(
                Column(
                    "perplexity_personal_mean",
                    table=InTable("own_perplexity", "Perplexity, clients' own models", place=60),
                    line=InLine("personal perplexity", "clients' own", on_a_text=True),
                    footnote=partial(fewer_footnote, count_column="personal_models"),
                ),
                Column("perplexity_personal_std"),
            ),
        ),
        # number of clients in these means: those with all layers of their own model pruned
        Column("personal_models"),
        Column(
            "perplexity_global",
            is_headline=True,
            table=InTable("perplexity", "Perplexity, global model", place=50),
            line=InLine("global perplexity", "global", on_a_text=True),
        ),
        # layers of the client's own language model that it has pruned
        ClientMetric("pruned_layers", least=0, is_count=True),
        # FedSpaLLM's loss is the mean relative error of the layers that were pruned
        _told_sometimes(
            "loss",
            required=_TRAINING,
            withheld=True,
            columns=(
                Column(
                    "loss_mean",
                    running_mean,
                    curve=Curve(
                        "loss", "Training loss", "Mean over the clients that trained in the round.", "Loss", place=20
                    ),
                    line=InLine("loss", format=".3f"),
                ),
            ),
        ),
        ClientMetric(
            "density",
            required=_TRAINING | _EVALUATION | _LAYER | _PERPLEXITY,
            least=0,
            most=1,
            columns=(
                Column(
                    "density_mean",
                    mean,
                    table=InTable("density", "Density, whole model", 3, place=80),
                    curve=Curve(
                        "density",
                        "Density of the whole model by round",
                        "Kept share of all tensors, mean over clients.",
                        "Density",
                        is_share=True,
                        place=10,
                    ),
                    line=InLine("density", "density", ".3f"),
                ),
            ),
        ),
        # kept share of convolution channels; null if none are removed
        ClientMetric(
            "channel_density",
            optional=_EVALUATION,
            least=0,
            most=1,
            columns=(
                Column("channel_density_mean", mean, table=InTable("channel_density", "Channels left", 3, place=90)),
            ),
        ),
        # one example's forward pass through the personal model, each layer times its density
        ClientMetric(
            "inference_flops",
            required=_EVALUATION,
            least=0,
            columns=(
                Column(
                    "inference_flops_mean",
                    mean,
                    table=InTable("inference_megaflops", "MFLOPs per prediction", 3, 1e-6, is_cost=True, place=90),
                ),
            ),
        ),
        # density of a pruned global model's prunable weights, and before the server expanded its masks
        Column("density_global", table=InTable("global_density", "Density, pruned matrices", 3, place=100)),
        Column(
            "density_before_expansion",
            table=InTable("union_density", "Density, pruned matrices before expansion", 3, place=110),
        ),
        _told_sometimes(
            "density_by_layer",
            "density",
            optional=_EVALUATION,
            least=0,
            most=1,
            by="layer",
            kind=FieldKind.BY_NAME,
            columns=(Column("density_by_layer", running_mean, kind=FieldKind.BY_NAME),),
        ),
        _told_sometimes("flops", required=_TRAINING, least=0, columns=(Column("flops", sum),)),
        ClientMetric("bytes_up"),
        ClientMetric("bytes_down"),
        # each client's ε so far; null without dp.enabled
        _epsilon("epsilon", InTable("epsilon", "ε", place=120), InLine("epsilon", "ε", format=".3g")),
        # the same by each accountant: privacy loss distributions and Rényi divergences
        _epsilon("epsilon_pld", InTable("pld_epsilon", "ε by PLD", place=122)),
        _epsilon("epsilon_rdp", InTable("rdp_epsilon", "ε by RDP", place=124), InLine("epsilon by RDP", format=".3g")),
        # epsilon at dp.second-delta
        _epsilon("epsilon_second", InTable("second_epsilon", "ε at the second δ", place=130)),
        # Fed-LTP's printed formula, which is no guarantee
        _epsilon("epsilon_paper", InTable("paper_epsilon", "ε, Fed-LTP's formula", 3, place=140)),
        # 1 if the client's noise derives from the run's seed, 0 if it comes from the operating system
        _told_sometimes(
            "epsilon_simulated",
            optional=_PRIVACY,
            least=0,
            most=1,
            is_count=True,
            columns=(_sometimes("epsilon_simulated", mean),),
        ),
        # seconds of a client's work, which may depend on the data
        ClientMetric("seconds", required=_TRAINING | _LAYER, least=0, withheld=True),
        # Fed-LTP: the round's score, a (noised) share of correct predictions, and the number of scores
        Column("validation_score"),
        Column("validations"),
        # within bytes_up and bytes_down
        Column("validation_bytes_up"),
        Column("validation_bytes_down"),
        # the best round so far by validation_score, whose model is evaluated and is the final one
        Column("best_round"),
        # number of clients whose privacy budget cannot pay for another round
        Column("budgets_spent"),
        # coordinates that stay as they were, since too few clients hold them: see min-holders
        _sometimes("few_holders"),
        _sometimes("failure_reasons", kind=FieldKind.TEXTS),
        # FedSpaLLM: metrics of each decoder layer, by its number
        _sometimes("layers", kind=FieldKind.TABLE),
        _sometimes("evaluated"),  # clients, see evaluate-clients
        _sometimes("clients"),  # of the run
        _sometimes("evaluation_failures", lost=Title("Evaluation failures", 30)),
        _sometimes("perplexity_by_text", kind=FieldKind.TABLE),
        _sometimes("evaluation_seconds"),
        _sometimes("notes", kind=FieldKind.TEXTS),
        # relative error of a layer's output against the dense layer's; reported by those that prune it
        ClientMetric("relative_error", least=0, recorded=Recorded.NEVER),
        _told_sometimes("layers_pruned"),
        # mean cross entropy of the next token, in nats, over the steps of a round of recovery
        _told_sometimes(
            "recovery_loss",
            least=0,
            columns=(_sometimes("recovery_loss", mean),),
        ),
        _told_sometimes("perplexity", least=0, kind=FieldKind.BY_NAME),
        # windows of a client's own text
        _told_sometimes("windows", least=1, most=2**31, is_count=True),
        _told_sometimes("windows_in_text", least=1, most=2**31, is_count=True),
    )
)
"""All numbers that are reported, in the order in which they are recorded."""
