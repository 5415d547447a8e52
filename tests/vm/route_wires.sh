#!/bin/bash
# What the kernel forgets of the two links when one was down: how each address is reached over the pair.
set -e
ip route replace 10.9.0.2/32 dev wire0 src 10.9.0.1 table 100
ip route replace 10.9.0.1/32 dev wire1 src 10.9.0.2 table 100
ip neigh replace 10.9.0.2 lladdr "$(cat /sys/class/net/wire1/address)" dev wire0
ip neigh replace 10.9.0.1 lladdr "$(cat /sys/class/net/wire0/address)" dev wire1
