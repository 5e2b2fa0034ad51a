#!/bin/bash
# ctest: timeout=240
# Signals after which a job continues, and the state that it reports when it ends.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"

# The job has a process group of its own. The group is not orphaned, so SIGTSTP stops it.
start() { # start <args>...: starts an endless job and waits until all ranks work
  : >"$tmp/out"
  set -m
  "$distrain" hybrid --epochs 1000000 --peer-timeout 60 --log-interval 10 "$@" >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  set +m
  wait_for_lines 4 ready "$tmp/out"
  wait_for_lines 1 epoch "$tmp/out"
}
pid_of() { jq -r "select(.event == \"start\" and .rank == $1).pid" "$tmp/out" 2>/dev/null; }
gone() { ! kill -0 "$1" 2>/dev/null; }
ends_by_term() { # ends_by_term <pid> <name>
  kill -TERM "$1"
  wait_for "$limit" gone "$1" || fail "$2: does not end by SIGTERM"
  wait "$1"
  code=$?
  expect 143 "$2"
  expect_no_process "$2"
}
goes_on() {
  wait_for_lines $(($(grep -c '"event":"epoch"' "$tmp/out") + 2)) epoch "$tmp/out"
}

# Sends SIGQUIT and checks the answers. Call it repeatedly, because a rank may be between two waits.
tells() { # tells <pid> <pattern>
  kill -QUIT "$1"
  sleep 0.1
  grep -Eq "$2" "$tmp/err"
}

all_stopped() { # the launcher and its ranks
  local pid
  for pid in "$launcher" $(jq -r 'select(.event == "start").pid' "$tmp/out"); do
    [[ $(awk '/^State:/ { print $2 }' "/proc/$pid/status" 2>/dev/null) == T ]] || return 1
  done
}

case_sigterm() {
  # Without --checkpoint, `end` reports the work done until the signal.
  start
  ends_by_term "$launcher" "SIGTERM"
  expect_log "SIGTERM"
  # shellcheck disable=SC2016 # $told is jq's
  expect_jq '(map(select(.event == "epoch")) | group_by(.rank) | map(map(.steps) | add) | add) as $told
    | .[-1] | .steps >= $told and .train_s > 0 and .rpc.calls > .steps and .loss > 0 and .updates > 0' "SIGTERM: what was done"

  # The launcher waits longer than the limit for a save that makes progress, but not for a step that never ends.
  start --checkpoint "$tmp/slow" --checkpoint-every 1000000 --save-timeout 4 --inject save=6s
  ends_by_term "$launcher" "a slow save"
  expect_jq '[.[] | select(.event == "checkpoint" and .action == "saved")] | length == 1' "a slow save"
  start --checkpoint "$tmp/never" --checkpoint-every 1000000 --save-timeout 1
  kill -STOP "$(pid_of 1)"
  kill -TERM "$launcher"
  wait "$launcher"
  code=$?
  expect 143 "a save that does not begin"
  expect_no_process "a save that does not begin"
}

case_sigquit() {
  local name rank
  name="SIGQUIT of a rank"
  start
  wait_for "$limit" tells "$(pid_of 2)" "^distrain: rank 2 \(master\) waits" || fail "$name: no word of it"
  goes_on
  grep -q '^distrain: rank [013]' "$tmp/err" && fail "$name: others answered"

  name="SIGQUIT of the launcher"
  kill -STOP "$(pid_of 3)"
  # Only one trainer waits for rank 3; the other may wait for that trainer.
  wait_for "$limit" tells "$launcher" '^distrain: rank [01] \(trainer[01]\) waits, [1-9][0-9]*\.[0-9] s: .*, called on rank 3$' ||
    fail "$name: no trainer says what it waits for: $(head -n 3 "$tmp/err")"
  kill -CONT "$(pid_of 3)"
  for rank in 1 2 3; do # each waits for the shutdown, a step, or a call
    wait_for "$limit" tells "$launcher" "^distrain: rank $rank \([a-z0-9]+\) waits" || fail "$name: no word of rank $rank"
  done
  goes_on
  ends_by_term "$launcher" "$name"
  expect_log "$name"

  name="SIGQUIT of a rank that joins"
  : >"$tmp/out"
  "$distrain" rl --rank 1 --master-port "$(free_port)" >"$tmp/out" 2>"$tmp/err" &
  rank=$!
  wait_for_lines 1 start "$tmp/out"
  wait_for "$limit" tells "$rank" '^distrain: rank 1 waits, [0-9.]+ s: rank 0 to join$' || fail "$name: $(cat "$tmp/err")"
  ends_by_term "$rank" "$name"

}

case_sigtstp() {
  local name
  name="SIGTSTP"
  start --peer-timeout 3
  for _ in $(few 1 2); do
    kill -TSTP "$launcher"
    wait_for "$limit" all_stopped || fail "$name: not all are stopped"
    sleep 6 # longer than the peer timeout
    all_stopped || fail "$name: somebody went on"
    kill -CONT "$launcher"
    goes_on
  done
  ends_by_term "$launcher" "$name"
  expect_log "$name"
}

case_reader_sleeps() {
  local name rank where launcher
  # No launcher reads the lines of this rank, and its blocked writer thread holds the lock that the last line needs.
  name="SIGTERM while the reader of stdout sleeps"
  mkfifo "$tmp/fifo"
  exec 9<>"$tmp/fifo"
  "$distrain" hybrid --local --epochs 1000000 --log-interval 1 >"$tmp/fifo" 2>"$tmp/err" &
  rank=$!
  wait_for "$limit" tells "$rank" '^distrain: rank 0 .*waits, [1-9][0-9.]* s: the reader of standard output$' ||
    fail "$name: SIGQUIT does not tell: $(tail -n 1 "$tmp/err")"
  ends_by_term "$rank" "$name"
  grep -q '^distrain: ended by SIGTERM$' "$tmp/err" || fail "$name: stderr does not say so"
  exec 9<&-

  # A job with checkpoints saves at the first signal, although all its lines wait for the reader.
  for where in --local --trainers=2; do
    name="SIGTERM while the reader of stdout sleeps, and there is something to save, $where"
    rm -rf "$tmp/saves"
    exec 9<>"$tmp/fifo"
    "$distrain" hybrid "$where" --epochs 1000000 --log-interval 1 --checkpoint "$tmp/saves" \
      --checkpoint-every 1000000000 >"$tmp/fifo" 2>"$tmp/err" &
    launcher=$!
    # Either of two trainers may be the first whose pipe is full.
    wait_for "$limit" tells "$launcher" '^distrain: rank [01] .*waits, [1-9][0-9.]* s: the reader of standard output$' ||
      fail "$name: SIGQUIT does not tell: $(tail -n 1 "$tmp/err")"
    ends_by_term "$launcher" "$name"
    grep -q "^distrain: checkpoint saved in $tmp/saves/step-" "$tmp/err" || fail "$name: stderr does not say so"
    [[ -n $(find "$tmp/saves" -path '*/step-*/manifest.json') ]] || fail "$name: nothing is saved"
    exec 9<&-
  done
}

run_cases
