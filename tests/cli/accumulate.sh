#!/bin/bash
# ctest: timeout=300
# Steps of several batches (--accumulate), and the type in which replicas average (--gradient-dtype).
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

# 90 examples of 2 trainers: the last step of an epoch has fewer examples than the others.
awk 'BEGIN {
  srand(3)
  for (i = 0; i < 90; ++i) {
    label = int(3 * rand())
    line = "__label__" substr("abc", label + 1, 1)
    for (j = 0; j < 1 + i % 5; ++j) line = line " w" (rand() < 0.5 ? label : 3 + int(30 * rand()))
    print line
  }
}' >"$tmp/examples"
hybrid=(hybrid --data "$tmp/examples" --test-data "$tmp/examples" --dense 8 --epochs 2 --mode sync --optimizer adam
  --clip 1 --lr 0.1 --log-interval 1)

steps() { jq -c 'select(.event == "step") | [.rank, .epoch, .step, .loss]' "$1" | sort; }

# same_training <file> <file> <tolerance> <name>: compares steps and their losses, and the epochs' examples. A run with
# --local has the trainers' mean losses.
same_training() {
  jq -es --slurpfile other "$2" --argjson most "$3" '
    def losses: map(select(.event == "step")) | group_by(.epoch * 1000 + .step)
      | map([.[0].epoch, .[0].step, (map(.loss) | add / length)]);
    def samples: map(select(.event == "epoch")) | group_by(.epoch) | map(map(.samples) | add);
    losses as $a | ($other | losses) as $b | ($a | length) > 4 and ($a | length) == ($b | length) and samples == ($other | samples)
      and all(range($a | length); $a[.][:2] == $b[.][:2] and ($a[.][2] - $b[.][2] | fabs) <= $most)' "$1" >/dev/null ||
    { fail "$4: not the same training"; steps "$1" | head -n 3; steps "$2" | head -n 3; }
}

# check <name> <command> <argument>...: 4 batches of 4 in a step are as one of 16, also with --local and after a resume.
# float32 sums in another order differ by about 1e-7 of a loss of 1; 40 steps of Adam may multiply that by 100.
check() {
  local name=$1
  shift
  run "$@" --batch-size 16
  expect 0 "$name, whole"
  mv "$tmp/out" "$tmp/whole"
  run "$@" --batch-size 4 --accumulate 4 --checkpoint "$tmp/saved.$name"
  expect 0 "$name, in parts"
  expect_log "$name, in parts"
  cp "$tmp/out" "$tmp/parts"
  same_training "$tmp/parts" "$tmp/whole" 1e-4 "$name, in parts"
  expect_jq ".[-1].steps == $(jq -s '.[-1].steps' "$tmp/whole") and .[-1].live_contexts == 0" "$name, in parts: steps"
  run "$@" --batch-size 4 --accumulate 4 --local
  expect 0 "$name, --local"
  same_training "$tmp/out" "$tmp/parts" 1e-4 "$name, --local"

  run "$@" --batch-size 4 --accumulate 4 --steps 2 --checkpoint "$tmp/resumed.$name"
  expect 0 "$name, first two steps"
  run "$@" --batch-size 4 --accumulate 4 --checkpoint "$tmp/resumed.$name" --resume auto --keep 9
  expect 0 "$name, resumed"
  [[ $(evaluated "$tmp/out") == "$(evaluated "$tmp/parts")" ]] || fail "$name, resumed: other results"
  [[ $(last_tensors "$tmp/saved.$name") == "$(last_tensors "$tmp/resumed.$name")" ]] || fail "$name, resumed: other bits"
}
# last_tensors <folder>: prints the sums of the tensors' files in the newest checkpoint, without those of sharded tables,
# whose rows are in the order in which trainers have first looked them up.
last_tensors() {
  local last
  last=$(printf '%s\n' "$1"/step-* | sort | tail -n 1)
  (cd "$last" && cksum model.safetensors optimizer.safetensors) || echo "none in $1 $RANDOM"
}
evaluated() { jq -c 'select(.event == "eval") | [.epoch, .set, .loss, .accuracy]' "$1" | tail -n 1 | grep . || echo "none $RANDOM"; }

case_hybrid() { check hybrid "${hybrid[@]}"; }
case_hybrid_sharded() { check sharded "${hybrid[@]}" --hash-bits 8 --servers 2 --optimizer adagrad; }
case_hybrid_streamed() { check streamed "${hybrid[@]}" --hash-bits 8 --in-memory 0 --optimizer sgd; }

