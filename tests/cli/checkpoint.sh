#!/bin/bash
# ctest: timeout=300
# --checkpoint and --resume: the same parameters as without interruption, damaged files, signals, interrupted saves.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

make_images "$tmp/data" 64 8
make_text 60 >"$tmp/text"
declare -A arguments=(
  [hybrid]="--mode sync --batches-per-epoch 100"
  [ps]="--mode sync --data $tmp/data --batch-size 4"
  [rnn]="--mode sync --trainers 2 --data $tmp/text --embedding-dim 8 --nhid 8 --batch-size 4 --bptt 5")

# job <command> <argument>...: runs a small job
job() {
  local command=$1
  shift
  # shellcheck disable=SC2086
  run "$command" ${arguments[$command]} "$@"
}
newest() { find "$1" -maxdepth 1 -name 'step-*' | sort | tail -n 1; }
saved() { # saved <name>: the last command's `checkpoint` lines report saves
  expect_jq '[.[] | select(.event == "checkpoint" and .action == "saved")] | length > 0
    and all(.[]; .rank == 0 and .step > 0 and .held_s <= .wall_s and (.path | test("/step-[0-9]{12}$")))' "$1: saved"
}
loaded() {
  expect_jq '[.[] | select(.event == "checkpoint" and .action == "loaded")] | length == 1
    and .[0].rank == 0' "$1: loaded"
}

# same_bytes <command>: checks that twelve steps, and twice six steps with a checkpoint between, save the same bytes.
same_bytes() {
  local command=$1 where name whole parts file
  for where in "" --local; do
    name="$command $where"
    whole=$tmp/$command$where.whole
    parts=$tmp/$command$where.parts
    # shellcheck disable=SC2086
    job $command $where --steps 12 --checkpoint "$whole" --checkpoint-every 6
    expect 0 "$name, whole"
    saved "$name, whole"
    # shellcheck disable=SC2086
    job $command $where --steps 6 --checkpoint "$parts"
    expect 0 "$name, first half"
    saved "$name, first half"
    # shellcheck disable=SC2086
    job $command $where --steps 12 --checkpoint "$parts" --checkpoint-every 3 --resume auto
    expect 0 "$name, second half"
    expect_log "$name, second half"
    loaded "$name, second half"
    saved "$name, second half"
    expect_jq '.[-1].steps == 12' "$name, second half: steps of two trainers"
    for file in model optimizer; do
      cmp "$(newest "$whole")/$file.safetensors" "$(newest "$parts")/$file.safetensors" ||
        fail "$name: $file differs"
    done
    [[ $(find "$parts" -mindepth 1 -maxdepth 1 ! -name .lock | wc -l) == 2 ]] || fail "$name: not the last two: $(ls "$parts")"
  done
  expect_no_process "$command"
}
case_same_bytes_hybrid() { same_bytes hybrid; }
case_same_bytes_ps() { same_bytes ps; }
case_same_bytes_rnn() { same_bytes rnn; }

# Damaged checkpoints and checkpoints of other jobs are refused.
refused() { # refused <words> <name>: resuming from $tmp/damaged fails
  local where
  for where in "" --local; do
    # shellcheck disable=SC2086
    job ps $where --steps 12 --resume "$tmp/damaged"
    expect 7 "$2 $where"
    expect_log "$2 $where"
    expect_jq ".[-1] | .kind == \"bad_data\" and (.message | test(\"$1\"))" "$2 $where"
    [[ $(grep -c '^distrain: ' "$tmp/err") == 1 ]] || fail "$2 $where: not one line on stderr"
  done
}

fresh() {
  rm -rf "$tmp/damaged"
  cp -r "$(newest "$tmp/intact")" "$tmp/damaged"
}

case_damaged_or_other() {
  job ps --steps 2 --checkpoint-every 1 --checkpoint "$tmp/intact"
  expect 0 "an intact checkpoint"
  fresh
  printf 'X' | dd of="$tmp/damaged/model.safetensors" bs=1 seek=9000 conv=notrunc 2>/dev/null
  refused model.safetensors "a changed byte"
  fresh
  truncate -s -1 "$tmp/damaged/optimizer.safetensors"
  refused optimizer.safetensors "a file cut short"
  fresh
  rm "$tmp/damaged/model.safetensors"
  refused model.safetensors "a missing file"
  fresh
  echo '{"format":' >"$tmp/damaged/manifest.json"
  refused manifest.json "a damaged manifest"
  rm "$tmp/damaged/manifest.json"
  refused "no checkpoint" "no manifest"
  job ps --trainers 3 --steps 12 --resume "$tmp/intact"
  expect 7 "another number of trainers"
  expect_log "another number of trainers"
  job hybrid --steps 12 --resume "$tmp/intact"
  expect 7 "another command's"
  expect_log "another command's"
  job ps --resume "$tmp/nowhere"
  expect_error 7 bad_data "--resume $tmp/nowhere: No such file" "--resume, nothing there"

  : >"$tmp/file"
  job ps --local --checkpoint "$tmp/file/here"
  expect 9 "a folder that cannot be"
  expect_log "a folder that cannot be"
  job ps --local --steps 2 --checkpoint "$tmp/first" --resume auto
  expect 0 "--resume auto, nothing there"
  saved "--resume auto, nothing there"
  expect_no_process "$selected"
}

