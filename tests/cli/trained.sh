#!/bin/bash
# A trained model is used: --eval-only gives what training printed.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

# make_examples <lines> <seed>: of three labels, which a word in two gives away.
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
make_examples 200 1 >"$tmp/examples"
make_examples 83 2 >"$tmp/test"
make_images "$tmp/images" 64 20
make_text 60 >"$tmp/text"
make_text 23 >"$tmp/valid"
declare -A arguments=(
  [hybrid]="--data $tmp/examples --test-data $tmp/test --epochs 2 --optimizer adagrad --batch-size 8"
  [ps]="--data $tmp/images --batch-size 4"
  [rnn]="--data $tmp/text --valid-data $tmp/valid --trainers 2 --epochs 2 --emsize 8 --nhid 8 --batch-size 4 --bptt 5")

evaluated() { # evaluated <file> <fields>: of the last evaluation
  jq -c "select(.event == \"eval\") | [$2]" "$1" | tail -n 1
}

for command in hybrid ps rnn; do
  # shellcheck disable=SC2086
  run $command ${arguments[$command]} --checkpoint "$tmp/$command"
  expect 0 "$command"
  mv "$tmp/out" "$tmp/$command.log"
  for where in "" --local; do
    name="$command $where --eval-only"
    # shellcheck disable=SC2086
    run $command $where --resume "$tmp/$command" --eval-only
    expect 0 "$name"
    expect_log "$name"
    expect_jq '(map(.event) | any(. == "epoch" or . == "step") | not) and .[-1].steps == 0' "$name: no training"
    # In one process the shares of the trainers are one, so that losses are summed in another order.
    fields=.loss,.accuracy,.perplexity,.samples
    [[ -z $where ]] || fields=.accuracy,.samples
    [[ $(evaluated "$tmp/out" $fields) == "$(evaluated "$tmp/$command.log" $fields)" ]] ||
      fail "$name: $(evaluated "$tmp/out" $fields), not $(evaluated "$tmp/$command.log" $fields)"
  done
done

run hybrid --eval-only
expect_error 2 invalid "--eval-only needs --resume" "--eval-only alone"
run ps --local --eval-only --resume auto --checkpoint "$tmp/none"
expect 7 "--eval-only of nothing"
expect_jq '.[-1].message | startswith("--eval-only: no checkpoint in ")' "--eval-only of nothing"
run hybrid --local --epochs 1 --checkpoint "$tmp/random"
expect 0 "random batches"
for where in "" --local; do
  # shellcheck disable=SC2086
  run hybrid $where --resume "$tmp/random" --eval-only
  expect 2 "$where no test data"
  expect_jq '.[-1].message | endswith("--eval-only: the job has no data to evaluate on")' "$where no test data"
done
finish
