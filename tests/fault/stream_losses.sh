#!/bin/bash
# ctest: timeout=240
# Each example of a stream is used once an epoch, although trainers are lost, come back, or resume in other numbers.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2317
source "$(dirname "$0")/../cli/lib.bash"
[[ $distrain == */counting_job/* ]] || distrain=$(realpath "$(dirname "$distrain")/../tests/counting_job/distrain")

seq 0 1999 | sed 's/.*/__label__x w&/' >"$tmp/examples"

# uses <checkpoint folder>: prints how many rows of the newest checkpoint have which count, as `count rows`.
uses() {
  python3 - "$1" <<'END' | sort -n | uniq -c | awk '{ print $2, $1 }'
import glob, json, struct, sys
with open(sorted(glob.glob(sys.argv[1] + "/step-*"))[-1] + "/model.safetensors", "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    begin, end = header["seen.weight"]["data_offsets"]
    file.seek(begin, 1)
    for value in struct.unpack(f"<{(end - begin) // 4}f", file.read(end - begin)):
        print(f"{value:g}")
END
}

# expect_uses <count> <checkpoint folder> <name>: every example was used so often.
expect_uses() {
  [[ $(uses "$2") == "$1 2000" ]] || fail "$3: not every example was used $1 times: $(uses "$2" | tr '\n' ';')"
}

# start <argument>...: starts a job whose ranks sleep before each call, and waits until it trains.
start() {
  rm -f "$tmp/out"
  "$distrain" --data "$tmp/examples" --log-interval 1 --peer-timeout 60 --threads 1 --inject delay=2ms "$@" \
    >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 20 step "$tmp/out"
}

case_losses() {
  local name
  name="a trainer is lost, and others read its shard"
  start --mode async --trainers 3 --epochs 2 --checkpoint "$tmp/lost"
  kill -9 "$(pid_of 2)"
  await_end
  expect 0 "$name"
  expect_jq '[.[] | select(.event == "lost")] | length == 1 and .[0].steps_in_doubt == 0' "$name"
  expect_uses 2 "$tmp/lost" "$name"

  name="lost trainers are started again"
  start --mode async --trainers 3 --epochs 3 --checkpoint "$tmp/back" --max-restarts 9
  kill -9 "$(pid_of 1)"
  wait_for_lines 1 returned "$tmp/out"
  kill -9 "$(pid_of 3)"
  await_end
  expect 0 "$name"
  expect_jq '[.[] | select(.event == "lost")] | length == 2 and all(.[]; .steps_in_doubt == 0)' "$name"
  expect_uses 3 "$tmp/back" "$name"
}

case_other_numbers() {
  local name mode trainers
  for mode in async sync; do
    name="$mode, resumed by other numbers of trainers"
    start --mode "$mode" --trainers 2 --epochs 2 --checkpoint "$tmp/$mode"
    for trainers in 3 1; do
      kill -TERM "$launcher"
      await_end
      expect 143 "$name"
      start --checkpoint "$tmp/$mode" --resume auto --trainers "$trainers"
      expect_jq '[.[] | select(.event == "warn") | .message | select(contains("not '"$trainers"': no example"))] | length == 1' \
        "$name"
    done
    await_end
    expect 0 "$name"
    expect_uses 2 "$tmp/$mode" "$name"
  done
}

run_cases