# Two jobs use one folder: the second job is refused before it trains, and the first is not affected.
case_two_jobs_in_one_folder() {
  local first where
  : >"$tmp/saving"
  # shellcheck disable=SC2086
  "$distrain" ps ${arguments[ps]} --steps 1000000 --checkpoint "$tmp/shared" --log-interval 1 \
    --checkpoint-every 1000000 >"$tmp/saving" 2>"$tmp/saving.err" &
  first=$!
  wait_for_lines 4 step "$tmp/saving"
  kill -USR1 "$first"
  wait_for_lines 1 checkpoint "$tmp/saving"
  for where in "" --local; do
    # shellcheck disable=SC2086
    job ps $where --checkpoint "$tmp/shared" --resume auto
    expect 7 "a second job $where"
    expect_log "a second job $where"
    expect_jq "[.[] | select(.event == \"error\")] | length == 1 and .[0].kind == \"bad_data\"
      and (.[0].message | startswith(\"another job saves in this folder: $tmp/shared\"))" "a second job $where"
    expect_jq 'all(.[]; .event != "step" and .event != "checkpoint")' "a second job $where: it trains"
    [[ $(grep -c '^distrain: ' "$tmp/err") == 1 ]] || fail "a second job $where: not one line on stderr"
  done
  # Another job may still read the folder.
  job ps --local --checkpoint "$tmp/shared" --resume auto --eval-only
  expect 0 "--eval-only beside a job that saves"
  kill -USR1 "$first"
  wait_for_lines 2 checkpoint "$tmp/saving"
  kill -TERM "$first"
  wait "$first"
  code=$?
  expect 143 "the first job"
  expect_log "the first job" "$tmp/saving"
  expect_jq 'all(.[]; .event != "error" and .event != "warn")' "the first job" "$tmp/saving"
  job ps --local --steps 1 --checkpoint "$tmp/shared" --resume "$(newest "$tmp/shared")" --eval-only
  expect 0 "what the first job has saved"
  expect_no_process "$selected"
}

# A signal makes the job save. SIGNAL may have a suffix: the signal goes to "one rank" or the ranks "one by one".
stopped() { # stopped <SIGNAL...> <command> <more>...
  local name=$1 command=$2 step pid ranks signal status
  signal=${name%%[ ,]*}
  status=$((128 + $(kill -l "$signal")))
  shift 2
  rm -rf "$tmp/stopped"
  : >"$tmp/out"
  # shellcheck disable=SC2086
  "$distrain" "$command" ${arguments[$command]} --steps 1000000 --log-interval 1 \
    --checkpoint "$tmp/stopped" --checkpoint-every 1000000 "$@" >"$tmp/out" 2>"$tmp/err" &
  local launcher=$!
  wait_for_lines 4 step "$tmp/out"
  ranks=$(jq -r 'select(.event == "start") | "\(.rank) \(.pid)"' "$tmp/out" 2>/dev/null | sort -n)
  case $name in
    *"one rank") kill -s "$signal" "$(sed -n 's/^1 //p' <<<"$ranks")" ;;
    *"one by one")
      while read -r _ pid; do
        kill -s "$signal" "$pid" 2>/dev/null
        sleep 0.1
      done <<<"$ranks"
      ;;
    *) kill -s "$signal" "$launcher" ;;
  esac
  wait "$launcher"
  code=$?
  expect "$status" "$name"
  expect_log "$name"
  saved "$name"
  expect_jq ".[-1] | .status == \"failed\" and .exit_code == $status and .signal == \"$signal\"
    and .kind == \"cancelled\" and (.message | test(\"checkpoint saved in .*step-\"))" "$name"
  expect_jq 'all(.[]; .event != "error")' "$name: no error"
  [[ $(wc -l <"$tmp/err") == 1 ]] || fail "$name: not one line on stderr"
  expect_no_process "$name"
  step=$(jq -r 'select(.event == "checkpoint").step' "$tmp/out" | tail -n 1)
  job "$command" --steps $((step + 3)) --checkpoint "$tmp/stopped" --resume auto "$@"
  expect 0 "$name, resumed"
  loaded "$name, resumed"
}

case_signal_of_launcher() { # ctest: first
  local command
  for command in $(few hybrid ps rnn); do
    stopped "SIGTERM, $command" "$command"
  done
  stopped "SIGTERM, async" ps --mode async
  if ! sanitized; then
    stopped "SIGTERM, ssp" ps --mode ssp --staleness 2
    stopped "SIGINT" ps
    stopped "SIGHUP" ps
  fi
  # Rank 0 is slow, so it serves trainers before its own part of the job begins.
  stopped "SIGTERM, a late rank 0" ps --mode async --inject delay=1s@rank=0 --trace "$tmp/trace.json"
}

