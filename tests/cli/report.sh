#!/bin/bash
# ctest: labels=asan timeout=180
# distrain report: the data in the page, verdicts, hostile logs, limits and errors. tests/browser opens the pages.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

# report <name> <argument>...: makes a page and writes the data in it to $tmp/data.
report() {
  local name=$1
  shift
  rm -f "$tmp/page.html"
  run report "$@" -o "$tmp/page.html"
  expect 0 "$name"
  [[ ! -s $tmp/out && ! -s $tmp/err ]] || fail "$name: wrote to stdout or stderr"
  sed -n 's/^<script type="application\/json" id="data">\(.*\)<\/script>$/\1/p' "$tmp/page.html" >"$tmp/data"
  (($(stat -c %s "$tmp/page.html") <= 2000000)) || fail "$name: the page has more than 2 MB"
}
says() { expect_jq ".[0] | $2" "$1" "$tmp/data"; } # says <name> <filter of the data>

# steps <number>: prints a log of that many steps. Its fields are in another order, so that check_lines leaves it out.
steps() {
  awk -v lines="$1" 'BEGIN { for (i = 1; i <= lines; ++i) printf "{\"ts\":%.3f,\"v\":1,\"run\":\"long\",\"event\":\"step\"," \
    "\"cmd\":\"ps\",\"rank\":1,\"role\":\"trainer1\",\"epoch\":1,\"step\":%d,\"loss\":%.6f,\"lr\":0.03,\"samples_per_s\":%d," \
    "\"staleness\":%d,\"version\":%d,\"delay\":0}\n", 1.7e9 + i / 100, i, i == 77777 ? 9 : 2 / (1 + i / 9000) + i % 7 / 50, \
    300 + i % 11, i == 55555 ? 42 : i % 3, i }'
}

case_runs() {
  local lines r
  run hybrid --data teacher --epochs 3 --log-interval 1 --trace "$tmp/trace"
  expect 0 "a run"
  cp "$tmp/out" "$tmp/one.jsonl"
  report "a run" "$tmp/one.jsonl" --trace "$tmp/trace"
  lines=$(grep -c '"event":"step"' "$tmp/one.jsonl")
  says "points" "[.runs[].tables[] | select(.event == \"step\") | (.columns.loss | length)] | add == $lines and length == 2"
  says "evaluations" '[.runs[].tables[] | select(.event == "eval") | .columns.accuracy[]] | length == 3'
  says "the losses are those of the log" "[.runs[].tables[] | select(.event == \"step\" and .rank == 1).columns.loss[0]]
    == [$(jq -s '[.[] | select(.event == "step" and .rank == 1)][0].loss * 1e5 | round / 1e5' "$tmp/one.jsonl")]"
  says "success" '.runs[0].verdict == {"state": "ok", "title": "Finished", "details": []}'
  says "options" '.runs[0].changed | keys == ["data", "epochs", "log_interval", "trace"] and .epochs == "100"'
  says "the trace" '.trace | map(select(.[0] == "step")) | length == 2 and all(.[2] == 30 and .[3] >= .[4] and .[4] > 0)'
  run rnn --data "$root/README.md" --epochs 1 --trainers 1
  cp "$tmp/out" "$tmp/rnn.jsonl"
  report "defaults that depend on --data" "$tmp/rnn.jsonl"
  says "defaults that depend on --data" '.runs[0] | (.changed | keys == ["data", "epochs"]) and .config.epochs == 1 and (.config | has("lr") | not)'
  report "a run" "$tmp/one.jsonl"
  says "CPU time" '[.runs[0].events[] | select(.event == "rank_end").cpu_s] | length == 4 and all(. > 0)'

  for r in 0 1 2 3; do
    "$distrain" hybrid --data teacher --epochs 2 --rank "$r" --job-id "report$$" --join-timeout 60 >"$tmp/rank$r.jsonl" &
  done
  wait
  gzip "$tmp/rank3.jsonl"
  report "a file for each rank" "$tmp"/rank?.jsonl*
  says "one run of four files" '.runs | length == 1 and (.[0] | (.files | length) == 4 and .verdict.state == "ok")'
  says "the job's end" '[.runs[0].events[] | select(.event == "end" and .scope == "job")] | length == 1 and .[0].rank == 0 and .[0].steps == 40'
  report "two runs" "$tmp/one.jsonl" "$tmp"/rank?.jsonl*
  says "two runs" '.runs | length == 2'
  cp "$tmp/one.jsonl" "$tmp/one.log"
  report "the same lines in two files" "$tmp/one.jsonl" "$tmp/one.log"
  says "the same lines in two files" '.runs[0] | (.files | length) == 1 and ([.tables[] | select(.event == "step").lines] | add) == '"$lines"
  "$distrain" report - <"$tmp/one.jsonl" >"$tmp/piped.html" || fail "by a pipe"
  report "the same by names" "$tmp/one.jsonl"
  [[ $(sed 's/"files":\["[^"]*"\]//' "$tmp/page.html" | cksum) == $(sed 's/"files":\["[^"]*"\]//' "$tmp/piped.html" | cksum) ]] ||
    fail "a page by a pipe differs"

  run pipeline --model resnet18 --stages 2 --image-size 32 --batch-size 8 --batches 2 --micro-batches 1,2
  expect 0 "a sweep"
  cp "$tmp/out" "$tmp/sweep.jsonl"
  report "a sweep" "$tmp/sweep.jsonl"
  says "a sweep" '.runs[0] | ([.events[] | select(.event == "split") | .num_split] == [1, 2])
    and .schedules["1"] == "gpipe, 2 stages, 1 micro-batches: 50.0 % bubble\n  stage 1  F0 .  .  B0  (holds 1)\n  stage 2  .  F0 B0 .  (holds 1)\n"'
}

