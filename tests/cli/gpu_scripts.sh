#!/bin/bash
# The scripts with which tests/gpu/run compares jobs, on stand-ins for distrain: a job that hangs, differs or is slow is
# reported, makes the script fail, and does not prevent the other jobs.
# Not under asan, because no compiled code of ours runs.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

# The losses of this stand-in differ from the CPU's only with TF32 and in ps. Its rnn hangs on a GPU.
cat >"$tmp/jobs" <<'END'
#!/bin/bash
device=cpu loss=0.5
[[ " $* " == *" --device cuda"* || " $* " == *=cuda* ]] && device=cuda:0
[[ $device != cpu && $NVIDIA_TF32_OVERRIDE != 0 ]] && loss=0.6
[[ $device != cpu && $1 == ps ]] && loss=0.7
[[ $device != cpu && $1 == rnn ]] && exec sleep 1000
echo '{"event":"start","role":"trainer1","device":"'$device'"}'
echo '{"event":"step","role":"trainer1","step":1,"loss":'$loss'}'
echo '{"event":"episode","role":"agent","episode":1,"running_reward":9}'
echo '{"event":"end","role":"launcher","exit_code":0}'
END
chmod +x "$tmp/jobs"
timeout "$limit" python3 "$root/tests/gpu/compare_jobs.py" "$tmp/jobs" 2 >"$tmp/out" 2>"$tmp/err"
code=$?
expect 1 "compare_jobs.py"
[[ -s $tmp/err ]] && fail "compare_jobs.py: $(tail -n 1 "$tmp/err")"
expect_jq 'map(select(.ok | not) | .job) | unique == ["ps", "rnn"]' "compare_jobs.py: what is not right"
expect_jq 'map(select(.ok) | .job) | unique == ["hybrid", "pipeline", "rl"]' "compare_jobs.py: what is"
expect_jq 'map(select(.job == "rnn"))[0] | .exit_code == null and .error == "no end after 2 s"' \
  "compare_jobs.py: a job that hangs"

# This stand-in for pipeline has the given $speed with two stages and two micro-batches.
cat >"$tmp/pipeline" <<'END'
#!/bin/bash
one=80 two=100
[[ " $* " == *" --stages 2 "* ]] && one=40 two=$speed
[[ $speed == none ]] && { echo "distrain: no GPU" >&2; exit 9; }
echo '{"event":"split","num_split":1,"batch_s":1,"samples_per_s":'$one'}'
echo '{"event":"split","num_split":2,"batch_s":1,"samples_per_s":'$two'}'
END
chmod +x "$tmp/pipeline"
for case in 95:0 85:0 none:1; do
  speed=${case%:*} timeout "$limit" python3 "$root/tests/gpu/compare_pipeline.py" "$tmp/pipeline" >"$tmp/out" 2>"$tmp/err"
  code=$?
  expect "${case#*:}" "compare_pipeline.py, $case"
  if [[ $case == none:* ]]; then
    expect_jq 'length > 0 and all(.[]; .exit_code == 9 and .error == "distrain: no GPU")' "compare_pipeline.py, $case"
  else
    expect_jq ".[-1] | .event == \"ratio\" and .num_split == 2 and .wanted == 0.9 and .speed == ${case%:*} / 100" \
      "compare_pipeline.py, $case"
  fi
done

# compare_pipeline.py reads the lines of the real job. --device cpu overrides the GPU that the script names.
timeout "$limit" python3 "$root/tests/gpu/compare_pipeline.py" "$distrain" --device cpu --model resnet18 \
  --image-size 33 --batch-size 2 --batches 1 --classes 10 --micro-batches 1,2 >"$tmp/out" 2>"$tmp/err"
expect_jq 'map(select(.event == "pipeline") | .num_split) == [1,2,1,2] and .[-1].speed > 0' \
  "compare_pipeline.py: real lines"
finish
