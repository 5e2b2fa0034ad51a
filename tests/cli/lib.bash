# Common functions of test scripts. A script sources this file, which takes the binary from $1, creates $tmp,
# and at the end removes $tmp and kills every process of the test. A script with several cases has a function
# case_<name> for each and ends with run_cases.
set -u
ulimit -c 0 # writing a core would keep a dead rank's connections open
distrain=$(realpath "$1")
script=$(realpath "$0")
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
# shellcheck disable=SC2034  # for the scripts
root=$(realpath "$here/../..")
limit=${DISTRAIN_TEST_LIMIT:-40} # seconds for one command or one wait
failures=0
code=0
tmp=$(mktemp -d)
export DISTRAIN_TEST_ID=$$.$RANDOM # marks all processes of this test
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE PMI_RANK PMI_SIZE \
  OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE SLURM_PROCID SLURM_NTASKS SLURM_STEP_ID \
  TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK \
  MPI_LOCALRANKID SLURM_LOCALID DISTRAIN_CUDA_LIBRARY DISTRAIN_TOKEN TORCHELASTIC_RUN_ID \
  TORCHELASTIC_RESTART_COUNT PMIX_NAMESPACE SLURM_JOB_ID SLURM_HET_JOB_ID SLURM_RESTART_COUNT \
  SLURM_STEP_NUM_NODES MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE JOB_COMPLETION_INDEX

# Prints the pids of this test's processes whose names are in `programs`, without zombies, which have no
# environment.
programs=distrain
processes() {
  local dir name
  for dir in /proc/[0-9]*; do
    { read -r name <"$dir/comm"; } 2>/dev/null || continue
    [[ " $programs " == *" $name "* ]] || continue
    grep -qzxs "DISTRAIN_TEST_ID=$DISTRAIN_TEST_ID" "$dir/environ" && echo "${dir#/proc/}"
  done
}

cleanup() {
  local pid
  for pid in $(processes); do kill -9 "$pid" 2>/dev/null; done
  rm -rf "$tmp"
}
trap cleanup EXIT

# Returns whether the binary has a sanitizer. Its processes start slowly, so scripts skip repetitions.
sanitized() { [[ -n ${DISTRAIN_TEST_LIMIT:-} ]]; }
# few <word>...: prints the first word under a sanitizer, otherwise all words.
few() { if sanitized; then echo "$1"; else echo "$@"; fi; }
# every <n> <word>...: prints all words in a soak run, otherwise the first n.
every() { if [[ ${DISTRAIN_SOAK:-} ]]; then echo "${@:2}"; else echo "${@:2:$1}"; fi; }

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

# run <argument>...: runs distrain and sets $code, $tmp/out and $tmp/err. A program that does not end in time fails the
# test, whatever exit code the test expects.
run() {
  timeout -k 2 "$limit" "$distrain" "$@" >"$tmp/out" 2>"$tmp/err"
  code=$?
  ((code != 124)) || fail "did not end in $limit s: $(basename "$distrain") $*"
  keep_lines "$tmp/out"
}

# keep_lines <file>: copies the JSON lines for check_lines, because the file may be overwritten later.
keep_lines() {
  local stamp
  stamp=$(stat -c '%n %s %y' "$1")
  [[ $stamp == "${kept:-}" ]] || grep -a '^{"v":.*}$' "$1" >>"$tmp/.seen"
  kept=$stamp
}

