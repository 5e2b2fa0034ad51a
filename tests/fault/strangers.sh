#!/bin/bash
# ctest: timeout=300
# Strangers connect to rank 0 while a rank is missing: with invalid hellos, with garbage, or silently. The job must
# still start and succeed, and the memory of rank 0 must not grow. tests/soak/strangers.sh sends 10,000 strangers.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 256 64
[[ ${DISTRAIN_SOAK:-} ]] && count=10000 || count=500
ulimit -n "$(ulimit -Hn)"

port=$(free_port)
start_rank() { # start_rank <rank>: starts a rank with long timeouts
  timeout -k 2 $((limit * 5)) "$distrain" ps --rank "$1" --data "$tmp/images" --trainers 3 --epochs 1 --threads 1 \
    --log-interval 0 --peer-timeout 60 --master-port "$port" >"$tmp/rank$1" 2>"$tmp/err$1" &
  pids[$1]=$!
}
memory() { awk -v name="$1:" '$1 == name { print $2 }' "/proc/$server/status"; } # in KiB

start_rank 0
start_rank 1
# shellcheck disable=SC2317  # called by wait_for
waits_for_two() { jq -es 'any(.[]; .event == "waiting" and .missing == [2, 3])' "$tmp/rank0" >/dev/null 2>&1; }
wait_for "$limit" waits_for_two || fail "rank 0 does not wait for ranks 2 and 3"
# shellcheck disable=SC2317
waits_for_rank_0() { # rank 1 refers to rank 0 for the names of the missing ranks
  jq -es 'any(.[]; .event == "waiting" and .missing == [0] and (.reason | endswith("names them")))' "$tmp/rank1" >/dev/null 2>&1
}
wait_for "$limit" waits_for_rank_0 || fail "rank 1 does not say that it waits for rank 0"
server=$(jq -rs 'map(select(.event == "start"))[0].pid' "$tmp/rank0")
before=$(memory VmRSS)
coproc strangers { python3 "$root/tests/support/strangers.py" "$port" "$count" 2 "${DISTRAIN_SEED:-1}" 2>"$tmp/strangers"; }
said() { # said <word>: checks that the next line of the strangers begins with the word
  read -r -t $((limit * 4)) line <&"${strangers[0]}" && [[ $line == "$1"* ]] && return
  fail "the strangers have not come to '$1': $(tail -n 1 "$tmp/strangers")"
}
said open
during=$(memory VmHWM)
echo "$count strangers, of whom $line: rank 0 had $before KiB, and $during KiB at most"
((during - before <= 16 * 1024)) || fail "rank 0 has grown from $before to $during KiB"
echo >&"${strangers[1]}"
said closed

start_rank 2
start_rank 3
for rank in 0 1 2 3; do
  wait "${pids[rank]}"
  code=$?
  expect 0 "rank $rank"
  expect_log "rank $rank" "$tmp/rank$rank"
  expect_jq '.[-1] | .event == "end" and .status == "ok"' "rank $rank" "$tmp/rank$rank"
done
expect_no_process "at the end"
finish
