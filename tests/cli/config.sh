#!/bin/bash
# --config, --print-config and --dry-run. tests/unit/app/test_config.cpp has the mistakes in files, test_placement.cpp the
# plans under other launchers.
# ctest: timeout=180
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

case_config() {
  local port
  cat >"$tmp/run.toml" <<'END'
# options of every rank
batches_per_epoch = 4   # the tutorials' spelling
epochs = 2
mode = "sync"
dense = [8,
  4]
join-timeout = "1m"
END
  run hybrid --config "$tmp/run.toml" --epochs 3
  expect 0 "--config"
  expect_log "--config"
  [[ -s $tmp/err ]] && fail "--config: wrote to stderr: $(cat "$tmp/err")"
  expect_jq '.[-1] | .steps == 24 and .config.epochs == 3 and .config.mode == "sync" and .config.dense == [8,4]
    and .config.batches_per_epoch == 4' "the command line wins over the file"
  run hybrid --config <(echo 'epochs = 2') --batches 2
  expect_jq '.[-1].steps == 8' "a file that can be read once"

  # The other ranks get the options of the file from rank 0.
  port=$(free_port)
  one_by_one() {
    local config=()
    [[ $1 != 0 ]] || config=(--config "$tmp/run.toml")
    timeout "$limit" "$distrain" hybrid --rank "$1" --master-port "$port" "${config[@]}"
  }
  joined "a file on rank 0" one_by_one
  expect_jq '.[-1] | .config.dense == [8,4] and .config.epochs == 2' "a file on rank 0" "$tmp/rank1"

  run hybrid --config "$tmp/none"
  expect_error 2 invalid "--config $tmp/none: No such file or directory" "a missing file"
  run hybrid --config "$tmp"
  expect_error 2 invalid "--config $tmp: Is a directory" "a folder"
  run rl --config "$tmp/run.toml"
  expect_error 2 invalid "run.toml:2: unknown option 'batches-per-epoch': it is an option of hybrid, rnn" "another job's file"
  run hybrid --config "$tmp/run.toml" --min-trainers 1
  expect_error 2 invalid "unknown option --min-trainers" "--config and a wrong option"
  echo 'data = """x"""' >"$tmp/quotes.toml"
  run hybrid --config "$tmp/quotes.toml"
  expect_error 2 invalid "quotes.toml:1: a text cannot begin with three quotes" "a text of several lines"
  echo 'local = true' >"$tmp/local.toml"
  run hybrid --config "$tmp/local.toml" --spawn --dry-run
  expect_error 2 invalid "--local excludes --spawn (config file $tmp/local.toml, command line)" "options that exclude each other"
  run hybrid --config "$tmp/local.toml" --spawn --local=false --dry-run
  expect_jq '.[0].mode == "spawn"' "a flag of the file is reset"
}

