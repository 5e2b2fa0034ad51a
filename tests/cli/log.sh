#!/bin/bash
# --log: a file gets the JSON lines of standard output, whole, whoever writes and however the run ends.
# ctest: timeout=180
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

short=(--epochs 2 --batches 4)

case_lines() {
  local where log=$tmp/new/folder/log port
  run hybrid "${short[@]}" --log "$log"
  expect 0 "--log"
  cmp "$tmp/out" "$log" || fail "--log differs from standard output"
  cp "$log" "$tmp/first"
  for where in "" --local; do
    # shellcheck disable=SC2086 # none or one
    run hybrid "${short[@]}" --log "$log" --pretty $where
    cmp -n "$(stat -c %s "$tmp/first")" "$tmp/first" "$log" || fail "--pretty $where: the first run's lines are gone"
    tail -c "+$(($(stat -c %s "$tmp/first") + 1))" "$log" >"$tmp/second"
    expect_log "--pretty $where" "$tmp/second"
    cp "$log" "$tmp/first"
  done
  # Ranks that start one by one share a file.
  port=$(free_port)
  log=$tmp/shared
  one_by_one() { timeout "$limit" "$distrain" hybrid "${short[@]}" --log-interval 1 --rank "$1" --master-port "$port" --log "$log"; }
  joined "ranks that share a file" one_by_one
  diff <(sort "$log") <(sort "$tmp"/rank[0-3]) >/dev/null || fail "a shared file differs from the ranks' lines"
  # What a killed process left of a line does not damage the next line.
  printf '{"cut' >"$tmp/cut"
  run hybrid "${short[@]}" --log "$tmp/cut"
  [[ $(sed -n 2p "$tmp/cut") == "$(head -n 1 "$tmp/out")" ]] || fail "after a part of a line: $(head -n 2 "$tmp/cut")"
  # Failures before any rank starts, and predictions.
  run hybrid --data "$tmp/none" --log "$tmp/failed"
  cmp "$tmp/out" "$tmp/failed" || fail "a failure before the start is not logged"
  printf '__label__a x y\n__label__b z w\n%.0s' {1..8} >"$tmp/text"
  run hybrid --data "$tmp/text" --epochs 1 --checkpoint "$tmp/saved"
  run predict "$tmp/saved" "$tmp/text" --log "$tmp/predicted"
  cmp "$tmp/out" "$tmp/predicted" || fail "predictions are not logged"
}

case_ends() {
  # The log gets the end of a job that a signal ends, or whose reader is gone.
  "$distrain" hybrid --epochs 1000000 --log "$tmp/log" >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 1 epoch "$tmp/log"
  kill -INT "$launcher"
  await_end
  cmp "$tmp/out" "$tmp/log" || fail "after SIGINT the log differs from standard output"
  expect_log "SIGINT" "$tmp/log"
  rm "$tmp/log"
  "$distrain" hybrid --epochs 1000000 --log-interval 1 --log "$tmp/log" 2>"$tmp/err" | head -n 1 >"$tmp/out"
  expect_log "a reader that is gone" "$tmp/log"
}

case_full() {
  local where refused
  # A full disk: one warning, and the job goes on.
  for where in "" --local; do
    # shellcheck disable=SC2086 # none or one
    run hybrid "${short[@]}" --log /dev/full $where
    expect 0 "/dev/full $where"
    expect_log "/dev/full $where"
    expect_jq 'map(select(.event == "warn")) | length == 1 and (.[0].message | test("--log /dev/full: No space left on device"))' \
      "/dev/full $where"
  done
  # A limit within a line: the file keeps whole lines.
  (ulimit -f 4 && exec "$distrain" hybrid "${short[@]}" --log "$tmp/log") 2>"$tmp/err" | cat >"$tmp/out"
  expect_jq 'map(select(.event == "warn")) | length == 1 and (.[0].message | test("--log .*: lines are missing there"))' "ulimit -f"
  expect_jq '.[-1].status == "ok"' "ulimit -f"
  jq -es 'length > 0' "$tmp/log" >/dev/null || fail "ulimit -f: not whole lines: $(tail -c 100 "$tmp/log")"
  # Files that cannot be opened refuse the job.
  mkfifo "$tmp/fifo"
  : >"$tmp/plain"
  for refused in "$tmp: is not a file" "$tmp/fifo: is not a file" "$tmp/plain/log: Not a directory"; do
    run hybrid "${short[@]}" --log "${refused%:*}"
    expect_error 2 invalid "--log $refused" "--log ${refused%:*}"
  done
  # shellcheck disable=SC2094 # the same file
  "$distrain" hybrid "${short[@]}" --log "$tmp/same" >"$tmp/same" 2>"$tmp/err"
  code=$?
  expect 2 "standard output's file"
  grep -q "standard output goes there already" "$tmp/err" || fail "standard output's file: $(cat "$tmp/err")"
}

run_cases
