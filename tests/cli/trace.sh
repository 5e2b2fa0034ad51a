#!/bin/bash
# ctest: timeout=300
# --trace: the file follows the rules of the format and contains the activities of each job.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

trace=$tmp/trace.json
# expect_trace <name> <ranks> <names>...: checks that the last command succeeded and wrote a valid trace.
expect_trace() {
  local name=$1 problems
  shift
  expect 0 "$name"
  expect_log "$name"
  problems=$(python3 "$here/check_trace.py" "$trace" "$@" 2>"$tmp/summary") || {
    fail "$name:"
    head -n 10 <<<"$problems"
    tail -n 3 "$tmp/summary"
  }
  rm -f "$trace"
}

ps=(ps --data "$tmp/images" --batch-size 4 --steps 6)

case_jobs() {
  make_images "$tmp/images" 96 32
  make_text 200 >"$tmp/text"
  run hybrid --epochs 4 --trace "$trace"
  [[ -s $tmp/err ]] && { fail "hybrid: wrote to stderr:"; head -n 5 "$tmp/err"; }
  expect_jq 'all(.[]; .event != "warn")' "no warnings"
  expect_trace hybrid 4 step@0 step@1 forward@0 loss@1 data@0 backward@0 backward@3 allreduce@0 allreduce@1 \
    hybrid.table@2 "call hybrid.table@1" job.next@0 EmbeddingTable.forward@3 "call EmbeddingTable.forward@0" \
    distrain.autograd.gradients@3 distrain.optim.step@3 \
    "rpc_async#distrain.optim.step(trainer1 -> ps)@1"
  run hybrid --epochs 2 --transport tcp --mode sync --trace "$trace"
  expect_trace "hybrid over TCP" 4 allreduce@0 EmbeddingTable.forward@3
  run "${ps[@]}" --trace "$trace" --checkpoint "$tmp/saved"
  expect_trace ps 3 step@1 forward@0 ConvNet.forward_training@0 backward@0 evaluate@1 save@0 data@2 job.next@0
  run rnn --steps 5 --trainers 2 --trace "$trace"
  expect_trace rnn 3 step@1 forward@2 WordEmbedding.forward@0 Decoder.loss@0 allreduce@1 backward@0 backward@1
  run rnn --data "$tmp/text" --valid-data "$tmp/text" --steps 5 --trace "$trace"
  expect_trace "rnn with data" 2 data@1 evaluate@1

  run hybrid --local --epochs 2 --trace "$trace"
  expect_trace "hybrid --local" 1 step forward loss backward update data
  run "${ps[@]}" --local --trace "$trace"
  expect_trace "ps --local" 1 step forward loss backward update evaluate data
  run rnn --local --steps 5 --trace "$trace"
  expect_trace "rnn --local" 1 step forward backward update data
}

case_pipeline_and_rl() {
  local pipeline
  pipeline=(pipeline --model resnet18 --image-size 33 --batch-size 8 --batches 1 --classes 10 --micro-batches 4)
  run "${pipeline[@]}" --trace "$trace"
  expect_trace pipeline 3 data@0 loss@0 forward@1 forward@2 backward@0 backward@1 backward@2 \
    PipelineStage.forward@1 "call PipelineStage.forward@0" "call distrain.rref.fetch@2" distrain.optim.step@2
  run "${pipeline[@]}" --local --trace "$trace"
  expect_trace "pipeline --local" 1 data forward loss backward update
  run rl --observers 2 --threshold 10 --trace "$trace"
  expect_trace rl 3 episode@1 environment@2 forward@0 backward@0 update@0 Observer.run_episode@1 PolicyAgent.select_actions@0 \
    "call PolicyAgent.select_actions@2" "episode > call PolicyAgent.report_rewards@2"

  run rl --local --threshold 10 --trace "$trace"
  expect_trace "rl --local" 1 episode environment forward backward update
}

