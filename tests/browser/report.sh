#!/bin/bash
# ctest: timeout=600
# The pages of distrain report in a headless Chromium, with lines of real runs: report.py says what is checked.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"
command -v chromium >/dev/null || exit 77

# page <name> <argument of report>...: makes a page and checks it, with the number of runs and of steps in its logs.
page() {
  "$distrain" report "${@:2}" -o "$tmp/$1.html" || fail "$1: report failed"
  python3 "$root/tests/browser/report.py" "$1" "$tmp/$1.html" "${@:2}" || fail "$1"
}

case_jobs() {
  make_images "$tmp/images" 256 64 28 bars
  make_text 400 >"$tmp/train.txt"
  make_text 40 >"$tmp/valid.txt"
  run hybrid --data teacher --epochs 3 --log-interval 1 --trace "$tmp/trace" && cp "$tmp/out" "$tmp/hybrid.jsonl"
  page hybrid "$tmp/hybrid.jsonl" --trace "$tmp/trace"
  run rnn --data "$tmp/train.txt" --valid-data "$tmp/valid.txt" --epochs 3 --embedding-dim 16 --nhid 16 --trainers 2 \
    --mode sync --log-interval 1 && cp "$tmp/out" "$tmp/rnn.jsonl"
  page rnn "$tmp/rnn.jsonl"
  run rl --max-episodes 20 --observers 2 --log-interval 1 && cp "$tmp/out" "$tmp/rl.jsonl"
  page rl "$tmp/rl.jsonl"
  run ps --data "$tmp/images" --epochs 2 --log-interval 1 && cp "$tmp/out" "$tmp/ps.jsonl"
  page ps "$tmp/ps.jsonl"
  run pipeline --model resnet18 --stages 3 --schedule 1f1b --image-size 32 --batch-size 16 --batches 2 --micro-batches 1,2,4 &&
    cp "$tmp/out" "$tmp/sweep.jsonl"
  page sweep "$tmp/sweep.jsonl"
}

case_faults() {
  make_images "$tmp/images" 512 64 28 bars
  # Each rank sleeps before each call, so that the job lasts long enough without much work.
  local job=(ps --data "$tmp/images" --epochs 4 --batch-size 16 --log-interval 1 --peer-timeout 60 --inject delay=20ms)
  "$distrain" "${job[@]}" --mode async --trainers 3 --max-restarts 3 --checkpoint "$tmp/async" >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 9 step "$tmp/out"
  kill -9 "$(pid_of 2)"
  wait_for_lines 1 returned "$tmp/out"
  await_end
  expect 0 "a loss and a return"
  cp "$tmp/out" "$tmp/returned.jsonl"
  page returned "$tmp/returned.jsonl"

  "$distrain" "${job[@]}" --mode sync --max-restarts 3 --checkpoint "$tmp/sync" --checkpoint-every 5 >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 1 checkpoint "$tmp/out"
  kill -9 "$(pid_of 1)"
  await_end
  expect 0 "a restart"
  cp "$tmp/out" "$tmp/restart.jsonl"
  page restart "$tmp/restart.jsonl"

  "$distrain" "${job[@]}" --mode sync >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 9 step "$tmp/out"
  kill -9 "$(pid_of 2)"
  await_end
  expect 137 "a failed run"
  cp "$tmp/out" "$tmp/failed.jsonl"
  page failed "$tmp/failed.jsonl"
}

case_ten_runs() {
  local i logs=()
  for i in 1 2 3 4 5 6 7 8 9 10; do
    run hybrid --data teacher --epochs 3 --log-interval 1 --lr "0.$i" --seed "$i"
    expect 0 "run $i"
    cp "$tmp/out" "$tmp/run$i.jsonl"
    logs+=("$tmp/run$i.jsonl")
  done
  page ten "${logs[@]}"
}

case_hostile_texts() {
  local nasty='</script><script>document.title=\"broken\"</script><img src=https://example.org/x onerror=alert(1)>'
  {
    echo "{\"ts\":1e9,\"v\":1,\"run\":\"$nasty\",\"event\":\"start\",\"cmd\":\"$nasty\",\"rank\":0,\"role\":\"$nasty\",\"config\":{\"$nasty\":\"$nasty\"}}"
    echo "{\"ts\":1000000001,\"v\":1,\"run\":\"$nasty\",\"event\":\"warn\",\"cmd\":\"$nasty\",\"rank\":0,\"role\":\"$nasty\",\"kind\":\"$nasty\",\"message\":\"$nasty\"}"
    echo "{\"ts\":1000000002,\"v\":1,\"run\":\"$nasty\",\"event\":\"step\",\"cmd\":\"$nasty\",\"rank\":0,\"role\":\"$nasty\",\"epoch\":1,\"step\":1,\"loss\":1,\"$nasty\":3}"
    echo "{\"ts\":1000000003,\"v\":1,\"run\":\"$nasty\",\"event\":\"step\",\"cmd\":\"$nasty\",\"rank\":0,\"role\":\"$nasty\",\"epoch\":1,\"step\":2,\"loss\":1e29}"
    printf '{"ts":1000000004,"v":1,"run":"big","event":"error","cmd":"ps","rank":0,"role":"x","kind":"k","message":"'
    head -c 3000000 /dev/zero | tr '\0' 'm'
    printf '","cause_rank":-5}\n{"ts":1000000005,"v":1,"run":"big","event":"split","num_split":-4,"stage_s":[null,2],"batch_s":null}\n'
    printf '{"ts":1000000005,"v":1,"run":"big","event":"split","num_split":4,"stage_s":[],"batch_s":1}\n'
    printf '{"ts":1000000003.5,"v":1,"run":"big","event":"restart","ranks":7,"cause_rank":"x","rank":3.5}\n'
    printf '{"ts":1000000006,"v":1,"run":"big","event":"checkpoint","action":["x"],"step":"many","rank":2,"path":{"a":1}}\n'
    printf '{"ts":1000000007,"v":1,"run":"big","event":"rank_end","rank":2,"rpc":7,"status":{},"steps":"none"}\n{"ts":10000'
  } >"$tmp/hostile.jsonl"
  page hostile "$tmp/hostile.jsonl"
}

run_cases
