#!/bin/bash
# ctest: labels=asan
# Bad data: exit code 7 and one error, if possible before any rank starts.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

printf '__label__a one two\n__label__b three\n' >"$tmp/good"
printf '__label__a one\n' >"$tmp/one"

case_refused_before_any_rank() {
  local shared
  run hybrid --data "$tmp/nowhere"
  expect_error 7 bad_data "$tmp/nowhere: No such file" "missing --data"
  run hybrid --data "$tmp"
  expect_error 7 bad_data "is a folder, a file is needed" "--data is a folder"
  : >"$tmp/empty"
  run hybrid --data "$tmp/empty"
  expect_error 7 bad_data "empty" "empty --data"
  run hybrid --data "$tmp/good" --test-data "$tmp/nowhere"
  expect_error 7 bad_data "--test-data" "missing --test-data"
  run hybrid --local --data "$tmp/nowhere"
  expect_error 7 bad_data "$tmp/nowhere: No such file" "--local, missing --data"

  # A file that several ranks cannot open independently is refused at once, with its name.
  mkfifo "$tmp/fifo"
  shared="not a regular file that each rank can open"
  run hybrid --data "$tmp/fifo"
  expect_error 2 invalid "--data $tmp/fifo: a pipe feeds one process" "a FIFO"
  # shellcheck disable=SC2094 # nothing writes to it
  run rnn --data "$tmp/good" --test-data /dev/fd/0 <"$tmp/good"
  expect_error 7 bad_data "--test-data /dev/fd/0: $shared" "an open file"
  run rnn --ranks 1 --data "$tmp/fifo"
  expect_error 7 bad_data "--data $tmp/fifo: $shared" "a FIFO of a launcher without rank 0"
  run rnn --local --data "$tmp/fifo"
  expect 7 "a FIFO that is read twice"
  expect_jq ".[-1].message == \"$tmp/fifo: not a regular file\"" "a FIFO that is read twice"
}

case_read_by_a_rank() {
  local where
  mkfifo "$tmp/fifo"
  cat "$tmp/good" >"$tmp/fifo" &
  run hybrid --local --data "$tmp/fifo" --steps 1
  expect 0 "a FIFO that is read once"

  gzip -c "$tmp/good" >"$tmp/good.gz"
  run hybrid --data "$tmp/good.gz" --epochs 1
  expect 0 "gzip"
  run hybrid --data "$tmp/one" --epochs 1
  expect 7 "one example for two trainers"
  expect_jq ".[-1].message == \"$tmp/one: 1 example is too few for 2 trainers: --trainers can be 1 at most\"" "one example"

  # Errors that only reading the file reveals: the rank reports the error, and the launcher repeats it as the root cause.
  printf '__label__a one two\nno label here\n' >"$tmp/bad"
  for where in "" --local; do
    # shellcheck disable=SC2086
    run hybrid $where --data "$tmp/bad" --epochs 1
    expect 7 "a line without label $where"
    expect_log "a line without label $where"
    expect_jq '.[-1] | .status == "failed" and .kind == "bad_data" and .exit_code == 7' \
      "a line without label $where"
    expect_no_process "a line without label $where"
  done
}

case_useless_and_unknown_words() {
  local where
  # Useless training continues with one warning.
  run hybrid --data "$tmp/one" --trainers 1 --epochs 1
  expect 0 "a single label"
  expect_jq "[.[] | select(.event == \"warn\").message] ==
    [\"$tmp/one: all examples have the label a: nothing can be learned\"]" "a single label"
  run hybrid --local --data teacher --epochs 1 --lr 30
  expect 0 "a loss that grows"
  expect_jq '[.[] | select(.event == "warn").message] | length == 1 and (.[0] | startswith("the loss grows: "))' "a loss that grows"

  # Words that are not in the training data are counted.
  printf '__label__a one four\n__label__b five two five\n' >"$tmp/other"
  for where in "" --local; do
    # shellcheck disable=SC2086
    run hybrid $where --data "$tmp/good" --test-data "$tmp/other" --steps 1
    expect 0 "unknown words $where"
    expect_jq '.[-1].unknown_words == 3' "unknown words $where"
    expect_jq '[.[0, -1].config | [.num_embeddings, .classes, .batches_per_epoch, .batch_size]] ==
      [[null, null, null, 32], [3, 2, null, 32]]' "recorded config $where"
  done

  printf 'one two three\n' >"$tmp/text"
  run rnn --data "$tmp/text" --batch-size 1 --steps 1
  expect 0 "recorded vocabulary"
  expect_jq '[.[] | select(.event == "start")][0].config.vocab_size == 10000 and
    .[-1].config.vocab_size == 5' "recorded vocabulary"
}

# `--data teacher` makes labels by a hidden teacher, so options for files have no effect; ./teacher is a file.
case_teacher() {
  local where
  for where in "" --local; do
    # shellcheck disable=SC2086
    run hybrid $where --data teacher --batches-per-epoch 2 --epochs 1 --batch-size 7 \
      --checkpoint "$tmp/taught$where"
    expect 0 "--data teacher $where"
    expect_jq 'any(.[]; .data == "teacher") and .[-1].steps == 4 and .[-1].eval.samples >= 1000 and
      any(.[]; .message == "--batch-size has no effect with --data teacher")' "--data teacher $where"
  done
  run hybrid --local --data teacher --servers 2 --steps 1
  expect 0 "--servers with --local"
  expect_jq 'any(.[]; .message == "--servers has no effect with --local apart from implying --table sharded")' \
    "--servers with --local"
  run hybrid --data teacher --valid-data "$tmp/good"
  expect_error 2 invalid "--valid-data needs --data FILE, not teacher" "--data teacher and a file"
  run predict "$tmp/taught" "$tmp/good"
  expect 7 "a teacher's model does not read text"
  expect_jq '.[-1].message | endswith("its model was not trained on text (--data FILE)")' \
    "a teacher's model does not read text"
  cp "$tmp/good" "$tmp/teacher"
  cd "$tmp" || exit
  run hybrid --local --data ./teacher --steps 1
  expect 0 "./teacher"
  expect_jq '.[0].data == "./teacher" and (.[-1] | .steps == 2 and has("eval") == false)' "./teacher"
  cd "$OLDPWD" || exit
  run hybrid --local --epochs 1
  expect_jq '.[0].data == "random batches with random labels"' "random labels"
}

run_cases