case_paths() {
  local long as_nobody
  # A name without a folder, and a file that already exists.
  cd "$tmp" || exit 1
  echo old >here.json
  run hybrid --epochs 1 --trace here.json
  trace=here.json expect_trace "a file that is there" 4 allreduce
  compgen -G '*.tmp-*' >/dev/null && fail "a temporary file is left"
  cd - >/dev/null || exit 1

  # Invalid paths are reported before any rank starts.
  run hybrid --trace "$tmp/none/t.json"
  expect_error 9 resources "--trace: cannot write $tmp/none/t.json: No such file or directory" "a missing folder"
  run hybrid --local --trace "$tmp"
  expect_error 2 invalid "--trace: $tmp: is not a plain file" "a folder"
  run hybrid --trace /dev/null
  expect_error 2 invalid "is not a plain file" "a device"
  [[ -c /dev/null ]] || fail "/dev/null is not what it was"
  long=$tmp/$(printf 't%.0s' {1..256})
  run hybrid --trace "$long"
  expect_error 9 resources "--trace: cannot write $long: File name too long" "a name too long"
  ln -s none/t.json "$tmp/dangling"
  run hybrid --trace "$tmp/dangling"
  expect_error 9 resources "--trace: cannot write $tmp/none/t.json: No such file or directory" "a link to nowhere"

  # Run as a user without rights, unless only root can read the folder of the binary.
  as_nobody=()
  if ((EUID == 0)) && command -v setpriv >/dev/null; then
    as_nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
    chmod 755 "$tmp"
    "${as_nobody[@]}" test -x "$tmp" && "${as_nobody[@]}" "$distrain" --version >/dev/null 2>&1 || as_nobody=()
  fi
  if ((${#as_nobody[@]})); then
    run_as_nobody() {
      timeout -k 2 "$limit" "${as_nobody[@]}" "$distrain" "$@" >"$tmp/out" 2>"$tmp/err"
      code=$?
    }
    mkdir -m 1777 "$tmp/sticky"
    mkdir -m 755 "$tmp/locked"
    echo mine >"$tmp/sticky/t.json"
    run_as_nobody hybrid --trace "$tmp/sticky/t.json"
    expect_error 9 resources "--trace: cannot replace $tmp/sticky/t.json: Operation not permitted" "a sticky folder"
    [[ $(cat "$tmp/sticky/t.json") == mine ]] || fail "a sticky folder: the file is not what it was"
    run_as_nobody hybrid --trace "$tmp/locked/t.json"
    expect_error 9 resources "--trace: cannot write $tmp/locked/t.json: Permission denied" "another user's folder"
    run_as_nobody hybrid --local --epochs 1 --trace "$tmp/sticky/new.json"
    expect 0 "a new file in a sticky folder"
  fi

  # A symbolic link is followed.
  echo old >"$tmp/target.json"
  ln -s target.json "$tmp/link.json"
  run hybrid --local --epochs 1 --trace "$tmp/link.json"
  [[ -L $tmp/link.json ]] || fail "a link has been replaced"
  trace=$tmp/target.json expect_trace "a link" 1 step
}

# Ranks that join inherit --trace from rank 0.
case_ranks_that_join() {
  local port rank
  port=$(free_port)
  for rank in 1 2 3; do
    timeout -k 2 "$limit" "$distrain" hybrid --epochs 2 --rank "$rank" --master-port "$port" >"$tmp/out$rank" 2>"$tmp/err$rank" &
  done
  run hybrid --epochs 2 --rank 0 --master-port "$port" --trace "$trace"
  wait
  expect_trace "ranks that join" 4 allreduce@1 EmbeddingTable.forward@3 hybrid.table@2
  jq -se 'map(select(.event == "end"))[0].status == "ok"' "$tmp"/out1 >/dev/null || fail "rank 1 did not end well"
}

case_trace_cannot_be_written() {
  local where
  # If there is no room for the file, the old file stays.
  echo old >"$trace"
  (
    ulimit -f 64
    timeout -k 2 "$limit" "$distrain" hybrid --epochs 20 --trace "$trace" >"$tmp/out" 2>"$tmp/err"
  )
  code=$?
  expect 9 "no room"
  expect_jq '.[-1] | .kind == "resources" and (.message | contains("cannot write"))' "no room"
  [[ $(cat "$trace") == old ]] || fail "no room: the old file is gone"
  compgen -G "$tmp/*.tmp-*" >/dev/null && fail "no room: a temporary file is left"
  rm "$trace"

  # If a job misses its goal and the trace cannot be written, the goal is the error and the trace a warning.
  for where in "" --local; do
    (
      ulimit -f 64
      # shellcheck disable=SC2086  # none or one
      timeout -k 2 "$limit" "$distrain" rl --max-episodes 20 $where --trace "$trace" >"$tmp/out" 2>"$tmp/err"
    )
    code=$?
    expect 11 "rl $where, no room"
    expect_log "rl $where, no room"
    expect_jq '[.[] | select(.event == "error").kind] == ["goal_not_reached"] and .[-1].kind == "goal_not_reached"
      and ([.[] | select(.event == "warn")] | length == 1 and .[0].kind == "resources"
        and (.[0].message | contains("cannot write")))' "rl $where, no room"
    [[ $(wc -l <"$tmp/err") == 1 ]] || fail "rl $where, no room: on stderr: $(cat "$tmp/err")"
  done

  # A job that fails before it begins leaves an old file unchanged.
  echo old >"$trace"
  for where in "" --local; do
    # shellcheck disable=SC2086
    run rl $where --max-episodes 3 --resume "$tmp/nowhere" --trace "$trace"
    expect 7 "rl $where, no checkpoint"
    [[ $(cat "$trace") == old ]] || fail "rl $where, no checkpoint: the old trace is gone"
  done
  rm "$trace"
}

case_failed_jobs() {
  local problems launcher
  make_images "$tmp/images" 96 32
  # A job that fails writes the records of rank 0 and reports its own error.
  run "${ps[@]}" --lr 1e6 --trace "$trace"
  expect 8 "a job that fails"
  expect_jq '.[-1].kind == "not_finite"' "a job that fails"
  if [[ -s $trace ]]; then
    problems=$(python3 "$here/check_trace.py" "$trace" 1 2>/dev/null) || fail "the trace of a job that fails: $problems"
  else
    fail "a job that fails leaves no trace"
  fi

  # A rank dies while rank 0, whose calls take 4 s each, collects the records. The trainers' calls are slow, so that
  # rank 0 has read their clocks before their last step. If it has not, it needs two calls to notice the loss, so the
  # launcher must wait for the peer timeout and 2 s.
  : >"$tmp/out"
  "$distrain" "${ps[@]}" --mode sync --peer-timeout 30 --inject delay=4s@rank=0,delay=100ms@rank=1,delay=100ms@rank=2 --trace "$trace" >"$tmp/out" 2>"$tmp/err" &
  launcher=$!
  wait_for_lines 2 epoch "$tmp/out"
  sleep 3
  kill -9 "$(jq -r 'select(.event == "start" and .rank == 2).pid' "$tmp/out")"
  wait "$launcher"
  code=$?
  expect 137 "a rank that dies in the gathering"
  expect_jq '.[-1] | .cause_rank == 2 and .signal == "SIGKILL"' "a rank that dies in the gathering"
  expect_jq 'map(select(.event == "rank_end") | [.rank, .exit_code]) | sort == [[0, 5], [1, 5]]' "the other ranks"
  problems=$(python3 "$here/check_trace.py" "$trace" 1 ConvNet.forward_training 2>/dev/null) ||
    fail "the trace when a rank dies in the gathering: $problems"
}

run_cases
