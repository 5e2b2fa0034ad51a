#!/bin/bash
# ctest: timeout=300
# Tokens: refused files, DISTRAIN_TOKEN, admission of ranks, listening ports. tests/cli/netns.sh tests several hosts.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"
make_token "$tmp/job.token"

case_files() {
  run hybrid --rank 1 --token-file "$tmp/none"
  expect_error 2 invalid "head -c 32 /dev/urandom" "no such token file"
  cp "$tmp/job.token" "$tmp/open.token"
  chmod 640 "$tmp/open.token"
  run hybrid --rank 1 --token-file "$tmp/open.token"
  expect_error 4 auth "chmod 600 $tmp/open.token" "a token that others may read"
  (umask 077 && printf '  short  \n' >"$tmp/short.token" && head -c 5000 /dev/zero | tr '\0' x >"$tmp/long.token")
  run hybrid --rank 1 --token-file "$tmp/short.token"
  expect_error 2 invalid "at least 16 characters" "a short token"
  run hybrid --rank 1 --token-file "$tmp/long.token"
  expect_error 2 invalid "at most 4096 bytes" "a long token"
  run hybrid --rank 1 --token-file "$tmp"
  expect_error 2 invalid "is not a file" "a folder as a token"
  run hybrid --rank 1 --token-file "$tmp/job.token" --insecure
  expect_error 2 invalid "--token-file excludes --insecure" "a token, and insecure"
  run hybrid --port-range 30010-30001
  expect_error 2 invalid "30000-30100" "a wrong port range"
  expect_no_process "$selected"
}

case_admitted() {
  local port
  port=$(free_port)
  by_file() {
    timeout "$limit" "$distrain" hybrid --epochs 2 --master-port "$port" --token-file "$tmp/job.token" --rank "$1"
  }
  joined "by file" by_file
  expect_jq '.[0].trust == "token"' "by file" "$tmp/rank0"

  port=$(free_port)
  by_variable() {
    DISTRAIN_TOKEN=$(cat "$tmp/job.token") timeout "$limit" "$distrain" hybrid --epochs 2 --master-port "$port" --rank "$1"
  }
  joined "by variable" by_variable
  expect_jq '.[0].trust == "token" and (map(select(.event == "warn"))[0].message | contains("DISTRAIN_TOKEN"))' \
    "by variable" "$tmp/rank1"

  port=$(free_port)
  by_user() { timeout "$limit" "$distrain" hybrid --epochs 2 --master-port "$port" --transport tcp --rank "$1"; }
  joined "by user" by_user
  expect_jq '.[0].trust == "user"' "by user" "$tmp/rank0"
  expect_no_process "$selected"
}

# refused <code> <kind> <words> <option...>: checks that rank 0 with `of_rank_0` refuses rank 1, started through `by`.
refused() {
  local code_of_1=$1 kind=$2 words=$3 zero
  shift 3
  port=$(free_port)
  rm -f "$tmp/rank0"
  "$distrain" hybrid --rank 0 --epochs 2 --master-port "$port" "${of_rank_0[@]}" >"$tmp/rank0" 2>/dev/null &
  zero=$!
  timeout -k 2 "$limit" "${by[@]}" "$distrain" hybrid --rank 1 --master-port "$port" "$@" >"$tmp/out" 2>"$tmp/err"
  code=$?
  expect "$code_of_1" "$words"
  expect_log "$words"
  expect_jq ".[-1] | .kind == \"$kind\" and (.message | contains(\"$words\"))" "$words"
  wait_for_lines 1 warn "$tmp/rank0"
  expect_jq 'map(select(.event == "warn"))[0].message | startswith("refused rank 1 from")' "$words" "$tmp/rank0"
  grep -qF "$(cat "$tmp/job.token")" "$tmp/rank0" "$tmp/out" "$tmp/err" && fail "$words: the token is told"
  kill "$zero"
  wait "$zero"
}

case_refused() {
  local of_rank_0 by
  of_rank_0=(--token-file "$tmp/job.token") by=()
  make_token "$tmp/another.token"
  refused 4 auth "has another token than rank 1" --token-file "$tmp/another.token"
  of_rank_0=(--job-id "the first")
  refused 3 rendezvous "give all ranks of a job the same --job-id" --job-id "the second"
  if ((EUID == 0)); then # another user on this host
    of_rank_0=() by=(setpriv --reuid 12345 --regid 12345 --clear-groups)
    refused 4 auth "rank 0 is no process of this user on this host"
  fi
  expect_no_process "$selected"
}

# Two jobs use one address: rank 0 of the second job finds the port in use; the first job refuses its other ranks.
case_two_jobs_at_one_address() {
  local port first
  port=$(free_port)
  "$distrain" hybrid --ranks 0-2 --epochs 2 --master-port "$port" --job-id A >"$tmp/a" 2>/dev/null &
  first=$!
  wait_for_lines 3 start "$tmp/a"
  run hybrid --ranks 0-2 --epochs 2 --master-port "$port" --job-id B
  expect_error 3 rendezvous ":$port" "rank 0 of another job"
  run hybrid --ranks 3 --epochs 2 --master-port "$port" --job-id B
  expect 3 "rank 3 of another job"
  expect_jq '.[-1].message | contains("rank 0 belongs to job ")' "rank 3 of another job"
  run hybrid --ranks 3 --epochs 2 --master-port "$port" --job-id A
  expect 0 "rank 3 of the job"
  wait "$first"
  code=$?
  expect 0 "the job at one address"
  expect_no_process "$selected"
}

# listeners: prints the TCP addresses and ports that our processes listen on.
listeners() {
  python3 - "$DISTRAIN_TEST_ID" <<'END'
import os, sys
inodes = set()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/comm") as comm:
            ours = b"DISTRAIN_TEST_ID=" + sys.argv[1].encode() in environ.read().split(b"\0")
            if not ours or comm.read() != "distrain\n":
                continue
        for fd in os.listdir(f"/proc/{pid}/fd"):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        continue
for table in ("tcp", "tcp6"):
    with open(f"/proc/net/{table}") as file:
        for words in (line.split() for line in list(file)[1:]):
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, _, port = words[1].rpartition(":")
                print(address, int(port, 16))
END
}
listens() { # listens <option...>: starts a job and writes the ports of the working ranks to $tmp/listeners
  rm -f "$tmp/rank0"
  "$distrain" hybrid --epochs 1000000 --log-interval 1 "$@" >"$tmp/rank0" 2>/dev/null &
  local job=$!
  wait_for_lines 1 step "$tmp/rank0"
  listeners >"$tmp/listeners"
  kill "$job"
  wait "$job"
  expect_jq '.[0].trust == "token"' "$*" "$tmp/rank0"
}

case_listening_ports() {
  local port
  listens
  [[ -s $tmp/listeners ]] && fail "a job of one host listens: $(cat "$tmp/listeners")"
  listens --transport tcp
  [[ $(wc -l <"$tmp/listeners") == 4 ]] || fail "--transport tcp: $(cat "$tmp/listeners")"
  grep -qv '^0100007F' "$tmp/listeners" && fail "not on loopback: $(cat "$tmp/listeners")"
  port=$(free_port)
  listens --transport tcp --port-range "$port-$((port + 20))"
  awk -v first="$port" '$2 < first || $2 > first + 20 { exit 1 }' "$tmp/listeners" ||
    fail "--port-range $port-$((port + 20)): $(cat "$tmp/listeners")"
  expect_no_process "$selected"
}

run_cases