case_verdicts() {
  make_images "$tmp/images" 128 32
  "$distrain" ps --mode sync --data "$tmp/images" --epochs 1000000 --log-interval 1 --peer-timeout 60 >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 4 step "$tmp/out"
  kill -9 "$(pid_of 1)"
  await_end
  expect 137 "a killed rank"
  cp "$tmp/out" "$tmp/killed.jsonl"
  report "a killed rank" "$tmp/killed.jsonl"
  says "a killed rank" '.runs[0].verdict | .state == "failed"
    and .title == "Failed: rank 1 (trainer1) was killed by SIGKILL (kill -9, or out of memory)"
    and (.details[0] | startswith("Kind peer_lost, by SIGKILL, exit code 137"))
    and .details[1] == "Then failed: rank 0 (parameter_server), rank 2 (trainer2)."'
  head -n 12 "$tmp/killed.jsonl" >"$tmp/open.jsonl"
  report "a log without an end" "$tmp/open.jsonl"
  says "a log without an end" '.runs[0].verdict | .state == "open" and (.title | startswith("No end line"))'

  run ps --data "$tmp/images" --lr 1e5
  expect 8 "a loss that is not finite"
  cp "$tmp/out" "$tmp/nan.jsonl"
  report "a loss that is not finite" "$tmp/nan.jsonl"
  says "a loss that is not finite" '.runs[0].verdict | .state == "failed" and (.title | test("^Failed: rank \\d \\(\\w+\\): the loss .*(NaN|not finite)"))'
  run hybrid --data "$tmp/missing"
  cp "$tmp/out" "$tmp/usage.jsonl"
  report "before any rank" "$tmp/usage.jsonl" "$tmp/nan.jsonl"
  says "before any rank" '.runs | length == 2 and .[0].id == "" and (.[0].verdict.title | test("^Failed: --data .*No such file"))'
  run rl --max-episodes 3
  cp "$tmp/out" "$tmp/missed.jsonl"
  report "a goal that is missed" "$tmp/missed.jsonl"
  says "a goal that is missed" '.runs[0].verdict | .state == "missed" and (.title | startswith("Goal not reached: not solved after 3"))'

  # Others lost rank 2, whose own file has the reason.
  cat >"$tmp/others.jsonl" <<'END'
{"ts":1e9,"v":1,"run":"r","event":"start","cmd":"ps","rank":1,"role":"trainer1","config":{}}
{"ts":1000000002,"v":1,"run":"r","event":"error","cmd":"ps","rank":1,"role":"trainer1","kind":"peer_lost","message":"rank 2 is lost: reset","cause_rank":2,"exit_code":5}
{"ts":1000000003,"v":1,"run":"r","event":"end","cmd":"ps","rank":1,"role":"trainer1","status":"failed","scope":"rank","kind":"peer_lost","message":"rank 2 is lost: reset","cause_rank":2,"exit_code":5}
END
  echo '{"ts":1000000001,"v":1,"run":"r","event":"error","cmd":"ps","rank":2,"role":"trainer2","kind":"resources","message":"out of memory: no 9 GB","cause_rank":2,"exit_code":9}' >"$tmp/own.jsonl"
  report "the rank's own reason" "$tmp/others.jsonl" "$tmp/own.jsonl"
  says "the rank's own reason" '.runs | length == 1 and .[0].verdict.title == "Failed: rank 2 (trainer2): out of memory: no 9 GB"'
}

