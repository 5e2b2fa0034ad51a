#!/bin/bash
# ctest: timeout=240
# Ranks started by srun on one node: scancel saves, a killed rank is named, two steps of one allocation stay apart.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317,SC2154
source "$(dirname "$0")/lib.bash"
# shellcheck source=slurm.bash
source "$(dirname "$0")/slurm.bash"

cd "$tmp" || exit

# step <name> <srun option>... -- <job option>...: starts a job of four ranks in the background, and sets $step and
# `files`.
step() {
  local name=$1 options=()
  shift
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  files=("$name".{0..3}.jsonl)
  srun "${options[@]}" -n 4 --output="$name.%t.jsonl" --error="$name.err" \
    distrain "${@:2}" 2>"$name.srun" &
  step=$!
}
trains() {
  local file
  for file in "${files[@]}"; do wait_for_lines 1 ready "$file"; done
  wait_for_lines 1 epoch "${files[0]}"
}

case_step() {
  local step files saved
  step a -N 1 -J a -- "${saving[@]}" --checkpoint saved --inject save=3s
  trains
  expect_ancestor slurmstepd "srun" "${files[@]}"
  scancel --name a
  await "$step"
  expect 143 "scancel"
  expect_ends 143 "scancel" "${files[@]}"
  expect_saved saved "scancel"
  step a -N 1 -- hybrid --steps 1 --checkpoint saved --resume auto
  await "$step"
  expect 0 "after scancel"
  [[ ! -s a.err && ! -s a.srun ]] || fail "after scancel: $(cat a.err a.srun)"
  expect_ends 0 "after scancel" "${files[@]}"
  expect_resumed "$saved" "after scancel" "${files[0]}"

  # Without -K, the exit code of srun is the highest one of the ranks: 137.
  step b -N 1 -- "${endless[@]}"
  trains
  kill -9 "$(pids_in b.2.jsonl)"
  await "$step"
  expect 137 "a killed rank"
  grep -qx "srun: error: n[12]: task 2: Killed" b.srun || fail "a killed rank: $(cat b.srun)"
  expect_ends 5 "a killed rank" b.{0,1,3}.jsonl
  cat b.{0,1,3}.jsonl >b.jsonl
  expect_jq '[.[] | select(.event == "error").cause_rank] == [2, 2, 2]' "a killed rank" b.jsonl
  expect_no_process "srun"
}

case_two_steps() {
  local job
  cat >steps <<'END'
#!/bin/bash
for job in a b; do
  srun --exact -N 1 -n 4 --output="$job.%t.jsonl" distrain hybrid --epochs 50 &
  pids+=($!)
done
wait "${pids[0]}" && wait "${pids[1]}"
END
  timeout -k 2 "$limit" salloc -Q -N 1 -n 8 bash steps >out 2>err
  code=$?
  expect 0 "two steps"
  [[ ! -s err ]] || fail "two steps: $(cat err)"
  for job in a b; do
    expect_ends 0 "two steps" "$job".{0..3}.jsonl
    expect_runs 1 "two steps" "$job".{0..3}.jsonl
  done
  expect_runs 2 "two steps" {a,b}.{0..3}.jsonl
  expect_no_process "two steps"
}

run_cases
