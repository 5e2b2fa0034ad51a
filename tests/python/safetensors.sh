#!/bin/bash
# ctest: timeout=900
# Python's safetensors reads checkpoints, and PyTorch's own ConvNet with those weights has the accuracy that
# distrain reported.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

newest() { printf '%s\n' "$1"/step-* | tail -n 1; }
convnet() { "$python" "$root/tests/python/convnet.py" "$@"; }

mkdir "$tmp/images"
convnet images "$tmp/images" || fail "convnet.py images"
for mode in sync async; do
  run ps --data "$tmp/images" --mode $mode --epochs 2 --checkpoint "$tmp/$mode"
  expect 0 "ps --mode $mode"
  convnet evaluate "$tmp/images" "$(newest "$tmp/$mode")" >"$tmp/python" || fail "evaluate $mode"
  jq -es '.[-1] as $python | map(select(.event == "end"))[0] as $last
    | map(select(.event == "eval"))[-1] as $eval
    | (($last.accuracy - $python.accuracy) | fabs) < 1e-6
      and (($eval.loss - $python.loss) | fabs) < 1e-4 and $last.accuracy > 0.2' \
    "$tmp/out" "$tmp/python" >"$tmp/verdict" ||
    fail "$mode: $(tail -n 1 "$tmp/out" | jq .accuracy) is not PyTorch's $(cat "$tmp/python")"
done

# Checkpoints of the other jobs.
run hybrid --epochs 1 --optimizer adam --checkpoint "$tmp/hybrid"
expect 0 hybrid
convnet inspect "$(newest "$tmp/hybrid")" | jq -e '
  .["model.safetensors"] == {"embedding.weight": [100, 16], "fc.bias": [8], "fc.weight": [8, 16]}
  and .["optimizer.safetensors"]["fc.weight.exp_avg"] == [8, 16]' >"$tmp/verdict" ||
  fail "hybrid: $(convnet inspect "$(newest "$tmp/hybrid")")"
run hybrid --epochs 1 --optimizer adagrad --servers 2 --checkpoint "$tmp/tables"
expect 0 "hybrid with tables"
index=$(newest "$tmp/tables")/table.safetensors.index.json
convnet inspect "$(newest "$tmp/tables")" | jq -e --slurpfile index "$index" '
  . as $files | [$index[0].weight_map | to_entries[] | $files[.value][.key]] as $shapes
  | ($shapes | all(length >= 1)) and ($index[0].metadata.servers == 2)
  and ([.[] | (.["embedding.weight.00001"], .["embedding.weight.00002"]) | values | .[1]] == [16, 16])
  and (.["table-00001-of-00002.safetensors"]["embedding.sum.00001"][1] == 16)' >"$tmp/verdict" ||
  fail "tables: $(convnet inspect "$(newest "$tmp/tables")")"
run rnn --epochs 1 --checkpoint "$tmp/rnn"
expect 0 rnn
convnet inspect "$(newest "$tmp/rnn")" | jq -e '.["model.safetensors"] | (keys | length) == 19
  and .["encoder.weight"] == [10, 2] and .["rnn.weight_hh_l3"] == [12, 3]
  and .["decoder.weight"] == [10, 3]' >"$tmp/verdict" ||
  fail "rnn: $(convnet inspect "$(newest "$tmp/rnn")")"
finish
