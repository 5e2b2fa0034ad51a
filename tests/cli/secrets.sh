#!/bin/bash
# ctest: timeout=300
# Neither a job's token nor the secret of its connections appears in places that others can read: process information,
# JSON lines, traces, checkpoints. SECURITY.md says where they are.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"
mkdir "$tmp/secrets"
make_token "$tmp/secrets/token"

# find_secret <secret> <path>...: prints the files that contain the secret.
find_secret() { python3 "$here/secrets.py" find "$tmp/secrets/$1" "${@:2}"; }
# hides <name> <path>...: checks that no secret of the job is in these files.
hides() {
  local secret found
  for secret in "$tmp"/secrets/*; do
    found=$(find_secret "$(basename "$secret")" "${@:2}" 2>&1)
    [[ -z $found ]] || fail "$1 shows the $(basename "$secret"): $found"
  done
}

# watch_processes: collects in $tmp/seen what any user can see of all processes, and in $tmp/environ the environments of
# this test's processes, which root and this user can see.
watch_processes() {
  local pid
  rm -rf "$tmp/seen" "$tmp/environ"
  mkdir "$tmp/seen" "$tmp/environ"
  ps -efww >"$tmp/seen/ps"
  cp /proc/net/unix "$tmp/seen"
  cat /proc/[0-9]*/{cmdline,comm} >"$tmp/seen/cmdlines" 2>/dev/null
  for pid in $(processes); do
    cat "/proc/$pid/environ" >"$tmp/environ/$pid" 2>/dev/null
    ls -l "/proc/$pid/fd" >"$tmp/seen/$pid.fds" 2>/dev/null
    cat "/proc/$pid/maps" >"$tmp/seen/$pid.maps" 2>/dev/null
  done
}

# start_job: starts two ranks with a launcher, and rank 2 through a recording proxy. They work until end_job. `given`
# has options for all ranks.
job=(ps --data "$tmp/images" --transport tcp --log-interval 1 --threads 1 --peer-timeout 60)
start_job() {
  make_images "$tmp/images" 64 32
  port=$(free_port)
  rm -rf "$tmp"/rank? "$tmp"/err? "$tmp/saves" "$tmp/trace" "$tmp/secrets/session secret" "$tmp/through"
  python3 "$here/secrets.py" record "$port" "$tmp/secrets/session secret" >"$tmp/through" 2>"$tmp/record-err" &
  recorder=$!
  wait_for "$limit" test -s "$tmp/through" || fail "no recorder: $(tail -n 1 "$tmp/record-err")"
  "$distrain" "${job[@]}" --epochs 1000000 --ranks 0-1 --master-port "$port" --trace "$tmp/trace" \
    --checkpoint "$tmp/saves" --checkpoint-every 5 "${given[@]}" >"$tmp/rank0" 2>"$tmp/err0" &
  launcher=$!
  wait_for_lines 1 start "$tmp/rank0"
  "$distrain" "${job[@]}" --rank 2 --master-port "$(cat "$tmp/through")" "${given[@]}" >"$tmp/rank2" 2>"$tmp/err2" &
  last=$!
  wait_for_lines 2 ready "$tmp/rank0"
  wait_for_lines 1 checkpoint "$tmp/rank0"
  wait_for_lines 1 step "$tmp/rank2"
  [[ $(stat -c %s "$tmp/secrets/session secret") == 32 ]] || fail "the secret of the connections is not known"
}

# end_job: asks the processes by SIGQUIT what they wait for, and ends them.
end_job() {
  local pid
  for pid in "$launcher" "$last"; do kill -QUIT "$pid"; done
  wait_for "$limit" test -s "$tmp/err2" || fail "SIGQUIT: nothing is told"
  kill -TERM "$launcher"
  wait "$launcher"
  code=$?
  expect 143 "the launcher"
  wait "$last"
  code=$?
  expect 143 "rank 2"
  kill "$recorder"
  wait "$recorder" 2>/dev/null
  expect_log "the launcher" "$tmp/rank0"
  expect_log "rank 2" "$tmp/rank2"
  [[ -s $tmp/trace && -n $(find "$tmp/saves" -name '*.safetensors') ]] || fail "no trace, or no checkpoint"
}
outputs=("$tmp/rank0" "$tmp/rank2" "$tmp/err0" "$tmp/err2" "$tmp/trace" "$tmp/saves")

case_find_secret_finds_all_encodings() {
  local spelling
  mkdir "$tmp/spelled"
  for spelling in "cat" "xxd -p -c 999" "base64 -w 0" "rev" "jq -Rr @uri"; do
    (printf 'a '; tr -d '\n' <"$tmp/secrets/token" | $spelling) >"$tmp/spelled/${spelling%% *}"
  done
  base64 -d "$tmp/secrets/token" | xxd -p -c 999 >"$tmp/spelled/decoded"
  (printf 'token='; tr -d '\n' <"$tmp/secrets/token") | base64 -w 0 >"$tmp/spelled/within"
  [[ $(find_secret token "$tmp/spelled" | wc -l) == 7 ]] || fail "spelled: $(find_secret token "$tmp/spelled")"
  expect_no_process "$selected"
}

case_token_file() {
  local given
  given=(--token-file "$tmp/secrets/token")
  start_job
  watch_processes
  [[ $(find "$tmp/environ" -type f | wc -l) == 4 ]] || fail "not four processes: $(ls "$tmp/environ")"
  # A rank with another token is refused; messages of both sides must not show a token.
  make_token "$tmp/secrets/another token"
  run "${job[@]}" --rank 2 --master-port "$port" --token-file "$tmp/secrets/another token"
  expect 4 "another token"
  wait_for_lines 1 warn "$tmp/rank0"
  end_job
  hides "by file: what processes show" "$tmp/seen" "$tmp/environ"
  hides "by file: what the job leaves" "${outputs[@]}" "$tmp/out" "$tmp/err"
  expect_no_process "$selected"
}

case_token_variable() {
  local given
  # The environments of the started processes and of the ranks that they fork keep the variable: see SECURITY.md.
  given=()
  DISTRAIN_TOKEN=$(cat "$tmp/secrets/token") start_job
  watch_processes
  end_job
  [[ $(find_secret token "$tmp/environ" | wc -l) == 4 ]] || fail "by variable: the environment is not seen"
  mkdir "$tmp/elsewhere"
  mv "$tmp/secrets/token" "$tmp/elsewhere"
  hides "by variable: the environment" "$tmp/environ"
  mv "$tmp/elsewhere/token" "$tmp/secrets"
  hides "by variable: what processes show" "$tmp/seen"
  hides "by variable: what the job leaves" "${outputs[@]}"

  DISTRAIN_TOKEN=short-secret run hybrid --rank 1
  expect_error 2 invalid "DISTRAIN_TOKEN: a token has at least 16 characters" "a short token"
  grep -qF short-secret "$tmp/out" "$tmp/err" && fail "a short token is told"
  expect_no_process "$selected"
}

run_cases
