#!/bin/bash
# ctest: labels=asan timeout=240
# If a rank or the launcher ends in any way, the job has the right exit code, one `end` line, and no process left.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"

# The death of a rank is noticed at once. The peer timeout only limits the time that the other ranks have to exit,
# so it is long, because the machine may be slow.
start() { # start <args>...: starts an endless job and waits until all ranks work
  : >"$tmp/out"
  "$distrain" hybrid --epochs 1000000 --peer-timeout 60 "$@" >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 4 ready "$tmp/out"
  wait_for_lines 1 epoch "$tmp/out"
}
pid_of() { jq -r "select(.event == \"start\" and .rank == $1).pid" "$tmp/out" 2>/dev/null; }
gone() { ! kill -0 "$launcher" 2>/dev/null; }
await_end() { # await_end <name>: sets $code
  if ! wait_for "$limit" gone; then
    fail "$1: still there after $limit s"
    kill -9 "$launcher"
  fi
  wait "$launcher" 2>/dev/null
  code=$?
}
ends() { # ends <code> <name>: the launcher ends with the code and leaves no process
  await_end "$2"
  expect "$1" "$2"
  expect_no_process "$2"
}

case_rank_is_killed() {
  local rank name
  for rank in 0 2 3; do
    name="kill -9 of rank $rank"
    start --log-interval 10
    kill -9 "$(pid_of "$rank")"
    ends 137 "$name"
    expect_log "$name"
    expect_jq ".[-1] | .status == \"failed\" and .exit_code == 137 and .cause_rank == $rank
      and .signal == \"SIGKILL\" and .host and (.message | test(\"rank $rank\"))" "$name"
    expect_jq "[.[] | select(.event == \"rank_end\") | [.rank, .exit_code]] | sort
      == ([[0,5],[1,5],[2,5],[3,5]] | map(select(.[0] != $rank)))" "$name: survivors exit with 5"
    [[ $(grep -c '^distrain: ' "$tmp/err") == 1 ]] || fail "$name: not one line on stderr"
  done

  name="SIGABRT of a rank"
  start
  kill -ABRT "$(pid_of 1)"
  ends 134 "$name"
  expect_log "$name"
}

case_rank_is_stopped_or_slow() {
  local name launcher
  name="SIGSTOP of a rank"
  start --peer-timeout $((limit / 10)) --rpc-timeout $((limit / 5))
  kill -STOP "$(pid_of 3)"
  await_end "$name"
  [[ $code == 5 || $code == 10 ]] || expect 5 "$name"
  expect_log "$name"
  expect_no_process "$name"

  name="a collective operation beyond its deadline"
  run hybrid --mode sync --collective-timeout 0.2 --inject delay=2s@rank=1 --steps 4
  expect 10 "$name"
  expect_log "$name"
  expect_jq '.[-1].kind == "deadline"' "$name"
  expect_no_process "$name"

  # While ranks join, only the launcher notices a stopped rank: other ranks expect it to start elsewhere.
  name="SIGSTOP of a rank while another is missing"
  : >"$tmp/out"
  "$distrain" hybrid --ranks 0-2 --master-port "$(free_port)" --peer-timeout $((limit / 10)) >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 3 start "$tmp/out"
  kill -STOP "$(pid_of 1)"
  ends 5 "$name"
  expect_log "$name"
  expect_jq '.[-1] | .cause_rank == 1 and .kind == "peer_lost" and (.message | test("stopped"))' "$name"
}

case_signals_of_a_job() {
  local name signal launcher
  name="kill -9 of the launcher"
  start
  kill -9 "$launcher"
  ends 137 "$name"

  for signal in TERM:143 INT:130 HUP:129; do
    name="SIG${signal%:*} of the launcher"
    start
    kill "-${signal%:*}" "$launcher"
    ends "${signal#*:}" "$name"
    expect_log "$name"
    expect_jq ".[-1] | .status == \"failed\" and .exit_code == ${signal#*:}
      and .signal == \"SIG${signal%:*}\"" "$name"
  done

  # In a job without checkpoints the signalled rank ends at once, and the others end because of it.
  name="SIGTERM of one rank"
  start
  kill -TERM "$(pid_of 1)"
  ends 143 "$name"
  expect_log "$name"
  expect_jq '.[-1] | .cause_rank == 1 and .kind == "cancelled" and .message == "ended by SIGTERM"' "$name"

  name="SIGHUP under nohup"
  : >"$tmp/out"
  (
    trap '' HUP
    exec "$distrain" hybrid --epochs 1000000 >"$tmp/out" 2>"$tmp/err"
  ) &
  launcher=$!
  wait_for_lines 1 epoch "$tmp/out"
  kill -HUP "$launcher"
  sleep 0.3
  kill -0 "$launcher" || fail "$name: ended"
  kill -TERM "$launcher"
  ends 143 "$name"

  # A rank without a launcher reports its own end.
  name="SIGTERM of a rank that joined"
  : >"$tmp/out" # so that wait_for_lines does not count lines of the last run
  "$distrain" hybrid --rank 1 --master-port 1 >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 1 start "$tmp/out"
  kill -TERM "$launcher"
  ends 143 "$name"
  expect_log "$name"
}

