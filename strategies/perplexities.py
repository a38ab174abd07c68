"""What FedSpaLLM records of an evaluation: perplexities of clients' own models and of the global one, text by text."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedprune_app.core import metrics
from fedprune_app.engine import wire
from fedprune_app.federation.exchanges import Rows
from fedprune_app.models.llm import Perplexity
from fedprune_app.results.measures import Reply
from fedprune_app.results.rows import number_in, round_columns, row_of
from fedprune_app.results.texts import OWN_TEXT


def client_row(
    fields: wire.Fields, texts: Sequence[str], num_layers: int, *, own_data: bool, has_own_model: bool = True
) -> dict[str, Any]:
    """Check a client's perplexities on the server's test ``texts``; return the columns of its row.

    A client with a text of its own tells of that text alone. A client that measures no model of its own tells
    of no other text. ``ValueError`` names a field that cannot be.
    """
    prefix = "perplexity/"
    has_own = own_data or prefix + OWN_TEXT in fields
    names = [OWN_TEXT] if has_own else sorted(name for name in texts if prefix + name in fields)
    main_text = OWN_TEXT if has_own else texts[0]
    if prefix + main_text not in fields and (has_own or has_own_model):
        raise ValueError(f"the evaluation has no field '{prefix}{main_text}'")
    values = {name: number_in("perplexity", fields, about=name) for name in names}
    windows = ("windows", "windows_in_text") if has_own else ()
    return {
        **row_of(Reply.PERPLEXITY, fields),
        "pruned_layers": number_in("pruned_layers", fields, most=num_layers),
        "perplexity_personal": values.get(main_text),
        "perplexity": values,
        **{name: number_in(name, fields) for name in windows},
    }


def over_clients(
    rows: Rows,
    global_model: Mapping[str, Perplexity],
    dense: Mapping[str, Mapping[str, Any]],
    num_layers: int,
    num_asked: int,
) -> dict[str, Any]:
    """Return the columns of an evaluation; the first text of ``dense`` is the one that the run is judged by.

    Own models count where all layers are pruned: part of a dense model is no standalone result. Clients' own texts are
    an entry by themselves, since no other model was measured on them. ``dense`` has what the dense model measured.
    ``num_asked`` clients were asked, of whom some may not have answered.
    """
    complete_rows = [row for row in rows.values() if row["pruned_layers"] == num_layers and row["perplexity"]]
    by_text: dict[str, dict[str, Any]] = {}
    for name, perplexity in global_model.items():
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
        **round_columns(rows.values(), Reply.PERPLEXITY),
        "perplexity_global": first["global"],
        "perplexity_personal_mean": first["personal_mean"],
        "personal_models": len(complete_rows),
        "perplexity_personal_std": first["personal_std"],
        "perplexity_by_text": by_text,
    }


def _client_summary(rows: Sequence[Mapping[str, Any]], text: str) -> dict[str, float]:
    values = [row["perplexity"][text] for row in rows if text in row["perplexity"]]
    summary = metrics.summary(values)
    return {"personal_mean": summary.mean, "personal_std": summary.std, "personal_models": len(values)}
