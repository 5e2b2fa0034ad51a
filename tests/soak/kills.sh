#!/bin/bash
# ctest: timeout=3600 serial
# Each job, each of its ranks: five SIGKILLs and five SIGSTOPs at random moments, from the first line to the
# last. KILLS_SEED says which moments; KILLS_ONLY=JOB[:RANK[:SIGNAL]] does some of it.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 256 64
python3 -u "$root/tests/soak/kills.py" "$distrain" "$tmp" || fail "ranks that were killed or stopped"
expect_no_process "at the end"
finish
