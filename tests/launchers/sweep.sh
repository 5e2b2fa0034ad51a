#!/bin/bash
# ctest: timeout=120
# Runs sweep.sh of examples/launch.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

example sweep.sh
timeout -k 2 "$limit" bash sweep.sh >out 2>err
code=$?
expect 0 sweep.sh
[[ $(cut -f 1 out | xargs) == "1 2 4 8" ]] || fail "sweep.sh: $(cat out)"
[[ $(cut -f 2 out | awk '$1 > 0' | wc -l) == 4 ]] || fail "sweep.sh: $(cat out)"
[[ ! -s err ]] || fail "sweep.sh: $(cat err)"
expect_ends 0 sweep.sh sweep.jsonl
expect_no_process sweep.sh
finish
