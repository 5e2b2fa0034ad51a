#!/bin/bash
# ctest: labels=soak timeout=600
# Batch jobs of Slurm on two nodes, with and without srun: signals, requeue, time limit, killed ranks, two jobs at once.
# Runs slurm.sbatch and slurm-sweep.sbatch of examples/launch.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317,SC2154
source "$(dirname "$0")/lib.bash"
# shellcheck source=slurm.bash
source "$(dirname "$0")/slurm.bash"

# submit <sbatch option>... <script>: sets $id, $run to the job's folder, and `files`.
submit() {
  id=$(sbatch --parsable "$@") || fail "sbatch $*: exit code $?"
  run=distrain-$id
  files=("$run"/rank{0..3}.jsonl)
}
no_job() { [[ ! $(squeue -h -j "$1" 2>/dev/null) ]]; }
await_job() { wait_for "${2:-$limit}" no_job "$1" || fail "job $1 did not end: $(squeue -h)"; }
job_field() { scontrol -o show job "$1" | grep -oP "\b$2=\K\S+"; }
trains() {
  local file
  for file in "${files[@]}"; do wait_for_lines "${1:-1}" ready "$file"; done
  wait_for_lines 1 epoch "${files[0]}"
}
expect_logged() { # expect_logged <pattern> <name>
  grep -qE "$1" "distrain-$id.log" || fail "$2: $(cat "distrain-$id.log")"
}

