#!/bin/sh
# One run on the nodes, and a report over all runs so far.
#   run.sh ADDRESS [KEY=VALUE]...      the SuperLink's Control API, and settings of the run
set -eu
connect.sh "$1"
shift
fedprune run --superlink compose --out "/results/$(date -u +%Y%m%d-%H%M%S)" "$@"
fedprune report /results -o /results/report.html
