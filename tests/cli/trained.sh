#!/bin/bash
# ctest: timeout=300
# Using a trained model: --eval-only and predict give exactly the numbers that training printed.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

# make_examples <lines> <seed>: prints examples with three labels; about half of the words tell the label.
make_examples() {
  awk -v lines="$1" -v seed="$2" 'BEGIN {
    srand(seed)
    for (i = 0; i < lines; ++i) {
      label = int(3 * rand())
      line = "__label__" substr("abc", label + 1, 1)
      for (j = 0; j < 1 + i % 5; ++j) line = line " w" (rand() < 0.5 ? label : 3 + int(30 * rand()))
      print line
    }
  }'
}

declare -A arguments=(
  [hybrid]="--data $tmp/examples --test-data $tmp/test --epochs 2 --optimizer adagrad --batch-size 8"
  [ps]="--data $tmp/images --batch-size 4"
  [rnn]="--data $tmp/text --valid-data $tmp/valid --trainers 2 --epochs 2 --emsize 8 --nhid 8 --batch-size 4 --bptt 5")
declare -A inputs=([hybrid]=$tmp/test [ps]=$tmp/images/t10k-images-idx3-ubyte [rnn]=$tmp/valid)

# train <command>: makes data and trains a model, whose checkpoints are in $tmp/<command>.
train() {
  case $1 in
    hybrid) make_examples 200 1 >"$tmp/examples" && make_examples 83 2 >"$tmp/test" ;;
    ps) make_images "$tmp/images" 64 20 ;;
    rnn) make_text 60 >"$tmp/text" && make_text 23 >"$tmp/valid" ;;
  esac
  # shellcheck disable=SC2086
  run "$1" ${arguments[$1]} --checkpoint "$tmp/$1"
  expect 0 "$1"
  mv "$tmp/out" "$tmp/$1.log"
}

predictions() { # predictions <file>: prints the model's answers without the expected ones
  jq -c 'select(.event == "prediction") | [.index, .label, .words, .scores]' "$1"
}
evaluated() { # evaluated <file> <fields>: prints the fields of the last evaluation
  jq -c "select(.event == \"eval\") | [$2]" "$1" | tail -n 1 | grep . || echo "no evaluation in $1 ($RANDOM)"
}

# train_and_use <command>: checks that --eval-only and predict give the numbers of the training.
train_and_use() {
  local command=$1 where name fields
  train "$command"
  for where in "" --local; do
    name="$command $where --eval-only"
    # shellcheck disable=SC2086
    run $command $where --resume "$tmp/$command" --eval-only
    expect 0 "$name"
    expect_log "$name"
    expect_jq '(map(.event) | any(. == "epoch" or . == "step") | not) and .[-1].steps == 0' "$name: no training"
    # --local does not split the examples between trainers, so losses are summed in another order.
    fields=.set,.epoch,.step,.loss,.accuracy,.perplexity,.samples,.words
    [[ -z $where ]] || fields=.set,.epoch,.step,.accuracy,.samples,.words
    [[ $(evaluated "$tmp/out" "$fields") == "$(evaluated "$tmp/$command.log" "$fields")" ]] ||
      fail "$name: $(evaluated "$tmp/out" "$fields"), not $(evaluated "$tmp/$command.log" "$fields")"
  done

  name="predict, of $command"
  run predict "$tmp/$command" "${inputs[$command]}"
  expect 0 "$name"
  expect_log "$name"
  fields=.accuracy,.perplexity
  [[ $(jq -c "select(.event == \"end\") | [$fields]" "$tmp/out") == "$(evaluated "$tmp/$command.log" "$fields")" ]] ||
    fail "$name: $(tail -n 1 "$tmp/out"), not $(evaluated "$tmp/$command.log" "$fields")"
  expect_jq '[.[] | select(.event == "prediction").index] | length > 0 and . == [range(length)]' "$name: all examples"
  expect_jq ".[-1].predicted == ([.[] | select(.event == \"prediction\")] | length) and .[-1].cmd == \"$command\"" "$name: end"
  expect_jq '[.[] | select(.event == "prediction").scores | add] | length > 0 and all(. > 0 and . < 1.00001)' "$name: probabilities"
  predictions "$tmp/out" >"$tmp/$command.file"
  # shellcheck disable=SC2002  # a pipe
  cat "${inputs[$command]}" | "$distrain" predict "$tmp/$command" >"$tmp/out" || fail "$name from stdin"
  [[ $(predictions "$tmp/out") == "$(cat "$tmp/$command.file")" ]] || fail "$name from stdin: others"
}

