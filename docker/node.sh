#!/bin/sh
# A SuperNode that says why it cannot connect, and ends: one line where there is no SuperLink, no TLS or another authority.
#   node.sh ADDRESS CA [OPTION]...      where nodes reach the SuperLink, its authority's certificate; of flower-supernode
set -eu
address=$1
ca=$2
shift 2
fedprune deploy check "$address" --root-certificates "$ca"
# A SuperLink that is away for ten minutes ends the node, whose restart checks again.
exec flower-supernode --superlink "$address" --root-certificates "$ca" --max-wait-time 600 "$@"
