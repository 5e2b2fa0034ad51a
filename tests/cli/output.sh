#!/bin/bash
# ctest: timeout=240
# stdout has only JSON lines, for any kind of stdout; a run without problems prints nothing on stderr.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

short=(--epochs 3 --batches 4)

case_lines() {
  local before
  run hybrid "${short[@]}"
  expect 0 "a short run"
  expect_log "a short run"
  [[ -s $tmp/err ]] && { fail "a clean run wrote to stderr:"; head -n 5 "$tmp/err"; }
  expect_jq '[.[] | select(.event == "start")] | (map(.rank) | sort) == [0,1,2,3]
    and all(.[]; .world_size == 4 and .pid > 1 and .host and .version and .torch and .seed == 1
      and .threads >= 1 and .device == "cpu" and .transport and .config.lr == 0.05)' "start lines"
  expect_jq 'map(select(.rank != null)) | group_by(.rank) | length == 4
    and all(.[]; .[0].event == "start" and .[-1].event == "rank_end")' "first and last line of a rank"
  expect_jq '[.[] | select(.event == "rank_end")] | (map(.role) | sort)
    == ["master","ps","trainer0","trainer1"] and all(.[]; .status == "ok")' "rank_end lines"
  expect_jq '.[-1] | .rank == null and .role == "launcher" and .status == "ok" and .exit_code == 0
    and .steps == 24 and .wall_s > 0 and .train_s > 0 and .steps_per_s > 0 and .rpc.calls > 0
    and .rpc.bytes_out > 0 and .rpc.bytes_in > 0 and .rss_mb > 10 and .live_rrefs == 0
    and .live_contexts == 0 and (.loss | type) == "number"' "end"
  expect_jq '(map(.run) | unique | length) == 1 and (.[0].run | test("^[0-9a-f]{16}$"))' "the run of all lines"
  expect_jq '.[-1].seed == 1 and .[-1].config == map(select(.event == "start" and .rank == 0))[0].config' "config in end"
  before=$(jq -s '.[0].run' "$tmp/out")
  expect_no_process "a short run"

  run hybrid --local "${short[@]}"
  expect 0 "--local"
  expect_log "--local"
  expect_jq '.[-1].steps == 24 and .[-1].live_rrefs == 0' "--local"
  expect_jq ".[-1].config.epochs == 3 and .[0].run == .[-1].run and .[0].run != $before" "--local: run and config"

  run hybrid --batch-size 7 "${short[@]}"
  expect 0 "an option without effect"
  expect_jq '[.[] | select(.event == "warn")] | length == 1 and (.[0].message | test("--batch-size"))' \
    "an option without effect"

  run hybrid "${short[@]}" --threads "$(($(nproc) + 1))"
  expect_jq '[.[] | select(.event == "warn")] | length == 1 and (.[0].message | test("--threads [0-9]+: this process may use"))' "too many threads"
}

