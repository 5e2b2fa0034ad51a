#!/bin/bash
# ctest: labels=soak timeout=900
# All five jobs on three hosts, started by hosts.sh of examples/launch: at 1 Gb/s, and with links that are cut for 2 s
# and for 10 s.
# shellcheck source-path=SCRIPTDIR source=namespaces.bash disable=SC2317,SC2154
source "$(dirname "$0")/namespaces.bash"
limit=60

# job_options <job> [endless]: sets `options` for six ranks.
job_options() {
  case $1 in
    hybrid) options=(hybrid --data teacher --epochs 20) ;;
    ps) options=(ps --data "$tmp/images" --epochs 2) ;;
    rnn) options=(rnn --epochs 2) ;;
    rl) options=(rl --max-episodes 5) ;;
    pipeline) options=(pipeline --model resnet18 --image-size 32 --classes 10 --batch-size 24 --micro-batches 3) ;;
  esac
  [[ ${2:-} ]] || return
  case $1 in
    rl) options=(rl --threshold 1000000) ;;
    pipeline) options+=(--batches 1000000) ;;
    *) options+=(--epochs 1000000) ;;
  esac
}

# one_gigabit: limits what each host sends.
one_gigabit() {
  local host
  for host in "${hosts[@]}"; do
    tc -n "$host" qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 50ms || fail "tc"
  done
}
sent_bytes() { tc -n "${hosts[$1]}" -s -j qdisc show dev eth0 | jq 'map(select(.kind == "tbf"))[0].bytes'; }

case_five_jobs() {
  local job options wanted sent name
  need tc
  make_images "$tmp/images" 256 64
  one_gigabit
  for job in hybrid ps rnn rl pipeline; do
    name="$job at 1 Gb/s"
    job_options "$job"
    three_hosts "${options[@]}"
    sent=$(sent_bytes 2)
    start_hosts
    await "$launcher"
    wanted=$([[ $job == rl ]] && echo 11 || echo 0) # the pole does not stay up after five episodes
    expect "$wanted" "$name"
    expect_ends "$wanted" "$name" "${files[0]}"
    # If rank 0 ends with an error, hosts.sh may stop the other hosts before they end by themselves.
    if [[ $job == rl ]]; then
      jq -es . "${files[@]}" >/dev/null || fail "$name: not all lines are JSON"
    else
      expect_ends 0 "$name" "${files[@]:1}"
    fi
    expect_runs 1 "$name" "${files[@]}"
    cat "${files[@]}" >all
    expect_jq '[.[] | select(.event == "ready").rank] | sort == [0, 1, 2, 3, 4, 5]' "$name" all
    (($(sent_bytes 2) > sent + 1000)) || fail "$name: h2 has sent nothing over its link"
    expect_no_process "$name"
  done
}

cut_link() { ip -n "$switch" link set port2 nomaster; }
mend_link() { ip -n "$switch" link set port2 master bridge; }
# steps: prints how much work rank 0 has reported.
steps() { grep -cE '"event":"(step|epoch|episode|eval)"' "${files[0]}"; }
more_steps() { (($(steps) > $1)); }

# ridden_out <job> <seconds of the cut> <peer timeout>
ridden_out() {
  local options name="$1, a link cut for $2 s" before
  job_options "$1" endless
  three_hosts "${options[@]}" --peer-timeout "$3" --log-interval 1
  start_hosts
  trains
  cut_link
  sleep "$2"
  mend_link
  before=$(steps)
  wait_for "$limit" more_steps "$before" || fail "$name: does not go on"
  kill "$launcher"
  await "$launcher"
  expect 143 "$name"
  expect_ends 143 "$name" "${files[@]}"
  jq -es 'any(.[]; .event == "lost") | not' "${files[@]}" >/dev/null || fail "$name: a rank is lost"
  expect_no_process "$name"
}

case_cut_2_s() {
  local job
  make_images "$tmp/images" 256 64
  for job in hybrid ps rnn rl pipeline; do ridden_out "$job" 2 15; done
}

case_cut_10_s() {
  local options name="hybrid, a link cut for 10 s" saved
  ridden_out hybrid 10 40
  job_options hybrid endless
  three_hosts "${options[@]}" --mode sync
  start_hosts
  trains
  wait_for_lines 1 checkpoint "${files[0]}"
  cut_link
  await "$launcher"
  expect 5 "$name"
  expect_ends 5 "$name" "${files[0]}"
  # The hosts cannot tell which of the two ranks on the other side fails first.
  expect_jq '.[-1].cause_rank | . == 4 or . == 5' "$name" "${files[0]}"
  jq -es . "${files[@]}" >/dev/null || fail "$name: not all lines are JSON"
  mend_link
  saved=$(saved_step h0/run-hosts/checkpoints)
  start_hosts
  trains
  expect_resumed "$saved" "$name, started again" "${files[0]}"
  kill "$launcher"
  await "$launcher"
  expect 143 "$name, started again"
  expect_no_process "$name"
}

run_cases
