#!/bin/bash
# ctest: timeout=300
# distrain pipeline: lines, sweeps, schedules, splits, weights, ranks that join.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

# Runs distrain in the background and sets $job. Empties $tmp/out first, so that old lines are not taken for new ones.
begin() {
  : >"$tmp/out"
  "$distrain" "$@" >"$tmp/out" 2>"$tmp/err" &
  job=$!
}

small=(pipeline --model resnet18 --image-size 33 --batch-size 8 --batches 2 --classes 10)

# A sweep, separate runs for each number of micro-batches, --local, and ranks that join have the same losses.
case_same_losses() {
  local n port rank
  run "${small[@]}" --num_split 1,3 --log-interval 1
  expect 0 "a sweep"
  expect_log "a sweep"
  [[ -s $tmp/err ]] && { fail "a sweep: wrote to stderr:"; head -n 5 "$tmp/err"; }
  expect_jq '[.[] | select(.event == "start")] | (map(.rank) | sort) == [0,1,2]
    and all(.[].config; .micro_batches == [1,3] and .stages == 2 and .split == null and .loss == "mse")' "start lines"
  expect_jq '[.[] | select(.event == "rank_end")] | (map(.role) | sort) == ["master","worker1","worker2"]' "rank_end lines"
  expect_jq '[.[] | select(.event == "step")] | map([.num_split, .step]) == [[1,1],[1,2],[3,1],[3,2]]
    and all(.[]; .rank == 0 and .samples_per_s > 0)' "step lines"
  expect_jq '[.[] | select(.event == "split")] | map(.num_split) == [1,3] and all(.[]; .rank == 0
    and .schedule == "gpipe" and .batches == 2 and .batch_size == 8 and .batch_s > 0 and .wall_s > .batch_s
    and (.stage_s | length == 2 and all(.[]; . > 0)) and .activations == [.num_split, .num_split]
    and .samples_per_s > 0 and .loss > 0)' "split lines"
  # shellcheck disable=SC2016  # jq's variables
  expect_jq '(map(select(.event == "split")) | min_by(.batch_s)) as $best | .[-1] | .steps == 4
    and .num_split == 3 and .best == {num_split: $best.num_split, batch_s: $best.batch_s}
    and .rpc.calls > 0 and .live_rrefs == 0 and .live_contexts == 0' "end"
  expect_no_process "a sweep"
  jq -c 'select(.event == "split") | [.num_split, .loss]' "$tmp/out" >"$tmp/sweep"

  # Separate runs for each number of micro-batches, and --local, have the same losses as a sweep.
  for n in 1 3; do
    run "${small[@]}" --micro-batches "$n"
    jq -c 'select(.event == "split") | [.num_split, .loss]' "$tmp/out"
  done >"$tmp/loop"
  cmp -s "$tmp/sweep" "$tmp/loop" || fail "a sweep and a loop differ: $(cat "$tmp/sweep" "$tmp/loop")"
  run "${small[@]}" --micro-batches 1,3 --local --threads 1
  expect 0 "--local"
  expect_log "--local"
  jq -c 'select(.event == "split") | .loss' "$tmp/out" >"$tmp/local"
  paste -d ' ' <(jq '.[1]' "$tmp/sweep") "$tmp/local" |
    awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-5 * $2) exit 1 }' ||
    fail "the losses are not those of --local: $(cat "$tmp/sweep" "$tmp/local")"

  # Ranks that join inherit all options.
  port=$(free_port)
  for rank in 2 1; do
    timeout "$limit" "$distrain" pipeline --rank "$rank" --master-port "$port" >"$tmp/rank$rank" 2>&1 &
  done
  run "${small[@]}" --rank 0 --master-port "$port" --micro-batches 3
  expect 0 "ranks that join"
  wait
  jq -c 'select(.event == "split") | [.num_split, .loss]' "$tmp/out" | cmp -s - <(tail -n 1 "$tmp/sweep") ||
    fail "ranks that join: another loss"
  for rank in 1 2; do expect_log "rank $rank" "$tmp/rank$rank"; done
  expect_no_process "$selected"
}

case_stages_and_schedules() {
  local rank
  run "${small[@]}" --stages 3 --split stem,layer3.0 --schedule 1f1b --micro-batches 4 --loss ce
  expect 0 "three stages"
  expect_jq '[.[] | select(.event == "split")][0] | .activations == [3,2,1] and (.stage_s | length) == 3' "three stages"

  # --explain prints the schedule without training.
  run pipeline --explain --stages 3 --micro-batches 2,4 --split layer1,layer3
  expect 0 "--explain"
  # shellcheck disable=SC2016  # jq's variables
  expect_jq 'length == 2 and map(.num_split) == [2,4] and (map(.bubble * 1000 | round) == [500, 333])
    and all(.[]; (.table | length) == 3 and .table[0].blocks[-1] == "layer1.2"
      and .table[2].blocks == ["layer4.0","layer4.1","layer4.2","head"]
      and (.num_split as $m | all(.table[].steps; length == 2 * $m)))
    and .[0].table[1].steps[0] == {op: "forward", micro_batch: 0, begin: 1}' "--explain"
  if command -v script >/dev/null; then
    on_terminal "'$distrain' pipeline --explain --micro-batches 2"
    grep -qx '  stage 1  F0 F1 .  .  B0 B1  (holds 2)' "$tmp/tty" || fail "timeline: $(cat "$tmp/tty")"
  fi

  # With sleeping stages one micro-batch passes the stages sequentially; several overlap, so that a batch takes less time
  # than the sum of its stages.
  run "${small[@]}" --batches 4 --micro-batches 1,4 --inject stage=300ms
  expect 0 "--inject stage"
  expect_jq '[.[] | select(.event == "split")] | .[0].batch_s >= 1.2 and .[1].batch_s >= 0.75
    and all(.[]; .stage_s[0] >= 0.6) and .[1].batch_s < (.[1].stage_s | add)' "--inject stage"
  for rank in $(few 2 1 3); do
    run "${small[@]}" --stages 3 --micro-batches 2 --inject "stage=40ms@rank=$rank" --trace "$tmp/trace.json"
    expect 0 "--inject stage@rank=$rank"
    expect_jq "[.[] | select(.event == \"split\")][0].stage_s[$rank - 1] >= 0.08" "--inject stage@rank=$rank"
    expect_jq "[.[0].traceEvents[] | select(.name == \"sleep\").pid] | unique == [$rank]" \
      "--inject stage@rank=$rank: others sleep" "$tmp/trace.json"
  done
  expect_no_process "$selected"
}

