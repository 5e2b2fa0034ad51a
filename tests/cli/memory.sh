#!/bin/bash
# What does not fit into memory. Not for asan, which takes terabytes of address space for itself.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

(
  ulimit -v 3000000
  timeout "$limit" "$distrain" pipeline --local --threads 1 --micro-batches 1 --batches 1 --image-size 700 \
    >"$tmp/out" 2>"$tmp/err"
)
code=$?
expect 9 "out of memory"
expect_jq '.[-1] | .kind == "resources" and (.message | test("out of memory") and (test("frame") | not))' "out of memory"
expect_no_process "out of memory"
finish
