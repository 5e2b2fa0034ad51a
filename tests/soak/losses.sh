#!/bin/bash
# ctest: timeout=1800 serial
# tests/fault/losses.py with 32 losses, one every 2 s: the accuracy is that of an undisturbed run, and the server's
# memory does not grow. LOSSES_SEED chooses the lost trainers.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

export LOSSES=${LOSSES:-32} LOSSES_EVERY=2 LOSSES_IMAGES=4096 LOSSES_EPOCHS=${LOSSES_EPOCHS:-40} LOSSES_LONGEST=700 \
  LOSSES_TRAINED=1
make_images "$tmp/images" $LOSSES_IMAGES 512 28 bars
for mode in ${LOSSES_MODES:-async ssp}; do
  for starter in launcher each; do
    python3 -u "$root/tests/fault/losses.py" "$distrain" "$tmp" "$mode" $starter "$(free_port)" ||
      fail "$mode, started again by $starter"
    expect_no_process "$mode, $starter"
  done
done
finish