case_signals() {
  local saved step rank
  # SIGTERM makes the job save, and the job can resume.
  saved=("${small[@]}" --micro-batches 2 --checkpoint "$tmp/saved" --resume auto --log-interval 1)
  begin "${saved[@]}" --batches 1000
  wait_for_lines 1 step "$tmp/out"
  kill "$job"
  wait "$job"
  code=$?
  expect 143 "SIGTERM"
  expect_log "SIGTERM"
  expect_jq '[.[] | select(.event == "checkpoint")] | length == 1 and .[0].action == "saved"' "SIGTERM"
  step=$(jq -r 'select(.event == "checkpoint").step' "$tmp/out")
  run "${saved[@]}" --batches $((step + 1))
  expect 0 "--resume"
  expect_jq "[.[] | select(.event == \"step\")] | length == 1 and .[0].step == $step + 1" "--resume"

  # The same with a signal to each rank one by one, to one stage, and with --local.
  begin "${saved[@]}" --batches 1000
  wait_for_lines 1 step "$tmp/out"
  for rank in 0 1 2; do
    kill "$(jq -r "select(.event == \"start\" and .rank == $rank).pid" "$tmp/out")" 2>/dev/null
    sleep 0.1
  done
  wait "$job"
  code=$?
  expect 143 "SIGTERM one by one"
  expect_log "SIGTERM one by one"
  expect_jq '[.[] | select(.event == "checkpoint" and .action == "saved")] | length == 1' "SIGTERM one by one"
  begin "${saved[@]}" --batches 1000
  wait_for_lines 1 step "$tmp/out"
  kill "$(jq -r 'select(.event == "start" and .rank == 2).pid' "$tmp/out")"
  wait "$job"
  code=$?
  expect 143 "SIGTERM of a stage"
  expect_jq '[.[] | select(.event == "checkpoint" and .action == "saved")] | length == 1' "SIGTERM of a stage"
  begin "${saved[@]}" --batches 1000 --local
  wait_for_lines 1 step "$tmp/out"
  kill "$job"
  wait "$job"
  code=$?
  expect 143 "SIGTERM of --local"
  expect_log "SIGTERM of --local"
  expect_jq '[.[] | select(.event == "checkpoint")] | map(.action) == ["loaded", "saved"]' "SIGTERM of --local"
  expect_no_process "$selected"
}

case_files_and_failures() {
  # Real images.
  make_images "$tmp/images" 30 10
  run "${small[@]}" --data "$tmp/images" --micro-batches 2 --loss ce --log-interval 1
  expect 0 "--data"
  expect_jq '[.[] | select(.event == "step")] | length == 2 and all(.[]; .accuracy >= 0 and .accuracy <= 1)' "--data"

  # The error names the stage that dies.
  begin "${small[@]}" --micro-batches 2 --inject stage=300ms --batches 1000 --log-interval 1
  wait_for_lines 1 step "$tmp/out"
  kill -9 "$(jq -r 'select(.event == "start" and .rank == 2).pid' "$tmp/out")"
  wait "$job"
  code=$?
  expect 137 "a stage dies"
  expect_log "a stage dies"
  expect_jq '.[-1] | .cause_rank == 2 and .signal == "SIGKILL"' "a stage dies"
  expect_no_process "a stage dies"

  # Missing and invalid files.
  run pipeline --data "$tmp/nowhere"
  expect_error 7 bad_data "--data $tmp/nowhere" "missing --data"
  run pipeline --weights "$tmp/nowhere"
  expect_error 7 bad_data "--weights $tmp/nowhere" "missing --weights"
  echo nothing >"$tmp/weights"
  # Rank 0 fails. The other ranks end because of it, sometimes before it, and ranks that have not joined yet do not wait
  # for the peer timeout.
  for _ in $(few 1 2 3 4 5); do
    run "${small[@]}" --weights "$tmp/weights" --peer-timeout 600
    expect 7 "bad --weights"
    expect_jq '.[-1].message | test("weights")' "bad --weights"
  done
  mkfifo "$tmp/pipe"
  run "${small[@]}" --weights "$tmp/pipe"
  expect 7 "--weights a pipe"
  expect_jq '.[-1].message | test("not a regular file")' "--weights a pipe"
  mkdir "$tmp/pipes"
  mkfifo "$tmp/pipes/train-images-idx3-ubyte"
  touch "$tmp/pipes/train-labels-idx1-ubyte"
  run "${small[@]}" --data "$tmp/pipes"
  expect 7 "--data with a pipe"
  expect_jq '.[-1].message | test("not a regular file")' "--data with a pipe"
  mkdir "$tmp/empty"
  run "${small[@]}" --data "$tmp/empty"
  expect 7 "no images"
  expect_no_process "$selected"
}

run_cases
