#!/bin/sh
# Make the SuperLink known to the flwr command, as the connection "compose".
#   connect.sh ADDRESS       of the SuperLink's Control API
set -eu
mkdir -p "$FLWR_HOME"
printf '[superlink.compose]\naddress = "%s"\nroot-certificates = "/certificates/ca.crt"\n' "$1" > "$FLWR_HOME/config.toml"
# Where nodes share the Control API's port (Flower 1.40 and later), it asks for a secret.
[ ! -e /control/control.secret ] || fedprune deploy login "$1" --secret /control/control.secret