# start_lines <value of an option>: prints the start of 64 runs with 120 such options.
start_lines() {
  for i in $(seq 64); do
    echo "$1" | awk -v i="$i" '{ printf "{\"ts\":1000000000,\"v\":1,\"run\":\"run%d\",\"event\":\"start\",\"cmd\":\"ps\",\"rank\":0,\"config\":{\"i\":%d", i, i
      for (k = 0; k < 120; ++k) printf ",\"option%d\":%s", k, $0; print "}}" }' | sed "s/RUN/$i/g"
  done
}

case_hostile_logs() {
  local nasty='</script><script>alert(1)</script><!-- & <b> \u2028 \" \u0000'
  {
    echo "{\"ts\":1e9,\"v\":1,\"run\":\"<i>$nasty\",\"event\":\"start\",\"cmd\":\"$nasty\",\"rank\":0,\"role\":\"$nasty\",\"config\":{\"$nasty\":\"$nasty\",\"lr\":1}}"
    echo "{\"ts\":1000000001,\"v\":1,\"run\":\"<i>$nasty\",\"event\":\"warn\",\"cmd\":\"ps\",\"rank\":0,\"role\":\"x\",\"kind\":\"$nasty\",\"message\":\"$nasty\"}"
    printf '{"ts":1000000002,"v":1,"run":"big","event":"error","cmd":"ps","rank":1e300,"role":"x","kind":"%s","message":"' k
    head -c 3000000 /dev/zero | tr '\0' 'm'
    printf '","cause_rank":-5}\n{"ts":1000000003,"v":1,"run":"big","event":"warn","message":"'
    head -c 9000000 /dev/zero | tr '\0' 'w'
    printf '"}\n'
    printf '{"ts":1000000003,"v":1,"run":"big","event":"warn","ranks":'
    head -c 100000 /dev/zero | tr '\0' '['
    head -c 100000 /dev/zero | tr '\0' ']'
    printf '}\n'
    head -c 200000 /dev/zero | tr '\0' '['
    printf '\n\377\376 not JSON\n{"other":"program"}\n[1]\n\n{"ts":1e999,"v":1,"event":"step"}\n'
    echo '{"ts":1000000004,"v":1,"run":"big","event":"step","cmd":"ps","rank":{"a":[]},"role":["r"],"step":1e308,"loss":-1e299,"epoch":null}'
    echo '{"ts":1000000004,"v":1,"run":"big","event":"split","cmd":"pipeline","num_split":1e18,"schedule":"gpipe","stage_s":[1]}'
    echo '{"ts":1000000005,"v":1,"run":"big","event":"split","cmd":"pipeline","num_split":4,"schedule":"<b>","stage_s":[1,2]}'
    echo '{"ts":1000000005,"v":1,"run":"big","event":"step","cmd":"ps","rank":1,"loss":0.5,"step":1}'
    printf '{"ts":1000000006,"v":1,"run":"big","event":"st'
  } >"$tmp/hostile.jsonl"
  report "hostile texts" "$tmp/hostile.jsonl"
  # The data is one line between two tags, so a tag of a text would end it early.
  [[ $(grep -c '<script' "$tmp/page.html") == 3 && $(grep -o 'alert(1)' "$tmp/page.html" | wc -l) -gt 2 ]] || fail "a text breaks out"
  grep -q '[<>&]' <(sed 's/^<.*//' "$tmp/data" | tr -d '\n') && fail "the data has characters of HTML"
  says "hostile texts" '.skipped == 7 and (.runs | length == 2) and .runs[1].verdict.state == "failed"
    and (.runs[1].verdict.title | length < 400) and ([.runs[1].tables[] | .columns.loss[]? | values] == [0.5])'
  says "texts stay as they are" '.runs[0].events[1].message | startswith("</script><script>alert(1)</script><!-- & <b> ")'
  grep -q "default-src 'none'" "$tmp/page.html" || fail "no policy forbids requests"

  for i in $(seq 70); do
    echo "{\"ts\":1000000000,\"v\":1,\"run\":\"run$i\",\"event\":\"start\",\"cmd\":\"ps\",\"rank\":0,\"role\":\"x\"}"
  done >"$tmp/many.jsonl"
  report "too many runs" "$tmp/many.jsonl"
  says "too many runs" '(.runs | length) == 64 and .skipped == 6'
  start_lines "\"RUN $(printf 'é%.0s' $(seq 150))\"" >"$tmp/options.jsonl"
  report "long options" "$tmp/options.jsonl"
  says "long options" '(.runs | length == 64) and .runs[5].config.i == 6'
  start_lines "[RUN,$(printf '["<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<<",[["<"]]],%.0s' $(seq 60))0]" >"$tmp/options.jsonl"
  report "nested options" "$tmp/options.jsonl"
  says "nested options" '.runs | length == 64'
}

