#!/bin/bash
# `distrain schema`, and check_lines.py, which must find lines that do not match it.
# Not under asan, because unit_app makes the same text under asan.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

"$distrain" schema >"$tmp/schema" || fail "distrain schema: exit code $?"
jq -e '.["$schema"] == "https://json-schema.org/draft/2020-12/schema"
  and ([.oneOf[] | .additionalProperties] | length > 0 and all(. == false))
  and ([.oneOf[].properties[] | .description | type] | length > 0 and all(. == "string"))
  and ([.oneOf[] | .properties.event.const as $event | .properties.cmd.enum[] | "\($event) \(.)"]
    | length > 0 and length == (unique | length))' "$tmp/schema" >/dev/null || fail "the schema is not closed, told and one a line"
run schema step
expect 0 "schema step"
jq -e '[.oneOf[].properties.event.const] | unique == ["step"]' "$tmp/out" >/dev/null || fail "schema step has others"

run hybrid --epochs 1 --batches-per-epoch 2 --log-interval 1
expect 0 hybrid
expect_log hybrid
jq -c 'select(.event == "step")' "$tmp/out" | head -n 1 >"$tmp/step"
jq -c 'select(.event == "end")' "$tmp/out" >"$tmp/end"

# check <words|none> <file> <filter>: applies the filter to the file's line and checks the reported problem.
check() {
  local said
  jq -c "$3" "$tmp/$2" >"$tmp/line"
  said=$(python3 "$root/tests/support/check_lines.py" "$tmp/schema" "$tmp/line") && said="none: $said"
  [[ $said == *"$1"* ]] || fail "$2 | $3: '$said', not '$1'"
  rm "$tmp/line"
}
check "none: 1 lines" step .
check "none: 1 lines" end .
check "none: 1 lines" step '.loss = null'
check "step has loss_s, which is not in the schema" step '.loss_s = 1'
check "step lacks loss" step 'del(.loss)'
check "step lacks role" step 'del(.role)'
check "epoch is \"1\", not of type integer" step '.epoch = "1"'
check "v is 2, not 1" step '.v = 2'
check "0 kinds of line in the schema are stride of hybrid" step '.event = "stride"'
check "0 kinds of line in the schema are step of rl" step '.cmd = "rl"'
check "rpc lacks calls" end 'del(.rpc.calls)'
check "rpc has calles, which is not in the schema" end '.rpc.calles = 1'
check "end has solved, which is not in the schema" end '.solved = true'
echo '{"v":1,"ts":2,"event":"step"}}' >"$tmp/broken"
said=$(python3 "$root/tests/support/check_lines.py" "$tmp/schema" "$tmp/broken") && fail "a broken line passes"
[[ $said == "no line of a job"* ]] || fail "a broken line: $said"
rm "$tmp/broken"
finish
