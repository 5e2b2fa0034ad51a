#!/bin/bash
# guided.sh <program of the fuzz preset> <target> [seconds]
# Runs one target under libFuzzer, starting from its seeds and its corpus. With GROW=1 it then minimizes the found
# inputs without losing coverage, and replaces the corpus by 30 of them.
set -eu
program=$(realpath "$1")
target=$2
seconds=${3:-${FUZZ_SECONDS:-15}}
corpus=$(dirname "$(realpath "${BASH_SOURCE[0]}")")/corpus/$target
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
found=$(dirname "$program")/found-$target- # an input that fails is kept there
mkdir -p "$tmp/new" "$corpus"
"$program" "--target=$target" "--write-seeds=$tmp/seeds"
# One thread, so that an input runs the same code each time.
export OMP_NUM_THREADS=1
"$program" "--target=$target" -max_total_time="$seconds" -timeout=10 -max_len=4096 -verbosity=0 \
  -print_final_stats=1 -artifact_prefix="$found" "$tmp/new" "$tmp/seeds" "$corpus"
[[ ${GROW:-} ]] || exit 0
mkdir "$tmp/least"
"$program" "--target=$target" -set_cover_merge=1 -use_counters=0 -max_len=1024 -verbosity=0 "$tmp/least" \
  "$corpus" "$tmp/new"
rm -rf "$corpus"
mkdir "$corpus"
find "$tmp/least" -type f | sort | head -n 30 | xargs -I{} cp {} "$corpus"