# Sets $took to the CPU time, which does not depend on other processes as the time until the end does.
timed_report() {
  local TIMEFORMAT='%U %S'
  rm -f "$tmp/timed.html"
  { time "$distrain" report "$tmp/long.jsonl" -o "$tmp/timed.html"; } 2>"$tmp/time"
  took=$(jq -R 'split(" ") | map(tonumber) | add' "$tmp/time")
}

case_long_logs() {
  steps 100000 >"$tmp/long.jsonl"
  sanitized || in_time 3 timed_report
  report "100,000 steps" "$tmp/long.jsonl"
  says "thinned" '.runs[0].tables[0] | .lines == 100000 and (.columns.step | length > 2000 and length < 9000 and .[0] == 1 and .[-1] == 100000)'
  says "extremes are kept" '.runs[0].tables[0].columns | (.loss | max) == 9 and (.staleness | max) == 42'
  # shellcheck disable=SC2016 # a variable of jq
  says "points lie all over the run" '.runs[0].tables[0].columns.step | [range(0; 100) as $i | map(select(. > 1000 * $i and . <= 1000 * ($i + 1))) | length] | min > 10'
  {
    steps 3
    awk 'BEGIN { for (i = 0; i < 20000; ++i) printf "{\"ts\":%.3f,\"v\":1,\"run\":\"long\",\"event\":\"%s\",\"cmd\":\"ps\",\"rank\":0}\n",
      1.7e9 + 1 + i / 100, i % 10 ? "warn" : "prediction" }'
    echo '{"ts":1700001000,"v":1,"run":"long","event":"end","cmd":"ps","rank":0,"status":"ok","scope":"job","steps":3,"exit_code":0}'
  } >"$tmp/chatty.jsonl"
  report "many warnings" "$tmp/chatty.jsonl"
  says "many warnings" '.runs[0] | .verdict.state == "ok" and .events[-1].event == "end" and all(.events[]; .event != "prediction")
    and .hidden_events + (.events | length) == 18001'
  # 60 ranks: the page stays small by fewer points of each.
  local ranks=60
  sanitized && ranks=10
  for i in $(seq "$ranks"); do steps 4000 | sed "s/\"rank\":1,\"role\":\"trainer1\"/\"rank\":$i,\"role\":\"t$i\"/"; done >"$tmp/wide.jsonl"
  report "many ranks" "$tmp/wide.jsonl"
  says "many ranks" '.runs[0].tables | length == '"$ranks"' and all(.columns.step[-1] == 4000)'
}