# Checks all JSON lines of the test's jobs against `distrain schema`: no unknown event or field, no field missing. The
# first test of a program writes the schema beside the program, because a start costs 0.25 s.
check_lines() {
  local files schema=$distrain.schema
  mapfile -d '' -t files < <(grep -rlaZ '^{"v":' "$tmp")
  ((${#files[@]})) || return
  if [[ ! $schema -nt $distrain ]]; then
    "$distrain" schema >"$tmp/.schema" || { fail "distrain schema: exit code $?"; return; }
    # The rename is atomic, so a concurrent test reads a whole file.
    { cp "$tmp/.schema" "$schema.$$" && mv "$schema.$$" "$schema"; } 2>/dev/null || schema=$tmp/.schema
  fi
  python3 -IS "$root/tests/support/check_lines.py" "$schema" "${files[@]}" >"$tmp/.checked" ||
    fail "lines that are not as 'distrain schema' says:
$(cat "$tmp/.checked")"
}

# expect <code> <name>: checks the exit code of the last command.
expect() {
  [[ $code == "$1" ]] && return
  fail "$2: exit code $code, not $1"
  tail -n 3 "${job_folder:-$tmp}"/{out,err} | cut -c1-400
}

# expect_log <name> [file]: checks that all lines have the common fields and that only the last line is an `end`.
expect_log() {
  local log=${2:-$tmp/out} problem
  keep_lines "$log"
  problem=$(jq -rs 'if length == 0 then "nothing on stdout"
    elif all(.[]; .v == 1 and (.ts | type) == "number" and (.event | type) == "string"
      and has("cmd") and has("rank") and has("role")) | not then "lines without the common fields"
    elif map(select(.event == "end")) | length != 1 then "not one end"
    elif .[-1].event != "end" then "end is not the last line"
    else "" end' "$log" 2>&1)
  [[ -z $problem ]] && return
  fail "$1: $problem"
  tail -n 3 "$log" | cut -c1-300
}

# expect_jq <filter> <name> [file]: checks that there are lines and that each result of the filter, applied to the array
# of all lines, is true. `all(...)` is also true for no element, so a filter that selects lines checks their number, too.
expect_jq() {
  keep_lines "${3:-$tmp/out}"
  jq -es "length > 0 and ([$1
    ] | length > 0 and all)" "${3:-$tmp/out}" >/dev/null 2>&1 && return
  fail "$2: not so: $1"
  tail -n 2 "${3:-$tmp/out}" | cut -c1-500
}

# expect_error <code> <kind> <words> <name>: checks a failure before any rank: `error`, `end`, a line on stderr.
expect_error() {
  expect "$1" "$4"
  jq -es --argjson code "$1" --arg kind "$2" --arg words "$3" 'map(.event) == ["error", "end"]
      and all(.[]; .v == 1 and .exit_code == $code and .kind == $kind)
      and (.[0].message | contains($words)) and .[1].message == .[0].message' \
    "$tmp/out" >/dev/null 2>&1 ||
    { fail "$4: not an error ($2) that says '$3':"; cut -c1-300 "$tmp/out"; }
  [[ $(wc -l <"$tmp/err") == 1 && $(cat "$tmp/err") == distrain:* ]] ||
    fail "$4: not one 'distrain: ' line on stderr"
}

# expect_no_process <name> [seconds]
expect_no_process() {
  local i
  for ((i = 0; i < ${2:-$((limit / 8))} * 20; ++i)); do
    [[ -z $(processes) ]] && return
    sleep 0.05
  done
  fail "$1: processes are left: $(processes | tr '\n' ' ')"
}

# wait_for <seconds> <command>...: waits until the command succeeds; returns 1 if it does not in time.
wait_for() {
  local i limit_s=$1
  shift
  for ((i = 0; i < limit_s * 20; ++i)); do
    "$@" && return 0
    sleep 0.05
  done
  return 1
}

# in_time <seconds> <command>...: runs the command, which sets $took to a number of seconds, up to three times until
# $took is at most <seconds>: a machine is rarely too busy three times in a row.
in_time() {
  local goal=$1 tries=0
  shift
  for (( ; ++tries <= 3; )); do
    took=
    "$@"
    [[ -n $took ]] || return # the command failed and has reported why
    jq -ne "$took <= $goal" >/dev/null && return
  done
  fail "$*: ends after $took s, not within $goal s, at the third try too"
}

# wait_for_lines <n> <event> <file>: waits until the file has n lines of the event.
has_lines() { [[ $(grep -cF "\"event\":\"$2\"" "$3" 2>/dev/null) -ge $1 ]]; }
wait_for_lines() { wait_for "$limit" has_lines "$@" || fail "no $1 lines of $2 after $limit s"; }

# on_terminal <shell command>: runs the command on a terminal and writes its output to $tmp/tty. script(1) may exit
# before it has read all output, so the shell waits until script(1) has read a mark at the end.
on_terminal() {
  local last=END-OF-$RANDOM
  : >"$tmp/script"
  script -qec "$1
    echo $last
    timeout $limit sh -c 'until grep -q $last \"$tmp/script\"; do sleep 0.05; done'" /dev/null >"$tmp/script" </dev/null
  grep -q $last "$tmp/script" || fail "on a terminal: not all was seen after $limit s: $1"
  tr -d '\r' <"$tmp/script" | sed "s/$last\$//; \${/^\$/d}" >"$tmp/tty"
}

# pid_of <rank>: prints the pid of the rank's last process in $tmp/out.
pid_of() { jq -rs "map(select(.event == \"start\" and .rank == $1))[-1].pid" "$tmp/out" 2>/dev/null; }
# Waits for $launcher, whose output is $tmp/out, and sets $code.
await_end() {
  wait "${launcher:?}"
  code=$?
  keep_lines "$tmp/out"
}

make_token() { (umask 077 && head -c 32 /dev/urandom | base64 >"$1"); }

# joined <name> <command>...: runs `<command> <rank>` for four ranks and checks that all succeed.
joined() {
  local name=$1 r pids=() i
  shift
  for r in 3 1 2 0; do
    "$@" "$r" >"$tmp/rank$r" 2>"$tmp/err$r" &
    pids+=($!)
  done
  for i in 0 1 2 3; do
    wait "${pids[i]}"
    code=$?
    [[ $code == 0 ]] || fail "$name: a rank exited with $code"
  done
  for r in 0 1 2 3; do
    expect_log "$name, rank $r" "$tmp/rank$r"
    expect_jq ".[0].event == \"start\" and .[-1].rank == $r and .[-1].status == \"ok\"" "$name" "$tmp/rank$r"
    [[ -s $tmp/err$r ]] && fail "$name: rank $r wrote to stderr"
  done
}

# Prints a free port. Python starts faster with -IS.
free_port() { python3 -IS "$root/tests/support/free_port.py"; }

# make_images <folder> <training images> <test images> [pixels a side] [bars]: writes random images in MNIST's format.
# The brightness of an image gives its class; with `bars`, the position of a bar, which a model learns faster.
make_images() {
  mkdir -p "$1"
  python3 -IS - "$1" "$2" "$3" "${4:-28}" "${5:-}" <<'END'
import random, struct, sys
folder, side, bars = sys.argv[1], int(sys.argv[4]), sys.argv[5] == "bars"
random.seed(1)
for name, count in (("train", int(sys.argv[2])), ("t10k", int(sys.argv[3]))):
    labels = bytes(random.randrange(10) for _ in range(count))
    with open(f"{folder}/{name}-labels-idx1-ubyte", "wb") as file:
        file.write(struct.pack(">II", 0x801, count) + labels)
    with open(f"{folder}/{name}-images-idx3-ubyte", "wb") as file:
        file.write(struct.pack(">IIII", 0x803, count, side, side))
        for label in labels:
            noise = random.randbytes(side * side)
            if bars:
                bright = range((2 * label + 4) * side, (2 * label + 6) * side)
                file.write(bytes(each % 100 + (120 if i in bright else 0) for i, each in enumerate(noise)))
            else:
                file.write(bytes(20 * label + each % 32 for each in noise))
END
}

# make_text <lines>: prints a text in which each word determines the next.
make_text() {
  awk -v lines="$1" 'BEGIN {
    for (i = 0; i < lines; ++i) {
      line = "the"
      for (j = 0; j < 7; ++j) line = line " w" (i * 5 + j * 3) % 23
      print line " ."
    }
  }'
}

# Installs the build that $distrain belongs to into $prefix.
install_build() {
  prefix=$tmp/prefix
  cmake --install "$(dirname "$distrain")/.." --prefix "$prefix" >"$tmp/log" 2>&1 && return
  fail "cmake --install: $(tail -n 3 "$tmp/log")"
  return 1
}

# configure <folder> <option>...: configures the CMake project in the folder with the installed distrain.
configure() { cmake -S "$1" -B "$tmp/build" -DCMAKE_PREFIX_PATH="$prefix" "${@:2}" >"$tmp/log" 2>&1; }
build_outside() { # build_outside <folder> <option>...
  configure "$@" && cmake --build "$tmp/build" -j 2 >"$tmp/log" 2>&1 && return
  fail "$(basename "$1") does not build: $(grep -i -A 3 error "$tmp/log" | head -n 5)"
  return 1
}

# Runs the case $2 of the script, as CTest does, or each case in a process of its own; then ends the script.
selected=${2:-}
run_cases() {
  local name
  if [[ $selected ]] && ! declare -F "case_$selected" >/dev/null; then
    fail "no case $selected"
  elif [[ $selected ]]; then
    "case_$selected"
  else
    local ran=0
    while read -r name <&3; do
      echo "case $name"
      ran=1
      bash "$script" "$distrain" "$name" 3<&- </dev/null || ((++failures))
    done 3< <(sed -nE 's/^case_([a-z0-9_]+)\(\).*/\1/p' "$script")
    ((ran)) || fail "no cases in $script"
  fi
  finish
}

finish() {
  check_lines
  ((failures == 0)) || echo "$failures checks failed"
  exit $((failures > 0))
}
