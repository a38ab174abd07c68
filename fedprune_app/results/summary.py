"""One line on a round, for the log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedprune_app.results.fields import tested_on


def summary_line(row: Mapping[str, Any]) -> str:
    """One line on a round, for the log."""
    parts = [f"{row['replies']} replies", f"{row['failures']} failures"]
    parts += [] if row["loss_mean"] is None else [f"loss {row['loss_mean']:.3f}"]
    parts += [f"epsilon {row['epsilon_max']:.3g}"] if row.get("epsilon_max") else []
    parts += [f"{(row['bytes_up'] + row['bytes_down']) / 1e6:.2f} MB", f"{row['seconds']:.1f} s"]
    for name, key in (("personal", "accuracy_personal_mean"), ("global", "accuracy_global")):
        if key in row and math.isfinite(row[key]):
            parts.append(f"{name} accuracy {100 * row[key]:.1f} %")
    for name, key in (("personal", "perplexity_personal_mean"), ("global", "perplexity_global")):
        if key in row and math.isfinite(row[key]):
            parts.append(f"{name} perplexity {row[key]:.2f} ({tested_on(row)})")
    return ", ".join(parts)
