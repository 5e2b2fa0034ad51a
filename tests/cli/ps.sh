#!/bin/bash
# ctest: timeout=300
# distrain ps: lines, lengths, modes, invalid images.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

make_images "$tmp/data" 96 32
ps=(ps --data "$tmp/data" --batch-size 4 --log-interval 1)

case_lines_and_lengths() {
  run "${ps[@]}" --verify-grads
  expect 0 "an epoch"
  expect_log "an epoch"
  [[ -s $tmp/err ]] && { fail "an epoch: wrote to stderr:"; head -n 5 "$tmp/err"; }
  expect_jq '[.[] | select(.event == "start")] | (map(.rank) | sort) == [0,1,2]
    and all(.[]; .world_size == 3 and .config.verify_grads == true and .config.mean == 0.1307
      and (.config.data | test("/data$")))' "start lines"
  expect_jq '[.[] | select(.event == "rank_end")] | (map(.role) | sort)
    == ["parameter_server","trainer1","trainer2"] and all(.[]; .status == "ok")' "rank_end lines"
  expect_jq '[.[] | select(.event == "step")] | length == 24 and all(.[]; .rank > 0 and .epoch == 1
    and (.loss | type) == "number" and .staleness >= 0 and .version >= 0 and has("samples_per_s"))' "step lines"
  expect_jq '[.[] | select(.event == "epoch")] | (map(.rank) | sort) == [1,2]
    and (map(.samples) | add) == 96' "epoch lines"
  expect_jq '[.[] | select(.event == "eval")] | length == 1 and .[0].samples == 32
    and .[0].accuracy >= 0 and .[0].accuracy <= 1' "eval line"
  expect_jq '.[-1] | .steps == 24 and (.loss | type) == "number" and .accuracy >= 0
    and .rpc.calls > 0 and .live_rrefs == 0 and .live_contexts == 0' "end"
  expect_no_process "an epoch"

  run "${ps[@]}" --limit 32
  expect 0 "--limit"
  expect_jq '.[-1].steps == 8' "--limit"
  run "${ps[@]}" --steps 3 --trainers 3
  expect 0 "--steps"
  expect_jq '.[-1].steps == 9' "--steps"
  run "${ps[@]}" --steps 30 --log-interval 0
  expect 0 "--steps beyond the epoch"
  expect_jq '.[-1].steps == 60 and all(.[]; .event != "step")' "--steps beyond the epoch"

  # The files may be compressed, and a test set is optional.
  mkdir "$tmp/packed"
  cp "$tmp"/data/train-* "$tmp/packed"
  gzip "$tmp/packed/train-images-idx3-ubyte"
  run ps --data "$tmp/packed" --local --steps 2
  expect 0 "packed, no test set"
  expect_jq '.[-1].steps == 4 and all(.[]; .event != "eval")' "packed, no test set"
  expect_no_process "$selected"
}

# The ranks take turns, and each has one worker.
case_one_trainer() {
  local mode one=("${ps[@]}" --trainers 1 --verify-grads --clip 1)
  for mode in async sync ssp; do
    run "${one[@]}" --mode "$mode" --epochs 2 --checkpoint "$tmp/one.$mode" --checkpoint-every 2
    expect 0 "one trainer, $mode"
    expect_jq '.[-1].steps == 48 and .[-1].live_contexts == 0 and ([.[] | select(.event == "eval")] | length) == 2' \
      "one trainer, $mode"
    run "${one[@]}" --mode "$mode" --epochs 3 --checkpoint "$tmp/one.$mode" --resume auto
    expect 0 "one trainer, $mode, resumed"
    expect_jq '.[-1].steps == 24' "one trainer, $mode, resumed"
  done
}

