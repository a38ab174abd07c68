"""This package holds the networks of the papers."""
