"""FedSpaLLM's metrics of an evaluation: perplexities of the clients' own models and of the server's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedprune_app.federation.metrics import Rows
from fedprune_app.federation.participation import Participation
from fedprune_app.federation.round import Reply, Round, RunContext
from fedprune_app.learning.language_models import perplexities
from fedprune_app.results import statistics
from fedprune_app.results.metrics import ReplyKind
from fedprune_app.results.recorder import number_in, round_columns, row_of
from fedprune_app.results.texts import OWN_TEXT
from strategies.pruned_model import PrunedModel

_PREFIX = "perplexity/"


@dataclass(frozen=True)
class TextMetrics:
    """Checks and summarises perplexities on the server's test texts or a client's own; the first text judges a run.

    FedSpaLLM itself sums the metrics of pruning.
    """

    context: RunContext
    model: PrunedModel
    participation: Participation

    def training_columns(self, round: Round) -> dict[str, Any]:
        return {}

    def evaluation_row(self, reply: Reply) -> dict[str, Any]:
        """Check a client's perplexities, and return them as columns.

        A client with a text of its own reports only that text. Without such a text, a client that has no pruned model
        of its own reports none.
        """
        config, fields = self.context.config, reply.fields
        texts = list(self.context.recorder.info["dense_perplexity"])
        # with privacy a client must not report perplexities on its own text
        is_own = self.context.clients[reply.client].own_data and not config.dp.enabled
        has_own_text = is_own or _PREFIX + OWN_TEXT in fields
        names = [OWN_TEXT] if has_own_text else sorted(name for name in texts if _PREFIX + name in fields)
        main_text = OWN_TEXT if has_own_text else texts[0]
        if _PREFIX + main_text not in fields and (has_own_text or config.fedspallm.merge != "hessians"):
            raise ValueError(f"the evaluation has no field '{_PREFIX}{main_text}'")
        values = {name: number_in("perplexity", fields, about=name) for name in names}
        windows = ("windows", "windows_in_text") if has_own_text else ()
        return {
            **row_of(ReplyKind.PERPLEXITY, fields),
            "pruned_layers": number_in("pruned_layers", fields, most=self.model.dense.num_layers),
            "perplexity_personal": values.get(main_text),
            "perplexity": values,
            **{name: number_in(name, fields) for name in windows},
        }

    def evaluation_columns(self, round: Round, rows: Rows) -> dict[str, Any]:
        """Evaluate the server's model, and return the columns of the evaluation.

        A client's own model counts only if all its layers are pruned: a partly dense model is no standalone result.
        Clients' own texts have a separate entry, since no other model was evaluated on them. Not every evaluator may
        have replied.
        """
        dense: Mapping[str, Mapping[str, Any]] = self.context.recorder.info["dense_perplexity"]
        num_layers, num_asked = self.model.dense.num_layers, len(self.participation.evaluators(round.number))
        complete_rows = [row for row in rows.values() if row["pruned_layers"] == num_layers and row["perplexity"]]
        by_text: dict[str, dict[str, Any]] = {}
        results = perplexities(self.context.config, self.model.dense, self._pruned_tensors)
        for name, perplexity in results.items():
            by_text[name] = {
                "dense": dense[name]["value"],
                "global": perplexity.value,
                **_client_summary(complete_rows, name),
                "asked": num_asked,
                "window": perplexity.window,
                "windows": perplexity.windows,
                "windows_in_text": perplexity.windows_in_text,
                "tokens": perplexity.window * perplexity.windows,
            }
        first = by_text[next(iter(dense))]
        if own_rows := [row for row in complete_rows if OWN_TEXT in row["perplexity"]]:
            windows = sum(row["windows"] for row in own_rows)
            by_text[OWN_TEXT] = {
                **_client_summary(own_rows, OWN_TEXT),
                "asked": num_asked,
                "window": first["window"],
                "windows": windows,
                "windows_in_text": sum(row["windows_in_text"] for row in own_rows),
                "tokens": windows * first["window"],
            }
        return {
            **round_columns(rows.values(), ReplyKind.PERPLEXITY),
            "perplexity_global": first["global"],
            "perplexity_personal_mean": first["personal_mean"],
            "personal_models": len(complete_rows),
            "perplexity_personal_std": first["personal_std"],
            "perplexity_by_text": by_text,
        }

    def _pruned_tensors(self, layer: int) -> Mapping[str, Tensor]:
        return self.model.layer(layer).tensors


def _client_summary(rows: Sequence[Mapping[str, Any]], text: str) -> dict[str, float]:
    values = [row["perplexity"][text] for row in rows if text in row["perplexity"]]
    summary = statistics.summary(values)
    return {"personal_mean": summary.mean, "personal_std": summary.std, "personal_models": len(values)}
