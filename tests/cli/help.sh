#!/bin/bash
# Help and version: plain text on stdout, exit code 0.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

text() { # text <name> <words in it>... : the last command printed it and nothing went wrong
  local name=$1 word
  shift
  expect 0 "$name"
  [[ -s $tmp/err ]] && fail "$name: wrote to stderr"
  for word; do
    grep -qF -- "$word" "$tmp/out" || fail "$name: does not say '$word'"
  done
}

run --version
text version distrain LibTorch
grep -qE '^distrain [0-9]+\.[0-9]+\.[0-9]+ \(LibTorch [0-9.]+\)$' "$tmp/out" || fail "version: format"
for args in --help -h help; do
  run "$args"
  text "$args" Usage: hybrid Examples:
done
for args in "hybrid --help" "hybrid -h" "help hybrid" "hybrid --bogus --help"; do
  # shellcheck disable=SC2086
  run $args
  text "$args" Usage: --trainers --mode "async|sync" "[0.05]" Examples:
done
for option in --device --checkpoint --trace --token-file --inject --config; do
  grep -qF -- "$option" "$tmp/out" && fail "hybrid --help names $option, which does not exist"
done
awk 'length > 100 { exit 1 }' "$tmp/out" || fail "hybrid --help has lines over 100 columns"
finish
