#!/bin/bash
# Measures allreduce of 64 MiB, steps with DDP (float32, bfloat16) and, if $CLICKS is a file of training data, hybrid
# between three network namespaces whose links send at most 1 Gb/s. `link` is the share of the time that the busiest
# link needs: for an allreduce for 2 (n - 1) / n of the values with n = 3 hosts, in packets of 1,448 bytes of data and 66
# of headers; for hybrid for what a trainer has sent. Needs root.
#   [CLICKS=FILE] ./run bench network
# shellcheck source-path=SCRIPTDIR source=../launchers/namespaces.bash disable=SC2154
benches=$(realpath "$(dirname "$1")")
source "$(dirname "$0")/../launchers/namespaces.bash"
for host in "${hosts[@]}"; do
  tc -n "$host" qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms
done
on() { ip netns exec "${hosts[$1]}" "${@:2}"; }

# all_reduce <ranks of a host> <op>...
all_reduce() {
  local world=$(($1 * 3)) rank options
  options=(--world "$world" --transport auto --address 10.81.0.10 --ops "$2" --bytes 67108864)
  for ((rank = 1; rank < world; ++rank)); do
    on $((rank / $1)) "$benches/bench_allreduce" --rank $rank "${options[@]}" >/dev/null &
  done
  on 0 "$benches/bench_allreduce" --rank 0 "${options[@]}" |
    jq -c 'select(.bytes > 1e6) | . + {link: (2 * 2 / 3 * .bytes * 8 / 1e9 * 1514 / 1448 / (.p50_us / 1e6))}'
  wait
}
all_reduce 1 allreduce,ddp,ddp_bf16
all_reduce 2 allreduce

# Hosts 0 and 1 have a trainer, host 2 the master and the server.
[[ ${CLICKS:-} ]] || exit 0
options=(hybrid --data "$CLICKS" --trainers 2 --threads 1 --batch-size 256 --embedding-dim 32 --epochs 6 --table sharded
  --optimizer rowwise-adagrad --master-addr 10.81.0.10 --master-port 29400 --insecure)
for prefetch in 0 1; do
  for rank in 1 2 3; do
    on $((rank < 2 ? rank : 2)) "$distrain" "${options[@]}" --prefetch $prefetch --rank $rank >/dev/null &
  done
  sent=$(on 0 cat /sys/class/net/eth0/statistics/tx_bytes)
  lines=$(on 0 "$distrain" "${options[@]}" --prefetch $prefetch --rank 0)
  wait
  sent=$(($(on 0 cat /sys/class/net/eth0/statistics/tx_bytes) - sent))
  jq -c --argjson sent "$sent" 'select(.event == "end" and .scope == "job")
    | {event: "bench", name: "hybrid", prefetch: '$prefetch', steps_per_s, sent_mb: ($sent / 1e6),
       link: ($sent * 8 / 1e9 / .train_s)}' <<<"$lines"
done
