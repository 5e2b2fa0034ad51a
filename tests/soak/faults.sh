#!/bin/bash
# ctest: timeout=7200 serial
# Faults in all jobs and roles, at random moments: FAULTS_COUNT of them (100), by FAULTS_SEED (1). A full disk takes
# root, which mounts a small tmpfs. FAULTS_ONLY=NUMBER repeats one of them; FAULTS_KEEP=FOLDER keeps the output of
# those that fail.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 256 64
python3 -u "$root/tests/soak/faults.py" "$distrain" "$tmp" || fail "injected faults"
umount "$tmp"/*/disk 2>/dev/null
expect_no_process "at the end"
finish
