#!/bin/bash
# Measures the cost of --trace: the median steps per second of hybrid and ps in alternating runs without and with it.
# Prints a JSON line per job. `ratio` is with divided by without; `ratios` are those of each pair, sorted. If they
# differ much, the machine was busy.
#   ./run bench trace [pairs of runs]
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
limit=300
pairs=${2:-7}

# measure <file> <args>...: runs a job and appends its speed and its number of ranks to the file.
measure() {
  local speeds=$1
  shift
  run "$@"
  ((code == 0)) || { tail -n 1 "$tmp/out" "$tmp/err" >&2; exit 1; }
  jq -cs '[(.[-1].steps_per_s), (map(select(.event == "rank_end")) | length)]' "$tmp/out" >>"$speeds"
}

# compare <args>...: runs pairs in alternating order, so that a machine that slows down favours neither variant.
compare() {
  local pair traced=(--trace "$tmp/trace.json")
  rm -f "$tmp/plain" "$tmp/traced"
  for ((pair = 0; pair < pairs; ++pair)); do
    ((pair % 2)) && measure "$tmp/traced" "$@" "${traced[@]}"
    measure "$tmp/plain" "$@"
    ((pair % 2)) || measure "$tmp/traced" "$@" "${traced[@]}"
  done
  # shellcheck disable=SC2016  # jq's variables
  jq -cn --arg job "$1" --argjson pairs "$pairs" --slurpfile plain "$tmp/plain" --slurpfile traced "$tmp/traced" '
    def median: map(.[0]) | sort | (.[(length - 1) / 2 | floor] + .[length / 2 | floor]) / 2;
    ($plain | median) as $without | ($traced | median) as $with
    | {event: "bench", name: "trace \($job)", impl: "distrain-unix", world_size: $plain[0][1], pairs: $pairs,
       steps_per_s: $without, traced_steps_per_s: $with, ratio: ($with / $without),
       ratios: ([$traced, $plain] | transpose | map(.[0][0] / .[1][0] * 1000 | round / 1000) | sort)}'
}

make_images "$tmp/images" 1600 32
compare hybrid --epochs 500
compare ps --data "$tmp/images" --steps 100