case_modes() {
  local where
  # The staleness between trainers.
  run "${ps[@]}" --steps 10 --mode ssp --staleness 0 --inject delay=5ms@rank=2
  expect 0 "ssp 0"
  expect_jq '[.[] | select(.event == "step")] | length == 20
    and all(.[]; .staleness == 0 and .version >= (.step - 1) * 2)' "ssp 0"
  run "${ps[@]}" --steps 10 --mode ssp --staleness 2 --inject delay=5ms@rank=2
  expect 0 "ssp 2"
  expect_jq '[.[] | select(.event == "step")] | length == 20 and all(.[]; .staleness >= 0 and .staleness <= 2)' "ssp 2"
  run "${ps[@]}" --steps 10 --mode sync
  expect 0 "sync"
  expect_jq '[.[] | select(.event == "step")] | group_by(.step) | length == 10
    and all(.[]; length == 2 and .[0].version == .[1].version)' "sync"
  run "${ps[@]}" --steps 2 --staleness 3
  expect 0 "--staleness without ssp"
  expect_jq '[.[] | select(.event == "warn")] | length == 1 and (.[0].message | test("--staleness"))' \
    "--staleness without ssp"

  # sync mode and --local give the same results on the test images.
  for where in "" --local; do
    # shellcheck disable=SC2086
    run "${ps[@]}" --mode sync --dropout off --steps 12 $where
    expect 0 "dropout off $where"
    jq -r 'select(.event == "eval").loss' "$tmp/out" | tail -n 1
  done >"$tmp/losses"
  jq -es 'length == 2 and (.[0] - .[1] | fabs) < 1e-4' "$tmp/losses" >/dev/null ||
    fail "sync and --local differ: $(tr '\n' ' ' <"$tmp/losses")"
  expect_no_process "$selected"
}

# --dropout takes a number, `on` or `off`.
case_dropout() {
  local rate wanted
  for rate in on off 0.3; do
    run "${ps[@]}" --local --dropout "$rate" --steps 2 --checkpoint "$tmp/rate-$rate"
    expect 0 "--dropout $rate"
    wanted=$rate
    [[ $rate == 0.3 ]] || wanted=\"$rate\"
    expect_jq ".[0].config.dropout == $wanted" "--dropout $rate"
    jq -c 'select(.event == "step").loss' "$tmp/out" >"$tmp/rate-$rate.losses"
    run "${ps[@]}" --resume "$tmp/rate-$rate" --steps 3
    expect 0 "--dropout $rate, resumed"
    expect_jq "[.[] | select(.event == \"start\").config.dropout] == [$wanted, $wanted, $wanted]" "--dropout $rate, resumed"
  done
  [[ $(sort -u "$tmp"/rate-*.losses | wc -l) == 6 ]] || fail "--dropout makes no difference"
  run "${ps[@]}" --local --dropout 0.0 --steps 2
  jq -c 'select(.event == "step").loss' "$tmp/out" | cmp -s - "$tmp/rate-off.losses" || fail "--dropout 0.0 is not off"
  expect_jq '.[0].config.dropout == "off" and .[-1].config.dropout == "off"' "--dropout 0.0"
  run "${ps[@]}" --local --resume "$tmp/rate-off" --dropout 0 --steps 3
  expect 0 "--dropout 0 in place of off"
  run "${ps[@]}" --local --resume "$tmp/rate-off" --dropout 0.3 --steps 3
  expect_error 7 bad_data "saved with --dropout off, not 0.3" "another --dropout"
  run predict "$tmp/rate-0.3" "$tmp/data"
  expect 0 "predict, with --dropout 0.3"
  expect_no_process "$selected"
}

