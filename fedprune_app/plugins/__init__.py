"""Code of others enters: it registers a system, a model, a dataset or a partition, and a run names it."""

from fedprune_app.plugins.loading import (
    Code,
    changed,
    check_named,
    check_reachable,
    code_in,
    described,
    error_line,
    function,
    installed,
    load,
    located,
    names_in,
)

__all__ = [
    "Code",
    "changed",
    "check_named",
    "check_reachable",
    "code_in",
    "described",
    "error_line",
    "function",
    "installed",
    "load",
    "located",
    "names_in",
]
