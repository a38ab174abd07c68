#!/bin/sh
# Let the SuperLink know the nodes' public keys. May be called again.
#   register.sh ADDRESS      of the SuperLink's Control API
set -eu
connect.sh "$1"
for key in /certificates/nodes/*.pub; do
    name=node-$(basename "$key" .pub)
    if said=$(flwr supernode register "$key" compose --name "$name" 2>&1); then
        echo "$name is registered"
    else
        case $said in
            *"already in use"*) echo "$name was registered before" ;;
            *) echo "$said" >&2; exit 1 ;;
        esac
    fi
done