case_no_reader() {
  local long where
  long=(--epochs 1000000 --log-interval 1)
  timeout "$limit" "$distrain" hybrid "${long[@]}" 2>"$tmp/err" | head -n 1 >"$tmp/out"
  code=${PIPESTATUS[0]}
  expect 141 "head -1"
  [[ -s $tmp/err ]] && fail "head -1: wrote to stderr"
  expect_jq '.[0].event == "start"' "head -1"
  expect_no_process "head -1"

  timeout "$limit" "$distrain" hybrid "${long[@]}" 2>"$tmp/err" >/dev/full
  code=$?
  expect 9 "/dev/full"
  grep -q 'distrain: stdout: ' "$tmp/err" || fail "/dev/full: stderr does not say so"
  expect_no_process "/dev/full"

  timeout "$limit" "$distrain" hybrid --local "${short[@]}" 2>"$tmp/err" >/dev/full
  code=$?
  expect 9 "--local >/dev/full"
  timeout "$limit" "$distrain" hybrid "${short[@]}" 2>"$tmp/err" >&-
  code=$?
  expect 9 "closed stdout"
  timeout "$limit" "$distrain" --help 2>"$tmp/err" >/dev/full
  code=$?
  expect 9 "--help >/dev/full"
  "$distrain" hybrid "${short[@]}" >"$tmp/out" 2>&- <&-
  code=$?
  expect 0 "closed stdin and stderr"
  expect_log "closed stdin and stderr"

  # If stderr cannot be written, the exit code and stdout still report the error.
  "$distrain" hybrid --bogus >"$tmp/out" 2>/dev/full
  code=$?
  expect 2 "a usage error, 2>/dev/full"
  expect_jq 'map(.event) == ["error", "end"]' "a usage error, 2>/dev/full"
  for where in "" --local; do
    # shellcheck disable=SC2086  # none or one
    timeout "$limit" "$distrain" rl --max-episodes 2 $where >"$tmp/out" 2>/dev/full
    code=$?
    expect 11 "rl $where 2>/dev/full"
    expect_log "rl $where 2>/dev/full"
  done
  "$distrain" hybrid --bogus >/dev/full 2>"$tmp/err"
  [[ $(cat "$tmp/err") == "distrain: unknown option --bogus"* ]] || fail "a usage error, >/dev/full: $(cat "$tmp/err")"

  # Ranks leave no files in $TMPDIR, regardless of how they end.
  mkdir "$tmp/tmpdir"
  for _ in 1 2 3; do
    TMPDIR=$tmp/tmpdir timeout "$limit" "$distrain" rl --max-episodes 50 --log-interval 1 2>/dev/null | head -n 1 >/dev/null
    TMPDIR=$tmp/tmpdir timeout "$limit" "$distrain" rl --max-episodes 50 --log-interval 1 >/dev/full 2>/dev/null
  done
  [[ -z $(ls "$tmp/tmpdir") ]] || fail "left in TMPDIR: $(ls "$tmp/tmpdir")"
}

# Output on a terminal; terminal.sh has whole sessions. --foreground keeps the job in the foreground.
case_terminal() {
  local short_run none where wrong
  if command -v script >/dev/null; then
    short_run="timeout --foreground $limit '$distrain' hybrid ${short[*]}"
    export TERM=xterm
    on_terminal "$short_run >'$tmp/out'"
    grep -q 'done: ' "$tmp/tty" || fail "no progress on a terminal"
    grep -qF $'\x1b[J' "$tmp/tty" || fail "no bar on a terminal"
    on_terminal "$short_run >/dev/null"
    grep -q 'done: ' "$tmp/tty" || fail "no progress on a terminal with >/dev/null"
    on_terminal "TERM=dumb $short_run >/dev/null"
    grep -q 'done: ' "$tmp/tty" || fail "no progress on a dumb terminal"
    grep -qF $'\x1b' "$tmp/tty" && fail "escapes on a dumb terminal"
    on_terminal "NO_COLOR=1 $short_run >'$tmp/out'"
    grep -q 'done: ' "$tmp/tty" || fail "no progress with NO_COLOR"
    grep -qF $'\x1b[3' "$tmp/tty" && fail "colours in spite of NO_COLOR"
    for none in -q --quiet "--progress none"; do
      on_terminal "$short_run $none >'$tmp/out'"
      [[ -s $tmp/tty ]] && fail "$none: wrote to the terminal: $(head -c 200 "$tmp/tty")"
    done
    on_terminal "timeout $limit '$distrain' hybrid ${short[*]} >'$tmp/out'"
    [[ -s $tmp/tty ]] && fail "in the background: wrote to the terminal: $(head -c 200 "$tmp/tty")"
    on_terminal "$short_run"
    [[ $(tail -n 1 "$tmp/tty") == hint:*--pretty* ]] || fail "no hint: $(tail -n 1 "$tmp/tty" | cut -c1-200)"
    sed -i '$d' "$tmp/tty"
    expect_log "both on a terminal" "$tmp/tty"
    # The error message is printed last, below the JSON lines.
    for where in "" --local "--rank 1 --master-addr 127.0.0.1 --master-port 9 --join-timeout 1"; do
      on_terminal "timeout --foreground $limit '$distrain' rl --max-episodes 1 $where"
      [[ $(tail -n 1 "$tmp/tty") == distrain:* ]] || fail "a failure, $where: $(tail -n 1 "$tmp/tty" | cut -c1-200)"
    done
    # The reader of a pipe writes to the terminal, too, so only whole lines are printed.
    on_terminal "$short_run | cat"
    grep -qF $'\x1b[J' "$tmp/tty" && fail "a bar where a pipe's reader writes to the terminal"
    grep -av '^{"v":' "$tmp/tty" | grep -q 'done: ' || fail "no lines where stdout is a pipe"
    grep -a '^{"v":.*}$' "$tmp/tty" >"$tmp/tty.json"
    expect_log "stdout to a pipe whose reader writes to the terminal" "$tmp/tty.json"
    DISTRAIN_PRETTY=1 on_terminal "$short_run"
    grep -q '^{' "$tmp/tty" && fail "DISTRAIN_PRETTY=1: JSON on a terminal"
    grep -q 'done: ' "$tmp/tty" || fail "DISTRAIN_PRETTY=1: no lines on a terminal"
  fi
  # With --pretty no JSON is printed, even for errors.
  for wrong in --bogus "--trainers 0" "--data $tmp/none"; do
    # shellcheck disable=SC2086  # an option and its value
    run hybrid --pretty $wrong
    [[ ! -s $tmp/out && $(wc -l <"$tmp/err") == 1 ]] || fail "--pretty $wrong: $(cat "$tmp/out")"
  done
  # If the job ends within an epoch, the epoch's line is marked as partial.
  run hybrid "${short[@]}" --steps 6
  expect_jq '[.[] | select(.event == "epoch")] | length > 2 and all(.[]; (.epoch == 2) == (.partial == true))' "an epoch in part"
  run hybrid "${short[@]}" --steps 6 --pretty
  grep -q '^ 2 steps of epoch 2/3  loss' "$tmp/out" || fail "an epoch in part: $(cat "$tmp/out")"
}

