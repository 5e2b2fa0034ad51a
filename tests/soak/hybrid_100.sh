#!/bin/bash
# ctest: timeout=1200 serial
# Runs a hundred 4-rank jobs in a row. No job may hang, fail or leave processes or files behind.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

limit=30
for i in $(seq 100); do
  mode=$([[ $((i % 2)) == 0 ]] && echo sync || echo async)
  transport=$([[ $((i % 3)) == 0 ]] && echo tcp || echo auto)
  run hybrid --epochs 10 --mode "$mode" --transport "$transport" --seed "$i"
  expect 0 "run $i ($mode, $transport)"
  expect_jq '.[-1] | .event == "end" and .live_rrefs == 0 and .live_contexts == 0' "run $i"
  [[ -s $tmp/err ]] && fail "run $i wrote to stderr"
  [[ -z $(processes) ]] || fail "run $i left processes"
  ((failures == 0)) || break
done
((failures == 0))
