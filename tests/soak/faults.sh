#!/bin/bash
# ctest: timeout=7200 serial
# Injects FAULTS_COUNT (100) faults into all jobs and roles at random moments; FAULTS_SEED (1) chooses them. The fault
# of a full disk needs root, which mounts a small tmpfs. FAULTS_ONLY=NUMBER repeats one trial; FAULTS_KEEP=FOLDER
# keeps the output of failed trials.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"
make_images "$tmp/images" 256 64
python3 -u "$root/tests/soak/faults.py" "$distrain" "$tmp" || fail "injected faults"
umount "$tmp"/*/disk 2>/dev/null
expect_no_process "at the end"
finish
