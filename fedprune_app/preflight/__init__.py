"""Preflight is all that happens before a run: it says whether the run may start, and what the run will do."""
