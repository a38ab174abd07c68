"""A model leaves a run: it is found, made small, written, packed, read again and asked."""
