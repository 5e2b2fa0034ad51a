#!/bin/bash
# ctest: timeout=300
# distrain rnn: random batches, a text, generated text, invalid data.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

run rnn
expect 0 "random batches"
expect_log "random batches"
[[ -s $tmp/err ]] && { fail "random batches: wrote to stderr:"; head -n 5 "$tmp/err"; }
expect_jq '[.[] | select(.event == "start")] | (map(.rank) | sort) == [0,1]
  and all(.[].config; .vocab_size == 10 and .nhid == 3 and .lr == 0.05 and .data == null)' "start lines"
expect_jq '[.[] | select(.event == "rank_end")] | (map(.role) | sort) == ["ps","trainer1"]' "rank_end lines"
expect_jq '[.[] | select(.event == "epoch")] | length == 10
  and all(.[]; .rank == 1 and .steps == 5 and .perplexity > 1)' "epoch lines"
expect_jq '.[-1] | .steps == 50 and .perplexity > 1 and .rpc.calls > 0 and .live_rrefs == 0
  and .live_contexts == 0' "end"
run rnn --trainers 2 --epochs 2 --mode sync
expect 0 "two trainers"
expect_jq '.[-1].steps == 20' "two trainers"
run rnn --generate 5 --epochs 1
expect 0 "--generate without --data"
expect_jq '[.[] | select(.event == "warn")] | length == 1 and (.[0].message | test("--generate"))' \
  "--generate without --data"

make_text 60 >"$tmp/train"
make_text 12 >"$tmp/valid"
text=(rnn --data "$tmp/train" --valid-data "$tmp/valid" --embedding-dim 8 --nhid 8 --batch-size 4 --bptt 5
  --log-interval 1)
run "${text[@]}" --epochs 2 --generate 6 --prompt "the w5"
expect 0 "a text"
expect_log "a text"
[[ -s $tmp/err ]] && { fail "a text: wrote to stderr:"; head -n 5 "$tmp/err"; }
expect_jq '[.[] | select(.event == "start")] | length == 2 and all(.[].config; .vocab_size == 10000 and .nlayers == 2
  and .clip == 0.25 and .lr == 20)' "a text: config"
expect_jq '[.[] | select(.event == "step")] | length > 10 and all(.[]; .words_per_s > 0)' "a text: step lines"
expect_jq '[.[] | select(.event == "eval")] | length == 2 and all(.[]; .perplexity > 1 and .words > 50)' \
  "a text: eval lines"
expect_jq '[.[] | select(.event == "text")] | length == 1 and (.[0].text | test("^the w5 .*[a-z.<]"))' \
  "a text: sample"
expect_jq '.[-1] | .perplexity > 1 and .words_per_s > 0' "a text: end"

# The same seed generates the same text.
jq -r 'select(.event == "text").text' "$tmp/out" >"$tmp/sample"
run "${text[@]}" --epochs 2 --generate 6 --prompt "the w5"
jq -r 'select(.event == "text").text' "$tmp/out" | cmp -s - "$tmp/sample" || fail "another sample from the same seed"

# sync mode and --local give the same results.
for where in "" --local; do
  # shellcheck disable=SC2086
  run "${text[@]}" --trainers 2 --mode sync --dropout 0 --lr 1 --steps 8 $where
  expect 0 "dropout 0 $where"
  jq -r 'select(.event == "end").steps' "$tmp/out" | grep -qx 16 || fail "--steps 8 $where"
  jq -r 'select(.event == "eval").loss' "$tmp/out" | tail -n 1
done >"$tmp/losses"
grep FAILED "$tmp/losses"
jq -es 'length == 2 and (.[0] - .[1] | fabs) < 1e-4' "$tmp/losses" >/dev/null ||
  fail "sync and --local differ: $(tr '\n' ' ' <"$tmp/losses")"

# Ranks that join inherit the text and cannot give another one.
port=$(free_port)
timeout "$limit" "$distrain" rnn --rank 1 --master-port "$port" >"$tmp/rank1" 2>&1 &
run "${text[@]}" --rank 0 --master-port "$port" --steps 3
expect 0 "ranks that join"
wait $!
code=$?
expect 0 "ranks that join"
port=$(free_port)
timeout "$limit" "$distrain" rnn --rank 1 --master-port "$port" --data "$tmp/train" >"$tmp/rank1" 2>"$tmp/err1" &
run rnn --rank 0 --master-port "$port"
wait $!
code=$?
expect 3 "--data on a trainer alone"
expect_log "--data on a trainer alone" "$tmp/rank1"