case_second_signal() {
  local name begun again before_the_save_would_be_given_up sent
  name="SIGTERM twice, with a rank that is stopped"
  start
  kill -STOP "$(pid_of 2)"
  now_ms() { echo $((${EPOCHREALTIME/[.,]/} / 1000)); }
  begun=$(now_ms)
  kill -TERM "$launcher"
  wait_for_lines 3 rank_end "$tmp/out" # the first signal has arrived; two pending signals would count as one
  again=$(now_ms)
  kill -TERM "$launcher" 2>/dev/null
  ends 143 "$name"
  took=$(($(now_ms) - begun))
  # Without the second signal the launcher would kill the ranks after 5 s. On a too slow machine this is not checked.
  ((took < 4800 || again - begun > 2500)) || fail "$name: took $took ms"

  # The second signal ends a job with checkpoints at once, although a save might take a minute. A signal very soon after
  # the first is taken for a copy of it.
  name="SIGINT twice, with a rank that cannot stop"
  start --checkpoint "$tmp/never" --resume auto
  kill -STOP "$(pid_of 2)"
  before_the_save_would_be_given_up=$((SECONDS + (limit < 50 ? limit : 50)))
  for ((sent = 0; SECONDS < before_the_save_would_be_given_up; ++sent)); do
    gone && break
    kill -INT "$launcher" 2>/dev/null
    sleep 1
  done
  gone || fail "$name: still there after $sent signals"
  ((sent > 1)) || fail "$name: ended by the first"
  ends 130 "$name"
}

# A terminal sends Ctrl-C to the shell and to all its jobs. A shell loop ends only if SIGINT killed its command; it
# continues if the command exited, with any status.
case_ctrl_c_of_a_loop() {
  local job saves case name folder
  interrupt_loop() { # interrupt_loop <lines> <event> <shell command>: sets $code
    python3 - "$tmp/out" "$tmp/err" "$limit" "$@" <<'END'
import os, signal, subprocess, sys, time
out, err, limit, lines, event, words = sys.argv[1:]
deadline = time.monotonic() + float(limit)
with open(out, "w") as file, open(err, "w") as errors:
    shell = subprocess.Popen(
        ["bash", "-c", f"for i in 1 2; do {words}; echo went on >&2; done"], stdout=file,
        stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
while open(out).read().count(f'"event":"{event}"') < int(lines) and time.monotonic() < deadline:
    time.sleep(0.05)
os.killpg(shell.pid, signal.SIGINT)
try:
    sys.exit(128 - shell.wait(2 * float(limit)))
except subprocess.TimeoutExpired:
    os.killpg(shell.pid, signal.SIGKILL)
    sys.exit(1)
END
    code=$?
  }
  job="'$distrain' hybrid --epochs 1000000 --log-interval 1"
  saves="$job --checkpoint-every 1000000 --checkpoint"
  for case in launcher joined local saving "saving, through a pipe" "saving alone, through a pipe"; do
    name="Ctrl-C of a loop: $case"
    case $case in
      launcher) interrupt_loop 4 step "$job" ;;
      joined) interrupt_loop 1 start "'$distrain' hybrid --rank 1 --master-port 1" ;;
      local) interrupt_loop 2 step "$job --local" ;;
      saving) interrupt_loop 2 step "$saves '$tmp/interrupted' --local" ;;
      *alone*) interrupt_loop 4 step "$saves '$tmp/alone' --local | cat" ;;
      *) interrupt_loop 4 step "$saves '$tmp/piped' | cat" ;;
    esac
    expect 130 "$name"
    grep -q 'went on' "$tmp/err" && fail "$name: the loop went on"
    [[ $case == *pipe ]] || expect_log "$name"
    [[ $case == *pipe ]] || expect_jq '.[-1] | .exit_code == 130 and .signal == "SIGINT"' "$name"
    expect_no_process "$name"
  done
  for folder in interrupted piped alone; do
    [[ -n $(ls "$tmp/$folder") ]] || fail "Ctrl-C: nothing saved in $folder"
  done
}

# If a terminal closes, SIGHUP arrives and writes to the terminal fail. The exit code must be the signal's.
case_terminal_closes() {
  local where
  close_terminal() { # close_terminal <args of distrain>...: closes the terminal at the fourth step; sets $code
    python3 - "$limit" "$distrain" "$@" <<'END'
import os, pty, signal, sys, time
child, terminal = pty.fork()
if child == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])
seen = b""
while seen.count(b'"event":"step"') < 4:
    seen += os.read(terminal, 65536)
os.close(terminal)
deadline = time.monotonic() + float(sys.argv[1])
while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
    time.sleep(0.05)
sys.exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
END
    code=$?
  }
  for _ in 1 2 3; do
    for where in "" --local; do
      # shellcheck disable=SC2086  # none or one
      close_terminal hybrid --epochs 1000000 --log-interval 1 $where
      expect 129 "a terminal that closes $where"
      expect_no_process "a terminal that closes $where"
    done
  done
  close_terminal hybrid --epochs 1000000 --log-interval 1 --local --checkpoint "$tmp/hung-up"
  expect 129 "a terminal that closes, saving"
  [[ -n $(ls "$tmp/hung-up") ]] || fail "a terminal that closes: nothing saved"
}

# No descriptor of one rank is open in another, and stdin is /dev/null.
case_descriptors() {
  local name rank pid
  name="descriptors"
  pipes_of() { find "/proc/$1/fd" -type l -printf '%l\n' | grep '^pipe:' | sort -u; }
  pipes_of $$ >"$tmp/ours" # descriptors that this test has inherited do not count
  start
  for rank in 0 1 2 3; do
    pid=$(pid_of "$rank")
    [[ $(readlink "/proc/$pid/fd/0") == /dev/null ]] || fail "$name: stdin of rank $rank"
    pipes_of "$pid" | comm -23 - "$tmp/ours" >"$tmp/pipes$rank"
  done
  [[ $(sort "$tmp"/pipes? | uniq -d) == "" ]] || fail "$name: ranks share pipes"
  kill -TERM "$launcher"
  ends 143 "$name"
}

run_cases