case_ranks_that_join() {
  local port r pids server
  # Ranks that join: the server reads no data, and a trainer may have its own path to the data.
  port=$(free_port)
  for r in 1 2; do
    timeout "$limit" "$distrain" ps --rank "$r" --master-port "$port" --data "$tmp/data" >"$tmp/rank$r" 2>&1 &
  done
  run ps --rank 0 --master-port "$port" --data "$tmp/nowhere" --mode sync --steps 3 --verify-grads
  expect 0 "ranks that join"
  for r in 1 2; do
    wait -n
    code=$?
    expect 0 "ranks that join"
  done
  expect_jq '.[-1] | .rank == 1 and .status == "ok" and .steps == 3' "ranks that join" "$tmp/rank1"

  # Ranks that end early report their steps; rank 0 makes no steps.
  port=$(free_port)
  pids=()
  for r in 1 2; do
    timeout "$limit" "$distrain" ps --rank "$r" --master-port "$port" --data "$tmp/data" >"$tmp/rank$r" 2>"$tmp/err" &
    pids+=($!)
  done
  "$distrain" ps --rank 0 --master-port "$port" --mode sync --epochs 1000000 --log-interval 1 >"$tmp/rank0" 2>"$tmp/err" &
  server=$!
  for r in 1 2; do wait_for "$limit" grep -q '"step":8,' "$tmp/rank$r" || fail "trainer $r makes no steps"; done
  kill -TERM "$server"
  wait "$server" "${pids[@]}"
  expect_log "ended by a signal, rank 0" "$tmp/rank0"
  expect_jq '.[-1] | .status == "failed" and .signal == "SIGTERM" and .scope == "job" and .steps >= 6' \
    "ended by a signal, rank 0" "$tmp/rank0"
  for r in 1 2; do
    expect_jq '.[-1] | .status == "failed" and .scope == "rank" and .steps >= 8 and .train_s > 0' \
      "rank 0 is lost, rank $r" "$tmp/rank$r"
  done
  expect_no_process "$selected"
}

# --servers N spreads the parameters.
case_servers() {
  local place losses=()
  run "${ps[@]}" --servers 2 --mode sync --steps 4 --checkpoint "$tmp/saved"
  expect 0 "two servers"
  expect_log "two servers"
  expect_jq '[.[] | select(.event == "start")] | (sort_by(.rank) | map(.role))
    == ["parameter_server0", "parameter_server1", "trainer2", "trainer3"] and all(.[]; .config.servers == 2)' "two servers"
  run "${ps[@]}" --world-size 5 --servers 3 --steps 1
  expect 0 "--world-size with --servers"
  expect_jq '[.[] | select(.event == "start")] | length == 5 and all(.[]; .config.trainers == 2)' "--world-size with --servers"

  # Any number of servers evaluates the checkpoint and goes on from it.
  for place in "" "--servers 3" "--servers 1" --local; do
    # shellcheck disable=SC2086
    run ps --data "$tmp/data" --resume "$tmp/saved" --eval-only $place
    expect 0 "evaluated, $place"
    losses+=("$(jq -r 'select(.event == "eval").loss' "$tmp/out")")
    # shellcheck disable=SC2086
    run ps --data "$tmp/data" --resume "$tmp/saved" --steps 5 $place
    expect 0 "resumed, $place"
    expect_jq '.[-1].steps == 2' "resumed, $place"
  done
  printf '%s\n' "${losses[@]}" | jq -es 'length == 4 and max - min < 1e-5' >/dev/null ||
    fail "the loss depends on the servers: ${losses[*]}"
  run ps --data "$tmp/data" --resume "$tmp/saved" --steps 5 --servers 3
  expect_jq '[.[] | select(.event == "warn" and (.message | contains("servers")))] | length == 1' "another --servers"
  run predict "$tmp/saved" "$tmp/data"
  expect 0 "predict"
  expect_jq '[.[] | select(.event == "prediction")] | length == 32' "predict"

  run ps --data "$tmp/data" --servers 0
  expect_error 2 invalid "--servers" "--servers 0"
  run ps --data "$tmp/data" --servers 9
  expect_error 2 invalid "--servers" "--servers 9"
  run ps --data "$tmp/data" --servers 2 --num-gpus 1
  expect_error 2 invalid "--num-gpus needs one server: with --servers, give --device server=cuda" "--num-gpus with --servers"
  run ps --data "$tmp/data" --servers 3 --world-size 3
  expect_error 2 invalid "the job needs 3 ranks beside its trainers" "--world-size without trainers"
  run "${ps[@]}" --local --servers 2 --steps 1
  expect 0 "--servers with --local"
  expect_jq '[.[] | select(.event == "warn" and (.message | contains("--servers has no effect")))] | length == 1' \
    "--servers with --local"
  expect_no_process "$selected"
}