case_errors() {
  steps 3 >"$tmp/log"
  refuse() { # refuse <exit code> <kind> <words> <argument>...
    run report "${@:4}"
    expect_error "$1" "$2" "$3" "report ${*:4}"
  }
  refuse 2 invalid "report needs a file: distrain report RUN.jsonl... -o report.html"
  refuse 2 invalid "report needs a file" -o "$tmp/page"
  refuse 2 invalid "--output needs a value" "$tmp/log" -o
  refuse 2 invalid "unknown option --tracee; did you mean --trace?" "$tmp/log" --tracee x
  refuse 7 bad_data "$tmp/none: No such file" "$tmp/none" -o "$tmp/page"
  refuse 7 bad_data "$tmp" "$tmp" -o "$tmp/page"
  refuse 7 bad_data "no JSON line of distrain" /dev/null -o "$tmp/page"
  refuse 7 bad_data "no JSON line of distrain" "$tmp/log" "$root/README.md" -o "$tmp/page"
  refuse 7 bad_data "no event of a trace" "$tmp/log" --trace "$tmp/log" -o "$tmp/page"
  refuse 7 bad_data "$tmp/none: No such file" "$tmp/log" --trace "$tmp/none" -o "$tmp/page"
  refuse 9 resources "cannot write $tmp/none/page: No such file or directory" "$tmp/log" -o "$tmp/none/page"
  refuse 9 resources "cannot write /dev/full: No space left on device" "$tmp/log" -o /dev/full
  [[ ! -e $tmp/page ]] || fail "a page is left after an error"
  # A forgotten page name must not cost a log.
  steps 5 >"$tmp/log2"
  refuse 2 invalid "-o $tmp/log2: exists and is not a page of report: it is not replaced" "$tmp/log" -o "$tmp/log2"
  [[ $(wc -l <"$tmp/log2") == 5 ]] || fail "a log was replaced"
  echo '<!DOCTYPE html>' >"$tmp/other.html"
  refuse 2 invalid "-o $tmp/other.html: exists and is not a page of report" "$tmp/log" -o "$tmp/other.html"
  ln -s page "$tmp/link"
  run report "$tmp/log" -o "$tmp/page" && run report "$tmp/log" -o "$tmp/link"
  expect 0 "a page is replaced"
  [[ -L $tmp/link && -z $(find "$tmp" -name '*.tmp') ]] || fail "a link is replaced, or a temporary file is left"
  refuse_reprot() { run reprot "$tmp/log" && expect_error 2 invalid "did you mean report?" reprot; }
  refuse_reprot
  on_terminal "'$distrain' report '$tmp/log'"
  grep -q '^distrain: report needs -o FILE: standard output is a terminal$' "$tmp/tty" || fail "a page for a terminal: $(head -c 300 "$tmp/tty")"
}

run_cases
