#!/bin/bash
# ctest: timeout=240
# What people see on terminals of 80 and 40 columns is as recorded in terminal/: with DISTRAIN_SOAK=1 each job in each
# way, otherwise a part of them.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"
command -v tmux >/dev/null || { echo "no tmux"; exit 77; }
TMPDIR=$tmp python3 "$here/terminal/record.py" "$distrain" ${DISTRAIN_SOAK:+--all} || fail "recorded screens"
expect_no_process "at the end"
finish
