#!/bin/bash
# --resume takes the job's options from the checkpoint and, if it is damaged, names one to use instead.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

make_images "$tmp/data" 64 8
saves=$tmp/saves
step() { printf '%s/step-%012d' "$saves" "$1"; }
warned() { # warned <words> <name>: the job printed one warning, with these words
  expect_jq "[.[] | select(.event == \"warn\").message] | length == 1 and (.[0] | endswith(\"$1\"))" "$2"
}

run ps --local --data "$tmp/data" --mode sync --trainers 3 --batch-size 4 --lr 0.05 --mean 0.5 --steps 4 \
  --checkpoint "$saves" --checkpoint-every 1 --keep 3
expect 0 "a job"
[[ $(find "$saves" -mindepth 1 -maxdepth 1 ! -name .lock | sort) == "$(step 2; echo; step 3; echo; step 4)" ]] ||
  fail "--keep 3: $(ls "$saves")"

as_saved='.config | .data != null and .trainers == 3 and .batch_size == 4 and .mean == 0.5 and .mode == "sync"'
run ps --local --checkpoint "$saves" --resume auto --steps 5 # --keep has the value of the first run
expect 0 "options of the checkpoint, --local"
expect_log "options of the checkpoint, --local"
expect_jq "[.[] | select(.event == \"start\") | $as_saved and .lr == 0.05] == [true]" "options of the checkpoint"
expect_jq '.[-1].steps == 3' "three trainers make one step each"
warned "with --steps 5 in place of 4" "--steps 5"
run ps --resume "$saves" --steps 6 --lr 0.01 --mode sync
expect 0 "ranks with options of the checkpoint"
expect_log "ranks with options of the checkpoint"
expect_jq "[.[] | select(.event == \"start\") | $as_saved and .lr == 0.01] == [true, true, true, true]" "all ranks"
warned "with --steps 6 in place of 5, --lr 0.01 in place of 0.05" "--lr and --steps"
run ps --resume "$saves"
expect 0 "the limit of steps was reached"
expect_jq 'all(.[]; .event != "warn") and .[0].config.steps == 0 and .[-1].steps == 3' "on to the end of the epoch"
run ps --resume "$saves" --steps 4
expect 0 "nothing is left to train"
expect_jq '.[-1].steps == 0' "nothing is left to train"
expect_jq '[.[] | select(.event == "warn").message] | length == 2
  and any(.[]; test(", step [0-9]+: nothing is left to train without a larger --steps$"))' "nothing is left to train"

run ps --resume "$saves" --mode async
expect_error 7 bad_data "saved with --mode sync, not async: leave --mode out, or train anew without --resume, in" "another mode"
run ps --resume "$saves" --mean 0.25
expect_error 7 bad_data "saved with --mean 0.5, not 0.25" "another mean"
run ps --resume "$saves" --world-size 3
expect 7 "another number of ranks"
expect_jq '.[-1].message | test("saved with --trainers 3, not 2")' "another number of ranks"
make_images "$tmp/other" 32 8
run ps --resume "$saves" --data "$tmp/other" --steps 9
expect 7 "other data"
expect_jq "([.[] | select(.event == \"warn\").message] | all(contains(\"--data\") | not)) and (.[-1].message | contains(
  \"saved while training on other data than there is in --data $tmp/other: resume with the data that it was trained on, --data $tmp/data, or\"))" \
  "other data"
run rl --resume "$saves"
expect_error 7 bad_data "a checkpoint of ps, not of rl" "another command's"

# The two newest checkpoints are damaged.
for damaged in model.safetensors manifest.json; do
  for at in 5 4; do printf X | dd of="$(step $at)/$damaged" bs=1 seek=200 conv=notrunc 2>/dev/null; done
  for resume in auto "$saves" "$(step 5)/"; do
    run ps --local --checkpoint "$saves" --resume "$resume" --steps 6
    expect 7 "$damaged, --resume $resume"
    expect_jq ".[-1].message | endswith(\"; the one before it is intact: --resume $(step 3)\")" "$damaged, --resume $resume"
  done
done
# Only the user may remove newer checkpoints.
run ps --local --checkpoint "$saves" --resume "$(step 3)" --steps 6
expect 2 "newer ones in the folder"
expect_jq '.[-1].message | contains(" is older than step-000000000005 in --checkpoint ")' \
  "newer ones in the folder"
[[ -d $(step 4) && -d $(step 5) ]] || fail "newer ones in the folder: removed"
run ps --local --checkpoint "$tmp/others" --resume "$(step 3)" --steps 6
expect 0 "from the intact one, to another folder"
rm -r "$(step 4)" "$(step 5)"
run ps --local --checkpoint "$saves" --resume "$(step 3)" --steps 6
expect 0 "from the intact one"
finish
