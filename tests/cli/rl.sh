#!/bin/bash
# ctest: timeout=300
# distrain rl: lines, reaching or missing the goal, --local, ranks that join, signals.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

one_error() { # one_error <name>: only the agent reports an error, that the goal was missed
  expect_jq '[.[] | select(.event == "error") | [.kind, .exit_code, .cause_rank, .rank]]
    == [["goal_not_reached", 11, 0, 0]] and (.[] | select(.event == "error").message) == .[-1].message' "$1"
}
start() { # start <args>...: starts an endless job and waits for its first episode
  : >"$tmp/out"
  timeout -k 2 "$limit" "$distrain" rl --threshold 1e6 --log-interval 1 --peer-timeout 60 "$@" >"$tmp/out" 2>"$tmp/err" &
  job=$!
  wait_for_lines 3 episode "$tmp/out"
}
pid_of() { jq -r "select(.event == \"start\" and .rank == $1).pid" "$tmp/out" 2>/dev/null; }
ended_by_term() { # ended_by_term <name>: the job ended by SIGTERM after a save
  expect 143 "$1"
  expect_log "$1"
  expect_jq '.[-1] | .signal == "SIGTERM" and (.message | test("checkpoint saved in"))' "$1"
  expect_no_process "$1"
}

case_goal() {
  run rl --max-episodes 12 --log-interval 5
  expect 11 "not solved"
  expect_log "not solved"
  [[ $(cat "$tmp/err") == "distrain: not solved after 12 episodes"* && $(wc -l <"$tmp/err") == 1 ]] ||
    fail "not solved: on stderr: $(head -n 3 "$tmp/err")"
  one_error "not solved"
  expect_jq '[.[] | select(.event == "start")] | (map(.rank) | sort) == [0,1]
    and all(.[]; .threads == 1 and .config.observers == 1 and .config.threshold == 475)' "start lines"
  expect_jq '[.[] | select(.event == "rank_end") | [.role, .status, .exit_code]] | sort
    == [["agent","failed",11],["observer1","ok",0]]' "rank_end lines"
  expect_jq '[.[] | select(.event == "episode")] | map(.episode) == [5, 10]
    and all(.[]; .rank == 0 and .reward >= 8 and .steps == .reward and .running_reward > 0
      and .env_steps_per_s > 0 and .requests_per_s > 0)' "episode lines"
  expect_jq '.[-1] | .status == "failed" and .exit_code == 11 and .kind == "goal_not_reached"
    and .cause_rank == 0 and .episodes == 12 and .solved == false and .steps > 100
    and .running_reward < 475 and .env_steps_per_s > 0 and .requests_per_s > 0 and .rpc.calls > .steps
    and .live_rrefs == 0 and .live_contexts == 0' "not solved: end"
  expect_no_process "not solved"

  run rl --threshold 10 --envs-per-observer 3 --observers 2
  expect 0 "solved"
  expect_log "solved"
  [[ -s $tmp/err ]] && { fail "solved: wrote to stderr:"; head -n 5 "$tmp/err"; }
  expect_jq '.[-1] | .status == "ok" and .solved == true and .running_reward > 10 and .live_rrefs == 0' "solved"

  run rl --epochs 3
  expect_error 2 invalid "--epochs" "an option of other jobs"
  run rl --lr-schedule cosine:5e
  expect_error 2 invalid "--lr-schedule cosine:5e: the job has neither epochs nor evaluations" "a schedule of epochs"
}

# --local plays the same episodes as several processes, regardless of how requests are batched.
case_same_episodes() {
  local size where
  for size in "--observers 1" "--observers 3 --envs-per-observer 2"; do
    for where in "" --local; do
      # shellcheck disable=SC2086
      run rl $size --max-episodes 25 --log-interval 1 $where
      expect 11 "rl $size $where"
      expect_log "rl $size $where"
      one_error "rl $size $where"
      jq -c 'select(.event == "episode") | [.episode, .reward, .steps, .running_reward]' "$tmp/out" >"$tmp/lines$where"
    done
    [[ $(wc -l <"$tmp/lines") == 25 ]] || fail "rl $size: not 25 lines"
    cmp -s "$tmp/lines" "$tmp/lines--local" || fail "rl $size: other episodes than with --local"
  done
}

case_ranks_that_join() {
  local port r other observer job
  # With ranks that join, only rank 0 reports that the goal was missed.
  port=$(free_port)
  for r in 1 2; do
    timeout "$limit" "$distrain" rl --rank "$r" --master-port "$port" >"$tmp/rank$r" 2>&1 &
  done
  run rl --rank 0 --observers 2 --master-port "$port" --max-episodes 3
  expect 11 "ranks that join: the agent"
  expect_log "ranks that join: the agent"
  expect_jq '.[-1] | .event == "end" and .rank == 0 and .kind == "goal_not_reached"' "ranks that join: the agent"
  one_error "ranks that join: the agent"
  [[ $(cat "$tmp/err") == "distrain: not solved after 3 episodes"* ]] || fail "ranks that join: $(cat "$tmp/err")"
  for r in 1 2; do
    wait -n
    code=$?
    expect 0 "ranks that join: an observer"
  done
  expect_jq '.[-1] | .event == "end" and .role == "observer1" and .status == "ok"' "ranks that join" "$tmp/rank1"

  # The agent names the observer that it lost.
  port=$(free_port)
  timeout "$limit" "$distrain" rl --rank 1 --master-port "$port" >"$tmp/rank1" 2>&1 &
  other=$!
  "$distrain" rl --rank 2 --master-port "$port" >"$tmp/rank2" 2>&1 &
  observer=$!
  : >"$tmp/out"
  timeout "$limit" "$distrain" rl --rank 0 --observers 2 --master-port "$port" --threshold 1e6 >"$tmp/out" 2>"$tmp/err" &
  job=$!
  wait_for_lines 1 episode "$tmp/out"
  kill -9 "$observer"
  wait "$job"
  code=$?
  expect 5 "an observer that joined is lost"
  wait "$other"
  code=$?
  expect 5 "an observer that joined is lost: the other one"
  expect_jq '.[-1] | .event == "end" and .kind == "peer_lost" and .cause_rank == 2' "an observer that joined is lost"
  expect_no_process "an observer that joined is lost"
}

