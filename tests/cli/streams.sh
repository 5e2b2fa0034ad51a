#!/bin/bash
# ctest: labels=asan
# Streamed training data: several files, gzip, pipes, the standard input, and what can be wrong with them.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

for i in {1..90}; do echo "__label__$((i % 2)) w$((i % 7)) v$((i % 11))"; done >"$tmp/all"
for i in 1 2; do sed -n "$((45 * i - 44)),$((45 * i))p" "$tmp/all" | gzip >"$tmp/part$i.gz"; done
hashed=(hybrid --task binary --hash-bits 16 --epochs 1 --batch-size 8 --embedding-dim 4 --in-memory 0)
pipe=("${hashed[@]}" --trainers 1 --data-format fasttext --labels "0,1")
samples='[.[] | select(.event == "epoch") | .samples] | add'

# bad <message> <path>...: expects that training on the files fails with the message.
bad() {
  run "${hashed[@]}" --trainers 1 --data "${@:2}"
  expect 7 "$1"
  expect_jq '.[-1] | .kind == "bad_data" and .exit_code == 7' "$1"
  grep -qF "$1" "$tmp/err" || fail "$1: $(cat "$tmp/err")"
  [[ $(wc -l <"$tmp/err") == 1 ]] || fail "$1: more than one line: $(cat "$tmp/err")"
  expect_no_process "$1"
}

case_files() {
  local data
  for data in "$tmp/part?.gz" "$tmp/part1.gz,$tmp/part2.gz" "$tmp/all"; do
    run "${hashed[@]}" --data "$data"
    expect 0 "$data"
    expect_jq "($samples) == 90" "$data: each example once"
    expect_jq 'any(.[]; .event == "epoch" and .data_wait_s >= 0)' "$data: data_wait_s"
  done
  run "${hashed[@]}" --data "$tmp"/part?.gz # expanded by the shell
  expect 0 "two values"
  run "${hashed[@]}" --data "$tmp/part1.gz" --data "$tmp/part2.gz" --steps-per-epoch 2 --epochs 3
  expect 0 "two options"
  expect_jq '[.[] | select(.event == "epoch") | .steps] == [2, 2, 2, 2, 2, 2]' "--steps-per-epoch"
  run hybrid --data "$tmp/part1.gz" --data "$tmp/part2.gz" --epochs 1
  expect 0 "a vocabulary of words"
  expect_jq "($samples) == 90" "a vocabulary of words"
}

case_other_trainers() {
  local from name again=(--checkpoint "$tmp/saved" --resume auto)
  for from in each rank0; do
    name="--data-from $from, resumed by one trainer"
    rm -rf "$tmp/saved"
    run "${hashed[@]}" --data "$tmp/all" --data-from "$from" --steps 3 --checkpoint "$tmp/saved"
    expect 0 "$name"
    run hybrid "${again[@]}" --epochs 1 --trainers 1
    expect 0 "$name"
    expect_jq '[.[] | select(.event == "warn") | .message | select(contains("saved with --trainers 2, not 1: no example"))] | length == 1' "$name"
    expect_jq "($samples) == 90 - 3 * 8 * 2" "$name: each example once"
  done
  rm -rf "$tmp/saved"
  run "${hashed[@]}" --data "$tmp/all" --steps-per-epoch 2 --checkpoint "$tmp/saved"
  run hybrid "${again[@]}" --epochs 2 --trainers 1
  expect 7 "another number of trainers with --steps-per-epoch"
  grep -q 'saved with --trainers 2, not 1: leave --trainers out' "$tmp/err" || fail "no reason: $(cat "$tmp/err")"
}

case_predict() {
  local row
  run "${hashed[@]}" --data "$tmp/all" --checkpoint "$tmp/saved"
  sed 's/__label__. //' "$tmp/all" >"$tmp/unlabelled"
  run predict "$tmp/saved" "$tmp/unlabelled"
  expect 0 "texts without labels"
  expect_jq '([.[] | select(.event == "prediction")] | length) == 90' "texts without labels"
  row=$(printf '1%s' "$(printf '\t5%.0s' {1..13})$(printf '\tab%.0s' {1..26})")
  for _ in {1..20}; do echo "$row" && echo "0${row#1}c"; done >"$tmp/criteo"
  run "${hashed[@]}" --data "$tmp/criteo" --checkpoint "$tmp/clicks"
  run predict "$tmp/clicks" "$tmp/criteo"
  expect_jq '([.[] | select(.event == "prediction")] | length) == 40 and .[-1].status == "ok"' "Criteo rows"
}

