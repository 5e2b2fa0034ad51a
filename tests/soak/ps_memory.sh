#!/bin/bash
# ctest: timeout=900
# The memory of a parameter server does not grow: at step 2000 it is at most 2 % more than at step 200.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

make_images "$tmp/images" 2000 100
"$distrain" ps --data "$tmp/images" --steps 3000 --epochs 1000 --log-interval 100 --threads 1 \
  >"$tmp/out" 2>"$tmp/err" &
job=$!
# shellcheck disable=SC2317  # called by wait_for
step_reached() { jq -es --argjson step "$1" 'any(.[]; .event == "step" and .step >= $step)' "$tmp/out" >/dev/null 2>&1; }
server_rss() { awk '/VmRSS/ { print $2 }' "/proc/$server/status"; }

wait_for_lines 3 ready "$tmp/out"
server=$(jq -r 'select(.event == "start" and .rank == 0).pid' "$tmp/out")
wait_for 300 step_reached 200 || fail "step 200"
early=$(server_rss)
wait_for 600 step_reached 2000 || fail "step 2000"
late=$(server_rss)
wait $job
code=$?
expect 0 "ps"
echo "rss of the server: $early kB at step 200, $late kB at step 2000"
((late * 100 <= early * 102)) || fail "the server has grown"
finish
