"""A run's language model: opening it, and measuring it on test texts."""

from dataclasses import replace

import torch

from fedprune_app.config import NO_POLICY, Config, ConfigError, Policy
from fedprune_app.core.named import TensorDict, ValueDict, Values
from fedprune_app.data.text import (
    perplexity_texts,
    stdlib_training_text,
    windows_of,
)
from fedprune_app.models.cutting import CUT_BY
from fedprune_app.models.embedded import embedded_folder
from fedprune_app.models.layer_pruning import same_inputs
from fedprune_app.models.llm import LanguageModel, LayerTensors, Perplexity, dense_perplexities, open_model
from fedprune_app.models.llm import perplexities as measured_perplexities
from fedprune_app.models.sources import model_digest, resolve_checkpoint
from fedprune_app.results.texts import OWN_TEXT

_FACTOR = 2.0  # of perplexities of one window


def language_model(config: Config, device: torch.device | str = "cpu", policy: Policy = NO_POLICY) -> LanguageModel:
    """Open the dense model with which a run starts.

    Raises ``ValueError`` if it is not on this machine, and :class:`~fedprune_app.config.PolicyError` if the ``policy``
    does not allow it.
    """
    if config.model == "auto":
        folder = embedded_folder([document.text for document in stdlib_training_text()])
        if not folder.is_dir():
            raise ValueError(
                "model 'auto' is not trained yet on this machine: `fedprune demo --llm` does it in minutes"
            )
    else:
        folder = resolve_checkpoint(config.model, config.download)
    if policy.allowed_models:
        policy.check_model(config.model, model_digest(config.model, folder))
    return open_model(folder, config.fedspallm.dtype, str(device))


def evaluation_texts(config: Config) -> dict[str, tuple[str, int]]:
    """Return the run's test texts by name, each with the largest number of windows (0: all).

    ``ValueError`` for one that cannot be read, or that has the name of clients' own texts.
    """
    texts = perplexity_texts(config.dataset, config.data_dir, config.fedspallm.more_texts())
    if OWN_TEXT in texts:
        raise ValueError(f"a test text is called {OWN_TEXT!r}, allowed: any other name; clients' own are called so")
    return texts


def evaluation_windows(config: Config, model: LanguageModel, text: str | None = None) -> tuple[TensorDict, TensorDict]:
    """Return by test text all of its windows, and those on which perplexity is measured.

    ``text``, if given, replaces all others. ``ValueError`` for a text shorter than a window.
    """
    options = config.fedspallm
    texts = evaluation_texts(config) if text is None else {OWN_TEXT: (text, 0)}
    all_windows, measured_windows = {}, {}
    for name, (content, max_windows) in texts.items():
        max_windows = min(max_windows or options.test_windows, options.test_windows or max_windows)
        try:
            windows = windows_of(model.encode(content), model.sequence_length(options.window))
        except ValueError as error:
            raise ValueError(f"test text '{name}': {error}") from None
        if options.start_token:
            windows = model.started(windows)
        all_windows[name], measured_windows[name] = windows, windows[:max_windows] if max_windows else windows
    return all_windows, measured_windows


def check_start_token(config: Config, model: LanguageModel) -> None:
    """Raise :class:`ConfigError` for a model that is another without the start token, which a setting leaves out."""
    if config.fedspallm.start_token or not len(model.encode("")):
        return
    # a text's first window begins with the token anyway
    windows = {name: each[-1:] for name, each in evaluation_windows(config, model)[1].items()}
    started = {name: model.started(each) for name, each in windows.items()}
    found, other = (dense_perplexities(model, texts, 1) for texts in (windows, started))
    for name, result in found.items():
        if result.value > _FACTOR * other[name].value:
            allowed = f"true: a window of {name} then has perplexity {other[name].value:.1f}, else {result.value:.1f}"
            raise ConfigError("fedspallm.start-token", False, allowed)


def check_same_model(model: LanguageModel, info: Values) -> None:
    """Raise :class:`ConfigError` if ``model`` is not the one with which the run of ``info`` began."""
    if (info.get("model") or {}).get("sha256", model.digest()) != model.digest():
        raise ConfigError("model", str(model.folder), "the one of the run", which="has other weights now")


def told_perplexities(config: Config, model: LanguageModel) -> ValueDict:
    """Return the dense model's perplexities by test text, as run.json tells them."""
    return {
        name: {
            "value": p.value,
            "window": p.window,
            "windows": p.windows,
            "windows_in_text": p.windows_in_text,
            "tokens": p.window * p.windows,
        }
        for name, p in perplexities(config, model, None).items()
    }


def perplexities(
    config: Config, model: LanguageModel, own_layers: LayerTensors | None, text: str | None = None
) -> dict[str, Perplexity]:
    """Return the perplexities of ``model``, by test text, with the matrices of ``own_layers`` instead of its own.

    Without ``own_layers`` they are those of the dense model. ``text``, if given, replaces all others under a reserved
    name, so that its perplexity is not compared with that of any other text.
    """
    all_windows, measured_windows = evaluation_windows(config, model, text)
    if own_layers is None:
        results = dense_perplexities(model, measured_windows, config.batch_size)
    else:
        results = measured_perplexities(
            model,
            lambda layer: {**model.layer_tensors(layer), **own_layers(layer)},
            measured_windows,
            config.batch_size,
        )
    return {name: replace(result, windows_in_text=len(all_windows[name])) for name, result in results.items()}


def observed_inputs(config: Config, model: LanguageModel) -> list[list[str]]:
    """Return the matrices of a layer in groups with the same inputs, whose Hessians clients send."""
    groups, has_all = same_inputs(model), config.fedspallm.observes_all()
    return [names for names in groups if has_all or names[0].split(".")[-2] in CUT_BY]
