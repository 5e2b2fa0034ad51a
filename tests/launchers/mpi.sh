#!/bin/bash
# ctest: timeout=240
# Jobs under Open MPI and under MPICH's Hydra: signals save, killed ranks are named, two jobs stay apart. Runs
# openmpi.sh and hydra.sh of examples/launch.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317,SC2154
source "$(dirname "$0")/lib.bash"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mkdir "$tmp/bin"
PATH=$tmp/bin:$PATH
# With several MPIs, Debian calls Open MPI's mpirun by this name, too.
use_openmpi() {
  need mpirun.openmpi
  ln -s "$(command -v mpirun.openmpi)" "$tmp/bin/mpirun"
}

# find_files <launcher> [folder]: sets `files` to the files with the output of four ranks, by their newest start.
find_files() {
  local log rank
  log=$(find "${2:-run-$1}" -maxdepth 1 -name 'log-*' 2>/dev/null | sort | tail -n 1)
  files=()
  for rank in 0 1 2 3; do
    case $1 in
      openmpi) files+=("$log/1/rank.$rank/stdout") ;;
      hydra) files+=("$log/rank$rank.jsonl") ;;
    esac
  done
  [[ -e ${files[0]} ]]
}
# trains <launcher>: waits until rank 0 has finished an epoch.
trains() {
  wait_for "$limit" find_files "$1" || fail "$1: no output"
  wait_for_lines 1 epoch "${files[0]}"
}

# whole <launcher>: runs the file of examples/launch as it is, and again, which resumes.
whole() {
  local files saved
  example "$1.sh"
  timeout -k 2 "$limit" bash "$1.sh" >out 2>err
  code=$?
  expect 0 "$1.sh"
  [[ ! -s out && ! -s err ]] || fail "$1.sh: prints $(head -n 5 out err)"
  find_files "$1"
  expect_ends 0 "$1.sh" "${files[@]}"
  expect_runs 1 "$1.sh" "${files[@]}"
  expect_jq '.[-1] | .scope == "job" and .steps == 400' "$1.sh" "${files[0]}"
  expect_saved "run-$1/checkpoints" "$1.sh"
  timeout -k 2 "$limit" bash "$1.sh" >out 2>err
  code=$?
  expect 0 "$1.sh, again"
  find_files "$1"
  expect_resumed "$saved" "$1.sh, again" "${files[0]}"
}

# interrupt <pid>: does what Ctrl-C does on a terminal.
interrupt() { kill -INT -- "-$1"; }

# stopped <launcher> <program> <exit code> <how>...: sends a signal while the job trains, and then resumes the job. The
# save takes longer than the time after which Open MPI kills.
stopped() {
  local files saved launcher file name="$1.sh, ended by ${*:4}"
  example "$1.sh" "job=(${saving[*]} --inject save=3s)"
  set -m
  bash "$1.sh" >out 2>err &
  launcher=$!
  set +m
  trains "$1"
  for file in "${files[@]}"; do wait_for_lines 1 ready "$file"; done
  expect_ancestor "$2" "$name" "${files[@]}"
  "${@:4}" "$launcher"
  await "$launcher"
  expect "$3" "$name"
  expect_ends "$3" "$name" "${files[@]}"
  expect_saved "run-$1/checkpoints" "$name"
  sed -i 's/ --epochs [0-9]* / --epochs 1000000 --steps 1 /' "$1.sh" # fewer steps than are done
  timeout -k 2 "$limit" bash "$1.sh" >out 2>err
  code=$?
  expect 0 "$name, again"
  find_files "$1"
  expect_resumed "$saved" "$name, again" "${files[0]}"
}

# killed <launcher>: kills rank 2. Sets `files`.
killed() {
  local file launcher
  example "$1.sh" "job=(${saving[*]})"
  bash "$1.sh" >out 2>err &
  launcher=$!
  trains "$1"
  wait_for_lines 1 ready "${files[2]}"
  kill -9 "$(pids_in "${files[2]}")"
  await "$launcher"
  expect_no_process "$1, a killed rank"
  for file in "${files[@]}"; do jq -es . "$file" >/dev/null || fail "$1, a killed rank: not all lines of $file are JSON"; done
}

# expect_named <rank>...: checks that these ranks of $files name rank 2 as the cause.
expect_named() {
  local rank
  for rank in "$@"; do
    expect_jq 'map(select(.event == "error"))[0].cause_rank == 2 and .[-1].exit_code == 5' "rank $rank names rank 2" \
      "${files[rank]}"
  done
}

# two_jobs <launcher>: runs two jobs at once.
two_jobs() {
  local files job pids=() all=()
  example "$1.sh" "job=(hybrid --data teacher --epochs 40 --checkpoint-every 1000)"
  for job in a b; do
    sed "s|^folder=run-$1|folder=run-$job|" "$1.sh" >"$job.sh"
    timeout -k 2 "$limit" bash "$job.sh" >"out.$job" 2>"err.$job" &
    pids+=($!)
  done
  for job in a b; do
    await "${pids[0]}"
    pids=("${pids[@]:1}")
    cp "out.$job" out
    cp "err.$job" err
    expect 0 "$1, two jobs"
    find_files "$1" "run-$job"
    expect_ends 0 "$1, two jobs" "${files[@]}"
    expect_runs 1 "$1, two jobs" "${files[@]}"
    all+=("${files[@]}")
  done
  expect_runs 2 "$1, two jobs" "${all[@]}"
}

case_openmpi() {
  local files
  use_openmpi
  whole openmpi
  stopped openmpi mpirun 143 kill -TERM
  stopped openmpi mpirun 143 interrupt
  # Either the other ranks or mpirun see the loss first. If mpirun does, it ends the other ranks.
  killed openmpi
  if [[ $code == 5 ]]; then
    grep -q "distrain: rank 2 (master) is lost: " err || fail "openmpi, a killed rank: $(cat err)"
  else
    expect 137 "openmpi, a killed rank"
    grep -q "mpirun noticed that process rank 2 .* exited on signal 9" err || fail "openmpi, a killed rank: $(cat err)"
  fi
  two_jobs openmpi
  expect_no_process openmpi
}

case_hydra() {
  local files
  need mpiexec.hydra
  whole hydra
  stopped hydra mpiexec.hydra 143 kill -TERM
  stopped hydra mpiexec.hydra 130 interrupt
  # Hydra combines the codes of the ranks, 137 and 5, by a bitwise OR.
  killed hydra
  expect 141 "hydra, a killed rank"
  expect_named 0 1 3
  two_jobs hydra
  expect_no_process hydra
}

run_cases
