#!/bin/bash
# ctest: timeout=3600 serial
# Each job, in sync mode: a rank is killed every 2 s for a minute, and the job ends like an undisturbed one. Runs with
# one launcher, and with three launchers in three network namespaces. `tables` is hybrid with tables on two servers.
# RESTARTS_ONLY=JOB runs only that job.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
# shellcheck source=../support/hosts.bash
source "$(dirname "$0")/../support/hosts.bash"

make_hosts 10.79.0 || {
  echo "no right to make network namespaces here, no ip command, or no bridges: one launcher only"
  hosts=()
}

make_images "$tmp/images" 256 64
export RESTARTS_SECONDS=${RESTARTS_SECONDS:-60} RESTARTS_SIZE=${RESTARTS_SIZE:-8} RESTARTS_LONGEST=600 RESTARTS_AT_LEAST=${RESTARTS_AT_LEAST:-20}
for job in ${RESTARTS_ONLY:-hybrid tables ps rnn rl pipeline}; do
  for where in "" "${hosts[*]}"; do
    rm -rf "$tmp/$job."*
    # shellcheck disable=SC2086  # no host, or three
    python3 -u "$root/tests/fault/restarts.py" "$distrain" "$tmp" "$job" $where || fail "$job, ${where:-one launcher}"
    expect_no_process "$job, ${where:-one launcher}"
    [[ $where || ${#hosts[@]} -gt 0 ]] || break
  done
done
finish