# Bad data.
run rnn --data "$tmp/nowhere"
expect_error 7 bad_data "--data $tmp/nowhere: No such file" "missing --data"
run rnn --data "$tmp"
expect_error 7 bad_data "is a folder, a file is needed" "--data is a folder"
run rnn --data "$tmp/train" --valid-data "$tmp/nowhere"
expect_error 7 bad_data "--valid-data" "missing --valid-data"
echo word >"$tmp/short"
for where in "" --local; do
  # shellcheck disable=SC2086
  run rnn --data "$tmp/short" $where
  expect 7 "a text of one word $where"
  expect_log "a text of one word $where"
  expect_jq '.[-1].kind == "bad_data"' "a text of one word $where"
done
run rnn --data "$tmp/train" --in-memory 1.5GB
expect_error 2 invalid "--in-memory 1.5GB: not a number of bytes" "--in-memory 1.5GB"

# Files that are read while training give the same numbers as files in memory.
numbers() { jq -c 'select(.event == "step" or .event == "eval") | [.event, .rank, .epoch, .step, .loss, .perplexity]' "$tmp/out" | sort; }
text+=(--mode sync --trainers 2 --epochs 1)
run "${text[@]}"
expect 0 "a text in memory"
numbers >"$tmp/numbers"
[[ $(wc -l <"$tmp/numbers") -gt 10 ]] || fail "no steps"
run "${text[@]}" --in-memory 0
expect 0 "--in-memory 0"
expect_log "--in-memory 0"
numbers | cmp -s - "$tmp/numbers" || fail "--in-memory 0: other numbers"

# refused <words> <name>: checks that a rank has ended the job because of bad data.
refused() {
  expect 7 "$2"
  # shellcheck disable=SC2016  # jq's variable
  jq -es --arg words "$1" '.[-1] | .kind == "bad_data" and (.message | contains($words))' "$tmp/out" >/dev/null ||
    fail "$2: $(tail -n 1 "$tmp/out" | cut -c1-500)"
}

# A compressed text is read into memory.
gzip -c "$tmp/train" >"$tmp/train.gz"
run "${text[@]}" --data "$tmp/train.gz"
expect 0 "gzip"
numbers | cmp -s - "$tmp/numbers" || fail "gzip: other numbers"
run "${text[@]}" --data "$tmp/train.gz" --in-memory 500
refused "train.gz: longer than the 500 bytes of --in-memory: unpack it with gunzip" "a long text"
run "${text[@]}" --data "$tmp/train.gz" --in-memory 0
refused "train.gz: longer than the 0 bytes of --in-memory: unpack it with gunzip" "gzip with --in-memory 0"

# A file of token numbers.
# shellcheck disable=SC2059  # the format has the bytes
for ((i = 0; i < 400; ++i)); do printf "\\x$((i % 10))\\0"; done >"$tmp/train.bin"
run rnn --data "$tmp/train.bin"
expect_error 2 invalid "a .bin file needs --vocab-size" "no --vocab-size"
bin=(rnn --data "$tmp/train.bin" --vocab-size 10 --embedding-dim 8 --nhid 8 --batch-size 4 --bptt 5 --lr 1)
run "${bin[@]}" --valid-data "$tmp/valid"
expect_error 2 invalid "must be a .bin file, as --data is" "a text and a .bin file"
run "${text[@]}" --valid-data "$tmp/train.bin"
expect_error 2 invalid "must be a text, as --data is" "a .bin file and a text"
run "${bin[@]}" --vocab-size 9
refused "train.bin: token 9 is 9, but the vocabulary has the numbers from 0 to 8" "too few words"
run "${bin[@]}" --generate 3 --prompt "1 10"
refused "--prompt: '10' is not the number of a token below 10" "a prompt with another number"
head -c 201 "$tmp/train.bin" >"$tmp/odd.bin"
run "${bin[@]}" --data "$tmp/odd.bin"
refused "odd.bin: 201 bytes are not a whole number of tokens of 2 bytes" "half a token"
run "${bin[@]}" --valid-data "$tmp/train.bin" --epochs 8 --checkpoint "$tmp/saved"
expect 0 ".bin"
expect_log ".bin"
trained=$(jq -c 'select(.event == "eval") | [.perplexity]' "$tmp/out" | tail -n 1)
run predict "$tmp/saved" "$tmp/train.bin"
expect 0 "predict a .bin file"
[[ $(jq -c 'select(.event == "end" and .predicted == 0) | [.perplexity]' "$tmp/out") == "$trained" ]] ||
  fail "predict a .bin file: $(tail -n 1 "$tmp/out"), not $trained"
echo 3 4 5 | "$distrain" predict "$tmp/saved" - --generate 4 >"$tmp/out" || fail "predict numbers"
expect_jq '[.[] | select(.event == "prediction").text | test("^[0-9]( [0-9]){3}$")] == [true]' "predict numbers"
run rnn --resume "$tmp/saved" --epochs 9 --in-memory 0
expect 0 "resume with a .bin file"
expect_no_process "rnn"
finish