case_print_config() {
  local job
  TORCHELASTIC_USE_AGENT_STORE=True RANK=0 WORLD_SIZE=4 MASTER_ADDR=localhost MASTER_PORT=29511 \
    run hybrid --print-config
  expect_jq '.[0] | .config.master_port != 29511 and .origins.master_port == "derived"' "a port beside that of torchrun"
  make_images "$tmp/images" 60 20
  printf 'seed = 7\npeer_timeout = "90s"\n' >"$tmp/c.toml"
  for job in hybrid rl rnn pipeline ps; do
    run "$job" --config "$tmp/c.toml" --num_threads 1 --print-config
    expect_error 2 invalid "unknown option --num_threads" "$job"
    run "$job" --config "$tmp/c.toml" --log_interval 5 --rpc_timeout 2m --print-config
    expect 0 "$job"
    expect_log "$job"
    expect_jq 'map(.event) == ["config", "end"] and .[-1].status == "ok"' "$job"
    # shellcheck disable=SC2016 # $file is jq's
    expect_jq '.[0] | ("config file '"$tmp/c.toml"'") as $file | .config.seed == 7 and .origins.seed == $file
      and .config.peer_timeout == 90 and .origins.peer_timeout == $file and .config.log_interval == 5
      and .config.rpc_timeout == 120 and .origins.rpc_timeout == "command line"
      and .config.device == "cpu" and .origins.device == "default" and (.config | keys) == (.origins | keys)' "$job"
    # The printed file gives the same options.
    cp "$tmp/out" "$tmp/first"
    run "$job" --config "$tmp/c.toml" --log_interval 5 --rpc_timeout 2m --print-config --pretty
    mv "$tmp/out" "$tmp/printed.toml"
    run "$job" --config "$tmp/printed.toml" --print-config
    diff <(jq 'select(.config).config | del(.config)' "$tmp/first") <(jq 'select(.config).config | del(.config)' "$tmp/out") ||
      fail "$job: the printed file gives other options: $(cat "$tmp/printed.toml")"
  done
  RANK=1 WORLD_SIZE=5 MASTER_ADDR=m MASTER_PORT=77 run hybrid --print-config
  expect_jq '.[0] | .config.rank == 1 and .origins.rank == "environment variable RANK"
    and .config.master_addr == "m" and .origins.master_addr == "environment variable MASTER_ADDR"
    and .config.master_port == 77 and .origins.world_size == "environment variable WORLD_SIZE"
    and .config.lr == null and .origins.lr == "rank 0"' "the environment"
  run hybrid --epochs 1 --batches 2 --lr 0.125 --checkpoint "$tmp/saved"
  run hybrid --checkpoint "$tmp/saved" --resume auto --epochs 2 --print-config --dry-run
  # shellcheck disable=SC2016 # $from is jq's
  expect_jq "(\"$tmp/saved/step-000000000002\") as \$from | .[0].config.lr == 0.125
    and .[0].origins.lr == \"checkpoint \" + \$from and .[0].origins.epochs == \"command line\" and .[1].resume == \$from
    and (map(.message // empty) | join(\"\") | test(\"--epochs 2 in place of 1\"))" "a checkpoint"
  run ps --print-config --data "$tmp/none"
  expect 0 "options are printed before they are checked"
  run pipeline --num_split 3 --print-config
  expect_jq '.[0] | .config.micro_batches == [3] and .origins.micro_batches == "command line"' "an old spelling"
}

# --dry-run checks the options but opens no port and makes no file.
case_dry_run() {
  local job
  make_images "$tmp/images" 60 20
  mkdir "$tmp/empty"
  cd "$tmp/empty" || exit 1
  coproc python3 -IS -c 'import socket
taken = socket.create_server(("127.0.0.1", 0))
print(taken.getsockname()[1], flush=True)
input()'
  read -r port <&"${COPROC[0]}"
  for job in hybrid rl rnn "pipeline --num_split 2" "ps --data $tmp/images"; do
    # shellcheck disable=SC2086 # a job and its options
    run $job --dry-run --checkpoint saved --log lines --trace t.json --master-addr 127.0.0.1 --master-port "$port" --threads 1
    expect 0 "$job"
    expect_log "$job"
    # shellcheck disable=SC2016 # $plan is jq's
    expect_jq "[.[] | select(.event == \"plan\")] as \$plan | (\$plan | map(.rank)) == [range(\$plan[0].world_size)]
      and (\$plan | length) >= 2 and all(\$plan[]; .role and .threads == 1 and .device == \"cpu\" and .mode == \"spawn\"
      and .master_port == $port and .host)" "$job"
    run "${job%% *}" --data "$tmp/none" --dry-run --checkpoint saved
    [[ $code == 7 || $job == rl ]] || fail "$job: --data is not checked"
  done
  run hybrid --ranks 2-3 --world-size 5 --dry-run --pretty
  [[ $(sed 's/ on .*:/:/' "$tmp/out") == 'rank 2 (trainer2): threads '*', device as rank 0 says
rank 3 (master): threads '*', device as rank 0 says' ]] || fail "--pretty: $(cat "$tmp/out")"
  run hybrid --local --dry-run
  expect_jq '.[0] | .rank == 0 and .role == "local" and .mode == "local"' "--local"
  run hybrid --rank auto --dry-run
  expect_jq '.[0] | .event == "plan" and .rank == null and .mode == "join" and .device == null' "--rank auto"
  [[ -z $(ls -A) ]] || fail "--dry-run left files: $(ls -A)"
  echo >&"${COPROC[1]}"
}

run_cases
