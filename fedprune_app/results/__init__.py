"""Results are what a run leaves: the run folder, the numbers that are reported, tables, figures and the report."""
