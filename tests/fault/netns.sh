#!/bin/bash
# ctest: timeout=300
# Three ranks in three network namespaces with a switch between them, as on three machines. A link silently loses
# all packets, in both directions or one, while the ranks join or train. tests/soak/netns.sh runs all cases.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"
# shellcheck source=../support/hosts.bash
source "$(dirname "$0")/../support/hosts.bash"

peer_timeout=10 # seconds; long, so that on a slow machine only the rank behind the cut link counts as lost
if ! make_hosts 10.78.0; then
  echo "skipped: no right to make network namespaces here, no ip command, or no bridges"
  exit 77 # CTest reports the test as skipped
fi

# lose <from> <to>: sends the packets between these hosts to a MAC address that no host has.
lose() { ip -n "${hosts[$1]}" neigh replace "10.78.0.1$2" lladdr 02:00:00:00:00:99 dev eth0 nud permanent; }
find_again() { ip -n "${hosts[$1]}" neigh replace "10.78.0.1$2" lladdr "02:00:00:00:00:1$2" dev eth0 nud permanent; }
break_link() { # break_link <how>: breaks the link of rank 2
  case $1 in
    both_ways) ip -n "$switch" link set port2 down ;;
    from) lose 2 0 && lose 2 1 ;;
    to) lose 0 2 && lose 1 2 ;;
  esac
}
mend() {
  ip -n "$switch" link set port2 up
  find_again 2 0 && find_again 2 1 && find_again 0 2 && find_again 1 2
}

make_images "$tmp/images" 256 64
make_token "$tmp/job.token"
renew() { # mends the links and removes the output of earlier ranks
  mend
  rm -f "$tmp"/rank?
}
mode=sync
start_rank() { # start_rank <rank> <option...>
  local rank=$1
  shift
  timeout -k 2 "$limit" ip netns exec "${hosts[rank]}" "$distrain" ps --rank "$rank" --master-addr 10.78.0.10 --token-file "$tmp/job.token" \
    --data "$tmp/images" --mode "$mode" --epochs 1000000 --log-interval 1 --peer-timeout "$peer_timeout" "$@" >"$tmp/rank$rank" \
    2>"$tmp/err$rank" &
  pids[rank]=$!
}
pids=()

# ends <name>: checks that all ranks fail and that the `error` lines of ranks 0 and 1 blame rank 2, which may blame any
# rank. Sets $took to the seconds from the cut to the ends of ranks 0 and 1.
ends() {
  local rank
  for rank in 0 1 2; do
    wait "${pids[rank]}"
    code=$?
    [[ $code == 3 || $code == 5 ]] || expect 5 "$1, rank $rank"
    expect_log "$1, rank $rank" "$tmp/rank$rank"
    expect_jq 'map(select(.event == "error")) | length == 1' "$1, rank $rank" "$tmp/rank$rank"
    [[ $rank == 2 ]] ||
      expect_jq 'map(select(.event == "error"))[0].cause_rank == 2' "$1, rank $rank" "$tmp/rank$rank"
  done
  local times
  times=$(jq -cs --argjson cut "$cut" 'map(select(.event == "end") | (.ts - $cut) * 100 | round / 100)' "$tmp"/rank[012])
  took=$(jq -n "${times}[0:2] | max")
  echo "$1: ranks end $times s after it"
  expect_no_process "$1"
  mend
}

# goal <how>: prints the limit in seconds. If only packets to rank 2 are lost, one or two more heartbeats of rank 2
# arrive before its TCP waits for acknowledgements.
goal() { [[ $1 == to ]] && echo $((peer_timeout + 2)) || echo $((peer_timeout + 1)); }

at_work() { # at_work <how>
  local rank
  renew
  for rank in 0 1 2; do start_rank "$rank"; done
  wait_for_lines 3 step "$tmp/rank2"
  cut=$EPOCHREALTIME
  break_link "$1"
  ends "link cut $1, at work"
}

case_at_work_both_ways() { in_time "$(goal both_ways)" at_work both_ways; }
case_at_work_from() { in_time "$(goal from)" at_work from; }
case_at_work_to() { in_time "$(goal to)" at_work to; }

# In async mode the job continues without the trainer behind the cut link, which ends. When the link works again,
# a new process replaces the trainer.
goes_on() { # goes_on <how>
  local rank name="link cut $1, at work, async"
  mode=async
  renew
  for rank in 0 1 2; do start_rank "$rank"; done
  wait_for_lines 3 step "$tmp/rank2"
  break_link "$1"
  wait_for_lines 1 lost "$tmp/rank0"
  wait "${pids[2]}"
  code=$?
  [[ $code == 3 || $code == 5 ]] || expect 5 "$name, rank 2"
  mend
  mv "$tmp/rank2" "$tmp/rank2.cut"
  start_rank 2
  wait_for_lines 1 returned "$tmp/rank0"
  wait_for_lines 3 step "$tmp/rank2"
  kill -TERM "${pids[0]}"
  wait "${pids[@]}" 2>/dev/null
  expect_jq '[.[] | select(.event == "lost").lost_rank] == [2] and [.[] | select(.event == "returned").returned_rank] == [2]' \
    "$name" "$tmp/rank0"
  expect_no_process "$name"
  mode=sync
}

case_at_work_async() {
  local how
  for how in $(every 1 both_ways from to); do goes_on "$how"; done
}

# The link breaks after rank 2 has sent rank 0 its address, while rank 2 waits for rank 1.
meeting() { # meeting <how>
  renew
  start_rank 0 --join-timeout 20
  start_rank 2 --join-timeout 20
  wait_for_lines 1 waiting "$tmp/rank2"
  cut=$EPOCHREALTIME
  break_link "$1"
  start_rank 1 --join-timeout 20
  ends "link cut $1, while meeting"
}

case_while_meeting() {
  local how
  for how in $(every 1 both_ways from to); do in_time "$(goal "$how")" meeting "$how"; done
}

run_cases
