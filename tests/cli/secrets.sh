#!/bin/bash
# ctest: timeout=300
# Neither a job's token nor the secret of its connections is to be found where others look: what processes show of
# themselves, lines, traces, checkpoints. SECURITY.md says where they are.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"
make_images "$tmp/images" 64 32
mkdir "$tmp/secrets"
make_token "$tmp/secrets/token"

# find_secret <secret> <path>...: where it is.
find_secret() { python3 "$here/secrets.py" find "$tmp/secrets/$1" "${@:2}"; }
# hides <name> <path>...: no secret of the job is there.
hides() {
  local secret found
  for secret in "$tmp"/secrets/*; do
    found=$(find_secret "$(basename "$secret")" "${@:2}" 2>&1)
    [[ -z $found ]] || fail "$1 shows the $(basename "$secret"): $found"
  done
}

# watch_processes: into $tmp/seen what anybody sees of all processes of this host, and $tmp/environ what root and
# this user see of those of this test.
watch_processes() {
  local pid
  rm -rf "$tmp/seen" "$tmp/environ"
  mkdir "$tmp/seen" "$tmp/environ"
  ps -efww >"$tmp/seen/ps"
  cp /proc/net/unix "$tmp/seen"
  for pid in /proc/[0-9]*; do
    cat "$pid/cmdline" "$pid/comm" 2>/dev/null
  done >"$tmp/seen/cmdlines"
  for pid in $(processes); do
    cat "/proc/$pid/environ" >"$tmp/environ/$pid" 2>/dev/null
    ls -l "/proc/$pid/fd" >"$tmp/seen/$pid.fds" 2>/dev/null
    cat "/proc/$pid/maps" >"$tmp/seen/$pid.maps" 2>/dev/null
  done
}

# What is searched for is found, however it is spelled.
mkdir "$tmp/spelled"
for spelling in "cat" "xxd -p -c 999" "base64 -w 0" "rev" "jq -Rr @uri"; do
  (printf 'a '; tr -d '\n' <"$tmp/secrets/token" | $spelling) >"$tmp/spelled/${spelling%% *}"
done
base64 -d "$tmp/secrets/token" | xxd -p -c 999 >"$tmp/spelled/decoded"
(printf 'token='; tr -d '\n' <"$tmp/secrets/token") | base64 -w 0 >"$tmp/spelled/within"
[[ $(find_secret token "$tmp/spelled" | wc -l) == 7 ]] || fail "spelled: $(find_secret token "$tmp/spelled")"

# Two ranks by a launcher, and rank 2 through somebody who records. They work until they are told to end, so that
# what processes show can be seen. `given` has options of all.
job=(ps --data "$tmp/images" --transport tcp --log-interval 1 --threads 1 --peer-timeout 60)
start_job() {
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

# end_job: tells what they wait for, and ends.
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

# ---- a file ----

given=(--token-file "$tmp/secrets/token")
start_job
watch_processes
[[ $(find "$tmp/environ" -type f | wc -l) == 4 ]] || fail "not four processes: $(ls "$tmp/environ")"
# Somebody with another token: what both sides say of it.
make_token "$tmp/secrets/another token"
run "${job[@]}" --rank 2 --master-port "$port" --token-file "$tmp/secrets/another token"
expect 4 "another token"
wait_for_lines 1 warn "$tmp/rank0"
end_job
hides "by file: what processes show" "$tmp/seen" "$tmp/environ"
hides "by file: what the job leaves" "${outputs[@]}" "$tmp/out" "$tmp/err"

# ---- the variable ----

# It stays in the environment of those that were given it, and of ranks that they fork: SECURITY.md says so.
rm "$tmp/secrets/another token"
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
expect_no_process "at the end"
finish