case_hybrid() {
  train_and_use hybrid

  # Without a file, predict tells the user that it reads from the terminal.
  if command -v script >/dev/null; then
    on_terminal "timeout --foreground $limit '$distrain' predict '$tmp/hybrid'"
    grep -q 'reading examples from standard input; end with Ctrl-D' "$tmp/tty" || fail "predict from a terminal: $(cat "$tmp/tty")"
  fi

  # Without labels the predictions are the same, but there is no accuracy.
  sed 's/__label__[abc] //' "$tmp/test" >"$tmp/unlabelled"
  run predict "$tmp/hybrid" "$tmp/unlabelled"
  expect 0 "no labels"
  [[ $(predictions "$tmp/out") == "$(cat "$tmp/hybrid.file")" ]] || fail "no labels: others"
  expect_jq 'all(.[]; has("expected") or has("accuracy") | not) and .[-1].predicted == 83' "no labels"
}

case_ps() {
  train_and_use ps
  run predict "$tmp/ps" "$tmp/images"
  expect 0 "a folder"
  [[ $(predictions "$tmp/out") == "$(cat "$tmp/ps.file")" ]] || fail "a folder: others"
  run ps --local --data "$tmp/images" --eval-only --resume auto --checkpoint "$tmp/none"
  expect 7 "--eval-only of nothing"
  expect_jq '.[-1].message | startswith("--eval-only: no checkpoint in ")' "--eval-only of nothing"
}

case_rnn() {
  local try
  train_and_use rnn
  for try in 1 2; do
    printf 'the w1\n\nw3 unheard w5\n' | "$distrain" predict "$tmp/rnn" - --generate 6 >"$tmp/generated$try"
  done
  expect_jq 'map(select(.event == "prediction").text | gsub("\n"; " <eos> ") | [scan("[^ ]+")] | length) == [6, 6]' \
    "text" "$tmp/generated1"
  [[ $(jq .text "$tmp/generated1") == "$(jq .text "$tmp/generated2")" ]] || fail "text: another one at the second time"

  # A resumed job accepts old names of options.
  run rnn --local --resume "$tmp/rnn" --emsize 8 --epochs 3
  expect 0 "--emsize with --resume"
  expect_jq '.[0].config.embedding_dim == 8 and .[-1].steps > 0' "--emsize with --resume"
  run rnn --local --resume "$tmp/rnn" --emsize 9
  expect_error 7 bad_data "saved with --embedding-dim 8, not 9" "another --emsize"
}

# predict runs all stages of a pipeline in one process, on images with labels, without labels, and from a folder.
case_pipeline() {
  local trained
  make_images "$tmp/images" 64 20
  run pipeline --data "$tmp/images" --valid-data "$tmp/images" --model resnet18 --image-size 33 --classes 10 \
    --batch-size 16 --num-split 2 --epochs 2 --loss ce --checkpoint "$tmp/pipeline" # the option's old name
  expect 0 pipeline
  trained=$(evaluated "$tmp/out" .accuracy)
  run predict "$tmp/pipeline" "$tmp/images/t10k-images-idx3-ubyte"
  expect 0 "predict, of pipeline"
  expect_log "predict, of pipeline"
  # shellcheck disable=SC2016  # jq's variables
  expect_jq 'map(select(.event == "prediction")) as $told
    | ($told | length == 20 and all(.[]; (.scores | length) == 10 and has("expected")))
    and .[-1].accuracy == ($told | map(select(.label == .expected)) | length / 20)' "predict, of pipeline"
  [[ $(jq -c 'select(.event == "end") | [.accuracy]' "$tmp/out") == "$trained" ]] || fail "predict, of pipeline: not $trained"
  predictions "$tmp/out" >"$tmp/pipeline.file"
  run predict "$tmp/pipeline" - <"$tmp/images/t10k-images-idx3-ubyte"
  [[ $(predictions "$tmp/out") == "$(cat "$tmp/pipeline.file")" ]] || fail "predict, of pipeline, from stdin: others"
  expect_jq '(map(select(.event == "prediction")) | length == 20) and all(.[]; has("expected") or has("accuracy") | not)' \
    "predict, of pipeline, no labels"
  run predict "$tmp/pipeline" "$tmp/images"
  [[ $(predictions "$tmp/out") == "$(cat "$tmp/pipeline.file")" ]] || fail "predict, of pipeline, a folder: others"

  run pipeline --resume "$tmp/pipeline" --num_split 3
  expect_error 7 bad_data "saved with --micro-batches 2, not 3" "another --num_split"
}

