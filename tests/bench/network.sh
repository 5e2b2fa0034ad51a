#!/bin/bash
# Measures allreduce of 64 MiB and steps with DDP between three network namespaces whose links send at most 1 Gb/s.
# `link` is the share of the time that the link needs for the bytes that a rank must send: 2 (n - 1) / n of the values,
# in packets of 1,448 bytes of data and 66 of headers. Needs root.
#   ./run bench network [option of bench_allreduce...]
# shellcheck source-path=SCRIPTDIR source=../launchers/namespaces.bash disable=SC2154
benches=$(realpath "$(dirname "$1")")
source "$(dirname "$0")/../launchers/namespaces.bash"
for host in "${hosts[@]}"; do
  tc -n "$host" qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms
done
options=(--world 3 --transport tcp --address 10.81.0.10 --ops "allreduce,ddp" --bytes 67108864)
for rank in 1 2; do
  ip netns exec "${hosts[rank]}" "$benches/bench_allreduce" --rank $rank "${options[@]}" >/dev/null &
done
ip netns exec "${hosts[0]}" "$benches/bench_allreduce" --rank 0 "${options[@]}" |
  jq -c 'select(.bytes > 1e6) | . + {link: (2 * (.world_size - 1) / .world_size * .bytes * 8 / 1e9 * 1514 / 1448
                                            / (.p50_us / 1e6))}'
wait
