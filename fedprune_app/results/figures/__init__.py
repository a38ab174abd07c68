"""All figures of a report, as plotly.js traces; the page sets colours, theme and size.

Every trace has its ``series``, an index into the groups. The page draws it in that series' colour and dash, and hides
it with the legend. All text is escaped, since plotly interprets some HTML.
"""

from fedprune_app.results.columns import epsilon_footnote
from fedprune_app.results.figures import clients, curves, masks, settings
from fedprune_app.results.figures.common import Figure
from fedprune_app.results.groups import Groups


def figures(groups: Groups) -> list[Figure]:
    all_figures = [
        Figure(
            "accuracy-by-round",
            "Accuracy by round",
            "Mean over all clients, or over those drawn by evaluate-clients, each on its own test split. A "
            "shade, or a bar at a single evaluation, is the range of the seeds.",
            curves.accuracies(groups, curves.by_round, "Round"),
        ),
        Figure(
            "accuracy-by-bytes",
            "Accuracy by traffic",
            "Against the training traffic so far, as measured on the serialised messages: to and from the server, or "
            "over all links where models go from peer to peer. Shades and bars are ranges of the seeds.",
            curves.accuracies(groups, curves.by_megabytes, "Measured traffic (MB)"),
        ),
        Figure(
            "accuracy-by-epsilon",
            "Accuracy by privacy",
            "Against the largest ε of any client so far, from the ledger of what ran: the smaller, the more private.",
            curves.accuracies(groups, curves.by_epsilon, f"Largest ε so far{epsilon_footnote(groups)}"),
        ),
        Figure(
            "accuracy-by-cost",
            "What accuracy costs",
            "One point per setting at the end of the run: accuracy against what was spent for it. Bars are "
            "standard deviations over seeds.",
            settings.by_cost(groups),
        ),
        Figure(
            "settings",
            "What a setting does",
            "One point per setting at the end of the run: the main number against the value of this setting. A line "
            "joins points of a system that differ in nothing else; bars are standard deviations over seeds. Choose "
            "settings by validation accuracy, not by test accuracy.",
            list(settings.by_setting(groups)),
        ),
        Figure(
            "clients",
            "Accuracy of each client",
            "One point per client in the last evaluation; the diamond is the mean of the worst tenth.",
            clients.accuracies(groups),
            rows=len(groups),
        ),
        Figure(
            "perplexity",
            "Perplexity by sparsity",
            "The global model (diamonds, solid) and the mean of the clients' own (circles, dotted), on each test text; "
            "lower is better, and the curves begin at the dense model. A view's name says how many windows of how many "
            "tokens were measured. After one round the clients' own are the standalone baseline, later they are not.",
            settings.perplexity(groups),
        ),
        Figure(
            "decoder-layers",
            "Decoder layers",
            "By layer of a language model, in the last round: how far the clients' masks agree, mean over pairs, and "
            "the density of their mean before and after the server expands its masks.",
            masks.decoder_layers(groups),
        ),
        Figure(
            "classes",
            "Accuracy by class and client",
            "Accuracy of each client's own model in the last evaluation, on the client's test examples of each class. "
            "A cell is empty where a client has none.",
            clients.by_class(groups),
            wide=True,
        ),
        Figure(
            "density-groups",
            "Accuracy by density of the client",
            "One point per client in the last evaluation, by its own kept share; the line joins the means of clients "
            "of the same density.",
            clients.by_density(groups),
        ),
        Figure(
            "bytes",
            "Traffic, measured and by the papers' formulas",
            "Training messages of the whole run, up ↑ and down ↓. Solid: measured. Hatched: the paper's own formula."
            + clients.on_peers(groups),
            clients.bytes_of_runs(groups),
            rows=len(groups),
        ),
        Figure(
            "layer-sets",
            "Traffic of a client by the layers it trains",
            "Measured on the last training messages of a client of each set, to it and from it. The last layer, which "
            "all train, is not named.",
            clients.by_layer_set(groups),
        ),
        Figure(
            "layers",
            "Density by layer",
            "Kept share of each layer in the last evaluation, mean over clients.",
            masks.densities(groups),
        ),
        *curves.figures_of_measures(groups),
        Figure(
            "epsilon",
            "Privacy spent",
            "ε from the ledger of what ran. Dotted: the budget, where there is one.",
            curves.over_rounds(curves.epsilon(groups)),
        ),
        Figure(
            "partition",
            "Who has which classes",
            "Training examples of each class at each client; an empty cell is none.",
            clients.partition(groups),
            wide=True,
        ),
        Figure(
            "masks",
            "Label similarity and mask similarity",
            "Each two clients: cosine of their training label counts, and the share of coordinates in which their "
            "masks agree. In both, clients stand in the order of their most frequent class.",
            masks.similarity(groups),
            wide=True,
        ),
        Figure(
            "agreement",
            "Agreement of the clients' masks",
            "Each two clients: the share of a language model's weights that both keep or both prune, all decoder "
            "layers together. A client of one document has its name.",
            masks.agreement(groups),
            wide=True,
        ),
    ]
    return [figure for figure in all_figures if figure.variants]
