#!/bin/bash
# ctest: timeout=300
# --device: a missing GPU ends the job with exit code 9. tests/unit/app/test_common_options.cpp tests invalid values.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

data=$tmp/images
make_images "$data" 64 16

options_of() { # options_of <job>: prints options that make the job short
  case $1 in
    hybrid) echo --epochs 1 --batches 2 ;;
    ps) echo --data "$data" --steps 2 ;;
    rnn) echo --epochs 1 --trainers 2 ;;
    rl) echo --max-episodes 1 ;;
    pipeline) echo --model resnet18 --image-size 33 --classes 10 --batches 1 --batch-size 4 --micro-batches 2 ;;
  esac
}
try() { # try <job> <options>...
  local job=$1
  shift
  # shellcheck disable=SC2046  # words
  run "$job" $(options_of "$job") "$@"
}

# No process of this test may see a GPU, even if this machine has one.
export CUDA_VISIBLE_DEVICES=

expect_no_gpu() { # expect_no_gpu <name> <pattern for the rank that reports it>
  expect 9 "$1"
  expect_log "$1"
  expect_jq 'map(select(.event == "error")) | length == 1 and (.[0] | .kind == "resources"
      and .exit_code == 9 and (.message | test("^rank '"$2"': .")))' "$1"
  expect_jq '.[-1] | .exit_code == 9 and .kind == "resources" and .cause_rank != null' "$1"
  [[ $(wc -l <"$tmp/err") == 1 && $(cat "$tmp/err") == distrain:\ rank* ]] || fail "$1: not one line on stderr"
  expect_no_process "$1"
}

case_all_jobs() {
  local job
  for job in $(few pipeline hybrid ps rnn rl); do
    try "$job" --device cuda
    expect_no_gpu "$job --device cuda" '[0-9]+ [(][a-z_]+[0-9]*[)]'
    try "$job" --device cuda --local
    expect_no_gpu "$job --device cuda --local" '0 [(]local[)]'
  done
}

# Only one role uses a GPU.
case_one_role() {
  try hybrid --device trainer1=cuda
  expect_no_gpu "hybrid --device trainer1=cuda" '1 [(]trainer1[)]'
  try hybrid --device server=cuda:1
  expect_no_gpu "hybrid --device server=cuda:1" '3 [(]ps[)]'
  try pipeline --device stage2=cuda
  expect_no_gpu "pipeline --device stage2=cuda" '2 [(]worker2[)]'
}

# A joining rank also reports its missing GPU, and the rank that it has joined ends at once.
case_rank_that_joins() {
  local port agent server
  port=$(free_port)
  "$distrain" rl --rank 0 --world-size 2 --master-port "$port" --join-timeout "$limit" --max-episodes 1 \
    >"$tmp/agent" 2>"$tmp/agent.err" &
  agent=$!
  try rl --rank 1 --master-port "$port" --device cuda:0
  expect 0 "an observer computes nothing on the GPU of its own that is not there"
  wait "$agent" || [[ $? == 11 ]] || fail "the agent of that job: $(cat "$tmp/agent.err")"
  port=$(free_port)
  "$distrain" rnn --rank 0 --trainers 1 --epochs 1 --master-port "$port" --join-timeout "$limit" \
    >"$tmp/ps" 2>"$tmp/ps.err" &
  server=$!
  run rnn --rank 1 --master-port "$port" --device trainer=cuda
  expect_no_gpu "a trainer that joins" '1 [(]trainer1[)]'
  wait "$server"
  [[ $? == 9 ]] || fail "the server of a trainer without its GPU did not end with 9"
  expect_jq '.[-1].cause_rank == 1' "the server names the trainer" "$tmp/ps"
}

case_num_gpus_and_cpu() {
  local words
  # Options that choose the CPU change nothing.
  for words in "--device cpu" "--device server=cpu,trainer=cpu" "--num-gpus 0" "--num-gpus 0 --device cpu"; do
    # shellcheck disable=SC2086  # words
    try ps $words
    expect 0 "ps $words"
    expect_jq 'map(select(.event == "start").device) == ["cpu", "cpu", "cpu"]
      and (map(has("device_mem_mb")) | any | not)' "ps $words"
  done
  expect_jq '.[-1] | has("device") | not' "the end of a job on CPUs"

  for words in "--num-gpus 1" "--num-gpus 2 --device trainer=cpu"; do
    # shellcheck disable=SC2086  # words
    try ps $words
    expect_no_gpu "ps $words" '0 [(]parameter_server[)]'
  done
  try ps --num-gpus 2 --local
  expect_no_gpu "ps --num-gpus 2 --local" '0 [(]local[)]'
}

run_cases
