#!/bin/bash
# ctest: timeout=600 lock=proxy first
# A slow and a broken network: rank 1 of three reaches rank 0 through a proxy that injects faults.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 256 64
pids=() codes=() order=(0 1 2)

# is_connected <port>: returns whether the port has an established connection.
is_connected() {
  awk -v port="$(printf '%04X' "$1")" '$4 == "01" && $2 ~ ":" port "$" { found = 1 } END { exit !found }' \
    /proc/net/tcp /proc/net/tcp6
}

# start <fault...>: starts three ranks with `options`. The output of the proxy goes to $tmp/proxy.
start() {
  local rank port through
  port=$(free_port)
  rm -f "$tmp"/rank? "$tmp"/err? "$tmp/proxy"
  python3 "$root/tests/support/proxy.py" "$port" "$@" >"$tmp/proxy" 2>"$tmp/proxy-err" &
  proxy=$!
  wait_for "$limit" test -s "$tmp/proxy" || fail "no proxy: $(tail -n 1 "$tmp/proxy-err")"
  through=$(head -n 1 "$tmp/proxy")
  for rank in "${order[@]}"; do
    if [[ $rank == 1 && ${order[2]} == 1 ]]; then
      wait_for "$limit" is_connected "$port" || fail "rank 2 does not come"
    fi
    timeout -k 2 "$limit" "$distrain" ps --rank "$rank" --data "$tmp/images" --dropout off --mode sync --transport tcp \
      --master-port "$([[ $rank == 1 ]] && echo "$through" || echo "$port")" --log-interval 0 "${options[@]}" \
      >"$tmp/rank$rank" 2>"$tmp/err$rank" &
    pids[rank]=$!
  done
}

# await <name>: waits for the ranks and sets `codes`.
await() {
  local rank
  for rank in 0 1 2; do
    wait "${pids[rank]}" 2>/dev/null
    codes[rank]=$?
    expect_log "$1, rank $rank" "$tmp/rank$rank"
  done
  kill "$proxy" 2>/dev/null
  wait "$proxy" 2>/dev/null
  [[ -s $tmp/proxy-err ]] && fail "$1: the proxy: $(tail -n 1 "$tmp/proxy-err")"
  expect_no_process "$1"
}

loss_of() { jq -c 'select(.event == "end") | [.status, .loss, .steps, .accuracy]' "$tmp/rank0"; }

# Delays, and cuts before both ends have proved that they know the token: the job is not affected.
case_unaffected() {
  local options expected faults
  # The peer timeout is long, because the machine may be slow and silence is not tested here.
  options=(--epochs 1 --peer-timeout 60)
  start
  await "no fault"
  expected=$(loss_of)
  [[ $expected == '["ok",'* ]] || fail "no fault: $expected"
  for faults in $(every 4 "*/both/delay=0.02" "*/both/rate=1000000" 1/both/piece=1 2/both/piece=7 \
    2/down/rate=300000 2/up/delay=0.2) $(every 2 1/up/cut=0.60 2/up/reset=30 1/up/drop=0 1/down/drop=0 1/down/cut=0.20 2/up/cut=1.50 2/both/drop=0); do
    start "$faults"
    await "$faults"
    [[ $(loss_of) == "$expected" ]] || fail "$faults: $(loss_of), not $expected"
    [[ ${codes[*]} == "0 0 0" ]] || fail "$faults: exit codes ${codes[*]}"
  done
}

# The ranks that each rank may blame. Ranks 0 and 1 cannot reach each other; the first of them that notices reports the
# other as lost, and all ranks accept that.
blamed=("[0, 1]" "[0, 1]" "[0, 1]")

# expect_errors <name>: checks that each failed rank has one `error` line.
expect_errors() {
  local rank
  for rank in 0 1 2; do
    ((codes[rank] != 0)) || continue
    expect_jq 'map(select(.event == "error")) | length == 1' "$1, rank $rank" "$tmp/rank$rank"
  done
}

