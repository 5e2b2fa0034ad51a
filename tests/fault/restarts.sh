#!/bin/bash
# ctest: timeout=240
# --max-restarts: a job whose ranks are killed repeatedly ends like an undisturbed job. Tests also failures without a
# restart, and signals while the launcher waits. tests/soak/restarts.sh runs all cases.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"

make_images "$tmp/images" 256 64

killed_repeatedly() { # killed_repeatedly <job>
  python3 "$root/tests/fault/restarts.py" "$distrain" "$tmp" "$1" || fail "$1, with ranks that are killed"
  expect_no_process "$1"
}

case_ranks_are_killed_ps() { killed_repeatedly ps; }
case_ranks_are_killed_hybrid() { sanitized || killed_repeatedly hybrid; }

# start <args>...: starts an endless job with checkpoints and waits until it has saved.
start() {
  rm -f "$tmp/out"
  rm -rf "$tmp/saves"
  "$distrain" ps --mode sync --data "$tmp/images" --epochs 1000000 --checkpoint "$tmp/saves" --checkpoint-every 5 \
    --peer-timeout 60 "$@" >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 1 checkpoint "$tmp/out"
}

case_one_restart_and_no_second() {
  local name
  name="one restart, and no second"
  start --max-restarts 1
  kill -9 "$(pid_of 1)"
  wait_for_lines 6 ready "$tmp/out"
  wait_for_lines 1 restart "$tmp/out"
  kill -9 "$(pid_of 0)"
  await_end
  expect 137 "$name"
  expect_log "$name"
  expect_jq '[.[] | select(.event == "restart")] | length == 1 and (.[0] | .generation == 1 and .cause_rank == 1
    and .restarts_left == 0 and .kind == "peer_lost" and .after_s == 0.25 and (.checkpoint | test("/saves/step-")))' "$name"
  expect_jq '[.[] | select(.event == "error")] | length == 1 and .[0].cause_rank == 0' "$name"
  expect_jq '.[-1] | .restarts == 1 and .cause_rank == 0' "$name"
  expect_jq '[.[] | select(.event == "checkpoint" and .action == "loaded")] | length == 1' "$name"
  [[ $(grep -c '^distrain: ' "$tmp/err") == 2 ]] || fail "$name: not two lines on stderr"
  grep -q 'rank 1 (trainer1) was killed by SIGKILL.*: the job starts again from .*/saves/step-.* (1 of 1)$' "$tmp/err" ||
    fail "$name: stderr does not say so"
  expect_no_process "$name"
}

case_signals() {
  local name launcher
  name="a signal to the launcher"
  start --max-restarts 5
  kill -TERM "$launcher"
  await_end
  expect 143 "$name"
  expect_log "$name"
  expect_jq 'all(.[]; .event != "restart") and .[-1].restarts == 0' "$name"

  name="a signal to a rank, which saves and ends"
  start --max-restarts 5
  kill -TERM "$(pid_of 2)"
  await_end
  expect 143 "$name"
  expect_jq 'all(.[]; .event != "restart")' "$name"

  # Rank 0 dies in its first save after each restart. Without progress the launcher waits longer each time.
  name="a signal while the launcher waits"
  rm -rf "$tmp/saves" "$tmp/out"
  "$distrain" ps --mode sync --data "$tmp/images" --epochs 1000000 --checkpoint "$tmp/saves" --checkpoint-every 5 \
    --inject fail=checkpoint.3 --max-restarts 50 >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 4 restart "$tmp/out"
  kill -INT "$launcher"
  await_end
  expect 130 "$name"
  expect_log "$name"
  expect_jq '[.[] | select(.event == "restart").after_s][:4] == [0.25, 0.5, 1, 2]' "$name"
  expect_jq '.[-1] | .kind == "cancelled" and .message == "ended by SIGINT"' "$name"
  expect_no_process "$name"
}

case_no_restart() {
  local name file
  name="a crash is no reason to start again"
  start --max-restarts 5
  kill -SEGV "$(pid_of 1)"
  await_end
  expect 139 "$name"
  expect_jq 'all(.[]; .event != "restart")' "$name"

  name="nor is wrong data"
  mkdir "$tmp/bad"
  cp "$tmp"/images/* "$tmp/bad"
  for file in "$tmp"/bad/*; do printf X | dd of="$file" bs=1 seek=2 conv=notrunc 2>/dev/null; done
  run ps --data "$tmp/bad" --checkpoint "$tmp/none" --max-restarts 5
  expect 7 "$name"
  expect_jq 'all(.[]; .event != "restart")' "$name"

  run ps --mode sync --max-restarts 5
  expect_error 2 invalid "--max-restarts needs --checkpoint in --mode sync" "without --checkpoint"
  run ps --rank 1 --max-restarts 5
  expect_error 2 invalid "--max-restarts needs a launcher: --ranks 1 in place of --rank 1" "of one rank"
  RANK=1 WORLD_SIZE=3 run ps --max-restarts 5
  expect_error 2 invalid "--max-restarts needs a launcher: --ranks 1 in place of RANK" "of one rank, by the environment"
  run ps --local --checkpoint "$tmp/none" --max-restarts 5
  expect_error 2 invalid "--max-restarts has no effect on --local" "--local"
}

case_lost_trainer() {
  local name launcher
  name="a lost trainer needs no checkpoint, a lost server does"
  rm -f "$tmp/out"
  "$distrain" ps --mode async --data "$tmp/images" --epochs 1000000 --max-restarts 5 --log-interval 1 \
    --peer-timeout 60 >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 4 step "$tmp/out"
  kill -9 "$(pid_of 1)"
  wait_for_lines 1 returned "$tmp/out"
  kill -9 "$(pid_of 0)"
  await_end
  expect 137 "$name"
  expect_jq '[.[] | select(.event == "restart")] | length == 1 and .[0].ranks == [1] and .[0].checkpoint == null' "$name"
  expect_jq '.[-1] | .cause_rank == 0 and .restarts == 1' "$name"
  expect_no_process "$name"
}

run_cases
