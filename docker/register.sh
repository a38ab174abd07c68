#!/bin/sh
# Let the SuperLink know the nodes' public keys, once each.
#   register.sh ADDRESS      of the SuperLink's Control API
set -eu
mkdir -p "$FLWR_HOME"
printf '[superlink.compose]\naddress = "%s"\nroot-certificates = "/certificates/ca.crt"\n' "$1" > "$FLWR_HOME/config.toml"
known=$(flwr supernode list compose --verbose --format json)
for key in /certificates/nodes/*.pub; do
    name=node-$(basename "$key" .pub)
    case $known in
        *"\"$name\""*) ;;
        *) flwr supernode register "$key" compose --name "$name" ;;
    esac
done
