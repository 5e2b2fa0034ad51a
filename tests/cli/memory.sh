#!/bin/bash
# Jobs that run out of memory. Not under asan, which reserves terabytes of address space.
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
expect_jq '.[-1].message | startswith("rank 0 (local): ") and contains("--batch-size or --image-size")' "out of memory"
run hybrid --num-embeddings 1000000000 --embedding-dim 1000000 --epochs 1
expect 9 "a table that is too large"
expect_jq '.[-1].message | test("^rank 3 \\(ps\\): out of memory: no [0-9]+ MiB for a tensor: smaller values of --num-embeddings or ")' \
  "a table that is too large"
# Too little memory even for the libraries gives an error message, without a crash, an abort or a hang.
for limit_kb in $(seq 380000 12000 452000); do
  (ulimit -v "$limit_kb" && exec timeout "$limit" "$distrain" hybrid --local --epochs 1 --threads 2) \
    >"$tmp/out" 2>"$tmp/err"
  code=$?
  ((code <= 9 || code == 127)) || fail "ulimit -v $limit_kb: exit code $code: $(cat "$tmp/err")"
done
expect_no_process "out of memory"
finish
