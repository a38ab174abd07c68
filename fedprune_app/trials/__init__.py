"""Attacks on our own promises."""
