#!/bin/bash
# Help and version: plain text on stdout, exit code 0.
# ctest: timeout=180
# Not under asan, because unit_app makes the same texts under asan.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317
source "$(dirname "$0")/lib.bash"

text() { # text <name> <words>... : the last command succeeded and printed a text with these words
  local name=$1 word out
  shift
  expect 0 "$name"
  [[ -s $tmp/err ]] && fail "$name: wrote to stderr"
  out=$(tr -s '[:space:]' ' ' <"$tmp/out")
  for word; do
    [[ $out == *"$word"* ]] || fail "$name: does not say '$word'"
  done
}

# has_options <name> <word>...: the last help text describes those of the words that are options. Other parts of the text,
# such as the examples, also name options.
has_options() {
  local name=$1 word
  shift
  for word; do
    [[ $word != --* ]] || grep -qE -- "^ +(-[a-zA-Z], )?$word( |\$)" "$tmp/out" || fail "$name: does not describe $word"
  done
}

case_version_and_overview() {
  local args built
  for args in -V "hybrid --version" "predict -V" --version; do
    # shellcheck disable=SC2086
    run $args
    text "$args" distrain LibTorch
  done
  grep -qE '^distrain [0-9]+\.[0-9]+\.[0-9]+ \(LibTorch [0-9.]+\)$' "$tmp/out" || fail "version: format"
  built="not compiled"
  [[ ! -e $(dirname "$distrain")/libdistrain_cuda.so ]] || built="compiled, tested on one GPU"
  grep -qxF "CUDA: $built" "$tmp/out" || fail "version: CUDA"
  for args in --help -h help; do
    run "$args"
    text "$args" Usage: "Jobs: hybrid train" Examples:
  done
}

declare -A words=([hybrid]="--trainers --mode async|sync" [ps]="--trainers --mode async|sync|ssp"
  [rnn]="--trainers --mode async|sync" [rl]="--observers --threshold --max-episodes"
  [pipeline]="--stages --micro-batches --schedule gpipe|1f1b|naive")

case_jobs() {
  local command forms args flag
  for command in "${!words[@]}"; do
    forms=()
    [[ $command != hybrid ]] || forms=("--help hybrid" "help hybrid" "hybrid help" "hybrid --bogus -h")
    forms+=("$command --help")
    for args in "${forms[@]}"; do
      # shellcheck disable=SC2086
      run $args
      # shellcheck disable=SC2086
      text "$args" Usage: ${words[$command]} "auto|PATH" Examples:
      # shellcheck disable=SC2086
      has_options "$args" ${words[$command]} --checkpoint --resume --inject
    done
    sed '/^Examples:/,$d' "$tmp/out" | awk 'length > 80 { exit 1 }' || fail "$command --help has lines over 80 columns"
    case $command in
      hybrid) text "$args" "[0.05]" ;;
      ps)
        text "$args" "async|sync|ssp" "[0.03]" "0.286"
        flag=$(awk '/^ +(-[a-zA-Z], )?--/ { is_it = /--verify-grads/ } is_it' "$tmp/out")
        [[ -n $flag && $flag != *"["* ]] || fail "ps --help: --verify-grads is missing, or has a default: '$flag'"
        ;;
      rl) text "$args" "save every N episodes; 0 saves only at the end" "[100]" "rl gains nothing from more than 1" ;;
      pipeline) text "$args" "save every N batches; 0 saves at the end of each epoch" ;;
      rnn) text "$args" "[20 with --data, otherwise 5]" ;;
    esac
  done
}

case_commands() {
  local command forms args
  for command in predict report help man completion schema; do
    forms=("help $command")
    [[ $command != predict ]] || forms+=("predict --help" "-h predict")
    for args in "${forms[@]}"; do
      # shellcheck disable=SC2086
      run $args
      text "$args" "Usage: distrain $command "
    done
    run man "$command"
    text "man $command" ".TH DISTRAIN-${command^^} 1 "
  done
  run predict help
  text "predict help" "Usage: distrain predict CHECKPOINT [FILE] [OPTION]..."
  has_options "predict help" --generate --device --threads
  grep -q "^ *--lr " "$tmp/out" && fail "predict help: has --lr, which has no effect on it"
  run report --help
  text "report --help" "Usage: distrain report FILE... [OPTION]..." "-o, --output FILE"
  has_options "report --help" --output --trace
}

run_cases