case_pretty() {
  local where rank pids
  DISTRAIN_PRETTY=1 run hybrid "${short[@]}"
  expect_log "DISTRAIN_PRETTY=1, but not on a terminal"
  for where in "" --local; do
    # shellcheck disable=SC2086  # none or one
    run hybrid "${short[@]}" --pretty $where
    expect 0 "--pretty $where"
    [[ -s $tmp/err ]] && fail "--pretty $where: wrote to stderr"
    [[ $(head -n 1 "$tmp/out") == "hybrid  "*"nothing can be learned"*"run "* &&
      $(tail -n 1 "$tmp/out") == "done: 24 steps of 2 trainers in "* && $(grep -c '^ epoch' "$tmp/out") == 3 ]] ||
      fail "--pretty $where: $(cat "$tmp/out")"
    # shellcheck disable=SC2086
    run hybrid "${short[@]}" --progress plain $where
    expect_log "--progress plain $where"
    grep -q '^done: 24 steps' "$tmp/err" || fail "--progress plain $where: $(cat "$tmp/err")"
  done
  # A launcher may give its ranks one terminal: rank 0 alone shows the job there, the others what went wrong.
  launched() { # launched <ranks> <option>...: into $tmp/rank? and $tmp/err?
    local rank ranks=$1 pids=()
    shift
    for rank in $ranks; do
      OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=4 \
        PMIX_NAMESPACE=output$$ timeout "$limit" "$distrain" hybrid "${short[@]}" --pretty "$@" >"$tmp/rank$rank" 2>"$tmp/err$rank" &
      pids+=($!)
    done
    wait "${pids[@]}"
  }
  launched "3 2 1 0"
  [[ $(head -n 1 "$tmp/rank0") == "hybrid  "* && $(tail -n 1 "$tmp/rank0") == "done: "* ]] ||
    fail "--pretty under a launcher: rank 0: $(cat "$tmp/rank0")"
  for rank in 1 2 3; do
    [[ ! -s $tmp/rank$rank && ! -s $tmp/err$rank ]] ||
      fail "--pretty under a launcher: rank $rank: $(cat "$tmp/rank$rank" "$tmp/err$rank")"
  done
  launched "2 1 0" --join-timeout 3
  for rank in 0 1 2; do
    [[ $(grep -c '^distrain: ' "$tmp/err$rank") == 1 && ($rank == 0 || ! -s $tmp/rank$rank) ]] ||
      fail "--pretty under a launcher: rank $rank of a job that fails: $(cat "$tmp/rank$rank" "$tmp/err$rank")"
  done
}

case_cpu_time() {
  local TIMEFORMAT='%U + %S' used
  { time run hybrid --data teacher --epochs 100; } 2>"$tmp/time"
  expect 0 "a run"
  used=$(cat "$tmp/time") # also of the launcher
  expect_jq ".[-1].cpu_s | . < 1.05 * ($used) + 0.1 and . > 0.4 * ($used)" "CPU time of all ranks"
}

run_cases
