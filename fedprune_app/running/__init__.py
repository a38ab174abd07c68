"""Running is one run from start to end, or one after another, on any engine: nothing is checked here any more."""
