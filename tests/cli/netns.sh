#!/bin/bash
# ctest: timeout=300
# Ranks 0, 1 and ranks 2, 3 run in two network namespaces with a veth pair between them, as on two machines.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

a=dta$$ b=dtb$$
if ! ip netns add "$a" 2>/dev/null; then
  echo "skipped: no right to make network namespaces here, or no ip command"
  exit 0
fi
remove_hosts() {
  ip netns del "$a" 2>/dev/null
  ip netns del "$b" 2>/dev/null
  cleanup
}
trap remove_hosts EXIT
ip netns add "$b"
ip -n "$a" link add eth0 type veth peer name eth0 netns "$b" || fail "no veth pair"
for host in "$a 1" "$b 2"; do
  read -r name number <<<"$host"
  ip -n "$name" link set lo up
  ip -n "$name" addr add "10.77.0.$number/24" dev eth0
  ip -n "$name" link set eth0 up
done

# two_hosts <name> <option...>: runs the four ranks, starting with the last.
two_hosts() {
  local name=$1 rank pids=()
  shift
  for rank in 3 2 1 0; do
    host=$([[ $rank -lt 2 ]] && echo "$a" || echo "$b")
    timeout -k 2 "$limit" ip netns exec "$host" "$distrain" hybrid --rank "$rank" "$@" \
      >"$tmp/rank$rank" 2>"$tmp/err$rank" &
    pids[rank]=$!
  done
  for rank in 0 1 2 3; do
    wait "${pids[rank]}"
    code=$?
    expect_log "$name, rank $rank" "$tmp/rank$rank"
  done
}

make_token "$tmp/job.token"
# refused <name> <words> <option...>: checks that rank 3 of the other host is refused and that both sides give advice.
refused() {
  local name=$1 words=$2
  shift 2
  rm -f "$tmp/rank0"
  ip netns exec "$a" "$distrain" hybrid --rank 0 --master-addr 10.77.0.1 --epochs 3 \
    "${of_rank_0[@]}" >"$tmp/rank0" 2>/dev/null &
  local rank0=$!
  timeout -k 2 "$limit" ip netns exec "$b" "$distrain" hybrid --rank 3 --master-addr 10.77.0.1 "$@" \
    >"$tmp/rank3" 2>"$tmp/err3"
  code=$?
  expect 4 "$name"
  expect_jq ".[-1] | .kind == \"auth\" and (.message | contains(\"$words\"))" "$name" "$tmp/rank3"
  grep -q "$words" "$tmp/err3" || fail "$name: $(cat "$tmp/err3")"
  wait_for_lines 1 warn "$tmp/rank0"
  kill "$rank0"
  wait "$rank0"
  expect_jq 'any(.[]; .event == "warn" and .kind == "auth" and (.message | test("^refused rank 3 from 10.77.0.2:")))' \
    "$name, rank 0" "$tmp/rank0"
  grep -qF "$(cat "$tmp/job.token")" "$tmp"/rank[03] "$tmp/err3" && fail "$name: the token is told"
}

case_two_hosts() {
  local rank
  two_hosts "two hosts" --master-addr 10.77.0.1 --epochs 20 --token-file "$tmp/job.token"
  for rank in 0 1 2 3; do
    expect_jq '.[-1] | .event == "end" and .status == "ok" and .live_rrefs == 0' "rank $rank" "$tmp/rank$rank"
    expect_jq 'map(select(.event == "ready"))[0].transport == "mixed"' "rank $rank" "$tmp/rank$rank"
  done

  two_hosts "insecure" --master-addr 10.77.0.1 --epochs 2 --insecure
  for rank in 0 1 2 3; do
    expect_jq '.[0].trust == "anybody" and .[-1].status == "ok"' "insecure, rank $rank" "$tmp/rank$rank"
  done
}

case_refused() {
  local of_rank_0
  of_rank_0=()
  refused "no token" "no process of this user on this host"
  of_rank_0=(--token-file "$tmp/job.token")
  make_token "$tmp/another.token"
  refused "another token" "has another token than rank 3" --token-file "$tmp/another.token"
  refused "a token on one side" "rank 0 has a token, rank 3 has none"
}

# Options of rank 0 apply to all ranks; an option that differs between two ranks is refused.
case_options_differ() {
  local rank0
  timeout -k 2 "$limit" ip netns exec "$a" "$distrain" hybrid --rank 0 --master-addr 10.77.0.1 \
    --token-file "$tmp/job.token" --epochs 3 --join-timeout 20 >"$tmp/rank0" 2>/dev/null &
  rank0=$!
  timeout -k 2 "$limit" ip netns exec "$b" "$distrain" hybrid --rank 3 --master-addr 10.77.0.1 \
    --token-file "$tmp/job.token" --epochs 4 >"$tmp/rank3" 2>/dev/null
  code=$?
  expect 3 "differing options"
  expect_jq '.[-1].message | contains("epochs") and contains("3") and contains("4")' "differing options" "$tmp/rank3"
  wait "$rank0"
  code=$?
  expect 3 "join timeout of rank 0"
}

# Some operators of Kubernetes set MASTER_ADDR to localhost in the pod of rank 0. With a token, the other pods reach it.
case_localhost_at_rank_0() {
  local rank pids=()
  for rank in 3 2 1 0; do
    timeout -k 2 "$limit" ip netns exec "$([[ $rank == 0 ]] && echo "$a" || echo "$b")" env RANK="$rank" WORLD_SIZE=4 \
      MASTER_ADDR="$([[ $rank == 0 ]] && echo localhost || echo 10.77.0.1)" \
      "$distrain" hybrid --epochs 2 --token-file "$tmp/job.token" >"$tmp/rank$rank" 2>"$tmp/err$rank" &
    pids[rank]=$!
  done
  for rank in 0 1 2 3; do
    wait "${pids[rank]}"
    code=$?
    expect 0 "MASTER_ADDR=localhost, rank $rank"
    expect_log "MASTER_ADDR=localhost, rank $rank" "$tmp/rank$rank"
  done
  # Without a token, rank 0 listens on 127.0.0.1 only.
  RANK=0 WORLD_SIZE=4 MASTER_ADDR=localhost run hybrid --master-port "$(free_port)" --join-timeout 1
  expect 3 "MASTER_ADDR=localhost without a token"
  expect_jq '.[-1].message | contains("rank 0 listens on 127.0.0.1, which only this host reaches")' \
    "MASTER_ADDR=localhost without a token"
}

run_cases
