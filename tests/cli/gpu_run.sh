#!/usr/bin/env bash
# ctest: timeout=120
# tests/gpu/run without a GPU: its verdict, exit codes and report, with stand-ins for the programs that it builds.
set -euo pipefail
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bin=$work/build/bin
mkdir -p "$bin" "$work/tools" "$work/empty"

program() { # program <path> : writes a program from stdin
  cat >"$1"
  chmod +x "$1"
}

program "$bin/gpu_info" <<'END'
#!/bin/bash
for ((i = 0; i < FAKE_GPUS; ++i)); do echo '{"event":"gpu","index":'$i'}'; done
((FAKE_GPUS > 0)) || { echo '{"event":"error","message":"no GPU"}'; exit 9; }
END
program "$bin/gpu" <<'END'
#!/bin/bash
echo "$*" >>"$FAKE_CALLS"
[[ "$*" != "$FAKE_FAILS" ]]
END
program "$bin/gpu_bench" <<'END'
#!/bin/bash
echo '{"event":"ratio","name":"echo-gpu","impl":"distrain-cuda","of":"pinned-copies","speed":'$FAKE_SPEED',"wanted":0.6}'
echo '{"event":"ratio","name":"echo-gpu","impl":"distrain-cuda","of":"distrain-cpu","speed":0.1,"wanted":null}'
END
program "$work/tools/compute-sanitizer" <<'END'
#!/bin/bash
[[ "$1 $2" == "--tool memcheck" ]] || exit 3
echo "========= ERROR SUMMARY: 0 errors"
while [[ $1 != */gpu ]]; do shift; done
exec "$@"
END
# This stand-in prints losses that fall with the learning rate; a GPU adds noise. In rnn any change of noise or learning
# rate is amplified from step 10, as in chaotic training.
program "$bin/distrain" <<'END'
#!/usr/bin/env python3
import json, os, sys
job, options = sys.argv[1], sys.argv[2:]
value = lambda name, default: options[options.index(name) + 1] if name in options else default
lr, device = float(value("--lr", "0.05")), value("--device", "cpu")
noise = 0 if device == "cpu" else float(os.environ["FAKE_NOISE"])
emit = lambda **fields: print(json.dumps({"role": "trainer", **fields}))
emit(event="start", device=device)
for step in range(1, 21):
    loss = 2 - lr * step + noise * step
    if job == "rnn" and step >= 10 and (noise or lr != 0.05):
        loss += 1
    event = {"rl": "episode"}.get(job, "step")
    emit(event=event, **{event: step, "step": step, "loss": loss, "running_reward": loss})
if "--micro-batches" in options and "cuda:0" in options:
    emit(event="split", num_split=4, batch_s=1, samples_per_s=10 if "--local" in options else 9.5)
emit(event="end", config={"lr": 0.05}, train_s=1)
END
cat >"$work/build/CTestTestfile.cmake" <<END
add_test(gpu.one "$bin/gpu" one)
set_tests_properties(gpu.one PROPERTIES LABELS gpu)
add_test(gpu.two "$bin/gpu" two)
set_tests_properties(gpu.two PROPERTIES LABELS "gpu;two_gpus")
END

# run <exit code> <verdict> <name=value>... [-- stage...] : sets `out` and checks the report.
run() {
  local expected=$1 correct=$2 code=0 settings=() fakes
  shift 2
  fakes=(FAKE_GPUS=1 FAKE_SPEED=0.9 FAKE_NOISE=1e-6 FAKE_FAILS=nothing FAKE_CALLS="$work/calls"
    DISTRAIN_GPU_BUILD="$work/build" PATH="$work/tools:$PATH")
  while (($#)) && [[ $1 != -- ]]; do
    settings+=("$1")
    shift
  done
  if (($#)); then shift; else set -- tests two-gpus jobs memcheck bench pipeline; fi
  rm -f "$work/build/report.tar.gz" "$work/calls"
  out=$(env "${fakes[@]}" "${settings[@]}" bash "$here/../gpu/run" "$@" 2>"$work/err") || code=$?
  if ((code != expected)) || [[ $(tail -n 1 <<<"$out") != *'"event":"end"'* ]]; then
    fail "exit code $code, not $expected"
  fi
  if [[ -n $correct ]]; then
    [[ $(tail -n 1 "$work/err") == "correct: $correct" ]] || fail "no 'correct: $correct'"
  else
    ! grep -q '^correct:' "$work/err" || fail "a verdict"
  fi
  tar -xOzf "$work/build/report.tar.gz" report/stdout.jsonl | cmp - <(printf '%s\n' "$out") ||
    fail "another report than output"
  tar -xOzf "$work/build/report.tar.gz" report/machine.txt report/stderr.txt >"$work/machine"
  grep -q '^== uname' "$work/machine" || fail "no machine in the report"
}
fail() {
  printf '%s\n%s\n' "$1" "$out" >&2
  cat "$work/err" >&2
  exit 1
}
has() { [[ $out == *"$1"* ]] || fail "no $1"; }

run 0 yes FAKE_SPEED=0.3
has '"failed":[],"slow":["bench"],"skipped":["two-gpus"]'
has '"stage":"two-gpus","reason":"it needs two GPUs, there is one"'
has '"event":"sanitizer","tool":"memcheck","exit_code":0,"summary":"ERROR SUMMARY: 0 errors"'
grep -q "skipped two-gpus" "$work/err" || fail "it does not say what is skipped"
[[ $(<"$work/calls") == $'one\n[memcheck]' ]] || fail "other tests"
grep -q '"job": "rnn".*"ok": true, "values": 20, "compared": 9,' <<<"$out" || fail "chaos is compared"

run 0 "" FAKE_GPUS=2 -- two-gpus
has '"failed":[],"slow":[],"skipped":[]'
[[ $(<"$work/calls") == two ]] || fail "two GPUs, and no test of them"
run 1 no FAKE_NOISE=1e-3 -- tests jobs
has '"failed":["jobs"]'
run 1 no FAKE_FAILS=one -- tests memcheck
has '"failed":["tests"]'
has '{"event":"test","name":"gpu.one","result":"Failed"'
run 1 no FAKE_FAILS="[memcheck]" -- memcheck
run 1 no DISTRAIN_GPU_SECONDS=5 -- tests jobs
has '"skipped":["tests","jobs"]'
run 9 no FAKE_GPUS=0 -- tests
has '"failed":["gpu"]'
run 0 "" -- bench
run 1 no -- nonsense
