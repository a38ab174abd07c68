#!/bin/sh
# Before the first start: the SuperLink's certificate, its executor's secret, and each node's key pair. Later starts: nothing.
#   setup.sh NODES HOST...      hosts: every name and address by which the SuperLink is reached
set -eu
nodes=$1
shift
if [ ! -e /superlink/ca.crt ]; then
    for host in "$@"; do set -- "$@" --host "$host"; shift; done
    fedprune deploy certificates "$@" --out /superlink
fi
cp /superlink/ca.crt /certificates/ca.crt
[ -e /superlink/superlink.db ] || fedprune deploy database /superlink/superlink.db
chmod 600 /superlink/superlink.db*  # an earlier version let others read it
if [ ! -e /secrets/superexec.secret ]; then
    (umask 077 && head -c 32 /dev/urandom > /secrets/superexec.secret.new)
    mv /secrets/superexec.secret.new /secrets/superexec.secret
fi
# Only where nodes share the Control API's port (docker/flower-1.40.yaml) is there a /control that is kept.
[ ! -w /control ] || [ -e /control/control.secret ] || fedprune deploy control-secret /control/control.secret
k=0
while [ "$k" -lt "$nodes" ]; do
    if [ ! -e "/node/$k/node.key.pub" ]; then
        rm -f "/node/$k/node.key"  # of a set-up that was cut short, which nobody has registered
        fedprune deploy node-key "/node/$k/node.key"
    fi
    mkdir -p /certificates/nodes
    cp "/node/$k/node.key.pub" "/certificates/nodes/$k.pub"
    k=$((k + 1))
done
