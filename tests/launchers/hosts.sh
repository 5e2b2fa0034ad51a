#!/bin/bash
# ctest: timeout=180
# Runs hosts.sh of examples/launch, with a stand-in for ssh that enters a network namespace.
# shellcheck source-path=SCRIPTDIR source=namespaces.bash disable=SC2317,SC2154
source "$(dirname "$0")/namespaces.bash"

case_whole() {
  local name=hosts.sh saved
  example hosts.sh
  use_ssh
  timeout -k 2 "$limit" bash hosts.sh >out 2>err
  code=$?
  expect 0 "$name"
  [[ ! -s out && ! -s err ]] || fail "$name: prints $(cat out err)"
  expect_ends 0 "$name" run-hosts/host0.jsonl
  expect_jq '.[-1] | .scope == "job" and .steps == 400' "$name" run-hosts/host0.jsonl
  saved=$(saved_step localhost/run-hosts/checkpoints)
  rm run-hosts/host0.jsonl
  timeout -k 2 "$limit" bash hosts.sh >out 2>err
  code=$?
  expect 0 "$name, again"
  expect_resumed "$saved" "$name, again" run-hosts/host0.jsonl
  expect_no_process "$name"
}

# SIGTERM, Ctrl-C and SIGKILL to the script end the ranks on all hosts. The first two wait until the ranks have saved.
case_signals() {
  local signal saved=0 name
  three_hosts "${saving[@]}" --inject save=2s
  for signal in TERM INT KILL; do
    name="hosts.sh, SIG$signal"
    start_hosts
    trains
    expect_ancestor "$launcher" "$name" "${files[@]}"
    if [[ $signal == INT ]]; then kill -INT -- "-$launcher"; else kill -"$signal" "$launcher"; fi
    await "$launcher"
    if [[ $signal == KILL ]]; then
      expect_no_process "$name" "$limit"
      expect 137 "$name"
    else
      expect_no_process "$name"
      expect 143 "$name"
    fi
    expect_ends 143 "$name" "${files[@]}"
    (($(saved_step h0/run-hosts/checkpoints) > saved)) || fail "$name: nothing saved after step $saved"
    ((saved == 0)) || expect_resumed "$saved" "$name" "${files[0]}"
    saved=$(saved_step h0/run-hosts/checkpoints)
  done
}

case_failures() {
  local name="hosts.sh, a killed rank"
  three_hosts "${endless[@]}"
  start_hosts
  trains
  kill -9 "$(jq -r 'select(.event == "start" and .rank == 4).pid' "${files[2]}")"
  await "$launcher"
  expect 5 "$name"
  expect_no_process "$name"
  expect_ends 5 "$name" "${files[@]:0:2}"
  expect_ends 137 "$name" "${files[2]}"
  cat "${files[@]}" >all
  expect_jq 'map(select(.event == "end").cause_rank) == [4, 4, 4]' "$name" all

  # One host cannot be reached. The others, which wait for its ranks, end at once.
  name="hosts.sh, no ssh to one host"
  sed -i 's/h2)/nohost)/' hosts.sh
  start_hosts
  await "$launcher"
  expect 255 "$name"
  expect_no_process "$name"
  [[ $(cat err) == *nohost* ]] || fail "$name: $(cat err)"
}

run_cases
