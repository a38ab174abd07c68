#!/bin/sh
# Let the SuperLink know the nodes' public keys, once each.
#   register.sh ADDRESS      of the SuperLink's Control API
set -eu
connect.sh "$1"
known=$(flwr supernode list compose --verbose --format json)
for key in /certificates/nodes/*.pub; do
    name=node-$(basename "$key" .pub)
    case $known in
        *"\"$name\""*) ;;
        *) flwr supernode register "$key" compose --name "$name" ;;
    esac
done