# The policy of rl plays the same episodes each time.
case_rl() {
  local try
  run rl --max-episodes 30 --checkpoint "$tmp/rl"
  expect 11 rl
  for try in 1 2; do
    run predict "$tmp/rl"
    expect 0 "predict, of rl"
    expect_log "predict, of rl"
    jq -c 'select(.event == "prediction") | [.index, .reward, .steps]' "$tmp/out" >"$tmp/played$try"
  done
  cmp -s "$tmp/played1" "$tmp/played2" || fail "predict, of rl: not the same twice"
  # shellcheck disable=SC2016  # jq's variables
  expect_jq 'map(select(.event == "prediction")) as $told | ($told | length == 10 and all(.[]; .reward == .steps and .reward >= 8))
    and .[-1].predicted == 10 and .[-1].reward == ($told | map(.reward) | add / 10)' "predict, of rl"
  run predict "$tmp/rl" --max-episodes 3
  [[ $(jq -c 'select(.event == "prediction") | [.index, .reward, .steps]' "$tmp/out") == "$(head -n 3 "$tmp/played1")" ]] ||
    fail "predict, of rl: not the first three"
  run predict "$tmp/rl" "$0"
  expect 2 "predict, of rl, of a file"
  run predict "$tmp/rl" --threshold 3
  expect_error 2 invalid "--threshold has no effect on predict" "a threshold"
}

case_refused() {
  local option where
  train hybrid
  run predict
  expect_error 2 invalid "predict needs a checkpoint" predict
  run predict "$tmp/nowhere"
  expect_error 7 bad_data "cannot open $tmp/nowhere: No such file or directory" "no checkpoint"
  run predict "$tmp/hybrid" "$tmp/nowhere"
  expect 7 "no input"
  run predict "$tmp/hybrid" "$tmp/test" --embedding-dim 3
  expect_error 7 bad_data "saved with --embedding-dim 16, not 3" "another model"
  run predict "$tmp/hybrid" "$tmp/test" --lr 0.1
  expect_error 2 invalid "--lr has no effect on predict" "a learning rate"
  for option in "optimizer sgd" "momentum 0" "weight-decay 0" "clip 0" "clip 1"; do # with the saved value or another one
    # shellcheck disable=SC2086
    run predict "$tmp/hybrid" "$tmp/test" --$option
    expect_error 2 invalid "--${option% *} has no effect on predict" "--$option"
  done
  run predict "$tmp/hybrid" "$tmp/nowhere" --trace "$tmp/nowhere/trace.json"
  expect_error 9 resources "--trace: " "a trace that cannot be written, before the input is read"
  run predict "$tmp/hybrid" "$tmp/test" --rank 0
  expect_error 2 invalid "--rank has no effect on predict" "a rank"
  run hybrid --eval-only
  expect_error 2 invalid "--eval-only needs --resume" "--eval-only alone"
  run hybrid --local --epochs 1 --checkpoint "$tmp/random"
  expect 0 "random batches"
  run predict "$tmp/random" "$tmp/test"
  expect 7 "a model without words"
  expect_jq '.[-1].message | endswith(": its model was not trained on text (--data FILE)")' "a model without words"
  for where in "" --local; do
    # shellcheck disable=SC2086
    run hybrid $where --resume "$tmp/random" --eval-only
    expect 2 "$where no test data"
    expect_jq '.[-1].message | endswith("--eval-only: the job has no data to evaluate on")' "$where no test data"
  done
}

# Truncated checkpoints, and other files in their place.
case_damaged() {
  local file damage newest name
  train hybrid
  for file in manifest.json model.safetensors vocabulary.safetensors; do
    for damage in "truncate -s 40" "truncate -s -1" "cp $0"; do
      rm -rf "$tmp/hostile"
      cp -r "$tmp/hybrid" "$tmp/hostile"
      newest=$(find "$tmp/hostile" -name 'step-*' | sort | tail -n 1)
      $damage "$newest/$file"
      name="predict, $damage $file"
      run predict "$tmp/hostile" "$tmp/test"
      expect 7 "$name"
      expect_log "$name"
      expect_jq '.[-1] | .kind == "bad_data" and (.message | test("; the one before it is intact: predict .*/step-[0-9]*$"))' "$name"
      [[ $(wc -l <"$tmp/err") == 1 ]] || fail "$name: not one line on stderr: $(head -c 300 "$tmp/err")"
    done
  done
  run predict "$(sed 's/.*predict //' "$tmp/err")" "$tmp/test"
  expect 0 "the one before it"
}

run_cases
