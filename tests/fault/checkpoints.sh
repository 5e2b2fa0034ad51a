#!/bin/bash
# ctest: timeout=240
# A folder of checkpoints that other programs change: another job takes it over, or somebody plants links.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

make_images "$tmp/data" 64 8
job=(ps --mode sync --data "$tmp/data" --batch-size 4)

# listing <folder>: prints names, types, sizes, times and link targets of all files in the folder.
listing() { find "$1" -printf '%P %y %s %T@ %l\n' | sort; }

# "${without_locks[@]}" <command>...: makes flock() fail, as without locks; exits with 77 if seccomp is not available.
without_locks=(python3 "$tmp/without_locks.py")
cat >"$tmp/without_locks.py" <<'END'
import ctypes, errno, os, platform, struct, sys
flock = {"x86_64": 73, "aarch64": 32}.get(platform.machine())
if flock is None:
    sys.exit(77)
code = [(0x20, 0, 0, 0),  # the system call's number
        (0x15, 0, 1, flock),
        (0x06, 0, 0, 0x00050000 | errno.ENOLCK),
        (0x06, 0, 0, 0x7fff0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.c_void_p)]
program = Program(len(code), ctypes.addressof(filters))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) != 0 or prctl(22, 2, ctypes.byref(program), 0, 0) != 0:
    sys.exit(77)
os.execv(sys.argv[1], sys.argv[1:])
END

# start <args>...: starts an endless job and waits until SIGUSR1 has made it save.
start() {
  : >"$tmp/first"
  "${without_locks[@]}" "$distrain" "${job[@]}" --steps 1000000 --checkpoint "$tmp/saves" --checkpoint-every 1000000 \
    --log-interval 1 --peer-timeout 60 "$@" >"$tmp/first" 2>"$tmp/first.err" &
  first=$!
  wait_for_lines 2 step "$tmp/first"
  kill -USR1 $first
  wait_for_lines 1 checkpoint "$tmp/first"
}
pids() { { echo $first; jq -r 'select(.event == "start").pid' "$tmp/first"; } | sort -u; }
# shellcheck disable=SC2317  # called by wait_for
stopped() {
  local pid
  for pid in $(pids); do
    [[ $(awk '/^State:/ { print $2 }' "/proc/$pid/status" 2>/dev/null) == T ]] || return 1
  done
}

"${without_locks[@]}" /bin/true
code=$?
if ((code == 77)); then
  echo "no seccomp here: a file system without locks is not tried"
else
  for where in $(few --local --trainers=2); do
    # The first job is stopped, as if its machine were dead, and another process resumes the job.
    name="a job that goes on after another has taken its place, $where"
    rm -rf "$tmp/saves"
    start "$where"
    expect_jq '[.[] | select(.event == "warn")] | length == 1 and .[0].kind == "resources"
      and (.[0].message | test("^--checkpoint .*/saves cannot be locked \\(No locks available\\): "))' "$name: no word" "$tmp/first"
    mapfile -t all < <(pids)
    kill -STOP "${all[@]}"
    wait_for "$limit" stopped || fail "$name: not all are stopped"
    step=$(jq -r 'select(.event == "checkpoint").step' "$tmp/first")
    "${without_locks[@]}" "$distrain" "${job[@]}" "$where" --steps $((step + 3)) --checkpoint "$tmp/saves" --resume auto \
      >"$tmp/out" 2>"$tmp/err"
    code=$?
    expect 0 "$name: the other"
    expect_log "$name: the other"
    listing "$tmp/saves" >"$tmp/before"
    kill -CONT "${all[@]}"
    kill -USR1 $first
    wait $first
    code=$?
    expect 7 "$name"
    expect_log "$name" "$tmp/first"
    expect_jq '[.[] | select(.event == "checkpoint" and .action == "saved")] | length == 1' "$name: it saves" "$tmp/first"
    expect_jq '.[-1] | .kind == "bad_data" and (.message | test("^another job has taken over .*/saves: "))' "$name" "$tmp/first"
    [[ $(grep -cE '^distrain: (rank 0 \([a-z0-9_]+\): )?another job has taken over ' "$tmp/first.err") == 1 ]] || fail "$name: not one line on stderr"
    listing "$tmp/saves" | cmp -s - "$tmp/before" || fail "$name: it has changed something:
$(listing "$tmp/saves" | diff "$tmp/before" -)"
    expect_no_process "$name"
  done
fi

# Somebody with write access to the folder plants links to valuable files.
run "${job[@]}" --local --steps 3 --checkpoint "$tmp/dear"
expect 0 "a folder to lead to"
listing "$tmp/dear" >"$tmp/before"
dear=$(find "$tmp/dear" -name 'step-*')
plant() { # plant <name> <target>: creates a link in a new folder with a checkpoint
  rm -rf "$tmp/planted"
  mkdir "$tmp/planted"
  cp -r "$dear" "$tmp/planted/step-000000000002"
  ln -s "$2" "$tmp/planted/$1"
}
untouched() { # untouched <name>
  listing "$tmp/dear" | cmp -s - "$tmp/before" || fail "$1: what a link leads to has changed"
}
for name in step-000000000009 .replaced-step-000000000009 .lock; do
  target=$dear
  [[ $name == .lock ]] && target=$dear/manifest.json
  plant $name "$target"
  run "${job[@]}" --local --steps 9 --checkpoint "$tmp/planted" --resume "$tmp/planted/step-000000000002"
  expect 7 "a link $name"
  expect_jq '.[-1] | .kind == "bad_data" and (.message | test("a symbolic link, which is not followed$"))' "a link $name"
  untouched "a link $name"
done
for name in .tmp-step-000000000009 .old-step-000000000009; do
  plant $name "$dear"
  run "${job[@]}" --local --steps 9 --checkpoint "$tmp/planted" --resume auto
  expect 0 "a link $name"
  [[ -L $tmp/planted/$name ]] && fail "a link $name: it is there still"
  untouched "a link $name"
done
# The link appears while a job saves in every step.
rm -rf "$tmp/planted"
: >"$tmp/out"
"$distrain" "${job[@]}" --local --steps 1000000 --checkpoint "$tmp/planted" --checkpoint-every 1 >"$tmp/out" 2>"$tmp/err" &
first=$!
wait_for_lines 3 checkpoint "$tmp/out"
ln -s "$dear" "$tmp/planted/step-000000999999"
wait $first
code=$?
expect 7 "a link that comes while it saves"
expect_log "a link that comes while it saves"
untouched "a link that comes while it saves"

finish
