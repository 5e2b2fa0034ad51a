#!/bin/bash
# ctest: timeout=180
# Runs the containers' command of examples/launch/k8s-indexed-job.yaml in two network namespaces that stand for pods,
# with the variables, names, secret and signals that Kubernetes gives them.
# shellcheck source-path=SCRIPTDIR source=lib.bash disable=SC2317,SC2154
source "$(dirname "$0")/lib.bash"
# shellcheck source=../support/hosts.bash
source "$(dirname "$0")/../support/hosts.bash"

for python in python3 /usr/bin/python3; do "$python" -c 'import yaml' 2>/dev/null && break; done ||
  skip "Python's yaml is not installed"
make_hosts 10.79.0 || skip "no right to make network namespaces here, no ip command, or no bridges"
cd "$tmp" || exit

# Writes the command, the variables and the mode of the secret of the job, and checks what belongs together.
"$python" - "$examples/k8s-indexed-job.yaml" <<'END' || fail "k8s-indexed-job.yaml"
import re, sys, yaml
service, job = yaml.safe_load_all(open(sys.argv[1]))
name, spec = job["metadata"]["name"], job["spec"]
pod = spec["template"]["spec"]
(container,) = pod["containers"]
variables = {each["name"]: each["value"] for each in container["env"]}
assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
assert service["spec"]["selector"] == {"job-name": name}
assert spec["completions"] == spec["parallelism"] == int(variables["PODS"])
assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
assert mounts.keys() == {each["name"] for each in pod["volumes"]}
secret = next(each["secret"] for each in pod["volumes"] if "secret" in each)
with open("words", "w") as file:
    for word in container["command"] + container["args"]:
        # Kubernetes replaces $(NAME) if it knows the variable NAME.
        file.write(re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word) + "\0")
with open("variables", "w") as file:
    file.writelines(f"{key}={value}\n" for key, value in variables.items())
open("mode", "w").write(f"{secret['defaultMode']:o}")
open("master", "w").write(variables["MASTER_ADDR"])
END

# A secret's files are links, as the kubelet makes them. Pods share the folder for checkpoints.
mkdir -p secret/..data checkpoints
# The kubelet writes a pod's own name into its hosts. The names in the service come later, from DNS.
printf '%s\n' '127.0.0.1 localhost' '10.79.0.10 distrain-0' >hosts
head -c 32 /dev/urandom | base64 >secret/..data/token
chmod "$(cat mode)" secret/..data/token
ln -s ..data/token secret/token
# pod <index> [<sed expression>]: runs the command in a pod, in the background. Sets pods[<index>].
pods=()
pod() {
  local words=() variables=()
  mapfile -d '' -t words <words
  [[ ! ${2:-} ]] || words[2]=$(sed "$2" <<<"${words[2]}")
  mapfile -t variables <variables
  # shellcheck disable=SC2016  # the inner shell expands these
  ip netns exec "${hosts[$1]}" unshare -mu bash -c '
    hostname "$0" && mount --bind hosts /etc/hosts && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /mnt &&
      mkdir -p /run/secrets/distrain /mnt/checkpoints && mount --bind secret /run/secrets/distrain &&
      mount --bind checkpoints /mnt/checkpoints && exec "$@"' "distrain-$1" \
    env -i PATH="$PATH" DISTRAIN_TEST_ID="$DISTRAIN_TEST_ID" JOB_COMPLETION_INDEX="$1" "${variables[@]}" \
    "${words[@]}" >"pod$1.jsonl" 2>"pod$1.err" &
  pods[$1]=$!
}
# await_pods <exit code> <name>
await_pods() {
  local index
  for index in 0 1; do
    await "${pods[index]}"
    expect "$1" "$2, pod $index"
  done
}
add_name() { echo "10.79.0.10 $(cat master)" >>hosts; }

case_whole() {
  local name=k8s-indexed-job.yaml
  # The first pod's name in the service is not known when the pods start.
  pod 1
  wait_for_lines 1 waiting pod1.jsonl
  pod 0
  wait_for_lines 1 waiting pod0.jsonl
  add_name
  await_pods 0 "$name"
  expect_ends 0 "$name" pod?.jsonl
  expect_runs 1 "$name" pod?.jsonl
  expect_jq '.[-1] | .scope == "job" and .steps == 400' "$name" pod0.jsonl
  expect_jq '[.[] | select(.event == "rank_end").rank] | sort == [2, 3]' "$name" pod1.jsonl
  expect_jq 'all(.[]; .event != "warn")' "$name" pod0.jsonl
  expect_jq 'all(.[]; .event != "warn")' "$name" pod1.jsonl
  [[ ! -s pod0.err ]] || fail "$name: $(cat pod0.err)"
  expect_no_process "$name"
}

# If a rank is killed, all pods end. Kubernetes starts them again, and the job resumes. SIGTERM saves.
case_killed() {
  local saved index long='s/--epochs 20/--epochs 1000000/' name="k8s-indexed-job.yaml, a killed rank"
  add_name
  for index in 0 1; do pod "$index" "$long"; done
  wait_for_lines 2 checkpoint pod0.jsonl
  expect_ancestor "${pods[0]}" "$name" pod0.jsonl
  expect_ancestor "${pods[1]}" "$name" pod1.jsonl
  kill -9 "$(jq -r 'select(.event == "start" and .rank == 2).pid' pod1.jsonl)"
  await "${pods[1]}"
  expect 137 "$name, its pod"
  await "${pods[0]}"
  expect 5 "$name, the other pod"
  expect_ends 5 "$name" pod0.jsonl
  expect_ends 137 "$name" pod1.jsonl
  expect_jq '.[-1].cause_rank == 2' "$name" pod0.jsonl
  expect_jq '.[-1].cause_rank == 2' "$name" pod1.jsonl
  expect_saved checkpoints "$name"

  name="k8s-indexed-job.yaml, restarted"
  for index in 0 1; do pod "$index" "$long"; done
  wait_for_lines 2 epoch pod0.jsonl
  expect_resumed "$saved" "$name" pod0.jsonl
  kill -TERM "${pods[@]}"
  await_pods 143 "$name"
  expect_ends 143 "$name" pod?.jsonl
  (($(saved_step checkpoints) > saved)) || fail "$name: SIGTERM saved nothing after step $saved"
  expect_no_process "$name"
}

run_cases
