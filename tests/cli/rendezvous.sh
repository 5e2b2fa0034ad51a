#!/bin/bash
# ctest: timeout=300
# A port in use is an error at once; ranks join by options and by environment variables.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

# Prints a port that it listens on, until standard input ends.
take_port() {
  python3 -c '
import socket, sys
s = socket.socket()
s.bind(("127.0.0.1", 0))
s.listen()
print(s.getsockname()[1], flush=True)
sys.stdin.read()'
}

case_port_in_use() {
  local holder port
  mkfifo "$tmp/hold"
  take_port <"$tmp/hold" >"$tmp/port" &
  holder=$!
  exec 7>"$tmp/hold"
  wait_for "$limit" test -s "$tmp/port" || fail "no port to take"
  port=$(cat "$tmp/port")
  run hybrid --epochs 1 --master-port "$port"
  expect_error 3 rendezvous ":$port" "port taken, launcher"
  grep -q -e "--job-id" "$tmp/err" || fail "port taken: not said what to do: $(cat "$tmp/err")"
  run hybrid --epochs 1 --rank 0 --master-port "$port"
  expect 3 "port taken, rank 0 joining"
  expect_log "port taken, rank 0 joining"
  expect_jq '.[-1] | .kind == "rendezvous" and .rank == 0' "port taken, rank 0 joining"
  exec 7>&-
  wait "$holder"
  expect_no_process "$selected"
}

case_nobody_comes() {
  local nobody
  # A waiting rank reports its reason every 5 s. The output of this rank is checked below.
  timeout "$limit" "$distrain" hybrid --rank 1 --master-port "$(free_port)" --join-timeout 6 >"$tmp/nobody" 2>/dev/null &
  nobody=$!
  # A host name without an address is reported at once, not only after 5 s.
  run hybrid --rank 1 --master-addr no-such-host.invalid --join-timeout 2
  expect 3 "a host without an address"
  expect_jq '[.[] | select(.event == "waiting").reason] | length == 1 and
    (.[0] | contains("no-such-host.invalid") and endswith("; check --master-addr (MASTER_ADDR)"))' "a host without an address"
  # A pod of a Kubernetes Indexed Job; its other pods are on other hosts.
  JOB_COMPLETION_INDEX=0 MASTER_ADDR=localhost run hybrid --world-size 4 --master-port "$(free_port)" --join-timeout 1
  expect 3 "JOB_COMPLETION_INDEX"
  expect_jq '.[-1] | .rank == 0 and (.message | contains("missing: 1, 2, 3; ranks 1, 2, 3 have not connected: see their output; rank 0 listens on 127.0.0.1, which only this host reaches"))' \
    "JOB_COMPLETION_INDEX"
  # A pod with several ranks.
  JOB_COMPLETION_INDEX=1 MASTER_ADDR=localhost run hybrid --ranks 2-3 --master-port "$(free_port)" --join-timeout 1
  expect 3 "--ranks in an Indexed Job"
  expect_jq 'all(.[]; .event != "warn")' "--ranks in an Indexed Job"
  JOB_COMPLETION_INDEX=1 run hybrid --epochs 1
  expect 0 "an index alone is no rank"

  wait "$nobody"
  code=$?
  expect 3 "nobody there"
  expect_log "nobody there" "$tmp/nobody"
  # shellcheck disable=SC2016 # the variables are of jq
  expect_jq '[.[] | select(.event == "waiting")] as $waiting | ($waiting | length > 0 and all(.missing == [0])) and
    all($waiting[].reason, .[-1].message; contains("rank 0 is not there yet, or has failed: see its output"))' \
    "nobody there" "$tmp/nobody"
  expect_jq '.[-1].message | contains("(--join-timeout)") and contains("--master-addr")' "nobody there" "$tmp/nobody"

  # On several nodes ranks could not find rank 0 without an address.
  SLURM_STEP_NUM_NODES=2 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=1 SLURM_STEP_ID=1 run hybrid
  expect_error 2 invalid "need --master-addr HOST" "no address on two nodes"
  run hybrid --rank 0 --master-addr 192.0.2.1
  expect 3 "an address of another host"
  expect_jq '.[-1].message | contains("no address of this host") and contains("--listen")' "an address of another host"
  expect_no_process "$selected"
}

case_by_option_and_environment() {
  local port sums r
  port=$(free_port)
  by_flag() { timeout "$limit" "$distrain" hybrid --epochs 2 --rank "$1" --master-port "$port"; }
  joined "by flag" by_flag
  port=$(free_port)
  by_environment() {
    RANK=$1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=$port \
      timeout "$limit" "$distrain" hybrid --epochs 2
  }
  joined "by environment" by_environment
  # Rank 0's last line sums up all ranks.
  expect_jq '.[-1] | .scope == "job" and .steps == 40 and .updates == 40 and .train_s > 0 and .loss > 0' \
    "by environment: end of rank 0" "$tmp/rank0"
  sums=$(for r in 0 1 2 3; do tail -n 1 "$tmp/rank$r"; done |
    jq -cs '[.[0].rpc.calls >= ([.[1:][].rpc.calls] | add) + 60, [.[1:][] | [.scope, .steps]]]')
  [[ $sums == '[true,[["rank",20],["rank",0],["rank",0]]]' ]] || fail "by environment: ends: $sums"
  # Each rank assumes that it is alone on its host until all ranks have joined.
  for r in 0 1 2 3; do
    # shellcheck disable=SC2016 # $alone and $shared are jq's
    expect_jq '[.[] | select(.event == "start" or .event == "ready").threads] as [$alone, $shared]
      | $shared == ([1, ($alone / 4 | floor)] | max)' "by environment: threads of rank $r" "$tmp/rank$r"
  done
  expect_no_process "$selected"
}

# Two concurrent steps of one Slurm allocation neither mix nor wait for each other.
case_slurm_steps() {
  local r pids
  by_step() {
    SLURM_PROCID=$2 SLURM_NTASKS=4 SLURM_JOB_ID=$$ SLURM_STEP_ID=$1 SLURM_STEP_NUM_NODES=1 \
      timeout "$limit" "$distrain" hybrid --epochs 2
  }
  for r in 1 2 3; do
    by_step 7 "$r" >"$tmp/other$r" 2>"$tmp/err$r" &
    pids[r]=$!
  done
  joined "by step" by_step 8
  by_step 7 0 >"$tmp/other0" 2>"$tmp/err0"
  code=$?
  expect 0 "the other step, rank 0"
  for r in 1 2 3; do
    wait "${pids[r]}"
    code=$?
    expect 0 "the other step, rank $r"
  done
  cat "$tmp"/other? >"$tmp/step"
  expect_jq '[.[] | select(.event == "end").run] | unique | length == 1' "the other step" "$tmp/step"
  expect_no_process "$selected"
}

# With --rank auto rank 0 assigns the ranks. One process too many waits in vain and reports that.
case_rank_auto() {
  local port rank i pids seconds
  port=$(free_port)
  auto() {
    local rank=auto
    [[ $1 == 0 ]] && rank=0
    timeout "$limit" "$distrain" hybrid --epochs 2 --rank "$rank" --master-port "$port"
  }
  for i in 1 2 3; do
    auto "$i" >"$tmp/auto$i" 2>"$tmp/err$i" &
    pids[i]=$!
  done
  auto 0 >"$tmp/auto0"
  code=$?
  expect 0 "--rank auto, rank 0"
  for i in 1 2 3; do
    wait "${pids[i]}"
    code=$?
    expect 0 "--rank auto"
    expect_log "--rank auto" "$tmp/auto$i"
    expect_jq '.[0] | .event == "start" and .rank == null and .role == null' "--rank auto" "$tmp/auto$i"
    expect_jq '[.[] | select(.event == "ready" or .event == "end").rank] | unique | length == 1 and .[0] > 0' \
      "--rank auto" "$tmp/auto$i"
  done
  [[ $(jq -s '[.[] | select(.event == "ready").rank] | sort == [1,2,3]' "$tmp"/auto[123]) == true ]] ||
    fail "--rank auto: not each rank once"
  port=$(free_port)
  for i in 0 1 2; do
    rank=auto
    ((i == 0)) && rank="0 --trainers 1 --epochs 1000000"
    # shellcheck disable=SC2086  # several words
    "$distrain" hybrid --rank $rank --master-port "$port" >"$tmp/auto$i" 2>"$tmp/err$i" &
    pids[i]=$!
  done
  wait_for_lines 1 ready "$tmp/auto0"
  for seconds in 1 5 20; do # retry, because rank 0 may get no CPU time for a while
    run hybrid --rank auto --join-timeout "$seconds" --master-port "$port"
    grep -q "rank 0 had no free place" "$tmp/out" && break
  done
  expect 3 "--rank auto, no place"
  expect_log "--rank auto, no place"
  expect_jq '.[-1] | .rank == null and .cause_rank == 0 and .message ==
    "rank 0 had no free place within the join timeout (--join-timeout): each rank of the job has been taken"' "--rank auto, no place"
  kill "${pids[0]}"
  wait "${pids[@]}"
  expect_no_process "$selected"
}

# Two launchers, one job.
case_two_launchers() {
  local port other of_run told
  port=$(free_port)
  timeout "$limit" "$distrain" hybrid --ranks 2-3 --master-port "$port" >"$tmp/b" 2>/dev/null &
  other=$!
  run hybrid --ranks 0-1 --master-port "$port" --epochs 2
  expect 0 "--ranks 0-1"
  wait "$other"
  code=$?
  expect 0 "--ranks 2-3"
  expect_log "--ranks 0-1"
  expect_log "--ranks 2-3" "$tmp/b"
  expect_jq '[.[] | select(.event == "rank_end").rank] | sort == [0,1]' "--ranks 0-1"
  expect_jq '[.[] | select(.event == "rank_end").rank] | sort == [2,3]' "--ranks 2-3" "$tmp/b"
  expect_jq '.[-1] | .scope == "job" and .steps == 40 and .updates == 40' "--ranks 0-1"
  expect_jq '.[-1] | .scope == "rank" and .steps == 0 and .updates == 40' "--ranks 2-3" "$tmp/b"
  expect_jq '[.[] | select(.event == "rank_end") | [.scope, .steps]] == [["rank", 20], ["rank", 20]]' "--ranks 0-1"
  # Both launchers report the run id, seed and config of rank 0.
  of_run='[.run, .seed, .config] | if any(. == null) then error("null") else . end'
  told=$(tail -n 1 "$tmp/out" | jq -c "$of_run") || fail "--ranks 0-1: end: $(tail -n 1 "$tmp/out")"
  [[ $(tail -n 1 "$tmp/b" | jq -c "$of_run") == "$told" ]] || fail "--ranks 2-3: end: $(tail -n 1 "$tmp/b"), not $told"
  expect_no_process "$selected"
}

# An option that is given on both sides must have the same value.
case_option_differs() {
  local port other
  port=$(free_port)
  timeout "$limit" "$distrain" hybrid --ranks 1-3 --master-port "$port" --lr 0.5 >"$tmp/b" 2>/dev/null &
  other=$!
  run hybrid --rank 0 --master-port "$port" --lr 0.25 --join-timeout 20
  expect 3 "--lr differs"
  expect_log "--lr differs"
  # shellcheck disable=SC2016 # the variables are of jq
  expect_jq '"rank [1-3] from (this host|127.0.0.1:[0-9]+): --lr is 0.5 on rank [1-3], 0.25 on rank 0" as $why |
    ([.[] | select(.event == "warn").message] | length > 0 and all(test("^refused " + $why))) and
    ([.[] | select(.event == "waiting").reason | select(startswith("rank") | not)] | # refused later
      length > 0 and all(test("^refused " + $why))) and
    (.[-1].message | test("missing: 1, 2, 3; refused " + $why))' "--lr differs: rank 0 says why it waits"
  wait "$other"
  code=$?
  expect 3 "--lr differs, other side"
  cat "$tmp/b" >>"$tmp/out"
  jq -r 'select(.event == "error").message' "$tmp/out" | grep 0.5 | grep 0.25 | grep -q lr ||
    fail "--lr differs: no message names both values"
  expect_no_process "$selected"
}

# A rank of another job is refused, and rank 0 continues to wait for its own ranks.
case_another_job() {
  local port other agent
  port=$(free_port)
  timeout "$limit" "$distrain" pipeline --rank 1 --master-port "$port" >"$tmp/b" 2>/dev/null &
  other=$!
  timeout "$limit" "$distrain" rl --rank 0 --master-port "$port" --max-episodes 2 >"$tmp/agent" 2>/dev/null &
  agent=$!
  wait "$other"
  code=$?
  expect 3 "another job"
  expect_jq '.[-1].message | contains("distrain pipeline") and contains("distrain rl")' "another job" "$tmp/b"
  run rl --rank 1 --master-port "$port"
  expect 0 "another job: the right one"
  wait "$agent"
  code=$?
  expect 11 "another job: rank 0"
  expect_no_process "$selected"
}

run_cases
