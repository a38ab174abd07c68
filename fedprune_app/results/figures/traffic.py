"""These figures show what was sent, measured and by the papers' formulas."""

from collections.abc import Sequence

from fedprune_app.results.figures.common import Trace, Variant, megabytes_text, row_axis, text_of
from fedprune_app.results.groups import Group, Statistic
from fedprune_app.results.measures import MEGABYTE

_PEER_CAPTION = (
    " ⇄ is what the clients send one another; the server only relays it here, so ↑ and ↓ show the same messages again."
)
_IN_A_STAR = {"bytes_up": "↑", "paper_bytes_up": "↑ formula", "bytes_down": "↓", "paper_bytes_down": "↓ formula"}
_OF_PEERS = {  # what one peer sends is what another one receives
    "peer_bytes": "⇄ peer to peer",
    "bytes_up": "↑ relayed",
    "paper_bytes_up": "⇄ formula",
    "bytes_down": "↓ relayed",
}


def on_peers(groups: Sequence[Group]) -> str:
    return _PEER_CAPTION if any(run.total("peer_bytes") is not None for group in groups for run in group.runs) else ""


def bytes_of_runs(groups: Sequence[Group]) -> list[Variant]:
    traces: list[Trace] = []
    longest = 0.0
    for index, group in enumerate(groups):
        titles = _IN_A_STAR if group.runs[0].total("peer_bytes") is None else _OF_PEERS
        totals = {title: Statistic.of(run.total(name) for run in group.runs) for name, title in titles.items()}
        megabytes = {title: total.mean / MEGABYTE for title, total in totals.items() if total}
        if not megabytes:
            continue
        longest = max(longest, *megabytes.values())
        traces.append(
            {
                "type": "bar",
                "series": index,
                "name": text_of(group.label),
                "orientation": "h",
                "x": list(megabytes.values()),
                "y": [index + 0.19 * (place - (len(megabytes) - 1) / 2) for place in range(len(megabytes))],
                "width": 0.17,
                "text": [f"{megabytes_text(size)} {title}" for title, size in megabytes.items()],
                "marker": {"pattern": {"shape": ["/" if "formula" in title else "" for title in megabytes]}},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    x_axis = {"title": {"text": "MB (10⁶ bytes)"}, "range": [0, longest * 1.5 or 1]}  # room for the bars' texts
    return [Variant("Traffic", traces, {"xaxis": x_axis, "yaxis": row_axis(groups)})] if traces else []


def by_layer_set(groups: Sequence[Group]) -> list[Variant]:
    """Return FedP3's Figure 6 of runs whose clients send some layers alone, as a mean over seeds that have the set."""
    tables = [[run.info.get("bytes_by_layer_set") or {} for run in group.runs] for group in groups]
    sets = list(dict.fromkeys(name for seeds in tables for table in seeds for name in sorted(table)))
    places = {name: place for place, name in enumerate(sorted(sets, key=lambda name: (len(name.split()), name)))}
    axis = {
        "tickvals": list(places.values()),
        "ticktext": [_layer_set_label(name) for name in places],
        "tickangle": -30,  # to the left, where there is room for the last one
    }
    variants = []
    for title, key in (("Upload ↑", "bytes_up"), ("Download ↓", "bytes_down")):
        traces: list[Trace] = []
        ratios: list[str] = []
        for index, (group, seeds) in enumerate(zip(groups, tables, strict=True)):
            means = {name: Statistic.of(table[name][key] for table in seeds if name in table) for name in places}
            megabytes = {name: mean.mean / MEGABYTE for name, mean in means.items() if mean}
            if not megabytes:
                continue
            ratios.append(f"{group.label}: {max(megabytes.values()) / min(megabytes.values()):,.3g}")
            traces.append(
                {
                    "type": "bar",
                    "series": index,
                    "name": text_of(group.label),
                    "x": [places[name] for name in megabytes],
                    "y": list(megabytes.values()),
                    "text": [megabytes_text(value) for value in megabytes.values()],
                    "hovertext": [text_of(name) for name in megabytes],
                    "hovertemplate": "%{y:.4g} MB, %{hovertext}",
                }
            )
        layout = {"xaxis": axis, "yaxis": {"title": {"text": "MB (10⁶ bytes)"}, "rangemode": "tozero"}}
        note = f"The largest set is this many times the smallest. {'; '.join(ratios)}."
        variants += [Variant(title, traces, layout, note)] if traces else []
    return variants


def _layer_set_label(name: str) -> str:
    layers = name.split()
    return text_of(" + ".join(layers) if len(layers) <= 3 else f"{layers[0]} … {layers[-1]} ({len(layers)})")
