#!/bin/bash
# ctest: timeout=600 first
# The examples build with an installed distrain, train, join from several terminals, resume bit by bit after a kill, and
# have distrain's help and completion.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"
reference=$(dirname "$distrain")/recommender_reference

for program in "$root"/examples/*.cpp; do
  (($(wc -l <"$program") <= 140)) || fail "$program has more than 140 lines"
done
install_build || finish
cp -r "$root/examples" "$tmp/examples"
# Use Clang if it is installed, because with a precompiled header it takes a quarter of the time.
quick=()
clang=$(command -v clang++) &&
  quick=("-DCMAKE_CXX_COMPILER=$clang" "-DCMAKE_PROJECT_INCLUDE=$root/tests/support/precompile.cmake")
build_outside "$tmp/examples" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O0 "${quick[@]}" || finish
cd "$tmp" || exit 1

newest() { find "$1" -maxdepth 1 -name 'step-*' | sort | tail -n 1; }

complete_words() ( # complete_words <words>...: prints the words that bash offers after them
  # shellcheck source=/dev/null
  source "$tmp/completion"
  COMP_WORDS=("$@")
  COMP_CWORD=$(($# - 1))
  "_$1"
  printf '%s ' "${COMPREPLY[@]}"
)

# The job that README.md shows: its loss starts at ln 2.
distrain=$tmp/build/xor programs=xor
run --trainers 3 --epochs 5 --lr 0.3
expect 0 xor
expect_log xor
expect_jq '.[-1].loss | . != null and . < 0.4' xor # null is less than any number
check_lines
rm -f "$tmp"/{.seen,out}

# The library without the job kit.
port=$(free_port)
terminals=()
for rank in 0 1 2; do
  timeout "$limit" build/runtime "$rank" "$port" >"$tmp/runtime$rank" 2>&1 &
  terminals+=($!)
done
for terminal in "${terminals[@]}"; do wait "$terminal" || fail "runtime: exit code $?"; done
grep -qx 'weight 2.000' "$tmp/runtime1" || fail "runtime: $(cat "$tmp"/runtime?)"

python3 examples/make_data.py . || fail "make_data.py: exit code $?"
for job in "recommender 3" "matrix_factorization 2 --data ratings.txt" "mlp 4 --data digits"; do # four ranks each
  read -r name trainers data <<<"$job"
  read -ra data <<<"$data"
  data+=(--trainers "$trainers")
  distrain=$tmp/build/$name programs=${name:0:15} # the kernel truncates names of processes

  run "${data[@]}" --trace "$tmp/trace.json"
  expect 0 "$name"
  expect_log "$name"
  [[ ! -s $tmp/err ]] || fail "$name: on stderr: $(head -n 1 "$tmp/err")"
  case $name in
    recommender) # compare with the same model in torch alone, with the same global batch size
      least=$("$reference" clicks.txt $((32 * trainers)) 10 0.01)
      expect_jq "$least > 0.8 and .[-1].accuracy >= $least - 0.01" "$name" ;;
    matrix_factorization) # the ratings have a variance of 0.89 and noise of 0.04
      expect_jq 'map(select(.event == "eval"))[-1].loss | . != null and . < 0.2' "$name" ;;
    mlp) expect_jq '.[-1].accuracy > 0.8' "$name" ;;
  esac
  problems=$(python3 "$here/check_trace.py" "$tmp/trace.json" 4 step@3 backward@3 2>&1) ||
    fail "$name, the trace: $problems"

  # A job that is killed at a random step and resumed saves the same files.
  small=("${data[@]}" --optimizer adam --steps 120 --checkpoint-every 20)
  [[ $name == mlp ]] || small+=(--mode sync)
  run "${small[@]}" --checkpoint "$tmp/whole"
  expect 0 "$name, whole"
  accuracy=$(tail -n 1 "$tmp/out" | jq '.accuracy // 0')
  "$distrain" "${small[@]}" --checkpoint "$tmp/parts" --log-interval 1 --inject save=1s \
    >"$tmp/killed" 2>/dev/null &
  wait_for_lines 1 checkpoint "$tmp/killed"
  wait_for_lines $((RANDOM % 60 * trainers)) step "$tmp/killed"
  # shellcheck disable=SC2046  # a word each
  kill -9 $(processes)
  wait $! 2>/dev/null
  code=$?
  expect 137 "$name, killed"
  step=$(basename "$(newest "$tmp/parts")")
  run "${small[@]}" --checkpoint "$tmp/parts" --resume auto
  expect 0 "$name, resumed"
  expect_jq 'map(select(.event == "checkpoint"))[0] | .action == "loaded" and .step < 120' \
    "$name, resumed at $step"
  for file in model optimizer; do
    cmp "$(newest "$tmp/whole")/$file.safetensors" "$(newest "$tmp/parts")/$file.safetensors" ||
      fail "$name: $file differs after $step"
  done

  if [[ $name == mlp ]]; then # mlp also has --local and predict
    run "${small[@]}" --checkpoint "$tmp/local" --local --threads 1
    expect 0 "$name --local"
    expect_jq "(.[-1].accuracy - $accuracy | fabs) < 0.005" "$name --local"
    run predict "$tmp/whole" digits
    expect 0 "$name predict"
    expect_jq "map(select(.event == \"prediction\")) | length == 500" "$name predict"
    expect_jq ".[-1].accuracy == $accuracy" "$name predict"
  fi

  # Start the four ranks separately.
  port=$(free_port)
  terminals=()
  for rank in 2 0 3 1; do
    timeout "$limit" "$distrain" "${data[@]}" --steps 50 --rank $rank --master-port "$port" \
      >"$tmp/out$rank" 2>"$tmp/err$rank" &
    terminals+=($!)
  done
  for terminal in "${terminals[@]}"; do
    wait "$terminal" || fail "$name: a rank that joined: exit code $?"
  done
  for rank in 0 1 2 3; do
    expect_log "$name --rank $rank" "$tmp/out$rank"
    expect_jq '.[0].world_size == 4 and .[-1].status == "ok" and .[-1].config.steps == 50' "$name --rank $rank" "$tmp/out$rank"
  done

  run --rank 4
  [[ $(cat "$tmp/err") == "$name: "* ]] || fail "$name --rank 4: on stderr: $(cat "$tmp/err")"
  [[ $(for rank in 0 1 2 3; do tail -n 1 "$tmp/out$rank" | jq '.run // error'; done | sort -u | wc -l) == 1 ]] ||
    fail "$name: ranks that joined are of several runs"

  run --help
  expect 0 "$name --help"
  for words in "Usage: $name " "[OPTION]..." --trainers --rank --resume --trace "help|man|completion|schema"; do
    grep -qF -- "$words" "$tmp/out" || fail "$name --help does not say '$words'"
  done
  "$distrain" completion bash >"$tmp/completion"
  offered=$(complete_words "$name" --epo)
  [[ $offered == "--epochs " ]] || fail "$name: bash offers '$offered' for --epo"
  expect_no_process "$name"
  check_lines
  rm -rf "$tmp"/{.seen,out*,killed,whole,parts,local,trace.json}
done

# The commands of docs/write-a-job.md.
mkdir tour
(cd tour && ln -s ../examples . && PATH=$tmp/build:$PATH timeout 120 bash examples/tour.sh >"$tmp/tour.out" 2>"$tmp/tour.err") ||
  fail "tour.sh: exit code $?: $(tail -n 3 "$tmp/tour.err")"
grep '^{' "$tmp/tour.out" >"$tmp/tour.lines" # without the help texts
expect_jq 'map(select(.accuracy > 0.8)) | length == 2' "tour.sh" "$tmp/tour.lines"
rm -r tour # check_lines knows the schema of one program only
finish
