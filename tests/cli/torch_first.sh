#!/bin/bash
# ctest: timeout=120
# A program whose main() uses torch before app::main does not hang, and its ranks, which are started by exec, behave
# like forked ranks.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"
plain=$distrain
first=$(dirname "$distrain")/../tests/torch_first/distrain

# with <binary> <log> <arguments>...
with() {
  distrain=$1
  run "${@:3}"
  expect 0 "$2 ${*:3}"
  expect_log "$2 ${*:3}"
  [[ ! -s $tmp/err ]] || fail "$2 ${*:3}: on stderr: $(head -n 1 "$tmp/err")"
  mv "$tmp/out" "$tmp/$2"
}
same() { # same <jq filter> <what>: the filter gives the same result for both logs
  [[ $(jq -cS "$1" "$tmp/forked" | sort) == "$(jq -cS "$1" "$tmp/by-exec" | sort)" ]] ||
    fail "$2 differ: $(jq -c "$1" "$tmp/by-exec" | head -n 2)"
}
compare() { # compare <arguments>...: compares two runs of a deterministic job
  with "$plain" forked "$@"
  rm -rf saved
  with "$first" by-exec "$@"
  same 'select(.event == "start") | [.rank, .role, .world_size, .seed, .threads, .transport, .config]' \
    "$1: start lines"
  same 'select(.event == "warn") | [.rank, .role, .message]' "$1: warnings"
  same 'select(.event | test("end")) | [.event, .rank, .role, .status, .steps, .loss]' "$1: last lines"
}

cd "$tmp" || exit 1
make_text 60 >"$tmp/a text"
# The model is large enough for a parallel region on a trainer's first thread, which would hang in a forked rank.
compare rnn --data "$tmp/a text" --threads 2 --emsize 256 --nhid 512 --batch-size 64 --epochs 1 --steps 2
# Tests a derived number of trainers, an option without effect, and a relative path.
compare hybrid --world-size 5 --batch-size 7 --epochs 2 --seed 3 --mode sync --checkpoint saved
expect_jq '[.[] | select(.event == "warn")] | length == 1' "a warning is told once" "$tmp/by-exec"
expect_jq '([.[] | select(.event == "start").pid] | unique | length) == 5' "processes" "$tmp/by-exec"
# Loading LibTorch takes 0.2 s, which would be missing if a rank measured time from its own start.
expect_jq '(map(select(.event == "rank_end") | .ts - .wall_s) | min) < (.[-1] | .ts - .wall_s) + 0.15' \
  "the ranks' time begins with the launcher's" "$tmp/by-exec"

# Each program runs half of a job.
port=$(free_port)
"$first" hybrid --ranks 0-1 --epochs 1000000 --master-port "$port" >"$tmp/left" 2>"$tmp/err" &
left=$!
"$plain" hybrid --ranks 2-3 --master-port "$port" >"$tmp/right" 2>"$tmp/err" &
right=$!
wait_for_lines 1 epoch "$tmp/left"
for pid in $(jq 'select(.event == "start").pid' "$tmp/left"); do
  [[ $(cat "/proc/$pid/comm") == distrain ]] || fail "a rank's name: $(cat "/proc/$pid/comm")"
  [[ $(ps -o pgid= "$pid" | tr -d ' ') == "$pid" ]] || fail "rank $pid has no process group of its own"
done
kill -TERM $left
wait $left
code=$?
expect 143 "SIGTERM of the left half"
expect_log "SIGTERM of the left half" "$tmp/left"
wait $right
code=$?
expect 5 "the right half"
expect_no_process "half of a job each"

# The ranks do not read the file of --config again, which may have changed, or be a pipe.
with "$first" by-exec hybrid --config <(echo 'epochs = 2') --batches 2
expect_jq '.[-1].steps == 8 and all(.[] | select(.event == "start"); .config.epochs == 2)' "--config" "$tmp/by-exec"

# The thread that waits for signals gets the signal. In a thread of OpenMP it would kill the process.
: >"$tmp/out"
"$first" hybrid --rank 1 --master-port 1 >"$tmp/out" 2>"$tmp/err" &
wait_for_lines 1 start "$tmp/out"
kill -TERM $!
wait $!
code=$?
expect 143 "SIGTERM of a rank that joined"
expect_log "SIGTERM of a rank that joined"

: >"$tmp/out"
"$first" hybrid --epochs 1000000 >"$tmp/out" 2>"$tmp/err" &
wait_for_lines 1 epoch "$tmp/out"
kill -9 $!
wait $! 2>/dev/null
expect_no_process "kill -9 of the launcher"

# DISTRAIN_SPAWNED_RANK is ignored if it is invalid or does not come from the launcher.
for told in '{"launcher":"x"}' '{"launcher":1}' x; do
  DISTRAIN_SPAWNED_RANK=$told run hybrid --epochs 1
  expect 0 "DISTRAIN_SPAWNED_RANK=$told"
done
finish