# A resumed job ends like an uninterrupted one.
case_save_and_resume() {
  local at folder file
  start --observers 2 --checkpoint "$tmp/saved"
  kill -TERM "$(pid_of 1)"
  wait "$job"
  code=$?
  expect 143 "SIGTERM"
  expect_log "SIGTERM"
  expect_jq '[.[] | select(.event == "checkpoint")] | length >= 1 and .[-1].action == "saved"' "SIGTERM"
  expect_jq '.[-1] | .signal == "SIGTERM" and (.message | test("checkpoint saved in"))' "SIGTERM"
  expect_no_process "SIGTERM"
  at=$(jq 'select(.event == "checkpoint").step' "$tmp/out" | tail -n 1)
  run rl --threshold 1e6 --observers 2 --checkpoint "$tmp/saved" --resume auto --max-episodes $((at + 5))
  expect 11 "--resume"
  expect_jq ".[-1].episodes == $((at + 5))" "--resume"
  run rl --threshold 1e6 --observers 2 --checkpoint "$tmp/whole" --max-episodes $((at + 5)) --local
  expect 11 "without a break"
  for folder in saved whole; do
    for file in model optimizer; do sha256sum <"$tmp/$folder/step-$(printf '%012d' $((at + 5)))/$file.safetensors"; done
  done >"$tmp/sums"
  [[ $(sort -u "$tmp/sums" | wc -l) == 2 ]] || fail "--resume: other bytes than without a break"
  run rl --seed 2 --observers 2 --checkpoint "$tmp/saved" --resume auto
  expect 7 "another seed"
  expect_jq '.[-1] | .kind == "bad_data" and (.message | test("saved with --seed 1, not 2"))' "another seed"
}

case_sigterm() {
  local rank name port observer agent_code job
  start --observers 2 --checkpoint "$tmp/launched"
  kill -TERM "$(pgrep -P "$job" -x distrain)"
  wait "$job"
  code=$?
  ended_by_term "SIGTERM to the launcher"
  start --observers 2 --checkpoint "$tmp/one-by-one"
  for rank in 0 1 2; do
    kill -TERM "$(pid_of "$rank")" 2>/dev/null
    sleep 0.1
  done
  wait "$job"
  code=$?
  ended_by_term "SIGTERM to the ranks one by one"
  start --observers 2 --checkpoint "$tmp/alone" --local
  kill -TERM "$(pid_of 0)"
  wait "$job"
  code=$?
  ended_by_term "SIGTERM with --local"
  start --observers 2
  kill -TERM "$(pgrep -P "$job" -x distrain)"
  wait "$job"
  code=$?
  name="SIGTERM without --checkpoint"
  expect 143 "$name"
  expect_log "$name"
  expect_jq '.[-1].signal == "SIGTERM" and all(.[]; .event != "checkpoint")' "$name"
  expect_no_process "$name"

  port=$(free_port)
  timeout "$limit" "$distrain" rl --rank 1 --master-port "$port" >"$tmp/rank1" 2>&1 &
  observer=$!
  start --rank 0 --observers 1 --master-port "$port" --checkpoint "$tmp/joined"
  kill -TERM "$(pid_of 0)"
  wait "$job"
  agent_code=$?
  wait "$observer"
  code=$?
  expect 143 "SIGTERM to an agent that joined: its observer"
  code=$agent_code
  ended_by_term "SIGTERM to an agent that joined"

  # While ranks are missing there is nothing to save.
  : >"$tmp/out"
  timeout "$limit" "$distrain" rl --rank 0 --master-port "$(free_port)" --checkpoint "$tmp/none" >"$tmp/out" 2>"$tmp/err" &
  job=$!
  wait_for_lines 1 waiting "$tmp/out"
  kill -TERM "$(pid_of 0)"
  wait_for 20 has_lines 1 end "$tmp/out" || fail "SIGTERM while ranks are missing: goes on waiting"
  wait "$job"
  code=$?
  expect 143 "SIGTERM while ranks are missing"
  expect_jq '.[-1] | .signal == "SIGTERM" and .message == "ended by SIGTERM"' "SIGTERM while ranks are missing"
}

case_rank_is_killed() {
  local rank name
  for rank in 0 2; do
    name="kill -9 of rank $rank"
    start --observers 3
    kill -9 "$(pid_of "$rank")"
    wait "$job"
    code=$?
    expect 137 "$name"
    expect_log "$name"
    expect_jq ".[-1] | .cause_rank == $rank and .signal == \"SIGKILL\"" "$name"
    expect_jq '[.[] | select(.event == "rank_end")] | length == 3 and all(.[]; .exit_code == 5)' "$name"
    expect_no_process "$name"
  done
}

run_cases