case_script() {
  local id run files name=slurm.sbatch
  example slurm.sbatch
  submit slurm.sbatch
  await_job "$id"
  [[ $(cat "distrain-$id.log") == "restart 0: exit code 0" ]] || fail "$name: $(cat "distrain-$id.log")"
  expect_ends 0 "$name" "${files[@]}"
  expect_runs 1 "$name" "${files[@]}"
  expect_jq '.[-1] | .scope == "job" and .steps == 2000' "$name" "${files[0]}"
  expect_jq '.[0].trust == "token"' "$name" "${files[3]}"
  [[ $(cat "$run"/*.err) == "" ]] || fail "$name: $(cat "$run"/*.err)"
  expect_no_process "$name"
}

# The signal that Slurm sends before the time limit saves and requeues. scancel saves and requeues nothing.
case_requeue() {
  local id run files saved name="slurm.sbatch, requeued"
  example slurm.sbatch "job=(${saving[*]} --inject save=3s)"
  submit slurm.sbatch
  trains
  expect_ancestor slurmstepd "$name" "${files[@]}"
  scancel --batch --signal=USR1 "$id"
  wait_for "$limit" grep -q "restart 0: exit code 143" "distrain-$id.log" || fail "$name: $(cat "distrain-$id.log")"
  expect_saved "$run/checkpoints" "$name"
  limit=120 trains 2 # Slurm waits before it starts a job again
  expect_resumed "$saved" "$name" "${files[0]}"
  [[ $(job_field "$id" Restarts) == 1 ]] || fail "$name: $(scontrol show job "$id")"
  scancel "$id"
  await_job "$id"
  (($(saved_step "$run/checkpoints") > saved)) || fail "$name: scancel saved nothing after step $saved"
  [[ $(job_field "$id" JobState) == CANCELLED ]] || fail "$name: $(scontrol show job "$id")"
  expect_logged "CANCELLED" "$name"
  [[ $(jq -r 'select(.event == "end").exit_code' "${files[@]}" | sort | uniq -c | xargs) == "8 143" ]] ||
    fail "$name: $(grep -h '"end"' "${files[@]}" | cut -c1-300)"
  jq -es . "${files[@]}" >/dev/null || fail "$name: not all lines are JSON"
  expect_no_process "$name"
}

case_time_limit() {
  local id run files saved name="slurm.sbatch, time limit"
  example slurm.sbatch "job=(${saving[*]})"
  submit --time=3 slurm.sbatch
  trains
  wait_for 170 grep -q "restart 0: exit code 143" "distrain-$id.log" || fail "$name: $(cat "distrain-$id.log")"
  expect_saved "$run/checkpoints" "$name"
  expect_ends 143 "$name" "${files[@]}"
  limit=120 trains 2
  expect_resumed "$saved" "$name" "${files[0]}"
  scancel "$id"
  await_job "$id"
  expect_no_process "$name"
}

# A job that fails is not requeued.
case_failures() {
  local id run files name="slurm.sbatch, a killed rank"
  example slurm.sbatch "job=(${endless[*]})"
  submit slurm.sbatch
  trains
  kill -9 "$(pids_in "${files[2]}")"
  await_job "$id"
  expect_logged "^srun: error: n2: task 2: Killed$" "$name"
  expect_logged "^restart 0: exit code (137|143)$" "$name" # 143 if srun has ended other ranks because of -K
  [[ $(job_field "$id" JobState) == FAILED ]] || fail "$name: $(scontrol show job "$id")"
  jq -es . "${files[@]}" >/dev/null || fail "$name: not all lines are JSON"

  # Rank 0 fails before the other ranks have joined, which would wait for it without -K.
  name="slurm.sbatch, no data"
  example slurm.sbatch "job=(hybrid --data nosuch)"
  submit slurm.sbatch
  await_job "$id"
  expect_logged "exit code 7$" "$name"
  expect_ends 7 "$name" "${files[0]}"
  [[ $(job_field "$id" JobState) == FAILED ]] || fail "$name: $(scontrol show job "$id")"
  expect_no_process "$name"
}

case_two_jobs() {
  local id run files ids=() all=() name="slurm.sbatch, two jobs"
  example slurm.sbatch "job=(hybrid --data teacher --epochs 100 --checkpoint-every 2000)"
  submit slurm.sbatch && ids+=("$id")
  submit slurm.sbatch && ids+=("$id")
  for id in "${ids[@]}"; do
    await_job "$id"
    files=(distrain-"$id"/rank{0..3}.jsonl)
    expect_ends 0 "$name" "${files[@]}"
    expect_runs 1 "$name" "${files[@]}"
    all+=("${files[@]}")
  done
  expect_runs 2 "$name" "${all[@]}"
  # Both jobs have run at the same time.
  jq -es '(map(select(.event == "ready").ts) | max) < (map(select(.event == "end").ts) | min)' "${all[@]}" >/dev/null ||
    echo "the two jobs did not run at the same time"
  expect_no_process "$name"
}

# Without srun, distrain starts all ranks in the batch script.
case_without_srun() {
  local id saved name="sbatch without srun"
  cd "$tmp" || exit
  {
    printf '#!/bin/bash\n#SBATCH -N 1 -n 4 --output=whole.jsonl --error=whole.err\n'
    echo "exec distrain ${saving[*]} --checkpoint saved"
  } >whole
  id=$(sbatch --parsable whole)
  wait_for_lines 4 ready whole.jsonl
  wait_for_lines 1 epoch whole.jsonl
  expect_ancestor slurmstepd "$name" whole.jsonl
  scancel --batch --signal=TERM "$id" # as --signal=B:TERM@60 does before the time limit
  await_job "$id"
  expect_ends 143 "$name" whole.jsonl
  expect_saved saved "$name"
  expect_jq '.[-1].role == "launcher" and .[-1].scope == "job"' "$name" whole.jsonl
  expect_no_process "$name"
}

case_sweep() {
  local id value name=slurm-sweep.sbatch
  example slurm-sweep.sbatch
  id=$(sbatch --parsable slurm-sweep.sbatch)
  await_job "$id" 150
  [[ $(cut -f 1 "distrain-sweep-$id.log" | xargs) == "1 2 4 8" ]] || fail "$name: $(cat "distrain-sweep-$id.log")"
  for value in 1 2 4 8; do
    expect_ends 0 "$name" "distrain-sweep-$id/$value.jsonl"
    [[ ! -s distrain-sweep-$id/$value.err ]] || fail "$name: $(cat "distrain-sweep-$id/$value.err")"
  done
  expect_runs 4 "$name" "distrain-sweep-$id"/*.jsonl
  expect_no_process "$name"
}

case_no_address() {
  cd "$tmp" || exit
  timeout -k 2 "$limit" srun -N2 -n4 --ntasks-per-node=2 distrain hybrid >out 2>err
  code=$?
  expect 2 "no --master-addr on two nodes"
  grep -q "need --master-addr HOST" err || fail "no --master-addr on two nodes: $(head -n 3 err)"
}

run_cases
