# Common functions of the scripts of tests/launchers, which run jobs under real launchers and the files of
# examples/launch. A script sources this file first.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash disable=SC2034  # for the scripts
source "$(dirname "${BASH_SOURCE[0]}")/../cli/lib.bash"
PATH=$(dirname "$distrain"):$PATH
trap "exit 143" TERM INT # so that the trap of EXIT removes daemons and hosts, too
examples=$root/examples/launch
# A job that runs until a signal, and the same with --checkpoint, which saves only then.
endless=(hybrid --data teacher --epochs 1000000)
saving=("${endless[@]}" --checkpoint-every 1000000)

skip() {
  echo "skipped: $*"
  exit 77 # CTest reports the test as skipped
}

# need <command>...: skips the test if a command is missing. ./run test --all installs all of them.
need() {
  local name
  for name in "$@"; do command -v "$name" >/dev/null || skip "$name is not installed"; done
}

# own_hosts <line>...: adds lines to /etc/hosts, in a mount namespace of the test's own, in which the script starts again.
own_hosts() {
  if [[ ! ${DISTRAIN_OWN_HOSTS:-} ]]; then
    unshare -m true 2>/dev/null || skip "no right to make a mount namespace"
    rm -rf "$tmp"
    # shellcheck disable=SC2086  # empty if there is no case
    exec env DISTRAIN_OWN_HOSTS=1 unshare -m bash "$script" "$distrain" $selected
  fi
  { cat /etc/hosts && printf '%s\n' "$@"; } >"$tmp/hosts"
  mount --bind "$tmp/hosts" /etc/hosts
}

# example <file> [<setting>=<value>...]: goes to a new folder and copies a file of examples/launch there, with other
# values for these settings at its top.
example() {
  local file=$1 setting
  job_folder=$(mktemp -d "$tmp/job.XXXX") && chmod 755 "$tmp" "$job_folder" && cd "$job_folder" || exit
  cp "$examples/$file" .
  for setting in "${@:2}"; do
    grep -q "^${setting%%=*}=" "$file" || fail "$file has no setting ${setting%%=*}"
    sed -i "s|^${setting%%=*}=[^#]*|$setting |" "$file"
  done
}

# pids_in <file>...: prints the pids in the `start` lines of the files.
pids_in() { jq -r 'select(.event == "start").pid' "$@"; }

# expect_ancestor <program or pid> <name> <file>...: checks that each rank with a `start` line runs and has this
# ancestor.
expect_ancestor() {
  local program=$1 name=$2 pid ancestor seen count=0
  shift 2
  for pid in $(pids_in "$@"); do
    ((++count))
    ancestor=$pid seen=
    while ancestor=$(awk '/^PPid:/ { print $2 }' "/proc/$ancestor/status" 2>/dev/null) && ((ancestor > 1)); do
      seen+=" $ancestor $(cat "/proc/$ancestor/comm" 2>/dev/null)"
    done
    [[ $seen" " == *" $program "* ]] || fail "$name: process $pid has the ancestors$seen, not $program"
  done
  ((count)) || fail "$name: no rank has started"
}

# expect_ends <code> <name> <file>...: checks that each line of the files is JSON, and that each rank's `end` line has
# the exit code.
expect_ends() {
  local wanted=$1 name=$2 file
  shift 2
  for file in "$@"; do
    expect_log "$name, $file" "$file"
    expect_jq ".[-1].exit_code == $wanted" "$name, $file" "$file"
  done
}

# expect_runs <n> <name> <file>...: checks how many jobs the ranks with these `end` lines belong to.
expect_runs() {
  local runs
  runs=$(jq -r 'select(.event == "end").run' "${@:3}" | sort | uniq -c | awk '{ print $1 }' | xargs)
  [[ $(wc -w <<<"$runs") == "$1" ]] || fail "$2: ranks by run: $runs, not $1 runs"
}

# saved_step <folder>: prints the step of the newest checkpoint.
saved_step() {
  local step
  step=$(find "$1" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1)
  [[ $step ]] && echo $((10#${step##*-}))
}

# expect_saved <folder> <name>: checks that there is a checkpoint, and sets $saved to its step.
expect_saved() {
  saved=$(saved_step "$1") || fail "$2: nothing saved in $1"
}

# expect_resumed <step> <name> <file of rank 0>: checks that the job was resumed at that step.
expect_resumed() {
  expect_jq "any(.[]; .event == \"checkpoint\" and .action == \"loaded\" and .step == ${1:-null})" "$2" "$3"
}

# await <pid>: waits for a process in the background and sets $code.
gone() { ! kill -0 "$1" 2>/dev/null; }
await() {
  wait_for "$limit" gone "$1" || { fail "process $1 did not end in $limit s"; kill -9 "$1"; }
  wait "$1"
  code=$?
}

