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
expect_no_process "rnn"
finish
