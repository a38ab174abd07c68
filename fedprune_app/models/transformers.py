"""Import of the optional package transformers."""

from typing import Any

from fedprune_app.core.torchvision_shim import prepare_torchvision


def import_transformers() -> Any:
    """Import the package transformers, made ready for a CPU-only torch. ``ValueError`` if it is not installed."""
    prepare_torchvision()
    try:
        import transformers
    except ImportError:
        raise ValueError("language models need the package transformers: install the extra fedprune[llm]") from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers
