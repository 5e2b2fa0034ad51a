#!/bin/bash
# ctest: labels=soak timeout=900
# Jobs under torchrun: one agent, two agents, signals, a killed rank, two jobs at neighbouring ports. Runs torchrun.sh
# of examples/launch. Uses the torchrun in PATH, or that of tests/python/requirements.txt.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317,SC2154,SC2119,SC2120
source "$(dirname "$0")/lib.bash"
if ! command -v torchrun >/dev/null; then
  # shellcheck source=../python/lib.bash
  source "$(dirname "$0")/../python/lib.bash"
  PATH=$(dirname "${python:?}"):$PATH
fi
limit=60

# find_files [attempt] [ranks]: sets `files` to the files with the output of the newest start, by local rank, of each
# agent.
find_files() {
  mapfile -t files < <(find "${of:-run-torchrun}"/log -path "*/attempt_${1:-0}/*/stdout.log" 2>/dev/null | sort)
  [[ ${#files[@]} == "${2:-4}" ]]
}
trains() {
  local file
  wait_for "$limit" find_files "$@" || fail "torchrun: ${#files[@]} files of output"
  for file in "${files[@]}"; do wait_for_lines 1 ready "$file"; done
  for file in "${files[@]}"; do has_lines 1 epoch "$file" && return; done
  wait_for "$limit" grep -q '"event":"epoch"' "${files[@]}" || fail "torchrun: no epoch"
}
file_of() { # file_of <rank>
  local file
  for file in "${files[@]}"; do
    jq -es "any(.[]; .event == \"start\" and .rank == $1)" "$file" >/dev/null && echo "$file"
  done
}

case_whole() {
  local files saved
  example torchrun.sh "port=$(free_port)"
  timeout -k 2 "$limit" bash torchrun.sh >out 2>err
  code=$?
  expect 0 torchrun.sh
  find_files
  expect_ends 0 torchrun.sh "${files[@]}"
  expect_runs 1 torchrun.sh "${files[@]}"
  expect_jq '.[-1] | .scope == "job" and .steps == 400' torchrun.sh "$(file_of 0)"
  expect_saved run-torchrun/checkpoints torchrun.sh
  [[ ! -s out ]] || fail "torchrun.sh: $(cat out)"
  rm -r run-torchrun/log
  timeout -k 2 "$limit" bash torchrun.sh >out 2>err
  code=$?
  expect 0 "torchrun.sh, again"
  find_files
  expect_resumed "$saved" "torchrun.sh, again" "$(file_of 0)"
  expect_no_process torchrun.sh
}

case_signals() {
  local files saved signal agent code_of
  for signal in TERM INT; do
    example torchrun.sh "port=$(free_port)" "job=(${saving[*]} --inject save=3s)"
    set -m
    bash torchrun.sh >out 2>err &
    agent=$!
    set +m
    trains
    expect_ancestor "$agent" "torchrun.sh" "${files[@]}"
    kill -"$signal" "$agent"
    await "$agent"
    expect 1 "torchrun.sh, SIG$signal"
    code_of=$([[ $signal == TERM ]] && echo 143 || echo 130)
    expect_ends "$code_of" "torchrun.sh, SIG$signal" "${files[@]}"
    expect_saved run-torchrun/checkpoints "torchrun.sh, SIG$signal"
    expect_no_process "torchrun.sh, SIG$signal"
  done
}

# torchrun starts all ranks again after a rank has been killed, and the job resumes.
killed() { # killed <number of agents>
  local files agents=() agent saved name="torchrun.sh, $1 agents, a killed rank"
  example torchrun.sh "port=$(free_port)" "hosts=$1" "ranks=$((4 / $1))" "job=(${endless[*]})"
  for ((agent = 0; agent < $1; ++agent)); do
    bash torchrun.sh >"out$agent" 2>"err$agent" &
    agents+=($!)
  done
  trains
  wait_for_lines 2 checkpoint "$(file_of 0)"
  kill -9 "$(pids_in "$(file_of 2)")"
  wait_for "$limit" grep -qE "failed \(exitcode: (-9|5)\) local_rank: " err? || fail "$name: $(cat err?)"
  find_files
  jq -es . "${files[@]}" >/dev/null || fail "$name: not all lines are JSON"
  # torchrun names the rank that it has seen end first. If that is another rank, then that rank names rank 2.
  cat "${files[@]}" >all
  grep -q "exitcode: -9" err? ||
    expect_jq 'map(select(.event == "error").cause_rank) | length > 0 and all(. == 2)' "$name" all
  saved=$(jq -s 'map(select(.event == "checkpoint" and .action == "saved").step) | max' "$(file_of 0)")
  trains 1
  expect_jq "any(.[]; .event == \"checkpoint\" and .action == \"loaded\" and .step >= $saved)" "$name, restarted" \
    "$(file_of 0)"
  kill "${agents[@]}"
  for agent in "${agents[@]}"; do
    await "$agent"
    expect 1 "$name"
  done
  expect_ends 143 "$name, restarted" "${files[@]}"
  expect_no_process "$name"
}

case_killed() { killed 1; }
case_killed_two_agents() { killed 2; }

case_two_agents() {
  local files agents=() agent
  example torchrun.sh "port=$(free_port)" "hosts=2" "ranks=2"
  for agent in 0 1; do
    timeout -k 2 "$limit" bash torchrun.sh >"out$agent" 2>"err$agent" &
    agents+=($!)
  done
  for agent in 0 1; do
    await "${agents[agent]}"
    expect 0 "torchrun.sh, agent $agent"
  done
  find_files
  expect_ends 0 "torchrun.sh, two agents" "${files[@]}"
  expect_runs 1 "torchrun.sh, two agents" "${files[@]}"
  expect_jq '.[-1] | .scope == "job" and .steps == 400' "torchrun.sh, two agents" "$(file_of 0)"
  expect_no_process "torchrun.sh, two agents"
}

# Two agents with --master-port, whose job has no id, beside a job at the next port.
case_two_jobs() {
  local port agents=() job agent
  cd "$tmp" || exit
  port=$(free_port)
  for job in 0 1; do
    for agent in 0 1; do
      timeout -k 2 "$limit" torchrun --no-python --nnodes 2 --node-rank "$agent" --nproc-per-node 2 \
        --master-addr localhost --master-port $((port + job)) --redirects 3 --log-dir "job$job/log" \
        distrain hybrid --data teacher --epochs 50 --insecure >"out$job$agent" 2>&1 &
      agents+=($!)
    done
  done
  for agent in "${agents[@]}"; do
    await "$agent"
    expect 0 "two jobs"
  done
  for job in 0 1; do
    of=job$job find_files || fail "two jobs: ${#files[@]} files"
    expect_ends 0 "two jobs" "${files[@]}"
    expect_runs 1 "two jobs" "${files[@]}"
  done
  mapfile -t files < <(find job? -name stdout.log)
  expect_runs 2 "two jobs" "${files[@]}"
  expect_no_process "two jobs"
}

run_cases