case_pipes() {
  run "${pipe[@]}" --data - <"$tmp/all"
  expect 0 "standard input"
  expect_jq "($samples) == 90" "standard input"
  run "${pipe[@]}" --local --data - <"$tmp/all"
  expect_jq "($samples) == 90" "standard input of --local"
  mkfifo "$tmp/fifo"
  cat "$tmp/all" >"$tmp/fifo" &
  run "${pipe[@]}" --data "$tmp/fifo"
  expect_jq "($samples) == 90" "a FIFO"
  bad "$tmp/fifo: no process writes to this pipe" "$tmp/fifo" --data-format fasttext --labels 0,1
  run "${pipe[@]}" --data - --trainers 3 <"$tmp/all"
  expect_jq "($samples) == 90" "three trainers"
  run "${pipe[@]}" --data - --trainers 2 --data-from each
  expect_error 2 invalid "one process can read a pipe" "--data-from each"
  run "${pipe[@]}" --data - --epochs 3 --steps-per-epoch 5 --checkpoint "$tmp/cut" <"$tmp/all"
  expect 0 "epochs of a pipe"
  expect_jq '[.[] | select(.event == "epoch") | .steps] == [5, 5, 2]' "epochs of a pipe"
  run "${pipe[@]}" --data - --epochs 2
  expect_error 2 invalid "a pipe can be read once" "two epochs"
  run "${pipe[@]}" --data - --checkpoint "$tmp/saved" --max-restarts 1
  expect_error 2 invalid "--max-restarts cannot go on" "--max-restarts"
  run "${pipe[@]}" --data - --checkpoint "$tmp/saved" --resume auto
  expect_error 2 invalid "--resume cannot go on" "--resume"
  run "${hashed[@]}" --trainers 1 --data -
  expect_error 2 invalid "give --data-format" "a format"
  run "${hashed[@]}" --trainers 1 --data - --data-format fasttext
  expect_error 2 invalid "give --labels" "labels"
  run hybrid --trainers 1 --data - --epochs 1
  expect_error 2 invalid "give --hash-bits" "words"
}

case_bad() {
  local row
  printf '\x1f' >"$tmp/nothing"
  head -c 100 "$tmp/part1.gz" >"$tmp/cut.gz"
  : >"$tmp/empty"
  mkdir "$tmp/folder"
  (cat "$tmp/all" && echo 'no label') >"$tmp/unlabelled"
  (cat "$tmp/all" && echo '__label__2 x') >"$tmp/three"
  row=$(printf '1%s' "$(printf '\t5%.0s' {1..13})$(printf '\tab%.0s' {1..26})")
  (echo "$row" && echo "$row" | cut -f 1-39) >"$tmp/short"
  (echo "$row" && echo "2${row#1}") >"$tmp/label"
  (echo "$row" && echo "${row/5/x}") >"$tmp/number"
  bad "$tmp/cut.gz: the gzip file is cut short" "$tmp/part1.gz" "$tmp/cut.gz"
  bad "$tmp/empty: an empty file" "$tmp/all" "$tmp/empty"
  bad "$tmp/folder: a folder" "$tmp/all" "$tmp/folder"
  bad "$tmp/unlabelled:91:1: no __label__NAME" "$tmp/unlabelled"
  bad "the number of labels is 3" "$tmp/three"
  bad "$tmp/short:2:" "$tmp/short"
  bad "$tmp/label:2:1: " "$tmp/label"
  bad "$tmp/number:2:3: " "$tmp/number"
  bad "no file matches this pattern" "$tmp/n*.gz"
  run "${hashed[@]}" --data "$tmp/short" --bad-rows skip --trainers 1
  expect 0 "--bad-rows skip"
  expect_jq "($samples) == 1 and .[-1].bad_rows == 1" "--bad-rows skip"
  expect_jq "any(.[]; .event == \"warn\" and (.message | contains(\"$tmp/short:2:\")))" "--bad-rows skip"
  run "${hashed[@]}" --data "$tmp/part1.gz" --data-from each
  expect 7 "fewer gzip files than trainers"
  expect_jq '.[-1].message | contains("1 file is too few for 2 trainers")' "fewer gzip files"
  run "${hashed[@]}" --data "$tmp/part1.gz"
  expect_jq "($samples) == 45" "one gzip file for two trainers"
  run hybrid --data "$tmp/short,$tmp/label" --epochs 1
  expect_error 2 invalid "$tmp/short: Criteo's format needs --hash-bits" "Criteo without --hash-bits"
  run "${hashed[@]}" --data "$tmp/all" --labels a,a
  expect_error 2 invalid "--labels: expected two or more different names" "labels"
}

run_cases
