#!/bin/bash
# ctest: timeout=300
# A job continues without killed trainers and admits their replacements. Tests also when a job does not continue, and
# what happens to a trainer that was only stopped. tests/soak/losses.sh runs longer.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"

# Each rank sleeps before each call, so that the job lasts long enough without much work.
export LOSSES_IMAGES=128 LOSSES_BATCH=4 LOSSES_ARGUMENTS="--inject delay=20ms"
make_images "$tmp/images" $LOSSES_IMAGES 32

case_launcher_restarts_async() {
  python3 "$root/tests/fault/losses.py" "$distrain" "$tmp" async launcher || fail "async, with a launcher"
  expect_no_process "async, with a launcher"
}

case_ranks_restart_ssp() {
  python3 "$root/tests/fault/losses.py" "$distrain" "$tmp" ssp each "$(free_port)" || fail "ssp, rank by rank"
  expect_no_process "ssp, rank by rank"
}

# start <args>...: starts an endless job and waits until it trains.
start() {
  rm -f "$tmp/out"
  "$distrain" ps --mode async --data "$tmp/images" --epochs 1000000 --log-interval 1 --peer-timeout 60 "$@" \
    >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 4 step "$tmp/out"
}

case_job_ends() {
  local name
  name="fewer than --min-trainers are left"
  start --trainers 3 --min-trainers 2
  kill -9 "$(pid_of 2)"
  wait_for_lines 1 lost "$tmp/out"
  kill -9 "$(pid_of 3)"
  await_end
  expect 137 "$name"
  expect_log "$name"
  expect_jq '[.[] | select(.event == "lost")] | length == 1 and (.[0] | .lost_rank == 2 and .trainers_left == 2)' "$name"
  expect_jq '.[-1] | .cause_rank == 3 and .signal == "SIGKILL"' "$name"
  expect_jq '[.[] | select(.event == "error")] | length == 1 and (.[0].message | contains("fewer trainers are left than --min-trainers 2"))' "$name"
  expect_no_process "$name"

  name="the server is killed"
  start --trainers 2
  kill -9 "$(pid_of 0)"
  await_end
  expect 137 "$name"
  expect_jq 'all(.[]; .event != "lost") and .[-1].cause_rank == 0' "$name"

  name="one of two servers is killed, after a loss"
  start --servers 2 --trainers 3
  kill -9 "$(pid_of 3)"
  wait_for_lines 1 lost "$tmp/out"
  expect_jq '[.[] | select(.event == "lost")] | length == 1 and (.[0] | .lost_role == "trainer3" and .trainers_left == 2)' "$name"
  kill -9 "$(pid_of 1)"
  await_end
  expect 137 "$name"
  expect_jq '.[-1].cause_rank == 1' "$name"

  name="the launcher is told to end, after a loss"
  start --trainers 3
  kill -9 "$(pid_of 1)"
  wait_for_lines 1 lost "$tmp/out"
  kill -TERM "$launcher"
  await_end
  expect 143 "$name"
  expect_no_process "$name"

  name="sync does not go on"
  start --trainers 2 --mode sync
  kill -9 "$(pid_of 2)"
  await_end
  expect 137 "$name"
  expect_jq 'all(.[]; .event != "lost")' "$name"

  run ps --data "$tmp/images" --trainers 2 --min-trainers 3
  expect_error 2 invalid "--min-trainers 3: the job has no more than --trainers 2" "more than there are"
  run hybrid --min-trainers 1
  expect 2 "hybrid has no --min-trainers"
}

# A replacement joins while the trainer is stopped. When the trainer continues, its rank is taken.
case_only_stopped() {
  local name port launcher rank pids
  name="one that was only stopped"
  port=$(free_port)
  rm -f "$tmp"/rank*
  "$distrain" ps --mode async --data "$tmp/images" --trainers 2 --epochs 1000000 --log-interval 1 --peer-timeout 4 \
    --master-port "$port" --rank 0 >"$tmp/rank0" 2>"$tmp/err0" &
  launcher=$!
  for rank in 1 2; do
    "$distrain" ps --rank "$rank" --master-port "$port" >"$tmp/rank$rank" 2>"$tmp/err$rank" &
    pids[rank]=$!
  done
  wait_for_lines 1 step "$tmp/rank2"
  kill -STOP "${pids[2]}"
  wait_for_lines 1 lost "$tmp/rank0"
  "$distrain" ps --rank 2 --master-port "$port" >"$tmp/rank3" 2>"$tmp/err3" &
  pids[3]=$!
  wait_for_lines 1 step "$tmp/rank3"
  kill -CONT "${pids[2]}"
  wait "${pids[2]}"
  code=$?
  expect 5 "$name"
  expect_jq '.[-1] | .kind == "peer_lost" and .cause_rank == 2' "$name" "$tmp/rank2"
  expect_jq '[.[] | select(.event == "returned")] | length == 1 and .[0].returned_rank == 2 and .[0].incarnation == 1' "$name" \
    "$tmp/rank0"
  run ps --rank 2 --master-port "$port" --join-timeout 20
  expect 3 "a third one in a place that is taken"
  grep -q 'rank 2 has been taken already' "$tmp/err" || fail "$name: the third one is not told so"
  kill -TERM "$launcher" 2>/dev/null
  wait "$launcher" "${pids[@]}" 2>/dev/null
  expect_no_process "$name"
}

run_cases