# ends <fault> <codes>...: checks that each rank exits with one of the codes and has one `error` line that blames the
# right rank. Sets $took to the seconds from the fault to the last `end` line.
ends() {
  local name=$1 rank
  shift
  start "$name"
  await "$name"
  grep -q '^hit' "$tmp/proxy" || fail "$name: the fault was not met"
  expect_errors "$name"
  for rank in 0 1 2; do
    [[ " $* " == *" ${codes[rank]} "* ]] ||
      fail "$name: rank $rank exits with ${codes[rank]}, not $*: $(tail -n 1 "$tmp/err$rank")"
    expect_jq "map(select(.event == \"error\"))[0].cause_rank as \$r | (${blamed[rank]} | index(\$r)) != null" \
      "$name, rank $rank blames one of ${blamed[rank]}" "$tmp/rank$rank"
    expect_jq "map(select(.event == \"error\"))[0] | .cause_rank != $rank or (.message | test(\"^rank [01] .*says: \"))" \
      "$name, rank $rank says who blames it" "$tmp/rank$rank"
  done
  local times
  times=$(jq -s --argjson hit "$(awk '/^hit/ { print $3; exit }' "$tmp/proxy")" \
    'map(select(.event == "end") | (.ts - $hit) * 100 | round / 100)' -c "$tmp"/rank?)
  took=$(jq -n "$times | max")
  echo "$name: ends after $times s"
}

# Faults while the ranks train: inside a header, inside a frame, or between two frames. The peer timeout is long, so
# that on a slow machine no other rank counts as lost.
training=(--epochs 1000000 --peer-timeout 10 --rpc-timeout 20)

case_connection_breaks() {
  local fault
  local options=("${training[@]}")
  for fault in $(every 2 2/up/cut=12.20 2/down/reset=11.5 2/down/cut=20.48 2/down/cut=9.0 2/up/reset=15.100); do
    in_time 1 ends "$fault" 5
  done
  for fault in $(every 1 2/up/cut=2.60 2/up/reset=220); do in_time 1 ends "$fault" 5; done
}

case_connection_is_silent() {
  local fault
  local options=("${training[@]}")
  for fault in $(every 2 2/up/stall=12.20 2/both/drop=12.0 2/down/stall=9.0 2/up/drop=12.0 2/down/drop=14.300); do
    in_time 11 ends "$fault" 5
  done
}

# Faults while the ranks join. Only rank 0 knows which rank is missing. Rank 1 joins last, because until then another
# process could replace it. The join timeout is longer than rank 1 takes to start on a slow machine.
case_breaks_while_joining() {
  local order options fault
  order=(0 2 1)
  options=(--epochs 1000000 --peer-timeout 10 --join-timeout 20)
  blamed[2]="[0, 1, null]"
  for fault in $(every 1 1/up/cut=3.0 1/down/cut=2.20); do in_time 1 ends "$fault" 5; done
  for fault in $(every 2 1/up/drop=3.0 1/down/drop=2.0); do in_time 11 ends "$fault" 3 5; done
}

# A flipped bit in a header breaks the header's checksum, so the connection fails, and with it the job. (The data
# between headers has no checksum.) Before the proof a rank may retry; after it the message is reported as damaged.
case_flipped_bits() {
  local flips way place options fault rank
  flips=(1/up/flip=2.0:3 1/down/flip=4.24:5 2/up/flip=6.8:6 2/down/flip=9.4:7 2/up/flip=8.24:0 2/down/flip=6.24:1)
  if [[ ${DISTRAIN_SOAK:-} ]]; then
    RANDOM=${DISTRAIN_SEED:-1}
    echo "flips of DISTRAIN_SEED=${DISTRAIN_SEED:-1}"
    for _ in {1..40}; do
      [[ $((RANDOM % 2)) == 0 ]] && way=up || way=down
      [[ $((RANDOM % 4)) == 0 ]] && place="1/$way/flip=$((RANDOM % 5))" || place="2/$way/flip=$((RANDOM % 14))"
      flips+=("$place.$((RANDOM % 48)):$((RANDOM % 8))")
    done
  fi
  options=(--epochs 4 --peer-timeout 10 --join-timeout 20 --rpc-timeout 12)
  for fault in "${flips[@]}"; do
    start "$fault"
    await "$fault"
    grep -q '^hit' "$tmp/proxy" || fail "$fault: was not met"
    [[ $fault == */flip=[01].* && ${codes[*]} == "0 0 0" ]] && continue
    expect_errors "$fault"
    for rank in 0 1 2; do
      [[ " 3 4 5 " == *" ${codes[rank]} "* ]] ||
        fail "$fault: rank $rank exits with ${codes[rank]}, not 3, 4 or 5: $(tail -n 1 "$tmp/err$rank")"
    done
    [[ $fault == */flip=[01].* ]] || grep -Eq '"(error|warn)".*damaged on the way' "$tmp"/rank[01] ||
      fail "$fault: nobody says what happened: $(tail -qn 1 "$tmp"/err?)"
    echo "$fault: exit codes ${codes[*]}"
  done
}

run_cases
