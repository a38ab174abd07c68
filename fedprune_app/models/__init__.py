"""This package holds the networks of the papers."""

from fedprune_app.models.vision import (
    INITIALISATIONS,
    MODELS,
    ImageShape,
    buffer_names,
    build_model,
    conv_net,
    initialise,
    load_state_tensors,
    parameter_names,
    prunable_names,
    state_tensors,
)

__all__ = [
    "INITIALISATIONS",
    "MODELS",
    "ImageShape",
    "buffer_names",
    "build_model",
    "conv_net",
    "initialise",
    "load_state_tensors",
    "parameter_names",
    "prunable_names",
    "state_tensors",
]
