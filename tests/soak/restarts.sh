#!/bin/bash
# ctest: timeout=3600 serial
# Each job, in sync mode: a rank is killed every 2 s for a minute, and the job ends like an undisturbed one. Runs with
# one launcher, and with three launchers in three network namespaces. RESTARTS_ONLY=JOB runs only that job.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

switch=dts$$
hosts=("dt0-$$" "dt1-$$" "dt2-$$")
# shellcheck disable=SC2317  # called by trap
remove_hosts() {
  local host
  for host in "${hosts[@]}" "$switch"; do ip netns del "$host" 2>/dev/null; done
  cleanup
}
trap remove_hosts EXIT
if ip netns add "$switch" 2>/dev/null && ip -n "$switch" link add bridge type bridge 2>/dev/null; then
  ip -n "$switch" link set bridge up
  for number in 0 1 2; do
    host=${hosts[number]}
    ip netns add "$host"
    ip -n "$switch" link add "port$number" type veth peer name eth0 netns "$host" || fail "no veth pair"
    ip -n "$switch" link set "port$number" master bridge up
    ip -n "$host" link set lo up
    ip -n "$host" addr add "10.79.0.1$number/24" dev eth0
    ip -n "$host" link set eth0 up
  done
else
  echo "no right to make network namespaces here, no ip command, or no bridges: one launcher only"
  hosts=()
fi

make_images "$tmp/images" 256 64
export RESTARTS_SECONDS=${RESTARTS_SECONDS:-60} RESTARTS_SIZE=${RESTARTS_SIZE:-8} RESTARTS_LONGEST=600 RESTARTS_AT_LEAST=${RESTARTS_AT_LEAST:-20}
for job in ${RESTARTS_ONLY:-hybrid ps rnn rl pipeline}; do
  for where in "" "${hosts[*]}"; do
    rm -rf "$tmp/$job."*
    # shellcheck disable=SC2086  # no host, or three
    python3 -u "$root/tests/fault/restarts.py" "$distrain" "$tmp" "$job" $where || fail "$job, ${where:-one launcher}"
    expect_no_process "$job, ${where:-one launcher}"
    [[ $where || ${#hosts[@]} -gt 0 ]] || break
  done
done
finish
