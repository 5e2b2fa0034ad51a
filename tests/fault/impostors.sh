#!/bin/bash
# ctest: timeout=300
# Impostors without the token connect to all listening ranks of a job, from before the ranks join until they end.
# tests/soak/impostors.sh sends 20,000 impostors to each of the five jobs.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 256 64
make_token "$tmp/job.token"
if [[ ${DISTRAIN_SOAK:-} ]]; then count=20000 jobs=(ps hybrid rnn rl pipeline); else count=400 jobs=(ps); fi
python3 -u "$root/tests/fault/impostors.py" "$distrain" "$tmp" "$count" "${jobs[@]}" || fail "impostors"
expect_no_process "at the end"
finish