case_signal_of_ranks() {
  local command
  stopped "SIGTERM, local" ps --local
  sanitized || stopped "SIGINT, local" rnn --local
  stopped "SIGINT of one rank" ps
  sanitized || stopped "SIGTERM of one rank" ps
  # Each rank must handle its signal even if other ranks have already told it to stop and it is saving or has saved.
  stopped "SIGINT, one by one" ps
  for command in $(few hybrid ps rnn); do
    stopped "SIGTERM, $command, one by one" "$command"
  done
}

# A job also saves if the reader of stdout is gone, for --local and for any rank.
unheard() { # unheard <name>: checks $code and $tmp/err of the process without a reader, and its checkpoint
  expect 141 "$1"
  [[ -s $tmp/err ]] && fail "$1: wrote to stderr: $(cat "$tmp/err")"
  [[ -n $(newest "$tmp/unheard") ]] || fail "$1: nothing saved"
  job ps --steps 1 --checkpoint "$tmp/unheard" --resume auto
  expect 0 "$1, resumed"
  rm -rf "$tmp/unheard"
}

case_no_reader() {
  local endless rank port other last
  endless="${arguments[ps]} --steps 1000000 --log-interval 1 --checkpoint $tmp/unheard --checkpoint-every 1000000"
  # shellcheck disable=SC2086  # words
  timeout "$limit" "$distrain" ps $endless --local 2>"$tmp/err" | sed '/"event":"step"/q' >"$tmp/out"
  code=${PIPESTATUS[0]}
  unheard "--local without a reader"
  for rank in 0 1; do
    port=$(free_port)
    for other in 0 1 2; do
      ((other == rank)) && continue
      # shellcheck disable=SC2086  # words
      timeout "$limit" "$distrain" ps $endless --rank $other --master-port "$port" >"$tmp/out$other" 2>/dev/null &
    done
    last="eval" # the server prints no `step` lines
    ((rank == 0)) || last=step
    # shellcheck disable=SC2086  # words
    timeout "$limit" "$distrain" ps $endless --rank $rank --master-port "$port" 2>"$tmp/err" |
      sed "/\"event\":\"$last\"/q" >"$tmp/out"
    code=${PIPESTATUS[0]}
    wait
    for other in 0 1 2; do
      ((other == rank)) && continue
      expect_jq '.[-1] | .exit_code == 143 and .signal == "SIGTERM"' "rank $other, as rank $rank has no reader" \
        "$tmp/out$other"
    done
    unheard "rank $rank without a reader"
  done
  expect_no_process "$selected"
}

# If there is no room for a checkpoint, the job continues and ends with 9 when its last save fails.
case_no_room() {
  local where
  for where in --local ""; do
    (
      ulimit -f 64
      # shellcheck disable=SC2086  # words
      timeout "$limit" "$distrain" ps ${arguments[ps]} $where --steps 3 --checkpoint "$tmp/room$where" \
        --checkpoint-every 1 >"$tmp/out" 2>"$tmp/err"
    )
    code=$?
    expect 9 "no room $where"
    expect_log "no room $where"
    expect_jq '[.[] | select(.event == "warn").message] | length == 3 and (.[1] | startswith("saving step 2 in ")
      and endswith("there is no earlier checkpoint; the job goes on and tries its next save"))' "no room $where"
    expect_jq '.[-1] | .kind == "resources" and (.message | contains("saving step 3 in "))' "no room $where"
    [[ -z $(newest "$tmp/room$where") && $(ls -A "$tmp/room$where") == .lock ]] ||
      fail "no room $where: left behind: $(ls -A "$tmp/room$where")"
  done
  expect_no_process "$selected"
}

# An interrupted save leaves the previous checkpoint or the new one.
case_interrupted_save() {
  local stride call name
  stride=7
  sanitized && stride=15
  job ps --local --steps 1 --checkpoint "$tmp/before"
  expect 0 "before an interrupted save"
  for ((call = 1; call < 80; call += stride)); do
    name="fail=checkpoint.$call"
    rm -rf "$tmp/cut"
    cp -r "$tmp/before" "$tmp/cut"
    job ps --local --steps 2 --checkpoint "$tmp/cut" --resume auto --inject fail=checkpoint."$call"
    ((code == 0)) && break # the save makes fewer system calls
    expect 137 "$name"
    job ps --local --steps 3 --checkpoint "$tmp/cut" --resume auto
    expect 0 "$name, after"
    loaded "$name, after"
    [[ $(find "$tmp/cut" -mindepth 1 -maxdepth 1 ! -name .lock | grep -cv '/step-[0-9]*$') == 0 ]] ||
      fail "$name: left behind: $(ls "$tmp/cut")"
  done
  ((call > 1 && call < 80)) || fail "--inject fail=checkpoint.N: stopped looking at $call"
  job ps --steps 2 --checkpoint "$tmp/cut2" --inject fail=checkpoint.2
  expect 137 "rank 0 died in a save"
  expect_log "rank 0 died in a save"
  expect_jq '.[-1] | .cause_rank == 0 and .signal == "SIGKILL"' "rank 0 died in a save"
  expect_no_process "$selected"
}

run_cases
