"""Code of others enters: it registers a system, a model, a dataset or a partition, and a run names it."""

from fedprune_app.plugins.loading import (
    Code,
    changed,
    check_named,
    check_reachable,
    code_in,
    described,
    function,
    installed,
    load,
    located,
    names_in,
    told,
)

__all__ = [
    "Code",
    "changed",
    "check_named",
    "check_reachable",
    "code_in",
    "described",
    "function",
    "installed",
    "load",
    "located",
    "names_in",
    "told",
]
