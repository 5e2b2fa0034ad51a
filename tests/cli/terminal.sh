#!/bin/bash
# ctest: timeout=240
# The display on terminals of 80 and 40 columns matches the recordings in terminal/: with DISTRAIN_SOAK=1 for each job
# in each mode, otherwise for some of them.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"
command -v tmux >/dev/null || { echo "no tmux"; exit 77; }
TMPDIR=$tmp python3 "$here/terminal/record.py" "$distrain" ${DISTRAIN_SOAK:+--all} || fail "recorded screens"
expect_no_process "at the end"
finish