# --valid-data and --test-data name other folders.
case_other_data() {
  make_images "$tmp/valid" 1 12
  make_images "$tmp/test" 1 10
  run "${ps[@]}" --valid-data "$tmp/valid" --test-data "$tmp/test" --epochs 2 --limit 16
  expect 0 "--valid-data, --test-data"
  expect_log "--valid-data, --test-data"
  expect_jq '[.[] | select(.event == "eval") | [.set, .epoch, .samples]]
    == [["valid", 1, 12], ["valid", 2, 12], ["test", 2, 10]] and .[-1].eval.set == "test"' "--valid-data, --test-data"
  mkdir "$tmp/none"
  run "${ps[@]}" --local --test-data "$tmp/none"
  expect 7 "--test-data without images"
  expect_jq '.[-1].message | endswith("/none: no t10k-images-idx3-ubyte in this folder")' "--test-data without images"
  mv "$tmp/test/t10k-labels-idx1-ubyte" "$tmp/none"
  run "${ps[@]}" --local --test-data "$tmp/test"
  expect 7 "--test-data without labels"
  run "${ps[@]}" --valid-data "$tmp/nowhere"
  expect_error 7 bad_data "--valid-data $tmp/nowhere: No such file" "missing --valid-data"
  expect_no_process "$selected"
}

# Bad data.
case_bad_data() {
  local images labels
  run ps --data "$tmp/nowhere"
  expect_error 7 bad_data "--data $tmp/nowhere: No such file" "missing --data"
  run ps --data "$0"
  expect_error 7 bad_data "is a file, a folder is needed" "--data is a file"

  bad() { # bad <words> <file to be spoilt> <command that writes another to stdout>...
    local words=$1 file=$2
    shift 2
    rm -rf "$tmp/bad"
    cp -r "$tmp/data" "$tmp/bad"
    "$@" >"$tmp/spoilt"
    mv "$tmp/spoilt" "$tmp/bad/$file"
    run ps --data "$tmp/bad" --local
    expect 7 "$file: $*"
    expect_log "$file: $*"
    expect_jq ".[-1] | .kind == \"bad_data\" and (.message | test(\"$words\"))" "$file: $*"
    [[ $(wc -l <"$tmp/err") == 1 ]] || fail "$file: $*: not one line on stderr"
  }
  images=train-images-idx3-ubyte labels=train-labels-idx1-ubyte
  bad "$images" "$images" head -c 5000 "$tmp/data/$images"
  bad "$images" "$images" head -c 10 "$tmp/data/$images"
  bad "$images" "$images" true
  bad "$images" "$images" cat "$tmp/data/$images" "$0"
  bad "$images" "$images" cat "$tmp/data/$labels"
  bad "$labels" "$labels" cat "$tmp/data/$images"
  bad "labels" "$labels" cat "$tmp/data/t10k-labels-idx1-ubyte"
  make_images "$tmp/small" 8 8 14
  bad "t10k-images" t10k-images-idx3-ubyte cat "$tmp/small/t10k-images-idx3-ubyte"
  cp -r "$tmp/data/." "$tmp/bad"
  gzip "$tmp/bad/$images"
  truncate -s -20 "$tmp/bad/$images.gz"
  run ps --data "$tmp/bad"
  expect 7 "a gzip file cut short"
  expect_log "a gzip file cut short"
  expect_jq '.[-1] | .kind == "bad_data" and (.message | test("train-images"))' "a gzip file cut short"
  [[ $(grep -c '^distrain: ' "$tmp/err") == 1 ]] || fail "a gzip file cut short: not one line on stderr"
  expect_no_process "$selected"
}

run_cases
