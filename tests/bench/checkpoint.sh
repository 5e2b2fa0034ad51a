#!/bin/bash
# Measures the cost of saves and prints a JSON line per job. `held` is the median fraction of a save's duration for
# which the job is blocked; `speed` is steps per second with a save every few seconds divided by steps per second
# without saves. Set TMPDIR to the disk to measure.
#   ./run bench checkpoint [seconds between saves]
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
limit=300
interval=${2:-5}
saves=5

# end_of <file> <args>...: runs a job and writes its `end` line to the file.
end_of() {
  run "${@:2}"
  ((code == 0)) || { tail -n 1 "$tmp/out" "$tmp/err" >&2; exit 1; }
  jq -c 'select(.event == "end")' "$tmp/out" >"$1"
}

# measure <name> <trainers> <option for the number of steps> <args>...
measure() {
  local name=$1 trainers=$2 count=$3 every bytes
  shift 3
  end_of "$tmp/trial" "$@" "$count" 10
  every=$(jq ".steps_per_s / $trainers * $interval | ceil" "$tmp/trial")
  end_of "$tmp/plain" "$@" "$count" $((every * 2))
  end_of "$tmp/saving" "$@" "$count" $((every * saves)) --checkpoint "$tmp/saves" --checkpoint-every "$every"
  bytes=$(du -sb "$tmp"/saves/step-* | awk '{ print $1; exit }')
  # shellcheck disable=SC2016  # jq's variables
  jq -cs --arg job "$name" --argjson bytes "$bytes" --slurpfile plain "$tmp/plain" '
    def median: sort | (.[(length - 1) / 2 | floor] + .[length / 2 | floor]) / 2;
    map(select(.event == "checkpoint")) as $saves
    | {event: "bench", name: "checkpoint \($job)", impl: "distrain-unix", bytes: $bytes, saves: ($saves | length),
       wall_s: ($saves | map(.wall_s) | median), held_s: ($saves | map(.held_s // .wall_s) | median),
       held: ($saves | map((.held_s // .wall_s) / .wall_s) | median), steps_per_s: $plain[0].steps_per_s,
       speed: (.[-1].steps_per_s / $plain[0].steps_per_s)}' "$tmp/out"
  rm -rf "$tmp/saves"
}

make_images "$tmp/images" 6400 32
common=(--log-interval 0 --threads 1)
rnn=(rnn --trainers 1 --embedding-dim 512 --nhid 512 --batch-size 4 --bptt 4 --optimizer adagrad)
measure rnn 1 --steps "${rnn[@]}" "${common[@]}"
hybrid=(hybrid --mode sync --num-embeddings 500000 --embedding-dim 32 --optimizer adagrad)
measure hybrid 2 --steps "${hybrid[@]}" "${common[@]}"
pipeline=(pipeline --model resnet50 --image-size 64 --batch-size 4 --num-split 2)
measure pipeline 1 --batches "${pipeline[@]}" "${common[@]}"
measure "pipeline --local" 1 --batches "${pipeline[@]}" --local "${common[@]}"
measure ps 2 --steps ps --mode sync --data "$tmp/images" --optimizer adam "${common[@]}"
