#!/bin/bash
# ctest: timeout=240
# Messages from an earlier generation of a job reach ranks of a later one: a late handshake, late calls, a replay of all
# messages, messages of a rank that was stopped, and joins with an old restart count. All are refused and reported, and
# the job ends with exactly the weights of an undisturbed run.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 128 32
make_token "$tmp/job.token"

trials() { # trials <function of generations.py>...
  DISTRAIN_TEST_LIMIT=$limit python3 -u "$root/tests/fault/generations.py" "$distrain" "$tmp" "$@" || fail "$*"
  expect_no_process "at the end"
}
case_late_joins() { trials two_generations first_words_late; }
case_late_calls() { trials stopped_meanwhile calls_late; }

run_cases
