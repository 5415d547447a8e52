#!/bin/bash
# Two soft-RoCE devices, rxe0 (10.9.0.1 on wire0) and rxe1 (10.9.0.2 on wire1), both in one namespace. Policy
# routing sends every packet between the two addresses over the veth pair: left alone, the kernel would pass them
# through lo, and a link taken down would change nothing.
set -e
modprobe -a rdma_rxe rdma_ucm veth
ip link add wire0 type veth peer name wire1
addresses=(10.9.0.1 10.9.0.2)
sysctl -qw net.ipv4.conf.all.rp_filter=0
for i in 0 1; do
  own=${addresses[$i]} other=${addresses[$((1 - i))]}
  ip addr add $own/32 dev wire$i
  ip link set wire$i mtu 4200 up
  sysctl -qw net.ipv4.conf.wire$i.accept_local=1 net.ipv4.conf.wire$i.rp_filter=0
  ip rule add pref $((10 + i)) iif wire$i lookup local
  ip rule add pref $((20 + i)) from $own to $other lookup 100
done
ip rule add pref 32000 lookup local
ip rule del pref 0
"$(dirname "$0")/route_wires.sh"
for i in 0 1; do rdma link add rxe$i type rxe netdev wire$i; done
