#!/bin/bash
# ctest: timeout=240
# What ranks of an earlier start of the job say comes to the ranks of a later one: late first words, late calls, all of
# it once more, a rank that was stopped meanwhile, and ranks that join by an old count of restarts. All are refused and
# named, and the job ends with the weights of an undisturbed run, bit by bit.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 128 32
make_token "$tmp/job.token"
DISTRAIN_TEST_LIMIT=$limit python3 -u "$root/tests/fault/generations.py" "$distrain" "$tmp" || fail "generations"
expect_no_process "at the end"
finish