case_prefetch() {
  # A step's batches are looked up together, so the rows of each lack the same updates.
  run "${hybrid[@]}" --mode async --trainers 1 --table sharded --optimizer sgd --batch-size 4 --accumulate 4 --prefetch 2
  expect 0 "--prefetch"
  expect_jq '[.[] | select(.event == "step")] | length > 4 and (map(.staleness) | max) <= 2' "--prefetch"
}

case_ps() {
  make_images "$tmp/images" 88 10
  check ps ps --data "$tmp/images" --mode sync --dropout 0 --lr 0.01 --log-interval 1 --epochs 2
  # Each batch has its own dropout.
  run ps --data "$tmp/images" --batch-size 4 --accumulate 3 --verify-grads --servers 2 --steps 3
  expect 0 "ps, async with two servers"
  expect_jq '.[-1].steps == 6' "ps, async with two servers"
}

case_rnn() {
  local rnn=(rnn --data "$tmp/text" --test-data "$tmp/text" --dropout 0 --trainers 2 --epochs 2 --optimizer sgd --lr 0.5
    --clip 1 --log-interval 1 --lr-schedule constant)
  make_text 300 >"$tmp/text"
  check rnn "${rnn[@]}" --embedding-dim 4 --nhid 6 --nlayers 1 --vocab-size 20 --mode sync
  # Each batch has its own dropout. One trainer has no replicas.
  local trainers
  for trainers in 1 2; do
    local dropped=("${rnn[@]}" --trainers "$trainers" --mode sync --batch-size 4 --accumulate 2 --dropout 0.5 --nlayers 2)
    run "${dropped[@]}" --local
    expect 0 "rnn, --local --trainers $trainers"
    mv "$tmp/out" "$tmp/local"
    run "${dropped[@]}"
    expect 0 "rnn, --trainers $trainers"
    same_training "$tmp/out" "$tmp/local" 1e-4 "rnn, --trainers $trainers"
  done
  run "${rnn[@]}" --accumulate 1000000
  expect 7 "more columns than words"
  expect_jq '[.[] | select(.event == "error").message] | length == 1 and (.[0] | contains("too few for"))' "more columns than words"
}

case_gradient_dtype() {
  local type bytes
  declare -A bytes
  for type in float32 float16 bfloat16; do
    # Layers of 4 MiB, and 4 steps, over TCP, because ranks that share memory send no gradients.
    run hybrid --transport tcp --embedding-dim 1000 --dense 1000 --epochs 1 --batches-per-epoch 4 --mode sync --gradient-dtype "$type"
    expect 0 "$type"
    expect_jq ".[0].config.gradient_dtype == \"$type\"" "$type"
    bytes[$type]=$(jq -s '.[-1].rpc.bytes_out' "$tmp/out")
  done
  # Both trainers send their gradients, 4 MB each, in each of 4 steps.
  for type in float16 bfloat16; do
    ((bytes[float32] - bytes[$type] > 15000000 && bytes[$type] > 16000000)) ||
      fail "$type: ${bytes[$type]} bytes, and ${bytes[float32]} with float32"
  done
  run rnn --trainers 2 --gradient-dtype float16 --epochs 1
  expect 0 "rnn"
  run hybrid --gradient-dtype bfloat16 --local --epochs 1
  expect 0 "--local"
}

case_usage() {
  run "${hybrid[@]}" --accumulate 0
  expect_error 2 invalid "--accumulate must be a whole number from 1" "--accumulate 0"
  run hybrid --accumulate 2 --epochs 1
  expect_jq 'map(select(.event == "warn").message) == ["--accumulate has no effect without --data"]' "without --data"
  run "${hybrid[@]}" --gradient-dtype float64
  expect_error 2 invalid "--gradient-dtype must be one of float32, float16, bfloat16" "--gradient-dtype"
  run "${hybrid[@]}" --accumulate 2 --steps 2 --checkpoint "$tmp/usage"
  expect 0 "saved"
  run "${hybrid[@]}" --accumulate 3 --resume "$tmp/usage"
  [[ $code == 7 || $code == 2 ]] || fail "another --accumulate at --resume: exit code $code"
  expect_jq '[.[] | select(.event == "error").message] | length == 1 and (.[0] | contains("accumulate"))' "another --accumulate"
}

run_cases
