#!/bin/bash
# Measures the speed of distrain pipeline and prints ratios of a batch's time, a JSON line each, for m micro-batches
# and p stages. `law` divides it by the schedule's ideal time, (m + p - 1) / m times that of the slowest stage.
# `local` divides it by the best time of the job in one process with two threads. `sleep` divides it, for stages that
# sleep 100 ms per pass, by (m + p - 1) / (m p) times the time with one micro-batch.
#   ./run bench pipeline [option of distrain pipeline...]
set -euo pipefail
distrain=$(realpath "$1")
shift
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

splits() { jq -cs 'map(select(.event == "split") | .stages = (.stage_s | length))'; }
"$distrain" pipeline --threads 1 "$@" | splits >"$tmp/ranks"
"$distrain" pipeline --local --threads 2 "$@" | splits >"$tmp/local"
# shellcheck disable=SC2016  # jq's variables
jq -c --slurpfile local "$tmp/local" '($local[0] | map(.batch_s) | min) as $local_s | .[]
  | ((.num_split + .stages - 1) / .num_split * (.stage_s | max)) as $allowed
  | {event: "bench", name: "pipeline", impl: "distrain-unix", world_size: (.stages + 1), num_split, batch_s,
     stage_s, local_batch_s: $local_s, law: (.batch_s / $allowed), local: (.batch_s / $local_s)}' "$tmp/ranks"
for stages in 2 3; do
  "$distrain" pipeline --stages $stages --inject stage=100ms --batches 6 | splits |
    jq -c '(.[0].batch_s) as $one | .[]
      | {event: "bench", name: "pipeline-schedule", impl: "distrain-unix", world_size: (.stages + 1), num_split,
         batch_s, sleep: (.batch_s / $one / ((.num_split + .stages - 1) / (.num_split * .stages)))}'
done
