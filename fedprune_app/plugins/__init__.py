"""Plug-ins: users' code that registers systems, models, datasets or partitions, and that a run names."""

from fedprune_app.plugins.loading import (
    Code,
    changed,
    changed_since,
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
    "changed_since",
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
